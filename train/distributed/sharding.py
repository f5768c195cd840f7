"""Sharding of a run with torch's ``fully_shard``: over the base's layers and over the head.

    shard=   the base's decoder layers     the head, its gradients and moments
    none     replicated                    replicated; gradients are summed over the processes
    head     replicated                    sharded
    full     sharded                       sharded

Shards are spread over all processes, or with ``hybrid`` over the processes of a node. The base's embedding, final norm
and output head stay replicated: heads read these tensors themselves, and tied tables stay one tensor. LoRA adapters
stay replicated too, because they are small and each belongs to two modules.

The arithmetic equals that of one process. Gradients are summed, never averaged, and the training step divides by the
global count of trained tokens. In bfloat16 the head computes with rounded copies, while its weights, summed gradients
and optimiser moments stay float32.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from drafthead.data.batch import LossOutput
from drafthead.errors import UserError
from drafthead.models.base.layers import drop_views
from drafthead.models.base.parts import BaseParts
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.settings.schema import require, settings
from drafthead.system.devices import can_pin, collective_backend

SHARD_MODES = ("none", "head", "full")
AUTO = "auto"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@settings(kw_only=True)
class ShardConfig:
    """Distribution of training over devices, and its precision."""

    mode: Literal["none", "head", "full"] = "none"
    """Weights that are sharded over the processes. ``head`` shards the head's weights, gradients and optimiser moments;
    ``full`` also shards the base's layers."""
    hybrid: bool = False
    """Shard within each node and replicate over nodes. This needs less traffic between nodes and more memory."""
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision in which the head computes. With ``bfloat16``, weights and sums of gradients stay in float32. ``auto``
    is bfloat16 on CPUs that multiply faster in it (measured when the base is loaded), else float32."""
    checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them, which saves memory. It has an effect on heads
    with attention layers."""
    offload_base: bool = False
    """Keep the base's shards in host memory and move them to the device layer by layer. Needs ``shard.mode=full``."""

    def __post_init__(self) -> None:
        for name, modes in (("hybrid", ("head", "full")), ("offload_base", ("full",))):
            value = getattr(self, name)
            require(not value or self.mode in modes, name, f"false unless shard.mode is {' or '.join(modes)}", value)


