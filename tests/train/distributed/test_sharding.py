"""Two gloo processes train as one does, however the weights are sharded, and save states that any number can load."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.models.base.layers import first_layers
from drafthead.train.distributed.sharding import ShardConfig, Sharding

sys.path.insert(0, str(Path(__file__).parent))
import spread

from support import TINY, random_base, refuses

LOSS_TOLERANCE = 1e-5
"""Relative. Sums over processes are taken in another order than sums over micro-batches, in float32."""
WEIGHT_TOLERANCE = 2e-5
"""Absolute, after 3 steps at 1e-3. AdamW divides a gradient by its own size, so rounding matters where terms cancel."""
BFLOAT16_TOLERANCE = 0.03
"""Relative, for losses and gradient norms: products of a few dozen terms, each rounded to 8 bits."""
Results = Callable[[str], list[dict[str, Any]]]
"""Function that returns each process's result for the name of a case."""


FAST = (
    "medusa whole", "medusa head", "medusa full, accumulated", "medusa hybrid", "medusa shared and tied",
    "medusa, one part empty", "medusa2 full", "hydra++ recomputed", "eagle3 full", "medusa bf16",
    "families",
)  # fmt: skip
"""Every sharding mode, and the heads with the most unusual weights."""


def cases(precision: str) -> list[Any]:
    """Return the cases of this precision as parameters of a test."""
    names = [name for name, case in spread.CASES.items() if case.shard.precision == precision]
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def results(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each process's result for any case. The fast cases, and the others, run in one start of the processes each."""
    folder = tmp_path_factory.mktemp("spread")
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    @cache
    def run(is_fast: bool) -> None:
        (folder / "meeting").unlink(missing_ok=True)
        names = [name for name in (*spread.CASES, "families") if (name in FAST) == is_fast]
        script = (spread.__file__, str(folder), *names)
        assert runs.script(folder, *script, processes=spread.PROCESSES, environment=node) == [0, 0], runs.output(folder)

    def of_case(name: str) -> list[dict[str, Any]]:
        run(name in FAST)
        return [torch.load(folder / f"{name}.{rank}.pt") for rank in range(spread.PROCESSES)]

    return of_case


@pytest.mark.parametrize("name", cases("float32"))
def test_two_processes_train_as_one(name: str, results: Results) -> None:
    expected, by_rank = spread.one_process(name), results(name)
    assert by_rank[0]["validated"] == by_rank[1]["validated"] and by_rank[0]["metrics"] == by_rank[1]["metrics"]
    for step, (metrics, want) in enumerate(zip(by_rank[0]["metrics"], expected["metrics"], strict=True)):
        for key in want:
            assert metrics[key] == pytest.approx(want[key], rel=LOSS_TOLERANCE, nan_ok=True), (step, key)
    weights = by_rank[0]["weights"]
    assert weights.keys() == expected["weights"].keys()
    for key, tensor in expected["weights"].items():
        assert weights[key].shape == tensor.shape and weights[key].dtype == tensor.dtype
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=WEIGHT_TOLERANCE)
    moments = by_rank[0]["moments"]
    assert moments.keys() == expected["moments"].keys()
    for key, values in expected["moments"].items():
        torch.testing.assert_close(moments[key], values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", cases("bfloat16"))
def test_bfloat16_computes_about_the_same_and_saves_float32(name: str, results: Results) -> None:
    expected, result = spread.one_process(name), results(name)[0]
    for want, metrics in zip(expected["metrics"], result["metrics"], strict=True):
        assert metrics["loss"] != want["loss"], "the head did not compute in bfloat16"
        for key, tolerance in (("loss", BFLOAT16_TOLERANCE), ("grad_norm", 2 * BFLOAT16_TOLERANCE)):
            assert metrics[key] == pytest.approx(want[key], rel=tolerance), key
    start = spread.build_head(spread.CASES[name]).state_dict()
    for key, tensor in expected["weights"].items():
        assert result["weights"][key].dtype == tensor.dtype
        change = (tensor - start[key]).abs().max()
        # A step moves a weight by at most the learning rate, whatever its gradient, and mostly in the same direction.
        assert (result["weights"][key] - tensor).float().abs().mean() <= 0.3 * change.float(), key


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
def test_each_process_holds_its_shards(name: str, head: float, layers: int, results: Results) -> None:
    plain = spread.build_head(spread.CASES[name])
    count = sum(p.numel() for p in plain.parameters())
    rows, width = next(plain.base.model.model.layers[0].parameters()).shape
    for result in results(name):
        assert sum(result["held"].values()) == pytest.approx(head * count, rel=0.01)
        assert result["layer"] == (rows // layers, width)


def test_every_process_reads_its_share_of_any_family(results: Results) -> None:
    for kind, settings in spread.FAMILIES.items():
        layers = random_base(TINY | {"model_type": kind} | settings, prepack=False).model.model.layers
        count = sum(parameter.numel() for parameter in layers.parameters())
        first, second = (result[kind] for result in results("families"))
        assert first + second == count and abs(first - second) < 0.05 * count, kind


def test_adapters_stay_whole(results: Results) -> None:
    plain = dict(spread.build_head(spread.CASES["medusa2 full"]).named_parameters())
    held = results("medusa2 full")[0]["held"]
    adapters = {name for name in plain if name.startswith("adapter.")}
    assert adapters and all((held[n] == plain[n].numel()) == (n in adapters) for n in plain if plain[n].numel() > 1)


@pytest.mark.parametrize("name", ["medusa full, accumulated", "medusa2 full", "eagle3 full"])
def test_one_process_resumes_from_a_state_of_two(name: str, results: Results) -> None:
    first, second = (result["saved"] for result in results(name))
    for key, value in first["weights"].items():
        assert type(value) is torch.Tensor and torch.equal(value, second["weights"][key])
    assert "d2t" in first["weights"]
    (last,) = spread.one_process(name, first)["metrics"]
    for key, want in results(name)[0]["metrics"][-1].items():
        assert last[key] == pytest.approx(want, rel=LOSS_TOLERANCE, nan_ok=True), key


def test_tied_tables_stay_one(results: Results) -> None:
    assert all(result["tied"] for result in results("medusa shared and tied"))
    assert not any(result["tied"] for result in results("medusa head"))


def test_hooks_of_a_view_are_its_own() -> None:
    """Sharding hooks the base's decoder; a head's own layers run in a view of it."""
    base = spread.load_base()
    view = first_layers(base, 1)
    handle = base.model.model.register_forward_hook(lambda *_: pytest.fail("the view ran the base's hook"))
    view.model.model(torch.tensor([[3, 4]]))
    handle.remove()


@pytest.mark.parametrize("settings", [{"hybrid": True}, {"offload_base": True, "mode": "head"}])
def test_bad_settings(settings: dict[str, Any]) -> None:
    refuses(f"{next(iter(settings))} must be false unless shard.mode", ShardConfig, **settings)


def test_hybrid_needs_to_know_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    sharding = Sharding(ShardConfig(mode="head", hybrid=True), torch.device("cpu"))
    try:
        refuses("shard.hybrid=true.*LOCAL_WORLD_SIZE", sharding.shard, spread.build_head(spread.CASES["medusa head"]))
    finally:
        sharding.close()
    assert not torch.distributed.is_initialized()
