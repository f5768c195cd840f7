"""What a run logs by itself: ``metrics.jsonl``, and one console line for each log step."""

import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drafthead.data.utils.display import duration
from drafthead.data.utils.files import read_json_lines, write_atomic
from drafthead.data.utils.floats import finite

Row = Mapping[str, Any]


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line, appended. Numbers that are not finite become null.

    A row holds ``total_step``, the optimiser steps finished over all phases; resuming drops later rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: Row) -> None:
        """Append a row; it survives a kill of this process from here on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(finite(row), allow_nan=False) + "\n")

    def truncate(self, total_step: int) -> None:
        """Keep rows up to ``total_step``, so that a resumed run logs no step twice; a torn last line goes too."""
        if self.path.exists():
            kept = [row for row in self.rows() if row.get("total_step", 0) <= total_step]
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows; empty when nothing was logged."""
        return read_json_lines(self.path)


def console_line(row: Row, steps: int) -> str:
    """A row as one line in a fixed order; ``steps`` is the length of its phase, which the eta counts to.

    ``NAME_loss`` keys are parts of the loss, shown after it.
    """
    depths = sorted(int(key[7:]) for key in row if key.startswith("accept_") and key[7:].isdigit())
    loss_parts = ", ".join(f"{key.removesuffix('_loss')} {row[key]:.4f}" for key in row if key.endswith("_loss"))
    parts = (
        f"{row['phase']} {row['step']:>{len(str(steps))}}/{steps}",
        f"loss {row['loss']:.4f}" + (f" ({loss_parts})" if loss_parts else ""),
        "accept " + " ".join(f"{row[f'accept_{depth}']:.3f}" for depth in depths),
        f"lr {row['lr']:.2e}",
        f"grad {row['grad_norm']:.3f}",
        f"{row['tokens_per_second']:,.0f} tok/s",
        f"{row['step_ms']:.0f} ms",
        f"{peak_memory() / 2**30:.2f} GiB",
        f"eta {duration((steps - row['step']) * row['step_ms'] / 1e3)}",
    )
    return "   " + "  ".join(parts)


def peak_memory() -> int:
    """Bytes at the peak so far: allocated on the GPU when torch uses one, else resident in this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
