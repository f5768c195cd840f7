"""Medusa-2 (Cai et al., 2401.10774, section 2.2): Medusa heads and their base trained jointly.

The base learns through LoRA adapters, so that its hidden states say more about later tokens; its own loss keeps it
close to the original. In phases with ``train_base`` the loss is::

    L = L_base + heads_weight * s(share_done) * sum_k decay^k L_k

where s is ``heads_schedule``, share_done the share of the phase that is done, decay ``loss.decay``, and L_k the loss of
head k, over the tuned base's hidden states. L_base is the cross-entropy of the corpus, or with self-distillation
KL(p || q) from the original base's distribution p to the tuned base's q. Every batch has the original base's hidden
states, so p costs no second pass. Earlier phases train the heads on the original base (Medusa-1), because untrained
heads would pull the base towards noise.

Differences from the reference code: L_base covers the trained tokens only (there, prompts and padding too), and is
computed in chunks like the heads' loss. A saved head has the adapter in its folder. It is loaded with the adapter
merged into the base, and decoding is exact for that base. ``eval/metrics/base_quality.py`` measures how far the tuned
base is from the original.
"""

import math
from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, LossOutput, TrainBatch
from drafthead.errors import UserError
from drafthead.models.base.base_config import ADAPTER, save_merged
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lora import LM_HEAD, LoraBase
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.heads.parts.losses import STATS, Labels, LossConfig, heads_loss
from drafthead.settings.schema import BelowOne, NonNegativeFloat, PositiveFloat, settings
from drafthead.system.devices import wide

