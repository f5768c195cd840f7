"""A trainable copy of a frozen base: LoRA adapters (Hu et al., 2106.09685) through peft, on stock modules.

A base may have fused and prepacked layers, through which no gradient passes. The copy has stock layers, which share the
base's weights, except for packed ones. Untrained adapters change no result.

Shape legend: B batch, T time, D width, V vocabulary.
"""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drafthead.data.batch import TrainBatch
from drafthead.errors import UserError
from drafthead.files.local import make_readable
from drafthead.models.base import adapter
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.fingerprint import fingerprint
from drafthead.models.base.layers import with_layers
from drafthead.models.base.lm_head import LMHead
from drafthead.models.kernels.fused import fresh_copy

LM_HEAD = "lm_head"
NAME = "default"  # of the adapter in peft


class LoraBase:
    """A base with trained adapters. It is not an ``nn.Module``, so that heads do not own its weights."""

    def __init__(self, base: BaseModel, targets: Sequence[str], checkpointing: bool = False, **settings: Any) -> None:
        """Make a trainable copy of ``base`` whose linear layers ``targets`` get untrained adapters. ``checkpointing``
        recomputes activations in the backward pass; ``settings`` are fields of peft's ``LoraConfig``."""
        from peft import LoraConfig, get_peft_model  # takes seconds to import

        self.base = base
        self.model = _trainable_copy(base)
        names = {name.rpartition(".")[2] for name, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        if unknown := sorted(set(targets) - names):
            what = f"{base.name} has no linear layer {unknown[0]!r} for an adapter"
            raise UserError(f"{what}; choose head.lora_targets from {sorted(names)}")
        if LM_HEAD in targets and _is_tied(base):
            what = f"{base.name} shares its output head with its embedding, so an adapter on the head would change both"
            raise UserError(f"{what}; set head.lora_lm_head=false")
        config = LoraConfig(
            base_model_name_or_path=base.name,
            revision=base.config.revision,
            target_modules=sorted(targets),
            task_type="CAUSAL_LM",
            **settings,
        )
        with warnings.catch_warnings(action="ignore"):  # peft and transformers warn about each other
            self._peft = get_peft_model(self.model, config)
            if checkpointing:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
                # Remove its hook from the embedding, which the base shares and which needs no gradient here.
                self.model.disable_input_require_grads()
        self.train(False)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the adapters' weights by name, with dashes instead of dots, which PyTorch forbids in names."""
        return {n.replace(".", "-"): p for n, p in self._peft.named_parameters() if ".lora_" in n}

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def hidden_states(self, batch: TrainBatch) -> Tensor:
        """Return hidden states [B, T, D] after the final norm, with gradients; tokens see their own document only."""
        return self.base.run_packed(self.model, batch)[0]

    @property
    def adapts_head(self) -> bool:
        return not isinstance(self.model.get_output_embeddings(), nn.Linear)

    def output_head(self) -> LMHead:
        """Return the output head over the whole vocabulary; if it has an adapter, this is added, with gradients."""
        head = self.base.lm_head
        if not self.adapts_head:
            return head
        # Adding the adapter to the weight costs one [V, D] sum per step, and lets the chunked loss use one matrix.
        change = self.model.get_output_embeddings().get_delta_weight(NAME)
        return replace(head, weight=head.weight + change.to(head.weight.dtype))

    def save(self, folder: Path) -> str:
        """Write the adapter in peft's format, and return the fingerprint of the base with this adapter merged."""
        self._peft.save_pretrained(str(folder), save_embedding_layers=False)
        make_readable(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
        return fingerprint(self.model, adapter.digest_of(self.base.fingerprint, folder))


def _trainable_copy(base: BaseModel) -> Any:
    """Return the base's model with stock layers and a new output layer; all other modules are shared."""
    layers = base.model.model.layers
    if base.prepacked:
        layers = nn.ModuleList(fresh_copy(layer, base.model.config, n) for n, layer in enumerate(layers))
    else:
        # Copy the modules but not their weights. The config must stay the same object, because attention reads it.
        shared = [
            *layers.parameters(),
            *layers.buffers(),
            *(m.config for m in layers.modules() if hasattr(m, "config")),
        ]
        layers = deepcopy(layers, {id(item): item for item in shared})
    model = with_layers(base, layers).model
    head = nn.Linear(base.hidden_size, base.vocab_size, bias=False, device="meta")
    head.weight = nn.Parameter(base.lm_head.weight, requires_grad=False)
    model.set_output_embeddings(head)
    return model


def _is_tied(base: BaseModel) -> bool:
    if base.device.type == "meta":  # where all addresses are 0
        return base.model.get_output_embeddings().weight is base.embedding
    return base.lm_head.weight.data_ptr() == base.embedding.data_ptr()
