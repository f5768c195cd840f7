"""Two gloo processes train as one does, however the weights are spread; and what is saved knows nothing of it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from drafthead.data.utils.errors import UserError
from drafthead.models.base.layers import first_layers
from drafthead.train.config import ShardConfig
from drafthead.train.distributed.sharding import Sharding
from support import run_together

sys.path.insert(0, str(Path(__file__).parent))
import spread

LOSS_TOLERANCE = 1e-5
"""Relative. Sums over processes come in another order than over micro-batches, in float32."""
WEIGHT_TOLERANCE = 2e-5
"""Absolute, after 3 steps of 1e-3: AdamW divides a gradient by its own size, so that rounding is not small beside it
where a gradient nearly cancels."""
BFLOAT16_TOLERANCE = 0.03
"""Relative, of losses and gradients' norms: products of a few dozen terms, each rounded to 8 bits."""
TIMEOUT_S = 240
Results = Callable[[str], list[dict[str, Any]]]
"""Name of a case -> what each process found."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each process found, of any case; all cases run in one start of the processes."""
    folder = tmp_path_factory.mktemp("spread")
    shared = {"WORLD_SIZE": str(spread.PROCESSES), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    places = [{"RANK": str(rank), **shared} for rank in range(spread.PROCESSES)]
    run_together([[spread.__file__, str(folder), *spread.CASES]] * spread.PROCESSES, *places, timeout_s=TIMEOUT_S)
    return lambda name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(spread.PROCESSES)]


def is_exact(name: str) -> bool:
    return spread.CASES[name].shard.precision == "float32"


@pytest.mark.parametrize("name", [name for name in spread.CASES if is_exact(name)])
def test_two_processes_train_as_one(name: str, results: Results) -> None:
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


@pytest.mark.parametrize("name", [name for name in spread.CASES if not is_exact(name)])
def test_bfloat16_computes_about_the_same_and_keeps_float32(name: str, results: Results) -> None:
    wanted, found = spread.one_process(name), results(name)[0]
    for want, got in zip(wanted["metrics"], found["metrics"], strict=True):
        assert got["loss"] != want["loss"], "this was no bfloat16"
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(want[key], rel=BFLOAT16_TOLERANCE), key
    start = spread.build_head(spread.CASES[name]).state_dict()
    for key, want in wanted["weights"].items():
        assert found["weights"][key].dtype == want.dtype
        moved = (want - start[key]).abs().max()
        # A step moves a weight by the learning rate at most, whatever its gradient; on the whole they go the same way.
        assert (found["weights"][key] - want).float().abs().mean() <= 0.3 * moved.float(), key


@pytest.mark.parametrize(
    ("name", "head", "layers"),
    [
        ("medusa whole", 1.0, 1),
        ("medusa head", 0.5, 1),
        ("medusa full, accumulated", 0.5, 2),
        ("medusa hybrid", 1.0, 1),  # each of the two is a node
        ("medusa bf16", 1.0, 1),
    ],
)
def test_what_a_process_holds(name: str, head: float, layers: int, results: Results) -> None:
    plain = spread.build_head(spread.CASES[name])
    whole = sum(p.numel() for p in plain.parameters())
    rows, width = next(plain.base.model.model.layers[0].parameters()).shape
    for found in results(name):
        assert sum(found["held"].values()) == pytest.approx(head * whole, rel=0.01)
        assert found["layer"] == (rows // layers, width)


def test_adapters_stay_whole(results: Results) -> None:
    plain = dict(spread.build_head(spread.CASES["medusa2 full"]).named_parameters())
    held = results("medusa2 full")[0]["held"]
    adapters = {name for name in plain if name.startswith("adapter.")}
    assert adapters and all((held[n] == plain[n].numel()) == (n in adapters) for n in plain if plain[n].numel() > 1)


@pytest.mark.parametrize("name", ["medusa full, accumulated", "medusa2 full", "eagle3 full"])
def test_one_process_goes_on_from_what_two_saved(name: str, results: Results) -> None:
    first, second = (found["saved"] for found in results(name))
    for key, value in first["weights"].items():
        assert type(value) is torch.Tensor and torch.equal(value, second["weights"][key])
    assert "d2t" in first["weights"]
    (last,) = spread.one_process(name, first)["metrics"]
    for key, want in results(name)[0]["metrics"][-1].items():
        assert last[key] == pytest.approx(want, rel=LOSS_TOLERANCE, nan_ok=True), key


def test_every_process_measures_the_same(results: Results) -> None:
    for name in spread.CASES:
        first, second = results(name)
        assert first["validated"] == second["validated"] and first["metrics"] == second["metrics"], name


def test_tied_tables_stay_one(results: Results) -> None:
    assert all(found["tied"] for found in results("medusa shared and tied"))
    assert not any(found["tied"] for found in results("medusa head"))


def test_hooks_of_a_view_are_its_own() -> None:
    """Sharding hooks the base's decoder; a head's own layers run in a view of it."""
    base = spread.load_base()
    view = first_layers(base, 1)
    handle = base.model.model.register_forward_hook(lambda *_: pytest.fail("the view ran the base's hook"))
    view.model.model(torch.tensor([[3, 4]]))
    handle.remove()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"hybrid": True}, "shard.hybrid must be false unless shard.mode is head or full, got True"),
        (
            {"mode": "head", "offload_base": True},
            "shard.offload_base must be false unless shard.mode is full, got True",
        ),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ShardConfig(**settings)


def test_an_old_torch_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    Sharding(ShardConfig(), torch.device("cpu"))
    with pytest.raises(UserError, match=r"shard.mode=head with .* needs torch 2.13 or newer, this is"):
        Sharding(ShardConfig(mode="head"), torch.device("cpu"))


def test_hybrid_needs_to_know_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    sharding = Sharding(ShardConfig(mode="head", hybrid=True), torch.device("cpu"))
    try:
        with pytest.raises(UserError, match=r"of 1 processes the launcher says that an unknown number are on this one"):
            sharding.shard(spread.build_head(spread.CASES["medusa head"]))
    finally:
        sharding.close()
    assert not torch.distributed.is_initialized()
