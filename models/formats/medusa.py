"""Medusa heads as FasterDecoding publishes them and as TGI reads them: the same tensors.

Head k is a ``Sequential`` of residual blocks and, in variant A, a projection::

    {k}.{j}.linear.weight [D, D]   {k}.{j}.linear.bias [D]   {k}.{blocks}.weight [V, D]

Variant B (the later recipe) has no projections and uses the base's. The released code repeats one block module, so
files of several blocks a head hold the same values under several names: read as ``tie_blocks``.
"""
# Medusa heads as vLLM read them while it had Medusa.

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.contract import (
    BASE_NAME,
    Engine,
    Format,
    Shape,
    Unsupported,
    assign,
    unsupported_vocabulary,
)
from drafthead.models.formats.tensors import rows_of, tied
from drafthead.models.heads.medusa import Blocks, MedusaConfig, MedusaHead, ResBlock

FULL_MODEL = "medusa_head."
"""Prefix of the heads in a whole Medusa-2 model."""


class MedusaFormat(Format):
    """FasterDecoding's folder: ``config.json`` and ``medusa_lm_head.safetensors``."""

    name = "medusa"
    title = "Medusa (FasterDecoding)"
    weights_file = "medusa_lm_head.safetensors"
    head = MedusaHead
    engines = (
        Engine("FasterDecoding/Medusa", "its loader reads medusa_lm_head.pt: save these tensors there with torch.save"),
        Engine("TGI", "in maintenance; loads the stricter to=tgi_medusa"),
        Engine("vLLM", "none: Medusa is gone in 0.33.0, and older versions read to=vllm_medusa"),
        Engine("SGLang", "never"),
    )
    config_keys = frozenset({"medusa_num_heads", "medusa_num_layers"})

    def unsupported(self, head: MedusaHead) -> list[Unsupported]:
        return [
            *unsupported_last_token(head),
            *unsupported_vocabulary(head, "to=vllm_medusa"),
            *_scaled_logits(head),
        ]

    def pack(self, head: MedusaHead) -> PublishedCheckpoint:
        own = head.config.own_lm_head
        config = {
            "medusa_num_heads": head.depth,
            "medusa_num_layers": head.config.num_layers,
            "version": "1" if own else "2",
        }
        return PublishedCheckpoint(config, _named(head))

    def expected_shapes(self, artefact: PublishedCheckpoint) -> dict[str, Shape]:
        heads, layers = artefact.integer("medusa_num_heads"), artefact.integer("medusa_num_layers")
        width = rows_of(artefact, "0.0.linear.weight", "Medusa")
        own = f"0.{layers}.weight"
        vocabulary = rows_of(artefact, own, "Medusa") if own in artefact.tensors else None
        wanted: dict[str, Shape] = {}
        for k in range(heads):
            for j in range(layers):
                wanted[f"{k}.{j}.linear.weight"] = (width, width)
                wanted[f"{k}.{j}.linear.bias"] = (width,)
            if vocabulary is not None:
                wanted[f"{k}.{layers}.weight"] = (vocabulary, width)
        return wanted

    def matches(self, config: dict[str, Any]) -> bool:
        return "medusa_num_heads" in config

    def normalize(self, artefact: PublishedCheckpoint) -> PublishedCheckpoint:
        """Without the base and the prefixes of a whole saved model; heads and blocks are counted in the weights."""
        tensors = _without_prefix(artefact.tensors)
        if len(tensors) != len(artefact.tensors):
            left_out = f"{len(artefact.tensors) - len(tensors)} tensors of the base model beside the heads: left out"
            artefact = artefact.with_notes(left_out)
        artefact = artefact.with_notes(tensors=tensors)
        parts = [name.split(".") for name in tensors]
        counts = {
            "medusa_num_heads": 1 + max((int(p[0]) for p in parts if p[0].isdigit()), default=-1),
            "medusa_num_layers": 1 + max((int(p[1]) for p in parts if p[2:] == ["linear", "weight"]), default=-1),
        }
        for key, count in counts.items():
            said = artefact.config.get(key)
            if count and said != count:
                # Published configs say 2 heads for files of 5; FasterDecoding's loader overrides them in the code.
                note = f"config.json says {key} {said}, the weights hold {count}: {count} it is"
                artefact = artefact.with_notes(note, config={**artefact.config, key: count})
        return artefact

    def sizes(self, artefact: PublishedCheckpoint) -> dict[str, int]:
        found = {"hidden_size": rows_of(artefact, "0.0.linear.weight", "Medusa")}
        own = f"0.{artefact.integer('medusa_num_layers')}.weight"
        return found | ({"vocab_size": rows_of(artefact, own, "Medusa")} if own in artefact.tensors else {})

    def settings(self, artefact: PublishedCheckpoint) -> MedusaConfig:
        heads, layers = artefact.integer("medusa_num_heads"), artefact.integer("medusa_num_layers")
        return MedusaConfig(
            num_draft_tokens=heads,
            num_layers=layers,
            own_lm_head=f"0.{layers}.weight" in artefact.tensors,
            tie_blocks=tied(artefact.tensors, ([f"{k}.{j}.linear" for j in range(layers)] for k in range(heads))),
        )

    def load_weights(self, head: MedusaHead, artefact: PublishedCheckpoint) -> None:
        for obstacle in _scaled_logits(head):
            raise UserError(f"{artefact.source}: {obstacle.found}; name the base that it was trained for")
        assign(_named(head), artefact)


