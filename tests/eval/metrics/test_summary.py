"""The contents of eval.json, and the quality of a tuned base against plain loops."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.data.batch import TrainBatch
from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.eval.lossless.equality import Diagnosis, Equality
from drafthead.eval.metrics import base_quality as quality
from drafthead.eval.metrics.base_quality import (
    BaseComparison,
    QualityLimits,
    check_quality,
    compare_bases,
    quality_line,
)
from drafthead.eval.metrics.summary import method_names, speedup_of, summarise
from drafthead.eval.report.tables import quality_table
from drafthead.eval.timing.interleaved import TimedResults, failed
from drafthead.eval.timing.result_log import FailedDecode, ResultLog
from drafthead.eval.trees.search import TreeOrder
from drafthead.models.decoding.cost_model import CostModel
from support import TinyBase, cases, refuses, row_of, steady_answer, summarised

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
    for key in ("by_span", "by_context_of", "degenerate"):
        assert summary.pop(key)  # 0.2.0 did not have this key
    computed = flat(summary)
    assert set(computed) == set(stored)
    for key, value in stored.items():
        assert type(computed[key]) is type(value), key
        assert computed[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), key


def test_answers_that_repeat_themselves_are_counted() -> None:
    """A loop of the prompt 4 has twice the acceptance of the other answer, of which tau without it is."""
    asked = [EvalPrompt("chat", number, []) for number in (3, 4)]
    fair, fast = steady_answer(41, 2.0, committed=2), steady_answer(41, 1.0, committed=4)
    loop = replace(fast, tokens=[9, *[7, 8] * 20])
    results = {"autoregressive": [steady_answer(41, 3.0)] * 2, "speculative": [fair, loop], "head": [fair, fair]}
    evaluation = summarised(asked, results, {})
    assert evaluation["degenerate"] == {
        "speculative": {"answers": 1, "of": 2, "prompts": [4], "mean_accepted_length_without": 2.0},
        "head": {"answers": 0, "of": 2, "prompts": [], "mean_accepted_length_without": 2.0},
    }
    assert evaluation["overall"]["mean_accepted_length"] > 2.5
    (low,) = evaluation["by_context_of"]["head"]
    assert low["steps"] == 40 and evaluation["by_context"] == evaluation["by_context_of"]["speculative"]


# Perplexity, greedy match rate and KL ---------------------------------------------------------------------------------


FIRST_TRAINED = 3


def batch(start: int) -> TrainBatch:
    """Two documents and padding; prompts of three tokens are not trained."""
    return row_of([range(start, start + 9), range(start + 9, start + 15)], FIRST_TRAINED, padding=1)


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_it_is_what_plain_loops_find(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(quality, "chunk_rows", lambda *_: rows)
    original, tuned = tiny_base(seed=0), tiny_base(seed=1)
    comparison = compare_bases(original, tuned, [batch(20), batch(60)])
    nll, agreed, kl, tokens = [0.0, 0.0], 0, 0.0, 0
    for start in (20, 60):
        for document in (list(range(start, start + 9)), list(range(start + 9, start + 15))):
            probs = [b.model(torch.tensor([document])).logits[0].log_softmax(-1) for b in (original, tuned)]
            for t in range(FIRST_TRAINED - 1, len(document) - 1):
                tokens += 1
                for which, dist in enumerate(probs):
                    nll[which] -= dist[t, document[t + 1]].item()
                agreed += int(probs[0][t].argmax() == probs[1][t].argmax())
                kl += (probs[0][t].exp() * (probs[0][t] - probs[1][t])).sum().item()
    assert comparison.tokens == tokens == 18
    assert comparison.original_perplexity == pytest.approx(math.exp(nll[0] / tokens), rel=1e-4)
    assert comparison.tuned_perplexity == pytest.approx(math.exp(nll[1] / tokens), rel=1e-4)
    assert comparison.greedy_match_rate == pytest.approx(agreed / tokens)
    assert comparison.kl == pytest.approx(kl / tokens, rel=1e-4)


TEXT = BaseComparison(tokens=1000, original_perplexity=20.0, tuned_perplexity=21.0, greedy_match_rate=0.93, kl=0.02)
ANSWERS = BaseComparison(tokens=500, original_perplexity=2.0, tuned_perplexity=2.0, greedy_match_rate=0.99, kl=0.01)


def test_bad_measurements_do_not_pass(tiny_base: TinyBase) -> None:
    nan = replace(TEXT, tuned_perplexity=math.nan, greedy_match_rate=math.nan)
    quality_json = check_quality({"text": nan}, QualityLimits(max_perplexity_ratio=1.1, min_greedy_match_rate=0.9))
    assert len(quality_json["failures"]) == 2
    refuses("no held-out tokens", compare_bases, tiny_base(), tiny_base(), [])


@cases(
    "limits, failures, says",
    (QualityLimits(), 0, "the recipe sets no quality limits"),
    (
        QualityLimits(max_perplexity_ratio=1.05, min_greedy_match_rate=0.9),
        0,
        "within the quality limits (ratio at most 1.05, same top-1 at least 90 %)",
    ),
    (
        QualityLimits(max_perplexity_ratio=1.04, min_greedy_match_rate=0.95),
        2,
        "quality limits exceeded: perplexity on text went from 20.000 to 21.000, a ratio of 1.0500 (limit 1.04); "
        "greedy match rate on text is 0.9300 (limit 0.95)",
    ),
)
def test_tables_name_the_limits(limits: QualityLimits, failures: int, says: str) -> None:
    quality_json = check_quality({"text": TEXT, "answers": ANSWERS}, limits)
    assert (quality_json["passed"], len(quality_json["failures"])) == (not failures, failures)
    assert quality_table(quality_json).rows[0] == ("text", "1,000", "20.000", "21.000", "1.0500", "93.00 %", "0.0200")
    assert quality_line(quality_json) == says
