"""Finished decodings on disk as they come, so that an interrupted evaluation continues."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafthead.data.contracts import DecodeResult, StepRecord
from drafthead.data.errors import UserError
from drafthead.eval.suites import EvalPrompt


@dataclass(frozen=True, kw_only=True)
class FailedDecode(DecodeResult):
    """Holds the place of an answer that bad input prevented: no tokens, no steps, no time."""

    error: str
    """Why this prompt failed, in this decoder or another."""


def prompt_key(prompt: EvalPrompt, ids: list[int]) -> str:
    """Hash of a prompt's ids; task and number keep two equal prompts of a suite apart."""
    return hashlib.sha256(json.dumps([prompt.task, prompt.number, ids]).encode()).hexdigest()[:16]


class Journal:
    """Results by (prompt key, decoder name), one JSON line each; of two lines with one key the later counts."""

    def __init__(self, path: Path | None) -> None:
        """Read what ``path`` holds; None keeps results in memory only.

        A last line without its end, torn by a kill, is cut off. Failures are not read: they are tried again.

        Raises:
            UserError: another line is broken.
        """
        self._path = path
        self._results: dict[tuple[str, str], DecodeResult] = {}
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
                if "error" not in row:
                    self._results[row["key"], row["decoder"]] = _from_json(row["result"])
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{path} line {number} is no decoding ({error!r}); remove the file to start again"
                ) from None

    def add(self, key: str, decoder: str, prompt: EvalPrompt, result: DecodeResult) -> None:
        """Keep a result, and append it to the file before returning."""
        self._results[key, decoder] = result
        if self._path is None:
            return
        row: dict[str, Any] = {"key": key, "task": prompt.task, "prompt": prompt.number, "decoder": decoder}
        row |= {"error": result.error} if isinstance(result, FailedDecode) else {"result": asdict(result)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _from_json(row: dict[str, Any]) -> DecodeResult:
    return DecodeResult(**row | {"steps": [StepRecord(**step) for step in row["steps"]]})
