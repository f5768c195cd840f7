"""benchmarks/heads.py gives every head the same time, goes on where it was stopped, and tables what it measured."""

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.eval.config import EvalConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.token_tree import TokenTree
from drafthead.train.config import PhaseConfig

Load = Callable[[str], ModuleType]


def arguments(out: Path, **changed: Any) -> Namespace:
    given = {"out": out, "minutes": 1.0, "shares": [1, 6, 3], "data": "smollm2_large", "overrides": ["debug=tiny"]}
    return Namespace(**given | changed)


def rows(phases: dict[str, tuple[int, float]], every: int = 1) -> list[dict[str, Any]]:
    """A log as the training loop writes it every so many steps: per phase its steps and what one takes in ms."""
    found: list[dict[str, Any]] = []
    total = 0
    for phase, (steps, step_ms) in phases.items():
        for step in range(1, steps + 1):
            total += 1
            at = {"phase": phase, "step": step, "total_step": total}
            speed = 200 / step_ms * 1e3  # 200 tokens a step
            if step % every == 0:
                found.append(at | {"lr": 1e-3, "loss": 4.0, "step_ms": step_ms, "tokens_per_second": speed})
        held_out = {f"held_out_accept_{k}": 0.5 / k for k in (1, 2)}
        found.append(at | {"held_out_loss": 5.0} | held_out | {"held_out_tokens_a_step": 1.25 + total / 1000})
    return found


