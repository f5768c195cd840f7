"""IBM's MLPSpeculator in the Hugging Face layout, tied and untied.

    speculator.emb.{i}.weight [V, E]    speculator.proj.{i}.weight [E, D], then [E, E]
    speculator.ln.{i}.weight|bias [E]   speculator.head.{i}.weight [V, E]

Tied, one of each serves all positions, except that projection 0 reads the base's state and 1 all later ones: a file
then holds emb.0, proj.0, proj.1, ln.0 and head.0, which is what vLLM and TGI read.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.contract import Engine, Format, Shape, Unsupported, assign, unsupported_vocabulary
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorHead, RNNCells

PREFIX = "speculator."
SHARED_FROM = {"emb": 1, "head": 1, "ln": 1, "proj": 2}
"""First index that a tied speculator has no tensor of its own for."""


class MLPSpeculatorFormat(Format):
    """``config.json`` and ``model.safetensors``."""

    name = "mlp_speculator"
    title = "MLPSpeculator (IBM)"
    head = MLPSpeculatorHead
    engines = (
        Engine(
            "vLLM",
            "removed: 0.33.0 has none. Only the V0 engine ran it (until 0.9 or 0.10); a port to V1 was closed (#20655)",
        ),
        Engine(
            "TGI",
            "the tied variant, with --speculate equal to n_predict; untied ones fail there; in maintenance mode",
            current=True,
        ),
        Engine("SGLang", "never"),
    )
    config_keys = frozenset(
        {
            "model_type",
            "architectures",
            "vocab_size",
            "emb_dim",
            "inner_dim",
            "n_predict",
            "tie_weights",
            "scale_input",
            "top_k_tokens_per_head",
        }
    )

    def pack(self, head: MLPSpeculatorHead) -> PublishedCheckpoint:
        settings = head.config
        cells = cast(RNNCells, head.cells)
        config = {
            "model_type": "mlp_speculator",
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "vocab_size": head.base.vocab_size,
            "emb_dim": head.base.hidden_size,
            "inner_dim": cells.proj[0].out_features,  # never 0, which TGI takes for a width
            "n_predict": settings.num_draft_tokens,
            # vLLM's default has three entries, and it asserts that there are n_predict.
            "top_k_tokens_per_head": [max(1, 5 - i) for i in range(settings.num_draft_tokens)],
            "n_candidates": 5,
            "tie_weights": settings.tie_weights,
            "scale_input": settings.scale_input,
        }
        return PublishedCheckpoint(config, _named(head))

    def unsupported(self, head: MLPSpeculatorHead) -> list[Unsupported]:
        settings = head.config
        ours = {
            "it has LSTM cells, and the format IBM's own": ("head.cell=rnn", settings.cell != "rnn"),
            "it reads the base's embedding, and the format has one of its own": (
                "head.own_embedding=true",
                not settings.own_embedding,
            ),
            "it uses the base's projection, and the format has one of its own": (
                "head.own_lm_head=true",
                not settings.own_lm_head,
            ),
        }
        found = [Unsupported(what, instead) for what, (instead, is_used) in ours.items() if is_used]
        return found + unsupported_vocabulary(head)

    def engines_for(self, head: MLPSpeculatorHead) -> tuple[Engine, ...]:
        if head.config.tie_weights:
            return self.engines
        said = "fails with untied weights; train with head.tie_weights=true"
        return tuple(replace(e, support=said, current=False) if e.name == "TGI" else e for e in self.engines)

    def expected_shapes(self, artefact: PublishedCheckpoint) -> dict[str, Shape]:
        positions, width = artefact.integer("n_predict"), artefact.integer("inner_dim")
        hidden, vocabulary = artefact.integer("emb_dim"), artefact.integer("vocab_size")
        tied = bool(artefact.config.get("tie_weights"))
        wanted: dict[str, Shape] = {}
        for i in range(positions):
            if not tied or i < SHARED_FROM["proj"]:
                wanted[f"{PREFIX}proj.{i}.weight"] = (width, width if i else hidden)
            if not tied or i < SHARED_FROM["emb"]:
                wanted[f"{PREFIX}emb.{i}.weight"] = wanted[f"{PREFIX}head.{i}.weight"] = (vocabulary, width)
                wanted[f"{PREFIX}ln.{i}.weight"] = wanted[f"{PREFIX}ln.{i}.bias"] = (width,)
        return wanted

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "mlp_speculator"

    def normalize(self, artefact: PublishedCheckpoint) -> PublishedCheckpoint:
        """With prefixed names and an inner width; tied files without their copies.

        Raises:
            UserError: copies in a tied file that are not equal.
        """
        tensors = {PREFIX + name.removeprefix(PREFIX): value for name, value in artefact.tensors.items()}
        config = dict(artefact.config)
        if not config.get("inner_dim"):
            config["inner_dim"] = config.get("emb_dim")
        if config.get("tie_weights"):
            tensors = _without_copies(tensors, artefact.source)
        top = config.get("top_k_tokens_per_head")
        if top is not None and (not isinstance(top, list) or len(top) != config.get("n_predict")):
            said = f"top_k_tokens_per_head is {top}, and vLLM asserts one entry for each position"
            artefact = artefact.with_notes(said + ": not used here")
        return artefact.with_notes(config=config, tensors=tensors)

    def sizes(self, artefact: PublishedCheckpoint) -> dict[str, int]:
        return {"hidden_size": artefact.integer("emb_dim"), "vocab_size": artefact.integer("vocab_size")}

    def settings(self, artefact: PublishedCheckpoint) -> MLPSpeculatorConfig:
        architectures = artefact.config.get("architectures")
        if architectures and "MLPSpeculatorPreTrainedModel" not in architectures:
            raise UserError(f"{artefact.source} is a {architectures}: only MLPSpeculatorPreTrainedModel is read")
        return MLPSpeculatorConfig(
            num_draft_tokens=artefact.integer("n_predict"),
            inner_dim=artefact.integer("inner_dim"),
            tie_weights=bool(artefact.config.get("tie_weights")),
            scale_input=bool(artefact.config.get("scale_input")),
        )

    def load_weights(self, head: MLPSpeculatorHead, artefact: PublishedCheckpoint) -> None:
        assign(_named(head), artefact)


def _named(head: MLPSpeculatorHead) -> dict[str, Tensor]:
    """A head's parameters by their published names."""
    cells = cast(RNNCells, head.cells)
    found: dict[str, Tensor] = {}
    for part, modules in (("emb", cells.emb), ("proj", cells.proj), ("ln", cells.ln)):
        for i, module in enumerate(modules):
            found |= {f"{PREFIX}{part}.{i}.{name}": parameter for name, parameter in module.named_parameters()}
    return found | {f"{PREFIX}head.{i}.weight": weight for i, weight in enumerate(head.projections.weights)}


def _without_copies(tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Tied files may repeat a tensor for every position; the repetitions must be equal."""
    kept = {}
    for name, value in tensors.items():
        part, _, index = name.removeprefix(PREFIX).partition(".")
        place, _, rest = index.partition(".")
        first = SHARED_FROM.get(part, 0)
        if place.isdigit() and int(place) >= first > 0:
            original = tensors.get(f"{PREFIX}{part}.{first - 1}.{rest}")
            if original is None or not torch.equal(original, value):
                raise UserError(f"{source} says tie_weights, but {name} is not the one of an earlier position")
        else:
            kept[name] = value
    return kept
