"""The contents of eval.json: any number of methods, failures left out of everything, keys and values of 0.2.0."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.eval.lossless.equality import Diagnosis, Equality
from drafthead.eval.metrics.summary import method_names, speedup_of, summarise
from drafthead.eval.timing.interleaved import TimedResults, failed
from drafthead.eval.timing.result_log import FailedDecode, ResultLog
from drafthead.eval.trees.cost_model import CostModel
from drafthead.eval.trees.search import TreeOrder
from support import steady_answer, summarised

NAMES = ("transformers", "autoregressive", "speculative")
SAME = Equality(same=True)
FAILED = FailedDecode(tokens=[], steps=[], prefill_s=0.0, total_s=0.0, error="the prompt is too long; shorten it")


def prompts(count: int) -> list[EvalPrompt]:
    return [EvalPrompt("math" if n % 2 else "coding", n, []) for n in range(count)]


def test_any_number_of_methods() -> None:
    results = {
        "lookup": [steady_answer(9, 1.5, committed=1)] * 2,
        "transformers": [steady_answer(9, 2.0)] * 2,
        "speculative": [steady_answer(9, 1.0, committed=2)] * 2,
        "assisted": [steady_answer(9, 4.0, committed=4)] * 2,
    }
    summary = summarised(prompts(2), results, {"speculative": [SAME] * 2, "lookup": [SAME] * 2})
    assert method_names(results) == ["speculative", "lookup", "assisted"]
    assert summary["headline"] == "speculative"
    overall = summary["overall"]
    assert list(overall["methods"]) == ["speculative", "lookup", "assisted"]
    assert [speedup_of(overall, name) for name in overall["methods"]] == pytest.approx([2.0, 4 / 3, 0.5])
    assert speedup_of(overall) == pytest.approx(2.0)
    assert overall["methods"]["lookup"]["identical_outputs"]["of"] == 2
    assert "identical_outputs" not in overall["methods"]["assisted"], "not compared is not the same as different"
    assert set(summary["metrics"]) == set(overall["methods"])
    assert summary["metrics"]["assisted"]["mean_accepted_length"] == 4
    assert list(summary["speedup_breakdown"]) == ["transformers"]


def test_failures_are_named_and_counted_nowhere() -> None:
    whole = {name: [steady_answer(9, 1.0), steady_answer(9, 1.0)] for name in NAMES}
    broken = {name: [FAILED, FAILED, *row] for name, row in whole.items()}
    numbered = [EvalPrompt("lost", 7, []), EvalPrompt("math", 8, []), *prompts(2)]
    different = Equality(same=False, position=5, diagnosis=Diagnosis.STOP)
    summary = summarised(numbered, broken, {"speculative": [different, different, SAME, SAME]})
    message = "the prompt is too long; shorten it"
    assert summary["failed"] == [
        {"prompt": number, "task": task, "message": message} for number, task in ((7, "lost"), (8, "math"))
    ]
    expected = summarised(prompts(2), whole, {"speculative": [SAME, SAME]})
    for key in ("overall", "metrics", "by_position", "by_entropy", "speedup_breakdown", "equality"):
        assert summary[key] == expected[key]
    assert summary["tasks"]["math"] == expected["tasks"]["math"]
    assert summary["tasks"]["lost"]["mean_accepted_length"] is None
    json.dumps(summary, allow_nan=False)


# A log that version 0.2.0 stored, and the summary that it wrote ------------------------------------------------------

FOLDER = Path(__file__).parent
METHODS = ("transformers", "autoregressive", "speculative", "prompt_lookup")
TURNS = [("math", 0, 0), ("chat", 1, 0), ("chat", 1, 1), ("code", 2, 0), ("math", 3, 0)]
COSTS = CostModel(verify={1: 0.03, 4: 0.034, 16: 0.05}, draft=0.003, overhead=0.001, context=200)
ORDER = TreeOrder([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)], [0.6, 0.2, 0.4, 0.1, 0.3])
TIE = Equality(same=False, position=4, tokens=(1, 2), margin=1e-6, near_tie=True, diagnosis=Diagnosis.TIE)
FAULT = Equality(same=False, position=2, tokens=(1, 2), margin=3.0, diagnosis=Diagnosis.CACHE)


def stored_summary() -> dict[str, Any]:
    log, lost = ResultLog(FOLDER / "stored_log.jsonl"), failed("the prompt is too long")
    prompts = [EvalPrompt(task, number, [], ("then?",) * (task == "chat")) for task, number, _ in TURNS]
    keys = [f"{number}-{turn}" for _, number, turn in TURNS]
    timed = TimedResults(
        prompts=prompts,
        turns=[turn for _, _, turn in TURNS],
        ids=[[1] * (250 + 100 * n) for n in range(len(TURNS))],
        results={name: [log[key, name] if (key, name) in log else lost for key in keys] for name in METHODS},
        order=[2, 0, 3, 1],
    )
    equalities = {"speculative": [SAME, TIE, SAME, SAME, FAULT], "prompt_lookup": [SAME] * 5}
    evaluation = summarise(timed, equalities, lambda tokens: len(tokens) - tokens.count(8), torch.float32, COSTS, ORDER)
    for group in (*evaluation["tasks"].values(), evaluation["overall"]):
        del group["hardware"], group["versions"]  # of this machine
    return evaluation


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return all leaves by their path, and the lengths of lists and dicts."""
    if not isinstance(value, (dict, list)):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    leaves = {path: len(value)}
    for key, inner in items:
        leaves |= flat(inner, f"{path}/{key}")
    return leaves


def test_every_key_and_value_is_that_of_version_0_2_0() -> None:
    stored = flat(json.loads((FOLDER / "stored_summary.json").read_text()))
    summary = json.loads(json.dumps(stored_summary(), allow_nan=False))
    assert summary.pop("by_span")  # 0.2.0 did not have this key
    computed = flat(summary)
    assert set(computed) == set(stored)
    for key, value in stored.items():
        assert type(computed[key]) is type(value), key
        assert computed[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), key
