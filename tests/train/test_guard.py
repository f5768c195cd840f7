"""Updates that would do harm: which are skipped, that nothing of them stays, and when the run ends."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json_lines
from drafthead.models.heads.medusa import MedusaHead
from drafthead.train.config import LossSpikeConfig, parse_run
from drafthead.train.pipeline import run_pipeline
from drafthead.train.trainer.checkpoint import load_latest
from drafthead.train.trainer.loss_spikes import HISTORY, LossSpikeFilter


def test_spikes_are_told_from_noise_once_the_median_is_known() -> None:
    guard = LossSpikeFilter(LossSpikeConfig(spike=3.0))
    assert guard.skip_reason(100.0, 1.0) is None, "nothing to compare with"
    for loss in [1.0, 2.0] * HISTORY:
        assert guard.skip_reason(loss, 1.0) is None
    assert guard.skip_reason(2.9, 1e6) is None
    assert guard.skip_reason(7.0, 1.0) == "the loss is 7, over 3 times the median of 2"
    assert guard.skipped == 1 and guard.losses[-1] is None, "a skipped loss must not move the median"


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_what_is_not_finite_is_skipped_from_the_first_step(loss: float, norm: float) -> None:
    assert "gradient norm" in (LossSpikeFilter(LossSpikeConfig(spike=0)).skip_reason(loss, norm) or "")


def test_no_spikes_when_turned_off_or_where_the_loss_is_nothing() -> None:
    off, zero = LossSpikeFilter(LossSpikeConfig(spike=0)), LossSpikeFilter(LossSpikeConfig())
    for _ in range(2 * HISTORY):
        assert off.skip_reason(1.0, 1.0) is None and zero.skip_reason(0.0, 1.0) is None
    assert off.skip_reason(1e9, 1.0) is None and zero.skip_reason(0.1, 1.0) is None


def test_the_count_is_of_the_latest_steps() -> None:
    guard = LossSpikeFilter(LossSpikeConfig(window=20, limit=2))
    for step in range(100):
        guard.skip_reason(math.nan if step % 9 == 0 else 1.0, 1.0)
        assert not guard.too_many or step % 9 < 2, step
    guard = LossSpikeFilter(LossSpikeConfig(window=20, limit=2))
    verdicts = [(guard.skip_reason(math.nan, 1.0) is not None, guard.too_many)[1] for _ in range(3)]
    assert verdicts == [False, False, True]


def test_memory_survives_a_resume() -> None:
    guard = LossSpikeFilter(LossSpikeConfig())
    for loss in [2.0] * HISTORY + [math.nan]:
        guard.skip_reason(loss, 1.0)
    again = LossSpikeFilter(LossSpikeConfig(), guard.losses)
    assert again.losses == guard.losses and again.skipped == 1
    assert again.skip_reason(11.0, 1.0) is not None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"spike": 0.5}, "guard.spike must be > 1, or 0"),
        ({"spike": math.nan}, "guard.spike must be > 1, or 0"),
        ({"window": 3}, "guard.window must be at least 16, got 3"),
        ({"limit": 100}, r"guard.limit must be in \[0, guard.window\), got 100"),
    ],
)
def test_bad_settings(settings: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        LossSpikeConfig(**settings)  # type: ignore[arg-type]


# In a whole run -----------------------------------------------------------------------------------------------


class PhasesDoneError(Exception):
    """The trainer went on to evaluation, which this file does not need."""


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, factor: Callable[[int], float], *overrides: str) -> Path:
    """Train with the loss of call ``n`` (from 1) multiplied by ``factor(n)``, up to the end of the phases."""
    original, calls = MedusaHead.loss, [0]

    def scaled(self, *args):  # type: ignore[no-untyped-def]
        out = original(self, *args)
        if torch.is_grad_enabled():
            calls[0] += 1
            out = type(out)(**{**vars(out), "loss_sum": out.loss_sum * factor(calls[0])})
        return out

    def stop(*args: object) -> None:
        raise PhasesDoneError

    options = ["recipe=medusa_smollm2", "debug=tiny", "log_every=1", "checkpoint.every_steps=3", "validate_every=50"]
    places = [f"out={folder / 'run'}", f"data.folder={folder / 'corpora'}"]
    with initialize_config_module("drafthead.recipes", version_base="1.3"):
        cfg = compose("train", overrides=[*options, *places, *overrides])
    with monkeypatch.context() as patched:
        patched.setattr(MedusaHead, "loss", scaled)
        patched.setattr("drafthead.train.pipeline._finish", stop)
        with pytest.raises(PhasesDoneError):
            run_pipeline(parse_run(cfg), OmegaConf.to_yaml(cfg, resolve=True))
    return folder / "run"


def logged(run: Path) -> list[tuple[int, float]]:
    return [(row["total_step"], row["loss"]) for row in read_json_lines(run / "metrics.jsonl") if "loss" in row]


def test_a_bad_batch_is_skipped_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A skipped step changes nothing but the position in the schedule."""
    bad = {4: math.nan, 18: 100.0}
    options = ("phases.pretrain.steps=20", "guard.limit=3")
    run = train(tmp_path, monkeypatch, lambda n: bad.get(n, 1.0), *options)
    said = capsys.readouterr().out
    assert (
        "phase pretrain, step 4: the loss is nan and the gradient norm nan; the update is skipped, 1 of at most 3"
        in said
    )
    assert "phase pretrain, step 18: the loss is" in said and "over 5 times the median of" in said
    steps = logged(run)
    assert [step for step, _ in steps] == [n for n in range(1, 31) if n not in bad]
    assert all(math.isfinite(loss) and loss < 10 for _, loss in steps)
    checkpoint = load_latest(run / "checkpoints")
    assert checkpoint is not None
    moments = [t for state in checkpoint.optimizer["state"].values() for t in state.values()]
    assert all(torch.isfinite(t).all() for t in (*moments, *checkpoint.head.values()))


def test_many_bad_batches_end_the_run_with_the_last_good_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("phases.pretrain.steps=30", "guard.limit=3", "checkpoint.keep=9")
    with pytest.raises(
        UserError, match=r"phase pretrain, step 18: the loss is nan.*4 updates were skipped.*are kept in .*optim.lr"
    ):
        train(tmp_path, monkeypatch, lambda n: math.nan if n > 14 else 1.0, *options)
    checkpoint = load_latest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.state.global_step == 15
    assert checkpoint.state.losses[-1] is None and all(torch.isfinite(w).all() for w in checkpoint.head.values())
    assert {int(state["step"]) for state in checkpoint.optimizer["state"].values()} == {14}
