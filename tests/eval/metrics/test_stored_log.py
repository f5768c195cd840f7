"""``eval.json`` of a stored log: every key and value that version 0.2.0 wrote for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.eval.lossless.equality import Diagnosis, Equality
from drafthead.eval.metrics.summary import summarise
from drafthead.eval.prompts.prompt import EvalPrompt
from drafthead.eval.timing.interleaved import TimedResults, failed
from drafthead.eval.timing.result_log import ResultLog
from drafthead.eval.trees.cost_model import CostModel
from drafthead.eval.trees.search import TreeOrder

FOLDER = Path(__file__).parent
METHODS = ("transformers", "autoregressive", "speculative", "prompt_lookup")
TURNS = [("math", 0, 0), ("chat", 1, 0), ("chat", 1, 1), ("code", 2, 0), ("math", 3, 0)]
COSTS = CostModel(verify={1: 0.03, 4: 0.034, 16: 0.05}, draft=0.003, overhead=0.001, context=200)
ORDER = TreeOrder([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)], [0.6, 0.2, 0.4, 0.1, 0.3])
SAME = Equality(same=True)
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
