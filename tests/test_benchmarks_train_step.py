"""The benchmark of a training step runs, and its numbers are of one piece; not whether they are good."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from drafthead.data.utils.errors import UserError
from drafthead.models.base.shape import ModelShape
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.train.config import PhaseConfig

FOLDER = Path(__file__).parent.parent / "benchmarks"
NAMES = ("common", "composed", "loss_memory", "step_parts", "train_step")
Load = Callable[[str], ModuleType]
TINY = ("recipe=medusa_smollm2", "debug=tiny", "--steps", "2", "--warm", "1")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Import a benchmark as `python benchmarks/NAME.py` does, with its folder first on the path."""
    monkeypatch.syspath_prepend(FOLDER)
    held = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(held)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("--phase", "distill", "phases.distill.features=cached", "phases.distill.accumulate=2"),
        ("shard=full", "shard.precision=bfloat16"),
    ],
    ids=["computed", "cached", "sharded"],
)
def test_the_parts_make_a_step(settings: tuple[str, ...], script: Load, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    script("train_step").main([*TINY, *settings, "--json", str(out)])
    record = json.loads(out.read_text())
    assert {"benchmark", "date", "arguments", "hardware", "versions"} <= record.keys()
    assert record["tokens_a_step"] == 2 * 512 * (2 if "--phase" in settings else 1)
    assert record["tokens_per_second"] == pytest.approx(record["tokens_a_step"] / record["step_s"])
    assert record["ratio_to_floor"] == pytest.approx(record["tokens_per_second"] / record["floor"]["tokens_per_second"])
    assert list(record["parts_s"]) == ["data", "base", "head", "optimiser"]
    assert all(seconds > 0 for seconds in record["parts_s"].values())
    assert 0 <= record["data_wait"] < 1 and record["mfu"] is None
    memory = record["memory"]
    assert set(memory["part_bytes"]) == {"base", "head", "optimiser"}
    assert memory["peak_to_plan"] == pytest.approx(memory["peak_bytes"] / memory["planned"])
    assert not torch.distributed.is_initialized()


def test_records_can_be_compared(script: Load, tmp_path: Path) -> None:
    path = str(tmp_path / "step.json")
    script("train_step").main([*TINY, "--json", path])
    compare = script("compare")
    assert compare.main([path, path]) == 0
    assert compare.direction(("ratio_to_floor",)) == compare.direction(("mfu",)) == 1
    assert compare.direction(("parts_s", "head")) == compare.direction(("memory", "part_bytes", "base")) == -1
    assert compare.direction(("data_wait",)) == -1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--steps", "0", "recipe=medusa_smollm2"], "--steps must be at least 1, got 0"),
        (["--phase", "joint", "recipe=medusa_smollm2"], "the recipe has no phase 'joint'; it has pretrain, distill"),
        (["recipe=nowhere"], "recipe=nowhere: "),
    ],
)
def test_bad_input(given: list[str], says: str, script: Load) -> None:
    with pytest.raises(UserError, match=says):
        script("train_step").main(given)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA A1000 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_a_gpu_that_is_not_known_has_no_peak(
    name: str, peak: float | None, script: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert script("train_step").peak_operations(torch.device("cuda")) == peak


def test_operations_by_hand(script: Load) -> None:
    """D 4, one layer of 2 heads of 2 and an MLP of 8: 4 * 16 + 3 * 32 products, and 8 weights of norms."""
    shape = ModelShape(
        hidden_size=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=2,
        intermediate_size=8,
        vocab_size=10,
        tied=True,
    )
    head = MedusaConfig(num_draft_tokens=3, own_lm_head=False)
    phase = PhaseConfig(corpus="text", seq_len=16)
    layer = 2 * (4 * 16 + 3 * 32 + 8 + 16 * 4)  # the last: 16 tokens, each over half of them, twice
    blocks, shared = 6 * 3 * (16 + 4), 4 * 3 * 10 * 4
    count = script("train_step").operations_per_token
    assert count(head, phase, shape) == layer + blocks + shared
    cached = PhaseConfig(corpus="text", seq_len=16, features="cached")
    assert count(head, cached, shape) == blocks + shared