def _checkpointed(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call ``method`` with activation checkpointing: store only its inputs, and call it again in the backward pass."""
    if not torch.is_grad_enabled():  # checkpoint would read random states, which waits for the device
        return method(*arguments, **named)
    return checkpoint(method, *arguments, use_reentrant=False, **named)


def checkpoint_activations(head: DraftHead) -> None:
    """Turn on activation checkpointing for the ``checkpointable`` methods of ``head`` (its attention layers)."""
    for owner, method in head.checkpointable():
        setattr(owner, method, partial(_checkpointed, getattr(owner, method)))


class Sharding:
    """Sharding of a run's base and head over the processes. All processes must call ``shard``."""

    def __init__(self, config: ShardConfig, device: torch.device) -> None:
        """Shard as ``config`` says, with weights on ``device``; nothing is sharded before ``shard``."""
        self.config, self.device = config, device
        self._made_group = False

    @property
    def shards_base(self) -> bool:
        """True if the base's layers are sharded. A process can then run the base only together with all others."""
        return self.config.mode == "full"

    def precision(self, base: BaseParts) -> torch.dtype:
        """Return the dtype in which the head computes. ``auto`` is bfloat16 if ``base`` runs faster in it on a CPU."""
        if self.config.precision != AUTO:
            return PRECISIONS[self.config.precision]
        faster = base.kernels is not None and base.kernels.bfloat16_reads
        return torch.bfloat16 if faster else torch.float32

    def shard(self, head: DraftHead) -> None:
        """Apply the settings to ``head`` in place: activation checkpointing, precision and sharding.

        With ``mode="full"`` the layers of the head's base are sharded too. Call this after loading weights and before
        building the optimiser. Every process must hold the same weights.
        """
        if self.config.checkpointing:
            checkpoint_activations(head)
        precision = self.precision(head.base)
        # Without sharding, ``fully_shard`` still keeps float32 weights for a bfloat16 computation.
        if self.config.mode == "none" and precision == torch.float32:
            return
        if not dist.is_initialized():  # a single process becomes a mesh of one
            dist.init_process_group(collective_backend(self.device), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
            self._made_group = True
        mesh = self._mesh()
        decoders = [head.base_model.model.model, *head.tuned_decoders()]
        frozen = {parameter for decoder in decoders for parameter in decoder.parameters()}
        if self.shards_base:
            policy = fsdp.OffloadPolicy()
            if self.config.offload_base:
                policy = fsdp.CPUOffloadPolicy(pin_memory=can_pin(self.device))
            options: dict[str, Any] = {"offload_policy": policy, "ignored_params": set(head.parameters())}
            for decoder in decoders:
                for layer in decoder.layers:
                    fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=True, **options)
                # The root shards nothing itself. It makes FSDP gather the next layer while the current one computes.
                fsdp.fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()))
            drop_views(head.base_model)
        _shard_head(head, mesh, precision, frozen)

    def reshard(self, head: DraftHead) -> None:
        """Free the weights that a sharded head gathered for forward passes without a backward pass."""
        if isinstance(head, fsdp.FSDPModule):
            head.reshard()

    def close(self) -> None:
        """Destroy the process group if ``shard`` created one, as it does for a single process."""
        if self._made_group:
            dist.destroy_process_group()
            self._made_group = False

    def _mesh(self) -> DeviceMesh:
        """Return the mesh of all processes; with ``hybrid`` its rows are the nodes."""
        world = dist.get_world_size()
        if self.config.mode == "none":
            return init_device_mesh(self.device.type, (world, 1), mesh_dim_names=("replicate", "shard"))
        if not self.config.hybrid:
            return init_device_mesh(self.device.type, (world,), mesh_dim_names=("shard",))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not local or world % local:
            raise UserError(
                f"shard.hybrid=true shards within a node, but the launcher puts {local or 'an unknown number'} of "
                f"{world} processes on this node (LOCAL_WORLD_SIZE); start the same number on every node with "
                "accelerate launch or torchrun, or set shard.hybrid=false"
            )
        return init_device_mesh(self.device.type, (world // local, local), mesh_dim_names=("replicate", "shard"))


def _shard_head(head: DraftHead, mesh: DeviceMesh, precision: torch.dtype, frozen: set[nn.Parameter]) -> None:
    """Shard the head in place, except its ``frozen`` parameters, and make it compute in ``precision``.

    All weights of the head are gathered together, because its loss uses all projections. ``head.loss`` is replaced by
    a function (``with_gradient``) whose result always has a gradient.
    """
    policy = fsdp.MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # The backward pass follows at once, so gathered weights stay.
    fsdp.fully_shard(head, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=frozen)
    assert isinstance(head, fsdp.FSDPModule)
    head.set_gradient_divide_factor(1.0)
    head.set_force_sum_reduction_for_comms(True)  # gloo has no averaging reduction
    head.set_reduce_scatter_unused_params(True)  # a process without targets leaves weights unused that others use
    loss = head.loss
    sharded = [index for index, p in enumerate(head.parameters()) if isinstance(p, DTensor) and p.requires_grad]

    def with_gradient(*arguments: Any) -> LossOutput:
        """Return the head's loss, with a gradient of 0 if no token is trained: other processes wait for a gradient."""
        out = loss(*arguments)
        if out.loss_sum.requires_grad or not torch.is_grad_enabled() or not sharded:
            return out
        gathered = list(head.parameters())[sharded[0]]
        return replace(out, loss_sum=out.loss_sum + 0.0 * gathered.flatten()[0])

    head.loss = with_gradient  # type: ignore[method-assign, assignment]
    for method in ("loss", "candidate_ranks"):
        fsdp.register_fsdp_forward_method(head, method)


def full_state_dict(head: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights and the optimiser state with whole tensors, on the CPU of the main process, for a checkpoint.

    All processes must call this. On the others both results are empty.
    """
    weights, state = get_state_dict(head, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return weights, dict(state)


def load_optimizer(head: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load moments that ``full_state_dict`` returned, for any number of processes; each process takes its shard.

    Learning rates and other settings of ``optimizer`` do not change. If ``state`` has no moments, nothing is loaded.
    """
    if not state["state"]:  # every update so far was skipped
        return
    names = {parameter: name for name, parameter in head.named_parameters()}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    full = {"state": dict(state["state"]), "param_groups": groups}
    set_optimizer_state_dict(head, optimizer, full, options=StateDictOptions(full_state_dict=True))  # type: ignore[arg-type]
