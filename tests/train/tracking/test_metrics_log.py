"""``metrics.jsonl`` is plain JSON, and console lines keep their order."""

import math
import re
from pathlib import Path

from drafthead.train.tracking.metrics_log import MetricsLog, console_line


def test_not_finite_becomes_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "overlap_1": math.nan, "more": {"a": [math.inf, 2]}})
    assert "NaN" not in log.path.read_text()
    (logged,) = log.rows()
    assert logged["overlap_1"] is None and logged["more"] == {"a": [None, 2]}


def test_console_line_has_a_fixed_order() -> None:
    row = {"phase": "distill", "step": 40, "lr": 1e-3, "loss": 2.5, "loss_1": 3.0, "base_loss": 0.25}
    row |= {"accept_10": 0.01, "accept_2": 0.2, "accept_1": 0.4, "accept_rate": 9.0, "base_accept": 0.9}
    row |= {"grad_norm": 0.5, "tokens_per_second": 12345.6, "step_ms": 10000.0}
    line = console_line(row, 410)
    peak = re.search(r"\d+\.\d\d GiB", line)
    # A process with torch loaded takes between 50 MiB and the machine; a unit error is a factor of 1024.
    assert peak and 0.05 <= float(peak[0].removesuffix(" GiB")) < 64
    line = line.replace(peak[0], "3.00 GiB")
    assert line == (
        "   distill  40/410  loss 2.5000 (base 0.2500)  accept 0.400 0.200 0.010  lr 1.00e-03  grad 0.500"
        "  12,346 tok/s  10000 ms  3.00 GiB  eta 1:01:40"
    )
