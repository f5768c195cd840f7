"""IBM's MLPSpeculator in the Hugging Face layout, tied and untied.

    speculator.emb.{i}.weight [V, E]    speculator.proj.{i}.weight [E, D], then [E, E]
    speculator.ln.{i}.weight|bias [E]   speculator.head.{i}.weight [V, E]

E is the inner width. In a tied speculator, all positions share one tensor of each kind, except for projections: proj.0
is applied to the base's state, and proj.1 to the head's own states. A file then has emb.0, proj.0, proj.1, ln.0 and
head.0, as vLLM and TGI expect.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.format import Engine, Fixed, Format
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorHead, RNNCells

PREFIX = "speculator."
SHARED_FROM = {"emb": 1, "head": 1, "ln": 1, "proj": 2}
"""Kind of tensor -> first position at which a tied speculator uses the tensor of the position before."""


class MLPSpeculatorFormat(Format):
    """Format of MLP speculators: ``config.json`` and ``model.safetensors``."""

    name = "mlp_speculator"
    title = "MLPSpeculator (IBM)"
    head_config = MLPSpeculatorConfig
    renames = {r"^cells\.": PREFIX, r"^projections\.weights\.(\d+)$": rf"{PREFIX}head.\1.weight"}
    aliases = {r"^(?!speculator\.)": PREFIX}
    required = {"n_predict": "num_draft_tokens", "inner_dim": "inner_dim"}
    optional = {"tie_weights": "tie_weights", "scale_input": "scale_input"}
    sizes = {"emb_dim": "hidden_size", "vocab_size": "vocab_size"}
    constants = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "n_candidates": 5}
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Format.only,
        "architectures": ("MLPSpeculatorPreTrainedModel",),
        "model_type": ("mlp_speculator",),
    }
    other_keys = frozenset({"top_k_tokens_per_head"})
    harmless = frozenset({"n_candidates"})
    fixed = {
        "cell": Fixed("rnn", "it has LSTM cells, and the format has IBM's RNN cells"),
        "own_embedding": Fixed(True, "it reads the base's embedding, and the format stores the head's"),
        "own_lm_head": Fixed(True, "it uses the base's output head, and the format stores the head's"),
    }

    def config(self, head: MLPSpeculatorHead) -> dict[str, Any]:
        return {
            **super().config(head),
            # Not 0 (the default): TGI would use it as the width.
            "inner_dim": cast(RNNCells, head.cells).proj[0].out_features,
            # vLLM's default has three entries, and it asserts that there are n_predict.
            "top_k_tokens_per_head": [max(1, 5 - i) for i in range(head.depth)],
        }

    def engines_for(self, head: MLPSpeculatorHead) -> tuple[Engine, ...]:
        fails = Engine("TGI", "fails with untied weights; train with head.tie_weights=true")
        return tuple(fails if e.name == "TGI" and not head.config.tie_weights else e for e in self.engines)

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "mlp_speculator"

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Fill in a missing ``inner_dim`` from ``emb_dim``, and drop copies of tied tensors."""
        checkpoint = super().normalize(checkpoint)
        config, tensors = dict(checkpoint.config), checkpoint.tensors
        if not config.get("inner_dim"):
            config["inner_dim"] = config.get("emb_dim")
        if config.get("tie_weights"):
            tensors = _without_copies(tensors, checkpoint.source)
        top = config.get("top_k_tokens_per_head")
        if top is not None and (not isinstance(top, list) or len(top) != config.get("n_predict")):
            note = f"top_k_tokens_per_head is {top}, but vLLM asserts one entry per position. The key is ignored here"
            checkpoint = checkpoint.updated(note)
        return checkpoint.updated(config=config, tensors=tensors)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        checkpoint.width("inner_dim", f"{PREFIX}proj.0.weight")
        return super().settings(checkpoint)


def _without_copies(tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Drop copies of tied tensors; reject copies that differ."""
    shared = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"speculator\.(emb|head|ln|proj)\.(\d+)(\..+)", name)
        if match is None or int(match[2]) < SHARED_FROM[match[1]]:
            shared[name] = value
            continue
        original = tensors.get(f"{PREFIX}{match[1]}.{SHARED_FROM[match[1]] - 1}{match[3]}")
        if original is None or not torch.equal(original, value):
            raise UserError(f"{source} says tie_weights, but {name} differs from the shared tensor; copy it again")
    return shared
