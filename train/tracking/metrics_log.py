"""The run's own log: ``metrics.jsonl``, and one console line per log step."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafthead.files.local import finite, read_json_lines, write_atomic
from drafthead.system.devices import peak_memory
from drafthead.system.display import duration

Row = Mapping[str, Any]


class MetricsLog:
    """``metrics.jsonl``: a JSON object per line, with ``total_step`` over all phases; NaN becomes null."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: Row) -> None:
        """Append a row and close the file, so that a later kill of this process cannot lose the row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(finite(row), allow_nan=False) + "\n")

    def truncate(self, total_step: int) -> None:
        """Remove rows of steps after ``total_step``, and a half-written last line, before a run resumes there."""
        if self.path.exists():
            rows = [row for row in self.rows() if row.get("total_step", 0) <= total_step]
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def rows(self) -> list[dict[str, Any]]:
        return read_json_lines(self.path)


def console_line(row: Row, steps: int) -> str:
    """Return a row of ``metrics.jsonl`` as one console line; values ``NAME_loss`` are in brackets after the loss."""
    depths = sorted(int(key[7:]) for key in row if key.startswith("accept_") and key[7:].isdigit())
    terms = ", ".join(f"{key.removesuffix('_loss')} {row[key]:.4f}" for key in row if key.endswith("_loss"))
    columns = (
        f"{row['phase']} {row['step']:>{len(str(steps))}}/{steps}",
        f"loss {row['loss']:.4f}" + (f" ({terms})" if terms else ""),
        "accept " + " ".join(f"{row[f'accept_{depth}']:.3f}" for depth in depths),
        f"lr {row['lr']:.2e}",
        f"grad {row['grad_norm']:.3f}",
        f"{row['tokens_per_second']:,.0f} tok/s",
        f"{row['step_ms']:.0f} ms",
        f"{peak_memory() / 2**30:.2f} GiB",
        f"eta {duration((steps - row['step']) * row['step_ms'] / 1e3)}",
    )
    return "   " + "  ".join(columns)
