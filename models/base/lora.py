"""A trainable copy of a frozen base: LoRA adapters (Hu et al., 2106.09685) through peft, on stock modules.

A base may run with fused and prepacked layers, through which no gradient passes. The copy has stock layers: they share
the base's weights where those are as they were loaded, and are unpacked once where they are packed. The base itself is
left as it is: with adapters that add nothing, the copy computes what the base does.

Shape legend: B batch, T time, D width, V vocabulary.
"""

import warnings
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from drafthead.data.batch import TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.models.base import adapter
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import with_layers
from drafthead.models.base.lm_head import LMHead
from drafthead.models.kernels.fused import fresh_copy

LM_HEAD = "lm_head"
NAME = "default"
"""peft's name of the one adapter."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What the adapters are."""

    rank: int
    alpha: float
    """An adapter adds ``alpha / rank * B A`` to a weight."""
    dropout: float
    """Of the adapters' inputs, in training."""
    targets: tuple[str, ...]
    """Names of the linear layers that get one."""
    checkpointing: bool
    """Compute every layer's activations again in the backward pass instead of keeping them."""


class LoraBase:
    """A base with adapters that are trained; no ``nn.Module``, so a head that holds one does not own its weights."""

    def __init__(self, base: BaseModel, settings: LoraSettings) -> None:
        """Make a trainable copy of ``base``; its adapters add nothing yet."""
        from peft import LoraConfig, get_peft_model  # takes seconds to import

        self.base = base
        self.model = _trainable_copy(base)
        found = {name.rpartition(".")[2] for name, part in self.model.named_modules() if isinstance(part, nn.Linear)}
        if unknown := sorted(set(settings.targets) - found):
            raise UserError(
                f"{base.name} has no linear layer {unknown[0]!r} to put an adapter on; it has {sorted(found)}"
            )
        if LM_HEAD in settings.targets and base.lm_head.weight.data_ptr() == base.embedding.data_ptr():
            raise UserError(
                f"{base.name} shares its output head with its embedding, which an adapter on the head would change "
                "too; set head.lora_lm_head=false"
            )
        config = LoraConfig(
            base_model_name_or_path=base.name,
            revision=base.config.revision,
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=sorted(settings.targets),
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings(action="ignore"):  # of peft and transformers to each other
            self._peft = get_peft_model(self.model, config)
            if settings.checkpointing:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
                # Puts a hook on the embedding, which is the base's too and here needs no gradient.
                self.model.disable_input_require_grads()
        self.train(False)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' weights by name, without dots."""
        return {n.replace(".", "-"): p for n, p in self._peft.named_parameters() if ".lora_" in n}

    def train(self, mode: bool) -> None:
        """Turn dropout on or off."""
        self.model.train(mode)

    def hidden_states(self, batch: TrainBatch) -> Tensor:
        """``h`` [B, T, D] after the final norm, with gradients for the adapters; a token sees its own document only."""
        out = self.model.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=self.base.document_masks(batch.document_ids, batch.position_ids, self.base.dtype),
            use_cache=False,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    @property
    def adapts_head(self) -> bool:
        """Whether the output head has an adapter."""
        return not isinstance(self.model.get_output_embeddings(), nn.Linear)

    def output_head(self) -> LMHead:
        """The tuned output head over the whole vocabulary, with gradients for its adapter if it has one."""
        head = self.base.lm_head
        if not self.adapts_head:
            return head
        # One [V, D] sum a step; the loss over it is chunked, which a product per adapter would not allow.
        change = self.model.get_output_embeddings().get_delta_weight(NAME)
        return replace(head, weight=head.weight + change.to(head.weight.dtype))

    def save(self, folder: Path) -> str:
        """Write the adapter in peft's format; returns the fingerprint of the base with it merged."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as tmp_path:
            self._peft.save_pretrained(tmp_path, save_embedding_layers=False)
            adapter.copy(Path(tmp_path), folder)  # without peft's empty model card
        return adapter.fingerprint(self.base.model, adapter.digest_of(self.base.fingerprint, folder))


def _trainable_copy(base: BaseModel) -> Any:
    """The base's model with stock layers and an output layer of its own, and everything else shared."""
    layers = base.model.model.layers
    if base.prepacked:
        layers = nn.ModuleList(fresh_copy(layer, base.model.config, n) for n, layer in enumerate(layers))
    else:
        # Modules of their own that share weights. The config must be the model's own: attention reads from it.
        parts = [*layers.parameters(), *layers.buffers(), *(m.config for m in layers.modules() if hasattr(m, "config"))]
        layers = deepcopy(layers, {id(part): part for part in parts})
    model = with_layers(base, layers).model
    head = nn.Linear(base.hidden_size, base.vocab_size, bias=False, device="meta")
    head.weight = nn.Parameter(base.lm_head.weight, requires_grad=False)
    model.set_output_embeddings(head)
    return model
