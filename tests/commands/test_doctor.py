"""The page about a machine, and a checklist that skips, survives faults and resumes."""

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from drafthead.commands.doctor import DoctorConfig, Step, checklist, page, passes, python, run_steps
from drafthead.errors import UserError
from support import call

TINY = ["recipe=medusa_smollm2", "debug=tiny"]


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1 parts of the page failed"):
        call("doctor", f"train=[{','.join(TINY)}]", "recipes=[medusa_smollm2,nowhere]")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 160
    text = "\n".join(lines)
    assert text.count("3 of 3 as plain decoding") == 6
    assert "drafthead 0." in text and "pass, ms" in text and "other processes" in text
    assert any(line.startswith("  medusa_smollm2") and line.endswith("fits") for line in lines)
    assert lines[-1].startswith("nowhere FAILED: UserError: recipe=nowhere: ")


def test_the_page_keeps_its_limit() -> None:
    started = perf_counter()
    lines = page(DoctorConfig(train=TINY, recipes=["medusa_smollm2"]), limit_s=0.5)
    assert perf_counter() - started < 5
    assert sum("FAILED: TimeoutError: time ran out" in line for line in lines) == 3


def test_a_failed_process_is_named() -> None:
    with pytest.raises(UserError, match=r"^pytest failed: .*not/there"):
        python("-m", "pytest", "not/there")
    with pytest.raises(UserError, match=r"^benchmarks/nothing.py failed: "):
        python("benchmarks/nothing.py")


def test_costs_have_shares() -> None:
    result = passes(TINY, 100)
    assert 0 < result["draft_share"] < 1 and 0 < result["loop_share"] < 1
    assert result["bandwidth_share"] is None and result["costs"]["context"] == 100


def test_what_needs_a_gpu_is_skipped_with_the_reason() -> None:
    steps = {name: reason for name, reason, _ in checklist(DoctorConfig(train=TINY))}
    assert {int(name.split()[0].strip(",")) for name in steps} == {0, 1, 2, 3, 4, 6, 7, 8, 9}
    assert all("needs a GPU" in reason for name, reason in steps.items() if "8B" in name)
    assert not any(steps[name] for name in ("0 machine", "2 equality of hydra_smollm2", "9 profile"))
    assert steps["2 equality of hydra_smollm2, graphs"] == "cpu has no graphs"


def test_a_checklist_survives_faults_and_resumes(tmp_path: Path) -> None:
    calls: list[str] = []
    faulty = True

    def work(name: str) -> Any:
        calls.append(name)
        if name == "b" and faulty:
            raise RuntimeError("no kernel\nimage")
        return {"ms": 1.5}

    steps: list[Step] = [(name, "", lambda name=name: work(name)) for name in "abc"]  # type: ignore[misc]
    steps.insert(1, ("gpu", "needs a GPU", lambda: work("gpu")))
    path = tmp_path / "doctor.jsonl"
    with pytest.raises(UserError, match="1 steps failed"):
        run_steps(path, steps)
    assert calls == ["a", "b", "c"]
    faulty = False
    run_steps(path, steps)
    run_steps(path, steps)
    assert calls == ["a", "b", "c", "b"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == ["a", "gpu", "b", "c", "b"]
    assert rows[1]["skipped"] == "needs a GPU" and rows[2]["error"].startswith("RuntimeError: no kernel")
    assert rows[4]["result"] == {"ms": 1.5} and all("device" in row for row in rows)
