"""CPU time of other processes during a measurement."""

import os
import subprocess
import sys
import time

from drafthead.system.machine import BUSY_CORES, OtherProcesses, other_processes_line

SPIN = "import time\nwhile time.process_time() < {}: pass"


def test_a_busy_process_of_somebody_else_is_counted() -> None:
    """A process whose parent has ended is not a descendant of ours."""
    double_fork = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPIN.format(2)!r}])"
    subprocess.run([sys.executable, "-c", double_fork], check=True)
    with OtherProcesses() as others:
        time.sleep(1)
    assert others.cores is not None and others.cores > BUSY_CORES


def test_our_own_processes_are_not_counted() -> None:
    """Own and other processes together use at most all cores, however busy the machine is."""
    before, count = os.times(), os.cpu_count() or 1
    with OtherProcesses() as others:
        processes = [subprocess.Popen([sys.executable, "-c", SPIN.format(0.5)]) for _ in range(count)]
        for process in processes:
            process.wait()
    after = os.times()
    own_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert own_s > 0.3
    assert others.cpu_s + own_s < 1.1 * count * others.wall_s


def test_the_line_warns_only_when_times_are_not_comparable() -> None:
    assert "not comparable" in other_processes_line(0.9) and "not comparable" not in other_processes_line(0.1)
    assert "unknown" in other_processes_line(None)
