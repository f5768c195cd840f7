"""The contents of eval.json: promised keys, any number of methods, failures left out of everything."""

import json

import pytest

from drafthead.eval.lossless.equality import Diagnosis, Equality
from drafthead.eval.metrics.summary import method_names, speedup_of
from drafthead.eval.prompts.prompt import EvalPrompt
from drafthead.eval.timing.result_log import FailedDecode
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
