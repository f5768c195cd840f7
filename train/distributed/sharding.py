"""Sharding of a run with torch's ``fully_shard``: over the base's layers and over the head.

    shard=   the base's decoder layers     the head, its gradients and moments
    none     replicated                    replicated; gradients are summed over the processes
    head     replicated                    sharded
    full     sharded                       sharded

Sharded over all processes, or with ``hybrid`` over those of a node. The base's embedding, final norm and output head
are replicated: heads read these tensors themselves, and tied tables stay one tensor. So are LoRA adapters, which are
small and belong to two modules each.

The arithmetic is that of one process: gradients are summed, never averaged; the training step divides by the global
count of trained tokens. In bfloat16 the head computes with rounded copies; its weights, the sum of its gradients and
its moments stay float32.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from drafthead.data.batch import LossOutput
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import drop_views
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.train.config import AUTO, PRECISIONS, ShardConfig


def _checkpointed(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Activation checkpointing: keep the inputs, compute the rest again in the backward pass."""
    if not torch.is_grad_enabled():  # checkpoint would look up random states, which takes a wait for the device
        return method(*arguments, **named)
    return checkpoint(method, *arguments, use_reentrant=False, **named)


def _wraps_heads() -> bool:
    """Whether this torch can."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Sharding:
    """Shards one run's base and head over the processes. Every method is collective."""

    def __init__(self, config: ShardConfig, device: torch.device) -> None:
        """For weights on ``device``."""
        self.config, self.device = config, device
        self._own_group = False
        asked = config.mode != "none" or config.precision == "bfloat16"
        if asked and not _wraps_heads():
            raise UserError(
                f"shard.mode={config.mode} with shard.precision={config.precision} needs torch 2.13 or newer, this is "
                f"{torch.__version__}; update torch, or use shard.mode=none with shard.precision=float32"
            )

    @property
    def shards_base(self) -> bool:
        """Whether the base's layers are sharded: then no process can run the base alone."""
        return self.config.mode == "full"

    def precision(self, base: BaseModel) -> torch.dtype:
        """What the head computes in; for ``auto`` what was measured to multiply faster on this CPU."""
        if self.config.precision != AUTO:
            return PRECISIONS[self.config.precision]
        faster = base.kernels is not None and base.kernels.bfloat16_reads
        return torch.bfloat16 if faster and _wraps_heads() else torch.float32

    def base_config(self, config: BaseConfig) -> BaseConfig:
        """The base's settings for training: packed weights are no parameters, so there are none where they shard."""
        return replace(config, prepack=False) if self.shards_base else config

    def shard(self, head: DraftHead) -> None:
        """Shard the head and what training runs of its base; after weights are loaded, before the optimiser is made.

        Every process must hold the same weights.
        """
        if self.config.checkpointing:
            for owner, method in head.checkpointable():
                setattr(owner, method, partial(_checkpointed, getattr(owner, method)))
        precision = self.precision(head.base)
        # Also for float32 weights beside a bfloat16 computation.
        if self.config.mode == "none" and precision == torch.float32:
            return
        if not dist.is_initialized():  # a process on its own is a mesh of one
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
            self._own_group = True
        mesh = self._mesh()
        decoders = [head.base.model.model, *head.tuned_decoders()]
        frozen = {parameter for decoder in decoders for parameter in decoder.parameters()}
        if self.shards_base:
            for decoder in decoders:
                self._shard_layers(decoder, mesh, set(head.parameters()))
            drop_views(head.base)
        _shard_head(head, mesh, precision, frozen)

    def reshard(self, head: DraftHead) -> None:
        """After forward passes without a backward: free the weights that they gathered."""
        if isinstance(head, FSDPModule):
            head.reshard()

    def close(self) -> None:
        """Destroy the process group that ``shard`` made for a process on its own."""
        if self._own_group:
            dist.destroy_process_group()
            self._own_group = False

    def _mesh(self) -> DeviceMesh:
        world = dist.get_world_size()
        if self.config.mode == "none":
            return init_device_mesh(self.device.type, (world, 1), mesh_dim_names=("replicate", "shard"))
        if not self.config.hybrid:
            return init_device_mesh(self.device.type, (world,), mesh_dim_names=("shard",))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not local or world % local:
            raise UserError(
                f"shard.hybrid=true shards within a node, but of {world} processes the launcher says that "
                f"{local or 'an unknown number'} are on this one (LOCAL_WORLD_SIZE); start as many on every node with "
                "accelerate launch or torchrun, or set shard.hybrid=false"
            )
        return init_device_mesh(self.device.type, (world // local, local), mesh_dim_names=("replicate", "shard"))

    def _shard_layers(self, decoder: Any, mesh: DeviceMesh, ours: set[nn.Parameter]) -> None:
        """Shard the layers of ``decoder``, but for the head's parameters ``ours``."""
        policy = OffloadPolicy()
        if self.config.offload_base:
            policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, offload_policy=policy, ignored_params=ours)
        # The root has nothing of its own; through it a layer is gathered while the one before it computes.
        fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()))


def _shard_head(head: DraftHead, mesh: DeviceMesh, precision: torch.dtype, frozen: set[nn.Parameter]) -> None:
    """Put the head under ``fully_shard`` as one unit: its loss reads all projections in turns, chunk by chunk."""
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # The backward pass follows at once, so nothing is freed between.
    fully_shard(head, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=frozen)
    assert isinstance(head, FSDPModule)
    head.set_gradient_divide_factor(1.0)
    head.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    head.set_reduce_scatter_unused_params(True)  # processes without a target may leave other weights unused
    head.loss = _always_backward(head)  # type: ignore[method-assign]
    for method in ("loss", "candidate_ranks"):
        register_fsdp_forward_method(head, method)


def _always_backward(head: DraftHead) -> Callable[..., LossOutput]:
    """The head's loss, with a gradient also where there is nothing to train on: the other processes wait for one."""
    loss = head.loss
    ours = [place for place, p in enumerate(head.parameters()) if isinstance(p, DTensor) and p.requires_grad]

    def with_gradient(*arguments: Any) -> LossOutput:
        out = loss(*arguments)
        if out.loss_sum.requires_grad or not torch.is_grad_enabled() or not ours:
            return out
        gathered = list(head.parameters())[ours[0]]
        return replace(out, loss_sum=out.loss_sum + 0.0 * gathered.flatten()[0])

    return with_gradient


def full_state_dict(head: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and optimiser state by parameter name, gathered onto the CPU of the main process; elsewhere empty."""
    weights, state = get_state_dict(head, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return weights, dict(state)


def load_optimizer(head: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Resume from the state in ``full_state_dict`` of any number of processes; each takes its own part.

    Version 0.1.0 saved parameters by number, in the optimiser's order.
    """
    names = {parameter: name for name, parameter in head.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    saved = [place for group in state["param_groups"] for place in group["params"]]
    name_of = dict(zip(saved, (name for group in groups for name in group), strict=True))
    if all(isinstance(place, str) for place in saved):
        name_of = {name: name for name in saved}
    if not state["state"]:  # every update so far was skipped
        return
    settings = zip(optimizer.state_dict()["param_groups"], groups, strict=True)
    found = {
        "state": {name_of[place]: values for place, values in state["state"].items()},
        "param_groups": [{**group, "params": params} for group, params in settings],
    }
    set_optimizer_state_dict(head, optimizer, found, options=StateDictOptions(full_state_dict=True))  # type: ignore[arg-type]
