"""Log of finished decodings on disk, from which an interrupted evaluation resumes."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.errors import UserError
from drafthead.files.local import digest, finite
from drafthead.models.decoding.step import DecodeResult, StepRecord


@dataclass(frozen=True, kw_only=True)
class FailedDecode(DecodeResult):
    """Result of a prompt that could not be answered: no tokens, no steps, no time."""

    error: str  # with this decoder or another


def prompt_key(prompt: EvalPrompt, ids: list[int], turn: int = 0) -> str:
    """Return a hash of a turn's ids, and of task, number and turn (from 0), because ids may occur twice in a suite."""
    # The first turn's number is not hashed, so that single-turn logs are independent of turns.
    identity = [prompt.task, prompt.number, ids, *([turn] if turn else [])]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


class ResultLog:
    """Results by (prompt key, decoder name), stored as lines of a JSONL file; the last line of a pair counts. Whatever
    changes a decoder's results (method, batch size, sampler) must change its name, its text in ``composition`` (such as
    a hash of weights) or the file."""

    def __init__(self, path: Path | None, composition: Mapping[str, str] | None = None) -> None:
        """Read the JSONL file ``path``; None keeps results in memory only. An incomplete last line, left by a kill, is
        removed. Failures are not read, so they are tried again. ``composition`` maps a decoder's name to a text that
        identifies its version; results with another text are not read."""
        self._path, self._composition = path, composition or {}
        self._results: dict[tuple[str, str], DecodeResult] = {}
        self.other_cpu_s: dict[tuple[str, str], float | None] = {}  # of other processes during each decoding
        if path is not None and path.exists():
            self._read(path)

    def __contains__(self, item: tuple[str, str]) -> bool:
        return item in self._results

    def __getitem__(self, item: tuple[str, str]) -> DecodeResult:
        return self._results[item]

    def _read(self, path: Path) -> None:
        whole, _, torn = path.read_bytes().rpartition(b"\n")
        if torn:  # otherwise the next line would continue it
            os.truncate(path, len(whole) + 1 if whole else 0)
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                row = json.loads(line)
                if row.pop("sha256") != digest(row):
                    raise ValueError("its checksum does not match")
                if row.get("made_of") != self._composition.get(row["decoder"]):
                    # An earlier line of this decoder is stale too: the others were timed again in a later process.
                    self._results.pop((row["key"], row["decoder"]), None)
                elif "error" not in row:
                    # A null was not measured, so the field takes its default, which it had before writing.
                    given = [{k: v for k, v in step.items() if v is not None} for step in row["result"]["steps"]]
                    steps = [StepRecord(**step) for step in given]
                    self._results[row["key"], row["decoder"]] = DecodeResult(**row["result"] | {"steps": steps})
                    self.other_cpu_s[row["key"], row["decoder"]] = row.get("other_cpu_s")
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise UserError(f"{path} line {number} is not a decoding ({error!r}); remove the file") from None

    def add(
        self,
        key: str,
        decoder: str,
        prompt: EvalPrompt,
        result: DecodeResult,
        turn: int = 0,
        other_cpu_s: float | None = None,
    ) -> None:
        self._results[key, decoder], self.other_cpu_s[key, decoder] = result, other_cpu_s
        if self._path is None:
            return
        row: dict[str, Any] = {"key": key, "task": prompt.task, "prompt": prompt.number, "turn": turn}
        row["decoder"] = decoder
        if decoder in self._composition:
            row["made_of"] = self._composition[decoder]
        if isinstance(result, FailedDecode):
            row["error"] = result.error
        else:
            row |= {"other_cpu_s": other_cpu_s, "result": finite(asdict(result))}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"sha256": digest(row)}, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
