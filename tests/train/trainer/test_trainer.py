"""Learning rates, optimisers, rows read ahead, boosted heads, and harmful updates that are skipped."""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drafthead.data.batch import HiddenStatesSpec, LossOutput, TrainBatch
from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import pack
from drafthead.errors import UserError
from drafthead.files.local import read_json_lines
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaHead
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.token_tree import TokenTree
from drafthead.train.original_base import OriginalBase
from drafthead.train.pipeline import run_pipeline
from drafthead.train.trainer.batches import PhaseData
from drafthead.train.trainer.boost import boosted, load_first, target_weights
from drafthead.train.trainer.checkpoint import load_latest
from drafthead.train.trainer.loss_spikes import HISTORY, LossSpikeConfig, skip_reason
from drafthead.train.trainer.optim import Muon, OptimConfig, head_optimizers, lr_at
from drafthead.train.trainer.step import train_step
from support import TinyBase, cases, composed, fitted, random_base, random_ids, refuses, rows_of


def curve(config: OptimConfig, steps: int) -> list[float]:
    return [lr_at(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", ["linear", "parabolic"])
def test_rises_to_the_peak_then_falls_to_the_floor(schedule: str, warmup: str) -> None:
    config = OptimConfig(lr=0.01, warmup_steps=10, schedule=schedule, warmup=warmup, final_lr_ratio=0.2)
    rates = curve(config, 100)
    assert rates[9] == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(0.002)
    assert 0 < rates[0] < 0.01
    assert all(a < b for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(a > b for a, b in zip(rates[9:-1], rates[10:], strict=True))


def test_short_curves() -> None:
    assert curve(OptimConfig(lr=0.1, final_lr_ratio=0.5), 1) == pytest.approx([0.05])
    for start in ("warmup", "start"):
        constant = OptimConfig(lr=0.1, warmup_steps=2, schedule="constant", decay_from=start)
        assert curve(constant, 5) == pytest.approx([0.05] + [0.1] * 4)
    for warmup_steps in (5, 9):  # a phase that is no longer than its warm-up
        assert curve(OptimConfig(lr=0.1, warmup_steps=warmup_steps), 5)[-1] == pytest.approx(0.1 * 5 / warmup_steps)


def ibm(x: int, steps: int = 21000, second: int = 15000) -> float:
    """fms-fsdp's factor of the learning rate after ``x`` steps: two stages, each min(parabolic warm-up, cosine)."""

    def stage(x: int, steps: int, peak: float, floor: float) -> float:
        warmup = min(2000, steps // 20)
        rise = peak * (1 - (1 - min(x, warmup) / warmup) ** 2)
        return min(rise, floor + 0.5 * (peak - floor) * (1 + math.cos(x / steps * math.pi)))

    return stage(x, second, 1.0, 0.1) if x <= second else stage(x - second, steps - second, 0.1, 0.01)


def test_the_two_stages_of_ibm_at_every_step() -> None:
    """Ours at step i is theirs after i + 1: theirs spends its first step at a learning rate of 0."""
    shape = {"warmup": "parabolic", "decay_from": "start", "final_lr_ratio": 0.1}
    first = curve(OptimConfig(lr=1e-3, warmup_steps=750, **shape), 15000)
    second = curve(OptimConfig(lr=1e-4, warmup_steps=300, **shape), 6000)
    expected = [1e-3 * ibm(x) for x in range(1, 21001)]
    assert first + second == pytest.approx(expected, rel=1e-12, abs=0)
    assert (ibm(0), ibm(15000), ibm(21000)) == pytest.approx((0.0, 0.1, 0.01))


class Joint(nn.Module):
    """Heads and an adapter of the base: as much of a head as ``head_optimizers`` needs."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(3, 2)
        self.adapter = nn.Linear(3, 2)
        self.frozen = nn.Linear(3, 2).requires_grad_(False)

    def lr_mult(self, parameter: nn.Parameter) -> float:
        return 4.0 if any(parameter is p for p in self.heads.parameters()) else 1.0


def test_a_factor_for_some_parameters_and_decay_of_trainable_matrices_only() -> None:
    module: Any = Joint()
    (optimizer,) = head_optimizers(module, OptimConfig(weight_decay=0.3))
    groups = optimizer.param_groups
    expected = [module.adapter.weight, module.adapter.bias, module.heads.weight, module.heads.bias]
    assert [group["params"] for group in groups] == [[p] for p in expected]
    assert [(g["lr_mult"], g["weight_decay"]) for g in groups] == [(1, 0.3), (1, 0), (4, 0.3), (4, 0)]
    assert groups[0]["betas"] == (0.9, 0.95)
    refuses("no trainable parameter", head_optimizers, module.requires_grad_(False), OptimConfig())


class _Quadratic:
    """The least that ``train_step`` asks of a head: every weight has the gradient 1."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.parameters = module, module.parameters

    def loss(self, *_: object) -> LossOutput:
        total = torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum()
        return LossOutput(loss_sum=total, tokens=torch.tensor(1), sums=torch.ones(1, 2), names=("a",))


def test_a_step_takes_the_factor_into_account() -> None:
    module: Any = Joint()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizers = head_optimizers(module, OptimConfig())
    batch: list[Any] = [(None, None)]
    train_step(_Quadratic(module), optimizers, batch, LossConfig(), lr=0.01, clip_norm=0.0)
    for name, parameter in module.named_parameters():  # Adam's first step is the learning rate, whatever the gradient
        moved = {"heads": 0.04, "adapter": 0.01, "frozen": 0.0}[name.split(".")[0]]
        torch.testing.assert_close(
            before[name] - parameter.detach(), torch.full_like(parameter, moved), atol=1e-6, rtol=0
        )


# Muon --------------------------------------------------------------------------------------------------------


def muon_head() -> DraftHead:
    shape = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
    return DSparkConfig(num_draft_tokens=2, markov_rank=4).build(random_base({**shape, "vocab_size": 300}))


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest() -> None:
    """One step of each, by hand: Muon's is orthogonal, of the size of AdamW's."""
    head = muon_head()
    muon, adamw = head_optimizers(head, OptimConfig(name="muon", weight_decay=0.0))
    matrices = {name for name, p in head.named_parameters() if any(p is q for q in muon.param_groups[0]["params"])}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    layers = {f"layers.{n}.self_attn.{p}.weight" for n in (0, 1) for p in projections if p[1:2] == "_"}
    assert layers <= matrices and {"fc.weight", "markov_in.weight"} <= matrices
    assert "markov_out.weight" not in matrices and not any("norm" in name for name in matrices)
    groups = [*muon.param_groups, *adamw.param_groups]
    assert sum(len(group["params"]) for group in groups) == len(list(head.parameters()))
    generator = torch.Generator().manual_seed(0)
    before = {name: p.detach().clone() for name, p in head.named_parameters()}
    for parameter in head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
    change = (head.get_parameter("fc.weight") - before["fc.weight"]).detach()
    values = torch.linalg.svdvals(change) / (0.01 * 0.2 * max(change.shape) ** 0.5)
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3  # Newton and Schulz stop early
    vector = (head.get_parameter("norm.weight") - before["norm.weight"]).detach()
    torch.testing.assert_close(vector.abs(), torch.full_like(vector, 0.01), rtol=1e-3, atol=0)


@cases("shape", (24, 8), (8, 24), (8, 8))
def test_muon_is_that_of_torch(shape: tuple[int, int]) -> None:
    """Three steps differ by the rounding of torch's bfloat16; states are exchangeable."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]
    options: Any = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    stock, ours = torch.optim.Muon(parameters[:1], **options), Muon(parameters[1:], **options)
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip(parameters, (stock, ours), strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved, expected = parameters[1].detach() - start, parameters[0].detach() - start
    assert float((moved - expected).norm() / expected.norm()) < 0.02
    ours.load_state_dict(stock.state_dict())


# Rows are read one micro-batch ahead ----------------------------------------------------------------------------------


def test_the_next_rows_are_read_meanwhile_and_no_more(tiny_base: TinyBase) -> None:
    documents = Documents.of([np.full(16, n + 3, np.int32) for n in range(6)])
    data = PhaseData(pack(documents, 16, split=False), OriginalBase.of(tiny_base()), HiddenStatesSpec())
    original_read, asked, done = data.read, [], threading.Semaphore(0)

    def watched(numbers: list[int]) -> tuple[TrainBatch, torch.Tensor | None]:
        batch = original_read(numbers)
        asked.append((numbers[0], threading.current_thread() is threading.main_thread()))
        done.release()
        return batch

    data.read = watched  # type: ignore[method-assign]
    stream = data.stream([n] for n in range(5))
    next(stream)
    for _ in range(2):
        assert done.acquire(timeout=10)
    assert asked == [(0, False), (1, False)]
    stream.close()


# A second head learns what the first head's tree misses ---------------------------------------------------------------


TREE = TokenTree.from_paths([(0,), (1,), (0, 0)])


def test_weights_by_hand() -> None:
    ranks = torch.tensor([[[0, 0], [2, 5], [1, 0], [-1, -1], [-1, -1]]])  # from place t, of t + 1 + k
    weights = target_weights(ranks, TREE, 3, 0.25)
    assert weights[0, :, 0].tolist() == [1, 1, 0.25, 1, 0.25], "ranks 0 and 1 are in the tree at depth 1"
    assert weights[0, :, 1].tolist() == [1, 1, 1, 0.25, 1]
    assert weights[0, :, 2].tolist() == [1] * 5, "the first head does not draft so deep"


def test_only_what_is_missed_has_a_gradient(tiny_base: TinyBase) -> None:
    """With floor 0 the loss is that of the target_weights targets alone; a first head that knows all leaves nothing."""
    base, batch = tiny_base(), rows_of([random_ids(16, seed=1), random_ids(16, seed=2)])
    known = rows_of([random_ids(16, seed=1)])
    first = fitted(HydraConfig(num_draft_tokens=2).build(base), known, 60, 0.01)  # the first row alone
    second = HydraConfig(num_draft_tokens=2).build(base)
    hidden = base.hidden_states(batch, second.spec)
    whole = second.loss(batch, hidden, LossConfig())
    (boosted_batch, _), *_ = boosted(iter([(batch, hidden)]), first, 2, 0.0)
    (rest, _), *_ = boosted(iter([(batch, hidden)]), first, 2, 1.0)
    torch.testing.assert_close(second.loss(rest, hidden, LossConfig()).loss_sum, whole.loss_sum)
    some = second.loss(boosted_batch, hidden, LossConfig())
    assert 0 < float(some.loss_sum.detach()) < float(whole.loss_sum.detach()) and 0 < int(some.tokens) < int(
        whole.tokens
    )
    (nothing, _), *_ = boosted(iter([(batch, hidden)]), fitted(first, batch, 120, 0.01), 2, 0.0)
    assert int(second.loss(nothing, hidden, LossConfig()).tokens) < int(some.tokens)


def test_weights_of_untrained_positions_are_ignored(tiny_base: TinyBase) -> None:
    """A head that trains one of its two positions does not take the larger weight of both."""
    base, batch = tiny_base(), rows_of([random_ids(16)])
    head = Eagle3Config(num_draft_tokens=2, ttt_steps=1).build(base)
    weights = torch.zeros(*batch.input_ids.shape, 2)
    weights[..., 1] = 1.0
    output = head.loss(replace(batch, weights=weights), base.hidden_states(batch, head.spec), LossConfig())
    assert int(output.tokens) == 0


def test_a_first_head_that_reads_other_layers_is_rejected(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    KangarooConfig(num_draft_tokens=2, exit_layer=1).build(base).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"reads the base's layers \(1,\).* reads \(\)"):
        load_first(str(tmp_path), HydraConfig(num_draft_tokens=2).build(base))


# Harmful updates ------------------------------------------------------------------------------------------------------


def test_spikes_are_told_from_noise_once_the_median_is_known() -> None:
    config, losses = LossSpikeConfig(spike=3.0), list[float | None]()
    assert skip_reason(config, losses, 100.0, 1.0) is None, "nothing to compare with"
    for loss in [1.0, 2.0] * HISTORY:
        assert skip_reason(config, losses, loss, 1.0) is None
    assert skip_reason(config, losses, 2.9, 1e6) is None
    assert skip_reason(config, losses, 7.0, 1.0) == "the loss is 7, over 3 times the median of 2"
    assert losses.count(None) == 1 and losses[-1] is None, "a skipped loss must not move the median"
    off, zero = partial(skip_reason, LossSpikeConfig(spike=0), []), partial(skip_reason, LossSpikeConfig(), [])
    for _ in range(2 * HISTORY):
        assert off(1.0, 1.0) is None and zero(0.0, 1.0) is None
    assert off(1e9, 1.0) is None and zero(0.1, 1.0) is None
    losses: list[float | None] = []
    for step in range(100):
        skip_reason(LossSpikeConfig(window=20, limit=2), losses, math.nan if step % 9 == 0 else 1.0, 1.0)
    assert len(losses) == 20 and losses.count(None) == 3, "of the latest 20"


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_a_loss_that_is_not_finite_is_skipped_from_the_first_step(loss: float, norm: float) -> None:
    assert "gradient norm" in (skip_reason(LossSpikeConfig(spike=0), [], loss, norm) or "")


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
    options += ["validate_every=50", "stages=[corpora,train]", "phases.pretrain.seq_len=128", "phases.distill.steps=3"]
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
    assert [step for step, _ in steps] == [n for n in range(1, 24) if n not in bad]
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
