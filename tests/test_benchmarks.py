"""The benchmarks run, and compare.py judges: on a random tiny base, for their function and not for their times."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from drafthead.data.utils.errors import UserError
from drafthead.eval.config import EvalConfig
from drafthead.eval.prompts.suites import load_suite
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import default_draft_config
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.token_tree import TokenTree
from support import small_head

Load = Callable[[str], ModuleType]


@pytest.fixture
def head(tiny_base: Callable[..., BaseModel], tmp_path: Path) -> Path:
    return small_head(tiny_base(), tmp_path / "head")


def test_decode_measures_every_part(script: Load, head: Path, tmp_path: Path) -> None:
    out = tmp_path / "now.json"
    against = "transformers,stock,prompt_lookup,hf_prompt_lookup:3,early_exit:2,plain"
    script("decode").main(
        ["--head", str(head), "--json", str(out), "--context", "40", "--long-context", "400", "--cost-repeats", "4"]
        + ["--against", against, "--suite", "builtin", "--prompts", "2", "--repeats", "2", "--max-new-tokens", "12"]
    )
    record = json.loads(out.read_text())
    assert {"benchmark", "date", "arguments", "hardware", "versions"} <= record.keys()
    assert list(record["costs"]["verify"]) == [str(n) for n in range(1, 33)] == list(record["verify_ratio"])
    ways = record["one_token"]
    fastest = min(ways["verify_s"], ways["transformers_s"], ways["stock_s"])
    assert record["verify_ratio"]["4"] == pytest.approx(record["costs"]["verify"]["4"] / fastest)
    assert record["kv"]["contexts"] == [40, 400]
    assert set(record["kv"]["cases"]) == {"static tree", "changing tree", "batch of 4"}
    for case in record["kv"]["cases"].values():
        assert case["handling_growth"] == pytest.approx(case["handling_s"]["400"] / case["handling_s"]["40"])
        assert all(case["handling_s"][n] > 0 < case["pass_s"][n] for n in ("40", "400"))
    found = record["against"]
    assert list(found["methods"]) == ["head", *against.split(",")]
    assert found["reference"] == "plain" and not found["failed"]
    speeds = {name: numbers["tokens_per_second"] for name, numbers in found["methods"].items()}
    plain = max(speeds[name] for name in ("plain", "transformers", "stock"))
    assert speeds[found["fastest_plain"]] == plain
    for name, numbers in found["methods"].items():
        assert numbers["same"] == found["prompts"] == 2, name
        assert numbers["ratio_to_fastest_plain"] == pytest.approx(speeds[name] / plain)
    assert found["methods"]["stock"]["overhead"] is None
    assert record["overhead"]["head"] == found["methods"]["head"]["overhead"] > 0


def test_every_repetition_is_timed(script: Load, head: Path, tiny_base: Callable[..., BaseModel]) -> None:
    race, base = script("race"), tiny_base()
    drafter = DraftHead.from_pretrained(head, base)
    runners = race.Runners(
        base=base,
        stock=None,
        drafter=drafter,
        draft_config=default_draft_config(drafter),
        specs=["plain"],
        config=EvalConfig(max_new_tokens=4),
    )
    found = race.run_race(runners, load_suite("builtin", 2), 3, lambda done, total: None)
    for prompts in found.runs.values():
        assert [len({run.total_s for run in runs}) for runs in prompts] == [3, 3]
    record = race.race_record(found, seed=0)
    runs = found.runs["plain"]
    seconds = sum(sorted(run.total_s for run in prompt)[1] for prompt in runs)
    tokens = sum(len(prompt[0].tokens) for prompt in runs)
    assert record["methods"]["plain"]["tokens_per_second"] == pytest.approx(tokens / seconds)


def test_a_prompt_that_cannot_be_answered_is_named(
    script: Load, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "mine.jsonl"
    suite.write_text('{"prompt": "' + "long " * 120 + '"}\n{"prompt": "short"}\n')
    main = script("decode").main
    main(["--head", str(head), "--only", "overhead", "--suite", str(suite), "--max-new-tokens", "6"])
    assert "left out: prompt 0" in capsys.readouterr().out
    suite.write_text('{"prompt": "' + "long " * 120 + '"}\n')
    with pytest.raises(UserError, match="no prompt could be answered: the prompt has"):
        main(["--head", str(head), "--only", "overhead", "--suite", str(suite), "--max-new-tokens", "6"])


def test_only_some_parts(script: Load, head: Path, tmp_path: Path) -> None:
    out = tmp_path / "some.json"
    parts = ["--only", "overhead", "--suite", "builtin", "--prompts", "1", "--max-new-tokens", "6"]
    script("decode").main(["--head", str(head), "--json", str(out), *parts])
    record = json.loads(out.read_text())
    assert set(record["overhead"]) == {"head", "plain"}
    assert not {"costs", "kv", "against"} & record.keys()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--only", "cost"], "--only knows costs, kv, against, overhead, got cost"),
        (["--against", "prompt_lookup"], "has no plain decoding to divide by; add one of plain, transformers, stock"),
        (["--against", "plain,wrong"], "unknown drafter or peer 'wrong'"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--context", "300", "--long-context", "300"], "--long-context 300 must be longer than --context 300"),
        (["--suite", "nowhere"], "unknown suite 'nowhere'"),
    ],
)
def test_bad_input_fails_before_anything_loads(script: Load, given: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        script("decode").main(["--head", "nowhere", *given])


def test_handling_keeps_the_path_and_leaves_the_base_alone(script: Load, tiny_base: Callable[..., BaseModel]) -> None:
    steps, base, tree = script("step_costs"), tiny_base(), TokenTree.from_paths([(0,), (1,), (0, 0)])
    decoder = base.model.model
    for rows in (1, 2):
        case = steps._Case(base, tree.shape, rows, context=20)
        before = case.cache.keys[:, :, :, :20].clone()
        assert case.handling_s() > 0 and case.pass_s() > 0
        assert base.model.model is decoder
        lengths = case.cache.positions(torch.zeros(1, 1, dtype=torch.int64)).flatten().tolist()
        assert lengths == [20 + 3] * rows  # the root and two drafts
        assert torch.equal(case.cache.keys[:, :, :, :20], before)


def test_stock_is_what_transformers_makes(script: Load, tiny_base: Callable[..., BaseModel]) -> None:
    base = tiny_base()
    stock = script("step_costs").load_stock(base)
    assert base.prepacked and not stock.prepacked
    assert stock.model.config._attn_implementation == "sdpa" != base.model.config._attn_implementation
    assert torch.equal(stock.embedding, base.embedding)


OLD: dict[str, Any] = {
    "benchmark": "decode",
    "arguments": {"context": 200},
    "hardware": {"cpu": "one", "cores": 2, "torch_threads": 2, "gpu": None, "ram_gb": 8.0},
    "costs": {"verify": {"1": 0.010, "4": 0.020}, "context": 200},
    "against": {"methods": {"head": {"tokens_per_second": 50.0, "interval_95": [1.0, None]}}},
}


@pytest.fixture
def compare(script: Load, tmp_path: Path) -> Callable[..., int]:
    """``compare.main`` on ``OLD`` and a changed copy."""

    def run(change: Callable[[dict[str, Any]], object], *options: str) -> int:
        new = json.loads(json.dumps(OLD))
        change(new)
        for name, record in (("old.json", OLD), ("new.json", new)):
            (tmp_path / name).write_text(json.dumps(record))
        code: int = script("compare").main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])
        return code

    return run


@pytest.mark.parametrize(
    ("where", "value", "code"),
    [
        (("costs", "verify", "4"), 0.0205, 0),
        (("costs", "verify", "4"), 0.022, 1),
        (("costs", "verify", "4"), 0.010, 0),
        (("against", "methods", "head", "tokens_per_second"), 40.0, 1),
        (("against", "methods", "head", "tokens_per_second"), 60.0, 0),
        (("costs", "context"), 400, 0),
        (("arguments", "context"), 400, 0),
    ],
)
def test_compare_knows_what_is_worse(
    compare: Callable[..., int], where: tuple[str, ...], value: float, code: int
) -> None:
    def change(record: dict[str, Any]) -> None:
        for name in where[:-1]:
            record = record[name]
        record[where[-1]] = value

    assert compare(change) == code
    assert compare(change, "--limit", "50") == 0


def test_compare_says_what_else_differs(compare: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    def change(record: dict[str, Any]) -> None:
        record["arguments"]["context"] = 300
        record["costs"]["draft"] = record["costs"]["verify"].pop("1")
        record["kv"] = {"nodes": 3, "contexts": [1, 2]}

    assert compare(change) == 0
    said = capsys.readouterr().out
    assert "arguments: context was 200, is 300" in said
    assert "only in the first file: costs.verify.1" in said
    assert "only in the second file: costs.draft" in said and "only in the second file: kv (3 numbers)" in said


def test_compare_refuses_other_hardware(compare: Callable[..., int]) -> None:
    def slower(record: dict[str, Any]) -> None:
        record["hardware"] |= {"cores": 4, "ram_gb": 7.9}
        record["costs"]["verify"]["4"] = 1.0

    with pytest.raises(UserError, match=r"different hardware \(cores 2 and 4\); pass --force"):
        compare(slower)
    assert compare(slower, "--force") == 1
    assert compare(slower, "--force", "--only", "against.*") == 0
    with pytest.raises(UserError, match="the second file does not say its hardware"):
        compare(lambda record: record.pop("hardware"))
    with pytest.raises(UserError, match="different benchmarks: decode and generation"):
        compare(lambda record: record.update(benchmark="generation"), "--force")
    with pytest.raises(UserError, match="no number in common"):
        compare(lambda record: None, "--only", "nothing")


@pytest.mark.parametrize(
    ("path", "direction"),
    [
        ("verify_ratio.4", -1),
        ("costs.draft_by_depth.3", -1),
        ("one_token.stock_s", -1),
        ("kv.cases.static tree.handling_s.200", -1),
        ("kv.cases.static tree.handling_growth", -1),
        ("kv.cases.static tree.pass_growth", 0),
        ("overhead.head", -1),
        ("against.methods.head.ratio_to_fastest_plain", 1),
        ("against.methods.head.same", 1),
        ("against.methods.head.interval_95.0", 0),
        ("against.prompts", 0),
        ("results.transformers generate.seconds", -1),
        ("results.drafthead.tokens", 0),
        ("chunked.bytes", -1),
        ("chunked.loss", 0),
        ("times_less", 1),
    ],
)
def test_direction_of_every_kind_of_number(script: Load, path: str, direction: int) -> None:
    assert script("compare").direction(tuple(path.split("."))) == direction


def test_scripts_end_with_one_line_and_a_code_of_their_own(script: Load, capsys: pytest.CaptureFixture[str]) -> None:
    common = script("common")

    def refuse() -> None:
        raise UserError("no such thing")

    for main, code in ((refuse, 2), (lambda: 1, 1), (lambda: None, None)):
        with pytest.raises(SystemExit) as ended:
            common.entry_point(main)
        assert ended.value.code == code
    assert capsys.readouterr().err == "error: no such thing\n"