HEAD_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: done,
    "sine": lambda done: math.sin(math.pi / 2 * done),
}
"""Share of a phase that is done (0 to 1) -> factor of the heads' loss."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MERGED = "merged"  # folder, in the head's folder, with the tuned base as a whole model


@settings(kw_only=True)
class Medusa2Config(MedusaConfig):
    """Settings of :class:`Medusa2Head`."""

    trains_base = True
    needs_layers = True
    lora_rank: Annotated[int, Field(ge=1, le=1024)] = 32
    """Rank of the base's LoRA adapters."""
    lora_alpha: PositiveFloat = 16.0
    """Scale of the adapters: an adapter adds ``lora_alpha / lora_rank * B A`` to its weight."""
    lora_dropout: BelowOne = 0.05
    """Dropout of the adapters' inputs."""
    lora_targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS))
    """Linear layers in each decoder layer that get an adapter."""
    lora_lm_head: bool = False
    """Also train an adapter of the base's output head, without dropout. Not possible if the output head is tied to the
    embedding."""
    base_loss: Literal["ce", "self_distillation"] = "self_distillation"
    """Loss of the base: ``ce`` (on the corpus) or ``self_distillation`` (KL to the original base)."""
    heads_weight: NonNegativeFloat = 0.2
    """Weight of the heads' loss relative to the base's (lambda_0 in the paper)."""
    heads_schedule: Literal["constant", "linear", "sine"] = "constant"
    """Schedule of the heads' weight over the phase. ``linear`` and ``sine`` rise from 0 to ``heads_weight``."""
    heads_lr_mult: PositiveFloat = 4.0
    """Learning rate of the heads divided by the phase's learning rate, in phases that train the base. The adapters use
    the phase's learning rate."""
    checkpointing: bool = False
    """Recompute the base's activations in the backward pass instead of keeping them."""
    save_merged: bool = False
    """Also save the tuned base as a whole model, in ``merged/`` in the head's folder. Other programs can load it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_lm_head and not self.own_lm_head:
            what = "head.lora_lm_head=true needs head.own_lm_head=true"
            raise ValueError(f"{what}: heads that share the base's output head would use the original one")
        if not self.lora_targets:
            raise ValueError("head.lora_targets must be at least one layer's name, got none")


class Medusa2Head(MedusaHead):
    """Medusa heads whose base can be trained too."""

    config: Medusa2Config
    base: BaseModel

    def __init__(self, config: Medusa2Config, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.adapter = nn.ParameterDict()  # empty before ``train_base``; in checkpoints, but not in ``saved_weights``
        self._tuned: LoraBase | None = None
        self._joint = False

    def train_base(self, now: bool) -> None:
        """Create the base's adapters if there are none; ``now`` says if the next phase trains them. New adapters change
        nothing until they are trained. A base that already has an adapter is rejected."""
        if self._tuned is None:
            if self.base.config.adapter is not None:
                what = f"{self.base.name} already has the adapter {self.base.config.adapter}"
                raise UserError(f"{what}; save it as a whole model (peft's merge_and_unload), and set base.name to it")
            config = self.config
            targets = [*config.lora_targets, *([LM_HEAD] if config.lora_lm_head else [])]
            sizes = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
            self._tuned = LoraBase(self.base, targets, config.checkpointing, **sizes)
            self.adapter.update(self._tuned.parameters())
        self._joint = now
        for parameter in self.adapter.values():
            parameter.requires_grad_(now)
        self.train(self.training)

    def train(self, mode: bool = True) -> "Medusa2Head":
        """Set the training mode; the adapters' dropout is on only in phases that train the base."""
        super().train(mode)
        if self._tuned is not None:
            self._tuned.train(mode and self._joint)
        return self

    def tuned_decoders(self) -> list[nn.Module]:
        return [] if self._tuned is None else [self._tuned.model.model]

    def lr_mult(self, parameter: nn.Parameter) -> float:
        adapter = any(parameter is other for other in self.adapter.values())
        return 1.0 if adapter or not self._joint else self.config.heads_lr_mult

    def loss(
        self, batch: TrainBatch, base_hidden: HiddenStates, config: LossConfig, share_done: float = 1.0
    ) -> LossOutput:
        """Return the heads' loss; in phases that train the base, the weighted sum of the base's and the heads' loss.
        ``base_hidden`` always has the original base's states. Joint phases use the tuned base's states, and add the
        metrics base_loss, heads_loss (without its scheduled weight) and base_accept (share of targets that are its
        likeliest token)."""
        if not self._joint:
            return super().loss(batch, base_hidden, config)
        tuned_hidden = self._tuned_hidden_states(batch)
        heads = super().loss(batch, tuned_hidden, config)
        base_sum, stats = self._base_loss(batch, tuned_hidden, base_hidden)
        weight = self.config.heads_weight * HEAD_SCHEDULES[self.config.heads_schedule](share_done)
        column = dict(zip(STATS, wide(stats[0]), strict=True))
        metrics = {
            "base_loss": (base_sum.detach(), column["count"]),
            "heads_loss": (heads.loss_sum.detach(), heads.tokens),
            "base_accept": (column["accept"], column["count"]),
        }
        return replace(
            heads,
            loss_sum=base_sum + weight * heads.loss_sum,
            sums=torch.cat([heads.sums, torch.stack([wide(torch.stack(pair)) for pair in metrics.values()])]),
            names=(*heads.names, *metrics),
        )

    @torch.no_grad()
    def candidate_ranks(self, batch: TrainBatch, base_hidden: HiddenStates, top: int) -> Tensor:
        return super().candidate_ranks(batch, self._tuned_hidden_states(batch) if self._joint else base_hidden, top)

    def _tuned_hidden_states(self, batch: TrainBatch) -> HiddenStates:
        """Return the tuned base's final states, with gradients; with ``lora_lm_head``, also set ``target_lm_head``."""
        assert self._tuned is not None
        if self._tuned.adapts_head:
            # The heads' labels come from the tuned output head, which only the base's loss trains.
            head = self._tuned.output_head()
            self.target_lm_head = replace(head, weight=head.weight.detach()).rows(self.d2t)
        return HiddenStates(final=self._tuned.hidden_states(batch))

    def _base_loss(
        self, batch: TrainBatch, tuned_hidden: HiddenStates, original: HiddenStates
    ) -> tuple[Tensor, Tensor]:
        """Return the base's own loss and its ``STATS`` [1, len(STATS)] over trained tokens, from the final states of
        the tuned base and, for self-distillation, of the original base."""
        assert self._tuned is not None
        next_ids, valid = batch.next_tokens(0)
        device, chosen = tuned_hidden.final.device, valid.flatten().nonzero()[:, 0]
        ids = next_ids.flatten()[chosen].to(device, non_blocking=True)
        chosen = chosen.to(device, non_blocking=True)
        distils = self.config.base_loss == "self_distillation"
        labels = Labels(
            ids=ids,
            valid=torch.ones_like(ids, dtype=torch.bool)[None],
            target_hidden=original.final.flatten(0, 1)[chosen] if distils else None,
            target_lm_head=self.base.lm_head if distils else None,
        )
        return heads_loss(
            tuned_hidden.final.flatten(0, 1)[chosen][None],
            [self._tuned.output_head()],
            labels,
            LossConfig(ce=float(not distils), kl=float(distils), decay=1.0),
        )

    def saved_weights(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.state_dict().items() if not name.startswith("adapter.")}

    def save_base(self, folder: Path) -> dict[str, Any]:
        if self._tuned is None:
            return super().save_base(folder)
        fingerprint = self._tuned.save(folder / ADAPTER)
        if self.config.save_merged:
            save_merged(replace(self.base.config, adapter=str(folder / ADAPTER)), folder / MERGED)
        identity = self.base_identity
        return {**identity, "fingerprint": fingerprint, "recipe": {**identity["recipe"], "adapter": ADAPTER}}
