"""Finished decodings on disk as they come, so that an interrupted evaluation continues."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.floats import finite
from drafthead.eval.prompts.prompt import EvalPrompt
from drafthead.models.decoding.step_log import DecodeResult, StepRecord


@dataclass(frozen=True, kw_only=True)
class FailedDecode(DecodeResult):
    """Holds the place of an answer that bad input prevented: no tokens, no steps, no time."""

    error: str
    """Why this prompt failed, in this decoder or another."""


def prompt_key(prompt: EvalPrompt, ids: list[int], turn: int = 0) -> str:
    """Hash of a turn's prompt ids (turns count from 0); task, number and turn tell equal ids of a suite apart."""
    # A first turn is hashed without its number, so that logs of single turns stay readable.
    identity = [prompt.task, prompt.number, ids, *([turn] if turn else [])]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


class ResultLog:
    """Results by (prompt key, decoder name), one JSON line each; of two lines with one key the later counts.

    A decoder's name tells apart all that one log may hold: method, batch size, sampler. Any text will do.
    """

    def __init__(self, path: Path | None, made_of: Mapping[str, str] | None = None) -> None:
        """Read what the JSONL file ``path`` holds; None keeps results in memory only.

        A last line without its end, torn by a kill, is cut off. Failures are not read: they are tried again. Nor are
        results under another mark (``made_of``) of a decoder that may change under one name: a hash of its weights.
        """
        self._path, self._made_of = path, made_of or {}
        self._results: dict[tuple[str, str], DecodeResult] = {}
        self.other_cpu_s: dict[tuple[str, str], float | None] = {}
        """CPU seconds of other processes during each decoding; None where they are unknown."""
        if path is not None and path.exists():
            self._read(path)

    def __contains__(self, item: tuple[str, str]) -> bool:
        return item in self._results

    def __getitem__(self, item: tuple[str, str]) -> DecodeResult:
        return self._results[item]

    def _read(self, path: Path) -> None:
        whole, _, torn = path.read_bytes().rpartition(b"\n")
        if torn:  # else the next line would be glued to it
            os.truncate(path, len(whole) + 1 if whole else 0)
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                row = json.loads(line)
                if row.get("made_of") != self._made_of.get(row["decoder"]):
                    # Nor what stands before it: the other decoders' later lines are of another process.
                    self._results.pop((row["key"], row["decoder"]), None)
                elif "error" not in row:
                    self._results[row["key"], row["decoder"]] = _from_json(row["result"])
                    self.other_cpu_s[row["key"], row["decoder"]] = row.get("other_cpu_s")
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"{path} line {number} is no decoding ({error!r}); remove the file to start again"
                ) from None

    def add(
        self,
        key: str,
        decoder: str,
        prompt: EvalPrompt,
        result: DecodeResult,
        turn: int = 0,
        other_cpu_s: float | None = None,
    ) -> None:
        """Keep a result, and append it to the file before returning."""
        self._results[key, decoder], self.other_cpu_s[key, decoder] = result, other_cpu_s
        if self._path is None:
            return
        row: dict[str, Any] = {"key": key, "task": prompt.task, "prompt": prompt.number, "turn": turn}
        row["decoder"] = decoder
        if decoder in self._made_of:
            row["made_of"] = self._made_of[decoder]
        if isinstance(result, FailedDecode):
            row["error"] = result.error
        else:
            row |= {"other_cpu_s": other_cpu_s, "result": finite(asdict(result))}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _from_json(row: dict[str, Any]) -> DecodeResult:
    # Without null, what was not measured takes the field's default, as it did when it was written.
    steps = [{key: value for key, value in step.items() if value is not None} for step in row["steps"]]
    return DecodeResult(**row | {"steps": [StepRecord(**step) for step in steps]})