class TgiMedusaFormat(MedusaFormat):
    """The same, within what TGI's two Medusa classes accept."""

    name = "tgi_medusa"
    title = "Medusa (TGI)"
    engines = (
        Engine(
            "TGI",
            "loads both variants; in maintenance mode; no speculation for more than 128 rows at a time",
            current=True,
        ),
        Engine("FasterDecoding/Medusa", "its loader reads medusa_lm_head.pt: save these tensors there with torch.save"),
        Engine("vLLM", "none: Medusa is gone in 0.33.0, and older versions read to=vllm_medusa"),
        Engine("SGLang", "never"),
    )

    def unsupported(self, head: MedusaHead) -> list[Unsupported]:
        found = super().unsupported(head)
        if not head.config.own_lm_head and head.config.num_layers != 1:
            layers = head.config.num_layers
            what = f"it has {layers} blocks a head and the base's projection, with which TGI has exactly 1 block"
            found.append(Unsupported(what, "head.own_lm_head=true or head.num_layers=1"))
        return found

    def matches(self, config: dict[str, Any]) -> bool:
        return False  # as an import it is the other one

    def check(self, artefact: PublishedCheckpoint) -> None:
        """As any format's, and what TGI asks of a config.

        Raises:
            UserError: tensors that are not those of the layout; a config with architectures, or without a base.
        """
        super().check(artefact)
        if "architectures" in artefact.config:
            raise UserError(f"{artefact.source}: TGI takes a config with architectures for no Medusa head; remove it")
        if not artefact.config.get(BASE_NAME):
            raise UserError(f"{artefact.source}: TGI needs base_model_name_or_path in config.json; add it")


def _named(head: MedusaHead) -> dict[str, Tensor]:
    """A head's parameters by FasterDecoding's names."""
    found = {}
    for k in range(head.depth):
        for j, block in enumerate(blocks_of(head, k)):
            found[f"{k}.{j}.linear.weight"] = block.linear.weight
            found[f"{k}.{j}.linear.bias"] = block.linear.bias
        if head.config.own_lm_head:
            found[f"{k}.{head.config.num_layers}.weight"] = head.output_head(k).weight
    return found


def blocks_of(head: MedusaHead, k: int) -> list[ResBlock]:
    """The blocks of head k as they are applied."""
    return cast(Blocks, head.blocks[k]).in_order()


def unsupported_last_token(head: MedusaHead) -> list[Unsupported]:
    """Heads that read more than the base's hidden state, which no Medusa format has."""
    if not head.config.reads_last_token:
        return []
    what = "its heads read the last token's embedding, and those of the format do not"
    return [Unsupported(what, "head.reads_last_token=false")]


