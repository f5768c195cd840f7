"""Interleaved runs that survive interruption, and the log of their finished decodings."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.errors import UserError
from drafthead.eval.timing.interleaved import Decoder, one_by_one, run_interleaved
from drafthead.eval.timing.result_log import FailedDecode, ResultLog, prompt_key
from drafthead.files.local import digest
from drafthead.models.decoding.step import DecodeResult
from support import refuses, steady_answer, step_record

NAMES = ("transformers", "autoregressive", "speculative")
TOO_LONG, UNBUILDABLE = 99, 98
quiet = partial(max, 0)


def prompts(count: int) -> list[EvalPrompt]:
    return [EvalPrompt("math" if n % 2 else "coding", n, [], input_ids=(n, n + 1)) for n in range(count)]


def build(prompt: EvalPrompt, answers: list[list[int]]) -> list[int]:
    if prompt.input_ids == (UNBUILDABLE,):
        raise UserError("the prompt is too long for a chat; shorten it")
    return [*(prompt.input_ids or ()), *(token for answer in answers for token in answer)]


def timed(
    suite: list[EvalPrompt], decoders: dict[str, Decoder], log: Path | None = None, seed: int = 0
) -> dict[str, list[DecodeResult]]:
    return run_interleaved(suite, build, decoders, log, seed, quiet).results


class Recorder:
    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self._stop_after = stop_after

    def decoders(self) -> dict[str, Decoder]:
        return {name: self._decoder(name) for name in NAMES}

    def _decoder(self, name: str) -> Decoder:
        def decode(ids: list[int]) -> DecodeResult:
            if ids[0] == TOO_LONG and name == "speculative":
                raise UserError("the prompt is too long; shorten it")
            if len(self.calls) == self._stop_after:
                raise KeyboardInterrupt
            self.calls.append((name, ids[0]))
            return steady_answer(9, 1.0 + ids[0])

        return one_by_one(decode)


def test_interleaves_after_one_warm_up_each() -> None:
    recorder = Recorder()
    progress: list[tuple[int, int]] = []
    on_progress = lambda *counts: progress.append(counts)  # noqa: E731
    timing = run_interleaved(prompts(12), build, recorder.decoders(), None, 0, on_progress)
    first = timing.order[0]
    assert sorted(recorder.calls[:3]) == sorted((name, first) for name in NAMES)
    measured = recorder.calls[3:]
    rounds = [measured[n : n + 3] for n in range(0, len(measured), 3)]
    assert [{n for _, n in turn} for turn in rounds] == [{n} for n in timing.order], "one prompt at a time"
    assert sorted(timing.order) == list(range(12)) != timing.order, "in a random order"
    for place in range(3):
        assert Counter(turn[place][0] for turn in rounds) == dict.fromkeys(NAMES, 4), "no decoder is favoured by order"
    assert progress == [(n, 36) for n in range(1, 37)]
    assert [r.total_s for r in timing.results["autoregressive"]] == [1.0 + n for n in range(12)], "in the suite's order"


def test_every_decoder_reads_the_reference_answer_of_the_turn_before() -> None:
    conversation = EvalPrompt("chat", 0, [], ("and then?",), input_ids=(1, 2))
    read: dict[str, list[list[int]]] = {name: [] for name in NAMES}

    def decoder(name: str) -> Decoder:
        def decode(ids: list[int]) -> DecodeResult:
            read[name].append(ids)
            return replace(steady_answer(3, 1.0), tokens=[NAMES.index(name)] * 3)

        return one_by_one(decode)

    timing = run_interleaved([conversation], build, {n: decoder(n) for n in NAMES}, None, 0, quiet)
    assert timing.turns == [0, 1] and timing.prompts == [conversation] * 2
    assert timing.ids == [[1, 2], [1, 2, 1, 1, 1]], "1 is the reference's answer"
    assert all(ids[-1] == [1, 2, 1, 1, 1] for ids in read.values())


@pytest.mark.parametrize("first", [TOO_LONG, UNBUILDABLE])
def test_a_turn_after_a_failed_one_fails_too(first: int) -> None:
    conversation = EvalPrompt("chat", 0, [], ("and then?",), input_ids=(first,))
    timing = timed([conversation, *prompts(1)], Recorder().decoders())
    assert [isinstance(r, FailedDecode) for r in timing["autoregressive"]] == [True, True, False]
    # Type: ignore[attr-defined].
    assert "earlier turn of this conversation failed: the prompt is too long" in timing["autoregressive"][1].error


@pytest.mark.parametrize("torn", [False, True], ids=["killed between lines", "killed inside a line"])
def test_an_interrupted_run_continues(tmp_path: Path, torn: bool) -> None:
    log = tmp_path / "run" / "decodes.jsonl"
    first = Recorder(stop_after=3 + 5)  # inside the second prompt
    with pytest.raises(KeyboardInterrupt):
        timed(prompts(4), first.decoders(), log)
    if torn:
        log.write_text(log.read_text()[:-20])
    done = first.calls[0][1]
    second = Recorder()
    results = timed(prompts(4), second.decoders(), log)
    again = sorted((name, n) for name in NAMES for n in range(4) if n != done)
    assert sorted(second.calls[3:]) == again, "times that are compared come from one process"
    assert results == timed(prompts(4), Recorder().decoders())

    third = Recorder()
    assert timed(prompts(4), third.decoders(), log) == results
    assert third.calls == [], "a finished run decodes nothing, not even to warm up"


def test_one_bad_prompt_does_not_lose_the_others(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    bad = EvalPrompt("math", 7, [], input_ids=(TOO_LONG,))
    results = timed([bad, *prompts(2)], Recorder().decoders(), log)
    for name in NAMES:
        assert [isinstance(r, FailedDecode) for r in results[name]] == [True, False, False]
        assert results[name][0].tokens == []
    (error,) = (row for row in map(json.loads, log.read_text().splitlines()) if "error" in row)
    said = {"prompt": 7, "task": "math", "decoder": "speculative", "error": "the prompt is too long; shorten it"}
    assert error == {"key": error["key"], "turn": 0, "sha256": error["sha256"], **said}
    again = Recorder()
    timed([bad, *prompts(2)], again.decoders(), log)
    assert {n for _, n in again.calls} == {TOO_LONG}, "failures are tried again, answers are not"


def test_the_cpu_time_of_other_processes_survives_a_resumption(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    timings = [run_interleaved(prompts(4), build, Recorder().decoders(), log, 0, quiet) for _ in range(2)]
    assert timings[1].resumed == 4 and timings[0].other_processes_cores == timings[1].other_processes_cores
    assert (timings[0].other_processes_cores is not None) == Path("/proc/stat").exists()
    rows = [json.loads(line) | {"other_cpu_s": 3.0} for line in log.read_text().splitlines()]
    for row in rows:
        row["sha256"] = digest({key: value for key, value in row.items() if key != "sha256"})
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seconds = sum(result.total_s for results in timings[0].results.values() for result in results)
    again = run_interleaved(prompts(4), build, Recorder().decoders(), log, 0, quiet)
    assert again.other_processes_cores == pytest.approx(3.0 * 12 / seconds)


# The log --------------------------------------------------------------------------------------------------------------


PROMPT = EvalPrompt("chat", 3, [{"role": "user", "content": "A"}], ("B",))


step = partial(step_record, 1, 2, depth=2)


def result(*entropies: float) -> DecodeResult:
    return DecodeResult(tokens=[5, 6, 7], steps=[step(entropy=e) for e in entropies], prefill_s=0.5, total_s=1.0)


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_entropy_survives_and_what_was_not_measured_is_null(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    name = "früh \u2028 aus, batch 4"
    ResultLog(path).add("k", name, PROMPT, result(0.1 + 0.2, math.nan, math.inf), 1)
    row = json.loads(path.read_text(), parse_constant=no_constant)
    assert row["turn"] == 1 and [s["entropy"] for s in row["result"]["steps"]] == [0.1 + 0.2, None, None]
    steps = ResultLog(path)["k", name].steps
    assert steps[0] == step(entropy=0.1 + 0.2)
    assert math.isnan(steps[1].entropy) and math.isnan(steps[2].entropy)


def test_a_decoder_that_was_made_of_something_else_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    def decoded(mark: str) -> bool:
        log = ResultLog(path, {"head:a": mark})
        assert ("k", "autoregressive") in log or not path.exists()
        return ("k", "head:a") in log

    def decode(mark: str) -> None:
        for name in ("autoregressive", "head:a"):
            ResultLog(path, {"head:a": mark}).add("k", name, PROMPT, result())

    decode("first")
    assert decoded("first") and not decoded("second")
    decode("second")
    assert decoded("second") and not decoded("first"), "the answer beside it is a later process's"
    assert ("k", "head:a") not in ResultLog(path)


def test_keys_tell_turns_prompts_and_ids_apart() -> None:
    twin = EvalPrompt("chat", 4, [])
    keys = [prompt_key(PROMPT, [1]), prompt_key(PROMPT, [1], 1), prompt_key(twin, [1]), prompt_key(PROMPT, [1, 1])]
    assert len({*keys}) == 4
    assert keys[0] == "c2673c072445c124", "logs that are on disk stay valid"


def test_a_broken_or_edited_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    ResultLog(path).add("k", "d", PROMPT, result())
    line = path.read_text()
    for content, says in (
        (line + '{"key": "k", "decoder": "d", "result": {"steps": [3]}}\n', "line 2"),
        (line.replace('"total_s": 1.0', '"total_s": 0.0625') + line, "line 1 .*checksum"),
    ):
        path.write_text(content)
        refuses(f"log.jsonl {says}.*remove the file", ResultLog, path)
