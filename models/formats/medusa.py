"""Medusa heads as FasterDecoding publishes them, TGI reads them, and vLLM serves them.

Head k is a ``Sequential`` of residual blocks and, in variant A, an output layer::

    {k}.{j}.linear.weight [D, D]   {k}.{j}.linear.bias [D]   {k}.{blocks}.weight [V, D]

Variant B (the authors' later recipe) has no output layers and uses the base's output head. The authors' code repeats
one block module, so a head with several blocks has equal values under several names. It is imported as ``tie_blocks``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.format import BASE_NAME, Fixed, Format, Unsupported, with_full_vocabulary
from drafthead.models.heads.medusa import Blocks, MedusaConfig, MedusaHead
from drafthead.models.heads.parts.draft_head import DraftHead

FULL_MODEL = "medusa_head."  # prefix of the heads' tensors in a Medusa-2 model that was saved as a whole


class MedusaFormat(Format):
    """FasterDecoding's format of Medusa: ``config.json`` and ``medusa_lm_head.safetensors``."""

    name = "medusa"
    title = "Medusa (FasterDecoding)"
    weights_file = "medusa_lm_head.safetensors"
    head_config = MedusaConfig
    required = {"medusa_num_heads": "num_draft_tokens", "medusa_num_layers": "num_layers"}
    harmless = frozenset({"version", "hidden_size", "vocab_size", "max_paths", "topk", "max_seq_len"})
    sizes: ClassVar[Mapping[str, str]] = {}
    block_name, output_name = "{k}.{j}.linear", "{k}.{layers}.weight"
    fixed = {"reads_last_token": Fixed(False, "its heads read the last token's embedding, and the format's do not")}
    vocabulary_advice: ClassVar[str | None] = f"{Format.vocabulary_advice} or to=vllm_medusa"

    def unsupported(self, head: MedusaHead) -> Unsupported:
        yield from super().unsupported(head)
        if head.config.own_lm_head:  # the format scales no outputs of a head's own layer
            yield from self.unsupported_logits(head, scaled=True, instead="head.own_lm_head=false")

    def tensors(self, head: MedusaHead) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for k, blocks in enumerate(head.blocks):
            for j, block in enumerate(cast(Blocks, blocks).in_order()):  # yields a tied block repeatedly
                name = self.block_name.format(k=k, j=j)
                tensors |= {f"{name}.{key}": parameter for key, parameter in block.linear.named_parameters()}
        for k, weight in enumerate(head.projections.weights):
            tensors[self.output_name.format(k=k, layers=head.config.num_layers)] = weight
        return tensors

    def config(self, head: MedusaHead) -> dict[str, Any]:
        return {**super().config(head), "version": "1" if head.config.own_lm_head else "2"}

    def matches(self, config: dict[str, Any]) -> bool:
        return "medusa_num_heads" in config

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Remove the base's tensors from a whole model; correct the numbers of heads and blocks."""
        checkpoint = super().normalize(checkpoint)
        tensors = checkpoint.tensors
        if any(name.startswith(FULL_MODEL) for name in tensors):
            tensors = {name.removeprefix(FULL_MODEL): t for name, t in tensors.items() if name.startswith(FULL_MODEL)}
        left_out = len(checkpoint.tensors) - len(tensors)
        notes = [f"{left_out} tensors of the base model were left out"] if left_out else []
        checkpoint = checkpoint.updated(*notes, tensors=tensors)
        paths = [name.split(".") for name in tensors]
        counts = {
            "medusa_num_heads": 1 + max((int(p[0]) for p in paths if p[0].isdigit()), default=-1),
            "medusa_num_layers": 1 + max((int(p[1]) for p in paths if p[2:] == ["linear", "weight"]), default=-1),
        }
        for key, count in counts.items():
            given = checkpoint.config.get(key)
            if count and given != count:
                # Published configs say 2 heads for files with 5; FasterDecoding's loader overrides them in its code.
                note = f"config.json says {key} {given}, but the weights hold {count}; {count} is used"
                checkpoint = checkpoint.updated(note, config={**checkpoint.config, key: count})
        return checkpoint

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        settings = super().settings(checkpoint)
        heads, layers = settings["num_draft_tokens"], settings["num_layers"]
        blocks = ([self.block_name.format(k=k, j=j) for j in range(layers)] for k in range(heads))
        own_lm_head = self.output_name.format(k=0, layers=layers) in checkpoint.tensors
        return {**settings, "own_lm_head": own_lm_head, "tie_blocks": tied(checkpoint.tensors, blocks)}

    def require_same(self, checkpoint: PublishedCheckpoint, head: MedusaHead) -> None:
        for what, _ in self.unsupported_logits(head, scaled=True) if head.config.own_lm_head else ():
            raise checkpoint.wrong_base(f"holds output layers, but {what}")