def _scaled_logits(head: MedusaHead) -> list[Unsupported]:
    if not head.config.own_lm_head or (head.target_lm_head.scale == 1.0 and head.target_lm_head.softcap is None):
        return []
    what = f"{head.base.name} scales or caps its logits, and the format does not those of a head's own projection"
    return [Unsupported(what, "head.own_lm_head=false")]


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(name.startswith(FULL_MODEL) for name in tensors):
        return tensors
    return {name.removeprefix(FULL_MODEL): t for name, t in tensors.items() if name.startswith(FULL_MODEL)}


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

    def unsupported(self, head: MedusaHead) -> list[Unsupported]:
        found = unsupported_last_token(head)
        if head.target_lm_head.softcap is not None:
            what = f"{head.base.name} caps its logits, and the format does not"
            found.append(Unsupported(what, "another base; no setting avoids it"))
        return found

    def pack(self, head: MedusaHead) -> PublishedCheckpoint:
        own, reduced = head.config.own_lm_head, len(head.d2t) != head.base.vocab_size
        tensors = _named_by_vllm(head)
        if not own:
            tensors["lm_heads.0.weight"] = head.target_lm_head.weight
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
            "logit_scale": head.target_lm_head.scale,
        }
        return PublishedCheckpoint(config, tensors)

    def expected_shapes(self, artefact: PublishedCheckpoint) -> dict[str, Shape]:
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

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "medusa" and "medusa_num_heads" not in config

    def normalize(self, artefact: PublishedCheckpoint) -> PublishedCheckpoint:
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

    def settings(self, artefact: PublishedCheckpoint) -> MedusaConfig:
        heads, layers = artefact.integer("num_heads"), artefact.integer("num_hidden_layers")
        reduced = artefact.integer("truncated_vocab_size") < artefact.integer("vocab_size")
        blocks = ([f"blocks.{k}.layers.{j}" for j in range(layers)] for k in range(heads))
        return MedusaConfig(
            num_draft_tokens=heads,
            num_layers=layers,
            own_lm_head=not artefact.config.get("original_lm_head"),
            tie_blocks=tied(artefact.tensors, blocks),
            draft_vocab_size=artefact.integer("truncated_vocab_size") if reduced else None,
        )

    def vocabulary(self, artefact: PublishedCheckpoint) -> Tensor | None:
        token_map = artefact.tensors.get("token_map")
        return None if token_map is None else token_map.long()

    def load_weights(self, head: MedusaHead, artefact: PublishedCheckpoint) -> None:
        scale = artefact.config.get("logit_scale", 1.0)
        if scale != head.target_lm_head.scale or head.target_lm_head.softcap is not None:
            raise UserError(
                f"{artefact.source} scales its logits by {scale}, {head.base.name} by {head.target_lm_head.scale} "
                f"(soft-cap "
                f"{head.target_lm_head.softcap}); name the base that it was trained for"
            )
        biases = {
            f"blocks.{k}.layers.{j}.bias": torch.zeros(head.base.hidden_size)
            for k in range(head.depth)
            for j in range(head.config.num_layers)
        }
        assign(_named_by_vllm(head), replace(artefact, tensors={**biases, **artefact.tensors}))
        if not head.config.own_lm_head:
            _require_the_bases(artefact.tensors["lm_heads.0.weight"], head, artefact.source)


def _named_by_vllm(head: MedusaHead) -> dict[str, Tensor]:
    """The same by vLLM's names."""
    found = {}
    for k in range(head.depth):
        for j, block in enumerate(blocks_of(head, k)):
            found[f"blocks.{k}.layers.{j}.weight"] = block.linear.weight
            found[f"blocks.{k}.layers.{j}.bias"] = block.linear.bias
        if head.config.own_lm_head:
            found[f"lm_heads.{k}.weight"] = head.output_head(k).weight
    return found


def _require_the_bases(weight: Tensor, head: MedusaHead, source: str) -> None:
    """A shared projection is the base's here; what was rounded to bfloat16 is still the same one."""
    own = head.target_lm_head.weight
    if not torch.allclose(weight.to(own), own, rtol=2**-7, atol=1e-6):
        raise UserError(
            f"{source} shares one projection that is not {head.base.name}'s own; name the base that it was trained for"
        )
