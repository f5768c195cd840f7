"""Runs fast cases on the simulated accelerator, in a process of their own; ``make test-accelerator`` runs all cases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerator import simulated

FOLDER = Path(__file__).parent


@pytest.mark.skipif(simulated.unavailable() is not None, reason=simulated.unavailable() or "")
@pytest.mark.parametrize("chosen", ["medusa or planted", pytest.param("", marks=pytest.mark.slow)])
def test_fast_cases_on_the_simulated_accelerator(chosen: str) -> None:
    path = os.pathsep.join(map(str, (FOLDER.parents[1], FOLDER.parent)))
    options = ["-q", "-m", "not slow", "-k", chosen, "-p", "no:cacheprovider", "-p", "accelerator.simulated"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER / "cases.py")],
        env=os.environ | {"PYTHONPATH": path},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
