"""Two gloo processes train as one does, however the weights are spread; and what is saved knows nothing of it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import spread

LOSS_TOLERANCE = 1e-5
"""Relative. Sums over processes come in another order than over micro-batches, in float32."""
WEIGHT_TOLERANCE = 2e-5
"""Absolute, after 3 steps of 1e-3: AdamW divides a gradient by its own size, so that rounding is not small beside it
where a gradient nearly cancels."""
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What each process found, of any case; all cases run in one start of the processes."""
    folder = tmp_path_factory.mktemp("spread")
    command = [sys.executable, spread.__file__, str(folder), *spread.CASES]
    started = []
    for rank in range(spread.PROCESSES):
        place = {"RANK": str(rank), "WORLD_SIZE": str(spread.PROCESSES), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for process in started:
            _, said = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, said[-4000:]
    finally:
        for process in started:
            process.kill()
    return lambda name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(spread.PROCESSES)]


@pytest.mark.parametrize("name", spread.CASES)
def test_two_processes_train_as_one(name: str, results: Callable[[str], list[dict[str, Any]]]) -> None:
    wanted, found = spread.one_process(name), results(name)
    for rank in range(spread.PROCESSES):
        for step, (want, got) in enumerate(zip(wanted["metrics"], found[rank]["metrics"], strict=True)):
            for key in want:
                assert got[key] == pytest.approx(want[key], rel=LOSS_TOLERANCE, nan_ok=True), (rank, step, key)
    weights = found[0]["weights"]
    assert weights.keys() == wanted["weights"].keys()
    for key, want in wanted["weights"].items():
        assert weights[key].shape == want.shape and weights[key].dtype == want.dtype
        torch.testing.assert_close(weights[key], want, rtol=0, atol=WEIGHT_TOLERANCE, msg=lambda m, k=key: f"{k}: {m}")
    moments = found[0]["optimizer"]["state"]
    assert moments.keys() == wanted["optimizer"]["state"].keys()
    for place, values in wanted["optimizer"]["state"].items():
        assert moments[place]["exp_avg"].shape == values["exp_avg"].shape
        torch.testing.assert_close(moments[place]["exp_avg"], values["exp_avg"], rtol=1e-3, atol=1e-5)
