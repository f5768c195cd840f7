"""Medusa heads as vLLM read them while it had Medusa.

    blocks.{k}.layers.{j}.weight [D, D]   blocks.{k}.layers.{j}.bias [D]   lm_heads.{k}.weight [W, D]   token_map [W]

The biases are read only if ``medusa_fc_bias`` is set, and one projection serves all heads if ``original_lm_head`` is.
Its config class takes every key with "num" and "heads", or "num" and "layers", for one of its own, so no other such key
may stand in the config.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafthead.data.errors import UserError
from drafthead.models.formats.artefact import Artefact
from drafthead.models.formats.blocks import tied
from drafthead.models.formats.contract import Engine, Format, Shape, assign
from drafthead.models.formats.medusa import blocks_of, last_token_obstacles
from drafthead.models.formats.obstacles import Obstacle
from drafthead.models.medusa import MedusaConfig, MedusaHead


class VllmMedusaFormat(Format):
    """What vLLM read while it had Medusa: one chain of top-1 proposals, no tree."""

    name = "vllm_medusa"
    title = "Medusa (historic vLLM)"
    head = MedusaHead
    engines = (
        Engine(
            "vLLM",
            "removed: 0.33.0 has none. The V1 engine had it from May 2025 (#17956), with an end-to-end test from April "
            "2026 (#41396); which release removed it is not known. Tensor parallelism above 1 hung (#16477)",
        ),
        Engine("SGLang", "never"),
        Engine("TGI", "no, it reads to=tgi_medusa"),
    )
    config_keys = frozenset(
        {
            "model_type",
            "hidden_size",
            "vocab_size",
            "truncated_vocab_size",
            "num_heads",
            "num_hidden_layers",
            "medusa_fc_bias",
            "original_lm_head",
            "logit_scale",
        }
    )

    def obstacles(self, head: MedusaHead) -> list[Obstacle]:
        found = last_token_obstacles(head)
        if head.teacher.softcap is not None:
            what = f"{head.base.name} caps its logits, and the format does not"
            found.append(Obstacle(what, "another base; no setting avoids it"))
        return found

    def pack(self, head: MedusaHead) -> Artefact:
        own, reduced = head.config.own_projection, len(head.d2t) != head.base.vocab_size
        tensors = _named_by_vllm(head)
        if not own:
            tensors["lm_heads.0.weight"] = head.teacher.weight
        if reduced:
            tensors["token_map"] = head.d2t
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": head.base.hidden_size,
            "vocab_size": head.base.vocab_size,
            "truncated_vocab_size": len(head.d2t),
            "num_heads": head.depth,
            "num_hidden_layers": head.config.num_layers,
            "medusa_fc_bias": True,  # its default drops the biases without a word
            "original_lm_head": not own,
            "logit_scale": head.teacher.scale,
        }
        return Artefact(config, tensors)

    def layout(self, artefact: Artefact) -> dict[str, Shape]:
        heads, layers = artefact.integer("num_heads"), artefact.integer("num_hidden_layers")
        width, rows = artefact.integer("hidden_size"), artefact.integer("truncated_vocab_size")
        wanted: dict[str, Shape] = {}
        for k in range(heads):
            for j in range(layers):
                wanted[f"blocks.{k}.layers.{j}.weight"] = (width, width)
                if artefact.config.get("medusa_fc_bias"):
                    wanted[f"blocks.{k}.layers.{j}.bias"] = (width,)
            if k == 0 or not artefact.config.get("original_lm_head"):
                wanted[f"lm_heads.{k}.weight"] = (rows, width)
        if rows < artefact.integer("vocab_size"):
            wanted["token_map"] = (rows,)
        return wanted

    def recognises(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "medusa" and "medusa_num_heads" not in config

    def repaired(self, artefact: Artefact) -> Artefact:
        """With vLLM's names of keys and tensors; of projections over all ids the rows of ``token_map``."""
        config = dict(artefact.config)
        for key in [k for k in config if "num" in k]:  # as vLLM's config class does
            for part, wanted in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
                if part in key and key != wanted:
                    config[wanted] = config.pop(key)
        config.setdefault("truncated_vocab_size", config.get("vocab_size"))
        tensors = {name.replace("medusa_heads.", ""): value for name, value in artefact.tensors.items()}
        token_map = tensors.get("token_map")
        if token_map is not None:  # projections may be whole: vLLM picked the rows itself
            tensors |= {
                name: value[token_map]
                for name, value in tensors.items()
                if name.startswith("lm_heads.") and len(value) > len(token_map)
            }
        return artefact.with_notes(config=config, tensors=tensors)

    def settings(self, artefact: Artefact) -> MedusaConfig:
        heads, layers = artefact.integer("num_heads"), artefact.integer("num_hidden_layers")
        reduced = artefact.integer("truncated_vocab_size") < artefact.integer("vocab_size")
        blocks = ([f"blocks.{k}.layers.{j}" for j in range(layers)] for k in range(heads))
        return MedusaConfig(
            num_heads=heads,
            num_layers=layers,
            own_projection=not artefact.config.get("original_lm_head"),
            tie_blocks=tied(artefact.tensors, blocks),
            draft_vocab_size=artefact.integer("truncated_vocab_size") if reduced else None,
        )

    def vocabulary(self, artefact: Artefact) -> Tensor | None:
        token_map = artefact.tensors.get("token_map")
        return None if token_map is None else token_map.long()

    def fill(self, head: MedusaHead, artefact: Artefact) -> None:
        scale = artefact.config.get("logit_scale", 1.0)
        if scale != head.teacher.scale or head.teacher.softcap is not None:
            raise UserError(
                f"{artefact.source} scales its logits by {scale}, {head.base.name} by {head.teacher.scale} (soft-cap "
                f"{head.teacher.softcap}); name the base that it was trained for"
            )
        biases = {
            f"blocks.{k}.layers.{j}.bias": torch.zeros(head.base.hidden_size)
            for k in range(head.depth)
            for j in range(head.config.num_layers)
        }
        assign(_named_by_vllm(head), replace(artefact, tensors={**biases, **artefact.tensors}))
        if not head.config.own_projection:
            _require_the_bases(artefact.tensors["lm_heads.0.weight"], head, artefact.source)


def _named_by_vllm(head: MedusaHead) -> dict[str, Tensor]:
    """The same by vLLM's names."""
    found = {}
    for k in range(head.depth):
        for j, block in enumerate(blocks_of(head, k)):
            found[f"blocks.{k}.layers.{j}.weight"] = block.linear.weight
            found[f"blocks.{k}.layers.{j}.bias"] = block.linear.bias
        if head.config.own_projection:
            found[f"lm_heads.{k}.weight"] = head.output_head(k).weight
    return found


def _require_the_bases(weight: Tensor, head: MedusaHead, source: str) -> None:
    """A shared projection is the base's here; what was rounded to bfloat16 is still the same one."""
    own = head.teacher.weight
    if not torch.allclose(weight.to(own), own, rtol=2**-7, atol=1e-6):
        raise UserError(
            f"{source} shares one projection that is not {head.base.name}'s own; name the base that it was trained for"
        )
