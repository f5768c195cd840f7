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

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import drop_views
from drafthead.models.base.parts import BaseParts
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.settings.schema import require, settings
from drafthead.system.devices import can_pin, collective_backend

SHARD_MODES = ("none", "head", "full")
AUTO = "auto"
M_MMAP_THRESHOLD = -3  # of malloc.h
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


def _return_freed_memory() -> None:
    """Let glibc return freed blocks from 1 MB on at once. Its heap would keep the memory of every gathered layer."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)


def checkpoint_activations(head: nn.Module) -> None:
    """Turn on activation checkpointing in the layers of ``head``, its own and transformers' ones."""
    module: Any
    for module in head.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


class Sharding:
    """Sharding of a run's base and head over the processes. All processes must call its methods."""

    def __init__(self, config: ShardConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self._made_group = False
        if config.mode == "full" and device.type == "cpu":
            _return_freed_memory()

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

    def shard_layers(self, decoder: Any, whole: Iterable[nn.Parameter] = ()) -> torch.device:
        """Shard the layers of a base's decoder in place, except ``whole`` parameters; return the shards' device. The
        weights may be on the meta device."""
        device, policy = self.device, fsdp.OffloadPolicy()
        if self.config.offload_base:
            device, policy = torch.device("cpu"), fsdp.CPUOffloadPolicy(pin_memory=can_pin(self.device))
        options: dict[str, Any] = {"offload_policy": policy, "ignored_params": set(whole)}
        for layer in decoder.layers:
            fsdp.fully_shard(layer, mesh=self._mesh, reshard_after_forward=True, **options)
        # The root shards nothing itself. It makes FSDP gather the next layer while the current one computes.
        fsdp.fully_shard(decoder, mesh=self._mesh, ignored_params=set(decoder.parameters()))
        return device

    def shard(self, head: DraftHead) -> None:
        """Apply the settings to ``head`` in place: activation checkpointing, precision and sharding. With
        ``mode="full"`` the layers of the head's base are sharded too, unless they are already. Call this after loading
        weights and before building the optimiser. Every process must hold the same weights."""
        if self.config.checkpointing:
            checkpoint_activations(head)
        precision = self.precision(head.base)
        # Without sharding, ``fully_shard`` still keeps float32 weights for a bfloat16 computation.
        if self.config.mode == "none" and precision == torch.float32:
            return
        base = head.base if isinstance(head.base, BaseModel) else None
        decoders = [*([base.model.model] if base else []), *head.tuned_decoders()]
        frozen = {parameter for decoder in decoders for parameter in decoder.parameters()}
        for decoder in decoders if self.shards_base else ():
            if base and not isinstance(decoder, fsdp.FSDPModule):
                self.shard_layers(decoder, head.parameters())
                drop_views(base)
        _shard_head(head, self._mesh, precision, frozen)

    def reshard(self, head: DraftHead) -> None:
        """Free the weights that a sharded head gathered for forward passes without a backward pass."""
        if isinstance(head, fsdp.FSDPModule):
            head.reshard()

    def close(self) -> None:
        """Destroy the process group if ``shard`` created one, as it does for a single process."""
        if self._made_group:
            dist.destroy_process_group()
            vars(self).pop("_mesh", None)
            self._made_group = False

    @cached_property
    def _mesh(self) -> DeviceMesh:  # with ``hybrid``, its rows are the nodes
        if not dist.is_initialized():  # a single process becomes a mesh of one
            dist.init_process_group(collective_backend(self.device), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
            self._made_group = True
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
    """Shard the head in place, except its ``frozen`` parameters, and make it compute in ``precision``. All weights of
    the head are gathered together, because its loss uses all projections."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # The backward pass follows at once, so gathered weights stay.
    fsdp.fully_shard(head, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=frozen)
    assert isinstance(head, fsdp.FSDPModule)
    head.set_gradient_divide_factor(1.0)
    head.set_force_sum_reduction_for_comms(True)  # gloo has no averaging reduction
    head.set_reduce_scatter_unused_params(True)  # a process without targets leaves weights unused that others use
    for method in ("loss", "candidate_ranks"):
        fsdp.register_fsdp_forward_method(head, method)


def full_state_dict(head: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights, and the optimisers' moments as ``state.<parameter>.<moment>``, with whole tensors. All
    processes must call this. The results are on the CPU of the main process, and empty on the others."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    weights, state = cast("tuple[dict[str, Any], dict[str, Any]]", get_state_dict(head, optimizers, options=options))
    return weights, {name: value for name, value in state.items() if isinstance(value, Tensor)}


def load_optimizers(head: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Tensor]) -> None:
    """Load moments that ``full_state_dict`` returned, for any number of processes; each process takes its shard.
    Learning rates and other settings do not change. If ``state`` has no moments, nothing is loaded."""
    if not state:  # every update so far was skipped
        return
    # torch 2.13 cannot load whole tensors from flattened names.
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        parameter, _, moment = name.removeprefix("state.").rpartition(".")
        by_parameter.setdefault(parameter, {})[moment] = tensor
    names = {parameter: name for name, parameter in head.named_parameters()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    full: Any = {"state": by_parameter, "param_groups": groups}
    set_optimizer_state_dict(head, optimizers, full, options=StateDictOptions(full_state_dict=True))