def write_log(folder: Path, found: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def phase(corpus: str, steps: int, train_base: bool = False) -> PhaseConfig:
    return PhaseConfig(corpus=corpus, steps=steps, train_base=train_base)


# The budget ----------------------------------------------------------------------------------------------------


def test_steps_fill_the_budget_whatever_a_step_takes(script: Load) -> None:
    choose = script("heads_training").choose_steps
    phases = {"pretrain": phase("text", 40), "distill": phase("generations", 300)}
    steps = choose(phases, {"pretrain": 2.0, "distill": 0.5}, 700, [1, 6, 3])
    assert steps == {"pretrain": 50, "distill": 1200}
    phases["joint"] = phase("generations", 30, train_base=True)
    steps = choose(phases, {"pretrain": 2.0, "distill": 0.5, "joint": 10.0}, 1000, [1, 6, 3])
    assert steps == {"pretrain": 50, "distill": 1200, "joint": 30}
    assert choose(phases, {"pretrain": 2.0, "distill": 0.5, "joint": 1e6}, 1, [1, 6, 3])["joint"] == 1


def test_phases_of_one_kind_divide_its_time_as_their_recipe_does(script: Load) -> None:
    phases = {"one": phase("generations", 100), "two": phase("generations", 300)}
    steps = script("heads_training").choose_steps(phases, {"one": 1.0, "two": 1.0}, 80, [1, 6, 3])
    assert steps == {"one": 20, "two": 60}


def test_a_probe_counts_whole_phases_without_their_first_steps(script: Load) -> None:
    training = script("heads_training")
    found = rows({"pretrain": (8, 40.0), "distill": (8, 20.0)})
    for row in found:
        if row["step"] <= training.PROBE_WARM and "step_ms" in row:
            row["step_ms"] = 9000.0
    assert training.probed_step_s(found, ["pretrain", "distill"]) == {"pretrain": 0.04, "distill": 0.02}
    assert training.probed_step_s(found[:12], ["pretrain", "distill"]) == {"pretrain": 0.04}


def test_every_head_trains_on_the_same_data_with_cached_features(script: Load, tmp_path: Path) -> None:
    heads = script("heads")
    found = [heads.open_entry(name, arguments(tmp_path, overrides=[])) for name in heads.HEADS]
    assert all(entry.run.data == found[0].run.data for entry in found)
    assert found[0].run.data.folder == "outputs/corpora/smollm2_large"
    assert [source.name for source in found[0].run.data.text.sources] == ["passages"]
    assert found[0].run.data.generations.self_prompted == 3000
    assert {p.features for entry in found for p in entry.run.phases.values()} == {"cached"}
    assert [entry.name for entry in found if entry.run.trains_base] == ["medusa2"]
    tiny = heads.open_entry("medusa", arguments(tmp_path, overrides=["debug=tiny", "phases.distill.optim.lr=1e-4"]))
    assert tiny.run.base.random and tiny.run.data.folder == str(tmp_path / "corpora")
    assert tiny.run.phases["distill"].optim.lr == 1e-4


# Training ------------------------------------------------------------------------------------------------------


class FakeCommand:
    """Stands for `drafthead`: leaves what a run leaves, and counts."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.broken = ""
        """Whose recipe fails."""

    def __call__(self, command: list[str], log: Path, display: Display, until: Any = None) -> int:
        self.calls.append(command)
        log.parent.mkdir(parents=True, exist_ok=True)
        settings = dict(part.split("=", 1) for part in command[1:])
        if self.broken and self.broken in settings["recipe"]:
            log.write_text("error: it broke\n")
            return 1
        if command[0] == "train":
            folder = Path(settings["out"])
            write_log(folder, rows({"pretrain": (8, 50.0), "distill": (8, 25.0)}))
            if until is None:
                write_json(folder / "eval.json", {})
        return 0

    def kinds(self) -> list[str]:
        return ["probe" if "probe" in " ".join(call) else call[0] for call in self.calls]


def test_training_goes_on_with_the_steps_it_began_with(
    script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, given = script("heads_training"), arguments(tmp_path)
    entry = script("heads").open_entry("medusa", given)
    fake = FakeCommand()
    monkeypatch.setattr(training, "drafthead", fake)
    assert training.train_all([entry], given, Display(enabled=False)) == {}
    assert fake.kinds() == ["data", "probe", "train"]
    settings = dict(part.split("=", 1) for part in fake.calls[-1][1:])
    assert settings["phases.pretrain.steps"] == str(round(60 / 7 / 0.05))
    assert settings["phases.distill.steps"] == str(round(60 * 6 / 7 / 0.025))
    assert settings["phases.distill.optim.warmup_steps"] == "20"
    assert not (tmp_path / "medusa" / "probe").exists()

    training.train_all([entry], given, Display(enabled=False))
    assert len(fake.calls) == 3  # finished: nothing to do
    (tmp_path / "medusa" / "eval.json").unlink()  # as after a kill
    training.train_all([entry], given, Display(enabled=False))
    assert fake.kinds()[3:] == ["data", "train"] and fake.calls[-1] == fake.calls[2]
    with pytest.raises(UserError, match=r"was begun with minutes 1\.0, now it is 2\.0; choose another --out"):
        training.train_all([entry], arguments(tmp_path, minutes=2.0), Display(enabled=False))


def test_a_head_that_fails_does_not_stop_the_others(
    script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, given = script("heads_training"), arguments(tmp_path)
    entries = [script("heads").open_entry(name, given) for name in ("draft_lm", "medusa")]
    fake = FakeCommand()
    monkeypatch.setattr(training, "drafthead", fake)
    training.budget_of(entries[0], given, Display(enabled=False))
    fake.broken = "draft_lm"
    failed = training.train_all(entries[::-1], given, Display(enabled=False))
    assert list(failed) == ["draft_lm"] and "training ended with 1: error: it broke" in failed["draft_lm"]
    assert [entry.finished for entry in entries] == [False, True]
    (entries[0].folder / "budget.json").unlink()
    fake.calls.clear()
    with pytest.raises(UserError, match="the corpora could not be made: error: it broke"):
        training.train_all(entries, given, Display(enabled=False))
    assert fake.kinds() == ["data"]
    with pytest.raises(UserError, match="the probe of draft_lm failed: error: it broke"):
        training.budget_of(entries[0], given, Display(enabled=False))


def test_a_command_is_shown_logged_and_ended(script: Load, tmp_path: Path) -> None:
    training, log = script("heads_training"), tmp_path / "a" / "log"
    assert training.drafthead(["--version"], log, Display(enabled=False)) == 0
    assert training.last_line(log).startswith("drafthead ")
    assert training.drafthead(["wrong"], log, Display(enabled=False)) == 2
    assert "unknown command 'wrong'" in training.last_line(log)
    assert training.drafthead(["--help"], log, Display(enabled=False), until=lambda: True) in (0, -15)


# Results -------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(script: Load, tmp_path: Path, tiny_base: Callable[..., BaseModel]) -> list[Any]:
    """Two heads of one base as their runs leave them."""
    entries = [script("heads").open_entry(name, arguments(tmp_path)) for name in ("medusa", "draft_lm")]
    for heads, entry in enumerate(entries, start=2):
        head = MedusaConfig(num_draft_tokens=heads).build(tiny_base())
        head.tree = TokenTree.chain(heads)
        head.save_pretrained(entry.folder / "head")
        write_log(entry.folder, rows({"pretrain": (6, 100.0), "distill": (54, 50.0)}, every=3))
        calibration = {"expected_tokens_largest": 1.9, "nodes": heads + 1, "expected_speedup": 2 - heads / 10}
        write_json(entry.folder / "calibration.json", {"calibration": calibration})
        write_json(entry.folder / "eval.json", {})
    write_json(
        entries[0].folder / "budget.json", {"settings": {"minutes": 0.05}, "steps": {"pretrain": 6, "distill": 54}}
    )
    return entries


def test_heads_are_measured_in_one_run_and_tabled(script: Load, trained: list[Any], tmp_path: Path) -> None:
    table, config = script("heads_table"), EvalConfig(suite="builtin", limit=2, max_new_tokens=8)
    with pytest.raises(UserError, match="medusa, draft_lm not measured yet in .*; run the part eval first"):
        table.find_results(trained, tmp_path)
    table.measure_heads(trained, config, tmp_path, Display(enabled=False))
    results = table.find_results(trained, tmp_path)
    overall = json.loads((tmp_path / "eval-shared" / "eval.json").read_text())["overall"]
    assert set(overall["methods"]) == {
        "speculative",
        f"head:{trained[1].folder / 'head'}",
        *table.LOOKUPS,
        table.WITH_LEAD,
    }
    assert f"medusa + {table.WITH_LEAD.removeprefix('head+')}" in results["peers"]["shared"]
    assert list(results["heads"]) == ["medusa", "draft_lm"]
    for heads, found in enumerate(results["heads"].values(), start=2):
        assert found["draft_positions"] == heads and found["tree_nodes"] == heads + 1
        assert found["training_minutes"] == pytest.approx((6 * 0.1 + 54 * 0.05) / 60)
        assert found["trained_tokens"] == 60 * 200
        assert found["held_out"]["chain"]["mean_accepted_tokens"] == pytest.approx(1.31)
        assert found["suite"]["same"] == found["suite"]["answers"] == 2
        assert found["suite"]["draft_ms"] > 0
    sizes = [found["trained_parameters"] for found in results["heads"].values()]
    assert sizes[1] == sizes[0] * 3 // 2  # three heads and two
    assert results["heads"]["medusa"]["budget"]["minutes"] == 0.05
    other = overall["methods"][f"head:{trained[1].folder / 'head'}"]["mean_accepted_tokens"]
    assert results["heads"]["draft_lm"]["suite"]["mean_accepted_tokens"] == other
    assert max(plain["ratio_to_fastest_plain"] for plain in results["plain"]["shared"].values()) == 1
    text = table.markdown(results)
    lines = text.splitlines()
    cells = [len(line.split("|")) for line in lines[: 2 + 2 + len(table.LOOKUPS) + 1 + 2]]
    assert len(set(cells)) == 1 and lines[2].startswith("| medusa |") and "| 1.31 | 1.90 | 3 |" in lines[2]
    assert "plain, our loop" in text and "prompt_lookup:3" in text
    assert [t.row_count for t in table.console_tables(results)] == [2, 2 + len(table.LOOKUPS) + 1 + 2]
    compared = dict(script("compare").numbers(results))
    directions = {name[-1]: script("compare").direction(name) for name in compared if name[0] == "heads"}
    assert directions["mean_accepted_tokens"] == directions["ratio_to_fastest_plain"] == directions["same"] == 1
    assert directions["draft_ms"] == -1
    assert not any(directions[name] for name in ("trained_parameters", "training_minutes", "trained_tokens", "top1"))


def test_what_was_measured_of_another_head_is_not_kept(
    script: Load, trained: list[Any], tmp_path: Path, tiny_base: Callable[..., BaseModel]
) -> None:
    table, config = script("heads_table"), EvalConfig(suite="builtin", limit=1, max_new_tokens=4)
    folder = tmp_path / "eval-shared"
    measured = []
    for change in (False, False, True):
        if change:  # the second head is known to the log by its folder alone
            MedusaConfig(num_draft_tokens=1).build(tiny_base()).save_pretrained(trained[1].folder / "head")
            (trained[1].folder / "head" / "tree.json").unlink()
        table.measure_heads(trained, config, tmp_path, Display(enabled=False))
        (log,) = folder.glob("eval-log-*.jsonl")
        measured.append(log.read_text())
    assert measured[0] == measured[1] != measured[2]
    assert len(measured[2].splitlines()) == len(measured[0].splitlines())


def test_a_tuned_base_has_a_run_of_its_own(script: Load, tmp_path: Path) -> None:
    table = script("heads_table")
    entries = [script("heads").open_entry(name, arguments(tmp_path)) for name in ("medusa2", "medusa", "kangaroo")]
    groups = {name: [entry.name for entry in members] for name, members in table.groups_of(entries).items()}
    assert groups == {"medusa2": ["medusa2"], "shared": ["medusa", "kangaroo"]}
    (line,) = table.tuned_lines({"heads": {"medusa2": {"gate_passed": False}, "medusa": {}}})
    assert line.startswith("medusa2: base tuned along") and "gate failed" in line


def test_a_finished_gate_and_a_log_without_measurements(script: Load, trained: list[Any]) -> None:
    table, folder = script("heads_table"), trained[0].folder
    write_json(folder / "quality.json", {"passed": True})
    assert table.training_results(folder)["gate_passed"] is True
    write_log(folder, [row for row in rows({"pretrain": (2, 10.0)}) if "step_ms" in row])
    with pytest.raises(UserError, match="no measurement on held-out answers"):
        table.training_results(folder)


# The command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--only", "trein"], "--only knows train, eval, table, got trein"),
        (["--heads", ","], "--heads names none; there are medusa, hydra"),
        (["--heads", "medusas", "debug=tiny"], "recipe=medusas_smollm2"),
        (["--minutes", "0"], "--minutes must be more than 0, got 0"),
        (["--shares", "1:6"], "--shares takes three whole numbers above 0 such as 1:6:3, got 1:6"),
        (["--suite", "nowhere"], "unknown suite 'nowhere'"),
        (["--limit", "0"], "limit must be >= 1"),
        (["--data", "nowhere"], "Could not find .data/nowhere"),
        (["phases.distill.steps=3"], "phases.distill.steps is set here"),
        (["out=here"], "out is set here"),
        (["debug"], "'debug' is no setting; give key=value"),
        (["--only", "table", "debug=tiny"], "has no trained head: run the part train first"),
    ],
)
def test_bad_input_fails_before_anything_starts(script: Load, given: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        script("heads").main(["--out", str(tmp_path / "none"), "--heads", "medusa", "--suite", "builtin", *given])


@pytest.mark.slow
def test_the_whole_command(script: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, record = tmp_path / "heads", tmp_path / "heads.json"
    given = ["--heads", "medusa,kangaroo", "--minutes", "0.02", "--out", str(out), "--suite", "builtin", "--limit", "2"]
    given += ["--max-new-tokens", "8", "--json", str(record), "--markdown", str(tmp_path / "heads.md"), "debug=tiny"]
    assert script("heads").main(given) == 0
    found = json.loads(record.read_text())
    assert found["benchmark"] == "heads" and list(found["heads"]) == ["medusa", "kangaroo"]
    for head in found["heads"].values():
        assert 0.2 * 0.02 < head["training_minutes"] < 10 * 0.02
        assert head["suite"]["same"] == 2 and head["trained_tokens"] > 0
    capsys.readouterr()
    assert script("heads").main([*given, "--only", "train,table"]) == 0
    said = capsys.readouterr().out
    assert "phase" not in said and "kangaroo" in said
