"""Harmful updates: which are skipped, and when the run ends."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from drafthead.errors import UserError
from drafthead.files.local import read_json_lines
from drafthead.models.heads.medusa import MedusaHead
from drafthead.train.pipeline import run_pipeline
from drafthead.train.trainer.checkpoint import load_latest
from drafthead.train.trainer.loss_spikes import HISTORY, LossSpikeConfig, skip_reason
from support import composed


def test_spikes_are_told_from_noise_once_the_median_is_known() -> None:
    config, losses = LossSpikeConfig(spike=3.0), list[float | None]()
    assert skip_reason(config, losses, 100.0, 1.0) is None, "nothing to compare with"
    for loss in [1.0, 2.0] * HISTORY:
        assert skip_reason(config, losses, loss, 1.0) is None
    assert skip_reason(config, losses, 2.9, 1e6) is None
    assert skip_reason(config, losses, 7.0, 1.0) == "the loss is 7, over 3 times the median of 2"
    assert losses.count(None) == 1 and losses[-1] is None, "a skipped loss must not move the median"


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_a_loss_that_is_not_finite_is_skipped_from_the_first_step(loss: float, norm: float) -> None:
    assert "gradient norm" in (skip_reason(LossSpikeConfig(spike=0), [], loss, norm) or "")


def test_no_spikes_when_turned_off_or_at_a_loss_of_zero() -> None:
    off, zero = partial(skip_reason, LossSpikeConfig(spike=0), []), partial(skip_reason, LossSpikeConfig(), [])
    for _ in range(2 * HISTORY):
        assert off(1.0, 1.0) is None and zero(0.0, 1.0) is None
    assert off(1e9, 1.0) is None and zero(0.1, 1.0) is None


def test_the_count_is_of_the_latest_steps() -> None:
    losses: list[float | None] = []
    for step in range(100):
        skip_reason(LossSpikeConfig(window=20, limit=2), losses, math.nan if step % 9 == 0 else 1.0, 1.0)
    assert len(losses) == 20 and losses.count(None) == 3, "of the latest 20"


# In a whole run -----------------------------------------------------------------------------------------------


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, factor: Callable[[int], float], *overrides: str) -> Path:
    """Train with the loss of call ``n`` (from 1) multiplied by ``factor(n)``."""
    original, calls = MedusaHead.loss, [0]

    def scaled(self, *args):  # type: ignore[no-untyped-def]
        out = original(self, *args)
        if torch.is_grad_enabled():
            calls[0] += 1
            out = type(out)(**{**vars(out), "loss_sum": out.loss_sum * factor(calls[0])})
        return out

    options = ["recipe=medusa_smollm2", "debug=tiny", "log_every=1", "checkpoint.every_steps=3"]
    options += ["validate_every=50", "stages=[corpora,train]"]
    with monkeypatch.context() as patched:
        patched.setattr(MedusaHead, "loss", scaled)
        run_pipeline(*composed(folder, *options, *overrides))
    return folder / "run"


def logged(run: Path) -> list[tuple[int, float]]:
    return [(row["total_step"], row["loss"]) for row in read_json_lines(run / "metrics.jsonl") if "loss" in row]


def test_a_bad_batch_is_skipped_and_leaves_nothing_behind(
    with_medusa_corpora: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A skipped step changes nothing but the position in the schedule."""
    bad = {4: math.nan, 18: 100.0}
    options = ("phases.pretrain.steps=20", "loss_spikes.limit=3")
    run = train(with_medusa_corpora, monkeypatch, lambda n: bad.get(n, 1.0), *options)
    output = capsys.readouterr().out
    assert "phase pretrain, step 4: the loss is nan and the gradient norm nan" in output and "1 of at most 3" in output
    assert "phase pretrain, step 18: the loss is" in output and "over 5 times the median of" in output
    steps = logged(run)
    assert [step for step, _ in steps] == [n for n in range(1, 31) if n not in bad]
    assert all(math.isfinite(loss) and loss < 10 for _, loss in steps)
    checkpoint = load_latest(run / "checkpoints")
    states = (checkpoint.optimizer, checkpoint.head)
    assert all(torch.isfinite(tensor).all() for state in states for tensor in state.values())


def test_many_bad_batches_end_the_run(with_medusa_corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("phases.pretrain.steps=30", "loss_spikes.limit=3", "checkpoint.keep=9")
    with pytest.raises(UserError, match="phase pretrain, step 18: .*4 updates were skipped.*optim.lr"):
        train(with_medusa_corpora, monkeypatch, lambda n: math.nan if n > 14 else 1.0, *options)
    checkpoint = load_latest(with_medusa_corpora / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.state["global_step"] == 15
    assert checkpoint.state["losses"][-1] is None and all(torch.isfinite(w).all() for w in checkpoint.head.values())
    assert {int(t) for name, t in checkpoint.optimizer.items() if name.endswith(".step")} == {14}
