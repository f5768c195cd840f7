"""What sharding makes of a device's memory, part by part."""

from dataclasses import dataclass

from drafthead.models.draft_head import HeadSize
from drafthead.models.model_shape import FLOAT32, ModelShape

GATHERED_LAYERS = 2
"""Layers of a sharded base that are whole at a time: the one that computes, and the one that is on its way."""
BFLOAT16 = 2


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a run's weights lie on its devices (``train/sharding.py``)."""

    mode: str = "none"
    """``none``, ``head`` or ``full``."""
    shards: int = 1
    """Devices that share one copy of what is sharded; ``none`` shards nothing."""
    compute_bytes: int = FLOAT32
    """Bytes of a value that the head computes with: 4, or 2 in bfloat16."""
    offload_base: bool = False
    """The base's shards lie in host memory."""
    checkpointing: bool = False
    """What attends in a head is computed again in the backward pass."""

    @property
    def places_head(self) -> bool:
        """Whether the head is under ``fully_shard``."""
        return self.mode != "none" or self.compute_bytes < FLOAT32


def spread_memory(
    memory: dict[str, int],
    shape: ModelShape,
    head: HeadSize,
    tokens: int,
    spread: Spread,
    *,
    base_bytes: int,
    twin: bool,
) -> dict[str, int]:
    """``memory`` of a whole base and head, on a device of ``spread``; N shards, c bytes the head computes with.

    - base weights, ``full``: the tables and the final norm, and 1/N of the layers (none of them when offloaded);
      gathered layers: ``GATHERED_LAYERS`` of them. A base that is trained along has a twin with layers of its own.
    - head weights, gradients, optimiser: 1/N of what is trained. Gathered head: ``c`` bytes a trained parameter.
    - gradients in flight: while they are reduced, whole in ``c`` bytes and once more in float32.
    - head activations: ``c`` bytes a value, without those computed again.

    Args:
        memory: bytes by part, as ``plan`` has them without adapters.
        shape: the base.
        head: the head.
        tokens: of a micro-batch.
        spread: how the weights lie.
        base_bytes: bytes a parameter of the base.
        twin: the run trains the base along in some phase.
    """
    found = dict(memory)
    kept = head.activations_per_token - (head.recomputable_per_token if spread.checkpointing else 0)
    found["head activations"] = tokens * kept * spread.compute_bytes
    shards = 1 if spread.mode == "none" else spread.shards
    if spread.places_head:
        shared = -(-head.trainable // shards)
        found["head weights"] = memory["head weights"] - (head.trainable - shared) * FLOAT32
        found["gradients"] = shared * FLOAT32
        found["optimiser"] = shared * 2 * FLOAT32
        found["gathered head"] = head.trainable * spread.compute_bytes
        found["gradients in flight"] = head.trainable * (spread.compute_bytes + FLOAT32)
    if spread.mode == "full":
        copies = 2 if twin else 1
        layers = shape.layer_parameters() * shape.num_layers * base_bytes
        found["base weights"] = memory["base weights"] - layers
        found["base weights"] += 0 if spread.offload_base else copies * layers // shards
        found["gathered layers"] = GATHERED_LAYERS * shape.layer_parameters() * base_bytes
    return found
