"""Interleaved runs that survive interruption, the bootstrap, equality, and the summary of eval.json."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from drafthead.data.contracts import DecodeResult, StepRecord
from drafthead.data.errors import UserError
from drafthead.eval import speed
from drafthead.eval.journal import FailedDecode
from drafthead.eval.suites import EvalPrompt

NAMES = ("transformers", "drafthead", "speculative")
TOO_LONG = 99


def answer(tokens: int, total_s: float, committed: int = 1) -> DecodeResult:
    steps = [
        StepRecord(
            position=1 + n * committed,
            proposed=4,
            depth=4,
            accepted=committed - 1,
            committed=committed,
            draft_s=0.01,
            verify_s=0.1,
            total_s=0.12,
        )
        for n in range((tokens - 1) // committed)
    ]
    return DecodeResult(tokens=list(range(tokens)), steps=steps, prefill_s=0.1, total_s=total_s)


def prompts(count: int) -> list[tuple[EvalPrompt, list[int]]]:
    return [(EvalPrompt("math" if n % 2 else "coding", n, []), [n, n + 1]) for n in range(count)]


class Recorder:
    """Decoders that note who was called with what, and may be interrupted."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self._stop_after = stop_after

    def decoders(self) -> dict[str, speed.Decoder]:
        return {name: self._decoder(name) for name in NAMES}

    def _decoder(self, name: str) -> speed.Decoder:
        def decode(ids: list[int]) -> DecodeResult:
            if ids[0] == TOO_LONG and name == "speculative":
                raise UserError("the prompt is too long; shorten it")
            if len(self.calls) == self._stop_after:
                raise KeyboardInterrupt
            self.calls.append((name, ids[0]))
            return answer(9, 1.0 + ids[0])

        return decode


def quiet(done: int, total: int) -> None:
    pass


def test_interleaves_after_one_warm_up_each() -> None:
    recorder = Recorder()
    progress: list[tuple[int, int]] = []
    results = speed.run_interleaved(
        prompts(12), recorder.decoders(), None, 0, lambda done, total: progress.append((done, total))
    )
    assert sorted(recorder.calls[:3]) == sorted((name, 0) for name in NAMES)
    measured = recorder.calls[3:]
    rounds = [measured[n : n + 3] for n in range(0, len(measured), 3)]
    assert [{n for _, n in turn} for turn in rounds] == [{n} for n in range(12)], "one prompt at a time"
    for place in range(3):
        assert Counter(turn[place][0] for turn in rounds) == dict.fromkeys(NAMES, 4), "no decoder is favoured by order"
    assert progress == [(n, 36) for n in range(1, 37)]
    assert [r.total_s for r in results["drafthead"]] == [1.0 + n for n in range(12)]


@pytest.mark.parametrize("torn", [False, True], ids=["killed between lines", "killed inside a line"])
def test_an_interrupted_run_continues(tmp_path: Path, torn: bool) -> None:
    log = tmp_path / "run" / "decodes.jsonl"
    first = Recorder(stop_after=3 + 5)  # inside the second prompt
    with pytest.raises(KeyboardInterrupt):
        speed.run_interleaved(prompts(4), first.decoders(), log, 0, quiet)
    if torn:
        log.write_text(log.read_text()[:-20])
    second = Recorder()
    results = speed.run_interleaved(prompts(4), second.decoders(), log, 0, quiet)
    again = sorted((name, n) for name in NAMES for n in (1, 2, 3))
    assert sorted(second.calls[3:]) == again, "times that are compared come from one process"
    assert results == speed.run_interleaved(prompts(4), Recorder().decoders(), None, 0, quiet)

    third = Recorder()
    assert speed.run_interleaved(prompts(4), third.decoders(), log, 0, quiet) == results
    assert third.calls == [], "a finished run decodes nothing, not even to warm up"


def test_equal_prompts_are_both_decoded(tmp_path: Path) -> None:
    twins = [(EvalPrompt("chat", n, []), [5]) for n in range(2)]
    recorder = Recorder()
    speed.run_interleaved(twins, recorder.decoders(), tmp_path / "log.jsonl", 0, quiet)
    assert len(recorder.calls) == 3 + 6


def test_a_broken_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"key": 1}\n')
    with pytest.raises(UserError, match=r"line 1 is no decoding .*remove the file"):
        speed.run_interleaved(prompts(1), Recorder().decoders(), log, 0, quiet)


