"""Finished decodings on disk: round trip, turns, decoder names, and damage."""

import json
import math
from functools import partial
from pathlib import Path

from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.eval.timing.result_log import ResultLog, prompt_key
from drafthead.models.decoding.step import DecodeResult
from support import refuses, step_record

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
