"""Perplexity, greedy match rate and KL against plain loops; limits that are exceeded."""

import math
from dataclasses import replace

import pytest
import torch

from drafthead.data.batch import TrainBatch
from drafthead.eval.metrics import base_quality as quality
from drafthead.eval.metrics.base_quality import (
    BaseComparison,
    QualityLimits,
    check_quality,
    compare_bases,
    quality_line,
)
from drafthead.eval.report.tables import quality_table
from support import TinyBase, cases, refuses, row_of

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


def test_nothing_held_out_is_said(tiny_base: TinyBase) -> None:
    refuses("no held-out tokens", compare_bases, tiny_base(), tiny_base(), [])


TEXT = BaseComparison(tokens=1000, original_perplexity=20.0, tuned_perplexity=21.0, greedy_match_rate=0.93, kl=0.02)
ANSWERS = BaseComparison(tokens=500, original_perplexity=2.0, tuned_perplexity=2.0, greedy_match_rate=0.99, kl=0.01)


def test_what_is_not_a_number_does_not_pass() -> None:
    nan = replace(TEXT, tuned_perplexity=math.nan, greedy_match_rate=math.nan)
    quality_json = check_quality({"text": nan}, QualityLimits(max_perplexity_ratio=1.1, min_greedy_match_rate=0.9))
    assert len(quality_json["failures"]) == 2


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
