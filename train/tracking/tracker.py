"""Where a run's numbers go: metrics.jsonl always, a console line a log step, an experiment tracker when asked."""

import json
import math
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from drafthead.data.utils.files import read_json_lines, write_atomic
from drafthead.train.config import TrackerConfig
from drafthead.train.tracking.backends import AccelerateBackend, Say, TrackerBackend, WandbBackend

Row = Mapping[str, Any]


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line, appended. Numbers that are not finite become null.

    A row holds ``total_step``, the optimiser steps finished over all phases; resuming drops what lies past it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: Row) -> None:
        """Append a row; it survives a kill of this process from here on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(_finite(row), allow_nan=False) + "\n")

    def truncate(self, total_step: int) -> None:
        """Keep rows up to ``total_step``, so that a resumed run logs no step twice; a torn last line goes too.

        Raises:
            UserError: a line before the last one is not JSON.
        """
        if self.path.exists():
            kept = [row for row in self.rows() if row.get("total_step", 0) <= total_step]
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows; empty when nothing was logged.

        Raises:
            UserError: a line before the last one is not JSON.
        """
        return read_json_lines(self.path)


class ConsoleLine:
    """Renders a log row as one line in a fixed order: phase step/total, loss, accept_1.., lr, ... eta."""

    def __init__(self, phase: str, steps: int) -> None:
        """``steps`` is the length of the phase; the eta counts to its end."""
        self.phase, self.steps = phase, steps

    def render(self, row: Row) -> str:
        """The line of a row with step, loss (and PART_loss), accept_k, lr, grad_norm, tokens_per_second and step_ms.

        Memory is the row's ``memory_bytes`` when it has one, else ``peak_memory()``.
        """
        accepted = " ".join(f"{row[key]:.3f}" for key in _accept_keys(row))
        memory = row.get("memory_bytes", peak_memory())
        parts = (
            f"{self.phase} {row['step']:>{len(str(self.steps))}}/{self.steps}",
            f"loss {row['loss']:.4f}{_parts(row)}",
            f"accept {accepted}",
            f"lr {row['lr']:.2e}",
            f"grad {row['grad_norm']:.3f}",
            f"{row['tokens_per_second']:,.0f} tok/s",
            f"{row['step_ms']:.0f} ms",
            f"{memory / 2**30:.2f} GiB",
            f"eta {_duration((self.steps - row['step']) * row['step_ms'] / 1e3)}",
        )
        return "   " + "  ".join(parts)


def _parts(row: Row) -> str:
    """What a loss of several parts is made of: `` (base 0.1234, heads 2.3456)`` of base_loss and heads_loss."""
    parts = [f"{key.removesuffix('_loss')} {row[key]:.4f}" for key in row if key.endswith("_loss")]
    return f" ({', '.join(parts)})" if parts else ""


def peak_memory() -> int:
    """Bytes at the peak so far: allocated on the GPU when torch uses one, else resident in this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Tracker:
    """Feeds the tracker of a recipe. It never fails a run: the first error is one warning line, then it is silent.

    Make it on the main process only, before the first row of ``metrics.jsonl``: a folder that has rows continues
    its wandb run, another starts a new one.
    """

    def __init__(self, config: TrackerConfig, folder: Path, name: str, settings: Row, say: Say) -> None:
        """Open the tracker.

        Args:
            config: which one.
            folder: the run folder; offline data and event files go below it.
            name: of the run, unless ``config.run_name`` is set.
            settings: of the run, nested; kept with it.
            say: receives lines for the user: where to look, how to sync, what went wrong.
        """
        self._config, self._folder, self._say = config, folder, say
        self._sink: TrackerBackend | None = None
        if config.kind != "none":
            self._guard(lambda: self._open(config.run_name or name, settings))

    def _open(self, name: str, settings: Row) -> None:
        config, folder, say = self._config, self._folder, self._say
        if config.kind == "wandb":
            self._sink = WandbBackend(
                folder, name, settings, say, project=config.project, entity=config.entity, mode=config.mode
            )
        else:
            self._sink = AccelerateBackend(folder, name, settings, say, kind=config.kind, project=config.project)

    def log(self, row: Row, step: int) -> None:
        """Send a row's finite numbers as ``PHASE/KEY`` under ``step``, the optimiser steps over all phases."""
        sink, prefix = self._sink, f"{row['phase']}/"
        if sink is not None:
            self._guard(lambda: sink.log(dict(_numbers(row, prefix)), step))

    def replay(self, rows: Iterable[Row]) -> None:
        """Send what the tracker lacks of the rows that this run logged before it was continued, before others."""
        for row in rows:
            if self._sink is not None and self._sink.lacks(row["total_step"]):
                self.log(row, row["total_step"])

    def finish(self, evaluation: Row | None = None) -> None:
        """Send the evaluation (numbers, and where the tracker takes them tables and pages) and close.

        Later calls do nothing.
        """
        sink, self._sink = self._sink, None
        if sink is not None:
            self._guard(lambda: sink.finish(dict(_numbers(evaluation or {})), evaluation, self._folder))

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a service that is down, full or changed must not cost a training run
            self._sink = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._say(f"warning: {self._config.kind} failed ({reason}); training goes on, metrics.jsonl has every row")


def _accept_keys(row: Row) -> list[str]:
    depths = sorted(int(key[7:]) for key in row if key.startswith("accept_") and key[7:].isdigit())
    return [f"accept_{k}" for k in depths]


def _numbers(row: Row, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            yield f"{prefix}{key}", value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
