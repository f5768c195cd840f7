"""CPU time of other processes during a measurement."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafthead.data.utils.machine import BUSY_CORES, OtherProcesses, other_processes_line

SPIN = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
needs_proc = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")


@needs_proc
def test_a_busy_process_of_somebody_else_is_counted_and_our_own_is_not() -> None:
    """A process whose parent has ended is not a descendant of ours."""
    double_fork = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPIN.format(4)!r}])"
    others, own = OtherProcesses(), OtherProcesses()
    with own:
        subprocess.run([sys.executable, "-c", SPIN.format(1)], check=True)
    subprocess.run([sys.executable, "-c", double_fork], check=True)
    with others:
        time.sleep(1)
    assert own.cores is not None and others.cores is not None
    # Tests may run beside other work, which counts both times.
    assert others.cores > BUSY_CORES and own.cores < (os.cpu_count() or 1) - 0.5


def test_the_line_warns_only_when_times_are_not_comparable() -> None:
    assert "not comparable" in other_processes_line(0.9) and "not comparable" not in other_processes_line(0.1)
    assert "unknown" in other_processes_line(None)