class TgiMedusaFormat(MedusaFormat):
    """The format ``medusa``, restricted to heads that TGI's two Medusa classes accept."""

    name = "tgi_medusa"
    title = "Medusa (TGI)"
    other_keys = frozenset({"architectures"})

    def unsupported(self, head: MedusaHead) -> Unsupported:
        yield from super().unsupported(head)
        if not head.config.own_lm_head and (layers := head.config.num_layers) != 1:
            what = f"it has {layers} blocks per head and the base's output head; TGI then supports exactly 1 block"
            yield what, "head.own_lm_head=true or head.num_layers=1"

    def matches(self, config: dict[str, Any]) -> bool:
        return False  # imports recognise these files as ``medusa``

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Reject a config that TGI would not recognise as a Medusa head, then normalize as ``medusa`` does."""
        if checkpoint.config.get("architectures"):
            raise UserError(f"{checkpoint.source}: TGI refuses a config.json with architectures; remove the key")
        if not checkpoint.config.get(BASE_NAME):
            raise UserError(f"{checkpoint.source}: TGI needs {BASE_NAME} in config.json; add it")
        return super().normalize(checkpoint)


class VllmMedusaFormat(MedusaFormat):
    """vLLM's format of Medusa. vLLM drafts a chain of most likely tokens, without a tree, over the full vocabulary."""

    name = "vllm_medusa"
    title = "Medusa (vLLM)"
    weights_file = Format.weights_file
    required = {"num_heads": "num_draft_tokens", "num_hidden_layers": "num_layers"}
    sizes = Format.sizes
    block_name, output_name = "blocks.{k}.layers.{j}", "lm_heads.{k}.weight"
    other_keys = frozenset({"model_type", "truncated_vocab_size", "medusa_fc_bias", "original_lm_head", "logit_scale"})
    aliases = {r"medusa_heads\.": ""}
    constants = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "medusa_fc_bias": True,  # vLLM's default silently drops the biases
    }
    vocabulary_advice = None

    def unsupported(self, head: MedusaHead) -> Unsupported:
        yield from Format.unsupported(self, head)
        if (ids := len(head.d2t)) != head.base.vocab_size:
            what = f"it drafts over {ids} of {head.base.vocab_size} ids, and vLLM 0.32.0 does not load a token_map"
            yield what, "vocabulary=full" if can_widen(head) else "head.draft_vocab_size=null"
        yield from self.unsupported_logits(head)

    def fitted(self, head: MedusaHead) -> DraftHead:
        """Return the head over the full vocabulary; with own output layers or an induction head: unchanged."""
        return with_full_vocabulary(head) if can_widen(head) and not head.config.induction_rank else head

    def derived_tensors(self, head: MedusaHead) -> dict[str, Tensor]:
        shared = {} if head.config.own_lm_head else {"lm_heads.0.weight": head.target_lm_head.weight}
        return shared | ({"token_map": head.d2t} if len(head.d2t) != head.base.vocab_size else {})

    def config(self, head: MedusaHead) -> dict[str, Any]:
        return {
            **Format.config(self, head),
            "truncated_vocab_size": len(head.d2t),
            "original_lm_head": not head.config.own_lm_head,
            "logit_scale": head.target_lm_head.scale,
        }

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "medusa" and "medusa_num_heads" not in config

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Rename keys as vLLM does, add zero biases, and keep only the output rows of the tokens in ``token_map``."""
        checkpoint = Format.normalize(self, checkpoint)
        config, tensors = {"logit_scale": 1.0, **checkpoint.config}, dict(checkpoint.tensors)
        for key in [k for k in config if "num" in k]:  # as vLLM's config class does
            for word, standard in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
                if word in key and key != standard:
                    config[standard] = config.pop(key)
        config.setdefault("truncated_vocab_size", config.get("vocab_size"))
        if not config.get("medusa_fc_bias"):
            if dropped := [name for name in tensors if name.startswith("blocks.") and name.endswith(".bias")]:
                what = f"{dropped[0]}, which vLLM drops unless config.json says medusa_fc_bias"
                raise UserError(f"{checkpoint.source} has {what}; set config.medusa_fc_bias=true")
            weights = {name: value for name, value in tensors.items() if name.startswith("blocks.")}
            tensors |= {n.removesuffix("weight") + "bias": w.new_zeros(len(w)) for n, w in weights.items()}
        token_map = tensors.get("token_map")
        if token_map is not None:  # vLLM selected these rows itself while it supported token_map
            tensors |= {
                name: value[token_map]
                for name, value in tensors.items()
                if name.startswith("lm_heads.") and len(value) > len(token_map)
            }
        return checkpoint.updated(config=config, tensors=tensors)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        return {**super().settings(checkpoint), "own_lm_head": not checkpoint.config.get("original_lm_head")}

    def vocabulary(self, checkpoint: PublishedCheckpoint) -> Tensor | None:
        if checkpoint.integer("truncated_vocab_size") >= checkpoint.integer("vocab_size"):
            return None
        checkpoint.width("truncated_vocab_size", "token_map")
        return checkpoint.tensors["token_map"].long()

    def require_same(self, checkpoint: PublishedCheckpoint, head: MedusaHead) -> None:
        checkpoint.require_scale(head.base)
        for what, _ in self.unsupported_logits(head):
            raise checkpoint.wrong_base(f"does not cap logits, but {what}")
        if not head.config.own_lm_head:
            checkpoint.require_base_tensor(head.base, "lm_heads.0.weight", head.target_lm_head.weight)


def can_widen(head: MedusaHead) -> bool:
    return not head.config.own_lm_head and len(head.d2t) != head.base.vocab_size


def tied(tensors: Mapping[str, Tensor], heads: Iterable[Sequence[str]]) -> bool:
    """Return True if every head has several blocks with equal weights; ``heads`` lists the blocks' names per head."""

    def equal(one: str, other: str) -> bool:
        pairs = [(tensors.get(f"{one}.{key}"), tensors.get(f"{other}.{key}")) for key in ("weight", "bias")]
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

    return all(len(names) > 1 and all(equal(names[0], other) for other in names[1:]) for names in heads)