def test_one_bad_prompt_does_not_lose_the_others(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    bad = (EvalPrompt("math", 7, []), [TOO_LONG])
    mixed = [bad, *prompts(2)]
    results = speed.run_interleaved(mixed, Recorder().decoders(), log, 0, quiet)
    for name in NAMES:
        assert [isinstance(r, FailedDecode) for r in results[name]] == [True, False, False]
        assert results[name][0].tokens == []
    errors = [row for row in map(json.loads, log.read_text().splitlines()) if "error" in row]
    assert [(e["prompt"], e["decoder"], e["error"]) for e in errors] == [
        (7, "speculative", "the prompt is too long; shorten it")
    ]

    summary = speed.summarise([p for p, _ in mixed], results, [speed.Equality(same=True)] * 3)
    assert summary["failed"] == [{"prompt": 7, "task": "math", "message": "the prompt is too long; shorten it"}]
    assert summary["overall"]["identical_outputs"]["of"] == 2
    json.dumps(summary, allow_nan=False)
    again = Recorder()
    speed.run_interleaved(mixed, again.decoders(), log, 0, quiet)
    assert all(n != 0 and n != 1 for _, n in again.calls[2:]), "failures are tried again, answers are not"


def test_speedup_is_a_ratio_of_totals_with_a_paired_interval() -> None:
    """Prompts of very different length, each exactly twice as fast: pairing leaves no doubt at all."""
    baseline = [answer(n, n / 10) for n in (4, 40, 400)]
    method = [answer(n, n / 20) for n in (4, 40, 400)]
    assert speed.speedup_interval(baseline, method) == pytest.approx((2.0, 2.0, 2.0))

    uneven = [answer(10, 1.0), answer(100, 5.0)]
    ratio, low, high = speed.speedup_interval([answer(10, 1.0), answer(100, 10.0)], uneven)
    assert ratio == pytest.approx((110 / 6) / (110 / 11))
    assert (low, high) == pytest.approx((1.0, 2.0))
    assert speed.speedup_interval(baseline, method, seed=1) == speed.speedup_interval(baseline, method, seed=1)


def test_interval_needs_two_prompts() -> None:
    ratio, low, high = speed.speedup_interval([answer(8, 2.0)], [answer(8, 1.0)])
    assert ratio == 2
    assert math.isnan(low) and math.isnan(high)
    assert all(math.isnan(x) for x in speed.speedup_interval([], []))


def margin_of(value: float) -> Callable[[int], float]:
    return lambda position: value


def never(position: int) -> float:
    raise AssertionError("the margin is costly: not asked for without two tokens to compare")


def test_compare_outputs() -> None:
    assert speed.compare_outputs([1, 2], [1, 2], never) == speed.Equality(same=True)
    assert speed.compare_outputs([1, 2, 3], [1, 5, 3], margin_of(-5e-5)) == speed.Equality(
        same=False, position=1, tokens=(2, 5), margin=5e-5, near_tie=True
    )
    assert not speed.compare_outputs([1], [2], margin_of(1e-4)).near_tie
    assert not speed.compare_outputs([1], [2], margin_of(math.nan)).near_tie
    assert speed.compare_outputs([1, 2, 3], [1, 2], never) == speed.Equality(same=False, position=2)


KEYS = {
    "mean_accepted_tokens",
    "acceptance_per_depth",
    "ctar",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "identical_outputs",
    "hardware",
    "versions",
}


def test_summary_has_the_promised_keys_and_the_faster_baseline_as_denominator() -> None:
    results = {
        "transformers": [answer(9, 3.0), answer(9, 2.5)],
        "drafthead": [answer(9, 2.0), answer(9, 2.2)],
        "speculative": [answer(9, 1.0, committed=2), answer(9, 1.1, committed=4)],
    }
    tie = speed.Equality(same=False, position=4, tokens=(1, 2), margin=1e-6, near_tie=True)
    summary = speed.summarise([p for p, _ in prompts(2)], results, [speed.Equality(same=True), tie])
    assert set(summary["tasks"]) == {"coding", "math"}
    for group in (*summary["tasks"].values(), summary["overall"]):
        assert set(group) == KEYS
    overall = summary["overall"]
    assert overall["speedup"]["vs_drafthead"] == pytest.approx(2.0)
    assert overall["speedup"]["interval_95"] == pytest.approx([2.0, 2.0]), "against drafthead, the faster one"
    assert overall["mean_accepted_tokens"] == pytest.approx(16 / 6)
    assert overall["baseline_tokens_per_second"] == pytest.approx({"transformers": 18 / 5.5, "drafthead": 18 / 4.2})
    assert overall["ctar"]["1"] == 1.0 and overall["ctar"]["2"] == pytest.approx(2 / 6) and len(overall["ctar"]) == 6
    assert overall["identical_outputs"] == {
        "same": 1,
        "of": 2,
        "near_ties": [{"prompt": 1, "position": 4, "tokens": [1, 2], "margin": 1e-6}],
        "different": [],
    }
    assert summary["tasks"]["coding"]["speedup"]["interval_95"] == [None, None]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_an_unexplained_difference_is_no_near_tie() -> None:
    results = {name: [answer(9, 1.0)] for name in NAMES}
    ended = speed.Equality(same=False, position=5)
    outputs = speed.summarise([prompts(1)[0][0]], results, [ended])["overall"]["identical_outputs"]
    assert outputs["near_ties"] == []
    assert outputs["different"] == [{"prompt": 0, "position": 5, "tokens": None, "margin": None}]


def test_hardware_and_versions_name_the_machine() -> None:
    machine = speed.hardware()
    assert set(machine) == {"cpu", "cores", "torch_threads", "ram_gb", "gpu"}
    assert machine["cpu"] and machine["cores"] >= 1 and machine["ram_gb"] > 0
    assert set(speed.versions()) == {"drafthead", "torch", "transformers", "python"}
