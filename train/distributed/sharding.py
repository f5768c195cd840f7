"""Where weights lie while a head is trained: torch's ``fully_shard`` over the base's layers and over the head.

    shard=   the base's decoder layers     the head, its gradients and moments
    none     whole on every device         whole; gradients are summed over the processes
    head     whole                         sharded
    full     sharded                       sharded

Sharded over all processes, or with ``hybrid`` over those of a node. The base's embedding, final norm and output head
stay whole: heads read these tensors themselves, and where the two tables are tied they stay one. LoRA adapters stay
whole too: two modules hold each of them, and they are small.

The arithmetic is that of one process: gradients are summed, never averaged, and whoever steps divides by the global
count of trained tokens. In bfloat16 the head computes with rounded copies; its weights, the sum of its gradients and
its moments stay float32.
"""
# Activation checkpointing: less memory for one more forward pass.

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from drafthead.data.batch import LossOutput
from drafthead.data.utils.errors import UserError
from drafthead.models.base.config import BaseConfig
from drafthead.models.base.layers import drop_views
from drafthead.models.heads.common.contract import DraftHead
from drafthead.train.config import PRECISIONS, ShardConfig


def recompute(owner: nn.Module, method: str) -> None:
    """From now on ``owner.method`` keeps its inputs in training, and computes the rest again in the backward pass."""
    setattr(owner, method, partial(_recomputed, getattr(owner, method)))


def _recomputed(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():  # checkpoint would look up random states, which takes a wait for the device
        return method(*arguments, **named)
    return checkpoint(method, *arguments, use_reentrant=False, **named)


class Sharding:
    """Spreads one run's base and head over the processes, and gathers what is saved. Every method is collective."""

    def __init__(self, config: ShardConfig, device: torch.device) -> None:
        """For weights on ``device``.

        Raises:
            UserError: this torch cannot do it.
        """
        self.config, self.device = config, device
        self._own_group = False
        if self.places_head and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UserError(
                f"shard.mode={config.mode} with shard.precision={config.precision} needs torch 2.13 or newer, this is "
                f"{torch.__version__}; update torch, or use shard.mode=none with shard.precision=float32"
            )

    @property
    def places_base(self) -> bool:
        """Whether the base's layers are spread: then no process can run the base alone."""
        return self.config.mode == "full"

    @property
    def places_head(self) -> bool:
        """Whether the head is under ``fully_shard``: also for its float32 weights beside a bfloat16 computation."""
        return self.config.mode != "none" or self.config.precision != "float32"

    def base_config(self, config: BaseConfig) -> BaseConfig:
        """The base's settings for training: packed weights are no parameters, so there are none where they shard."""
        return replace(config, prepack=False) if self.places_base else config

    def place(self, head: DraftHead) -> None:
        """Spread the head and what training runs of its base; before the optimiser is made, after weights are loaded.

        Every process must hold the same weights. What the base had captured of its weights' places is dropped.

        Raises:
            UserError: ``hybrid``, and the launcher does not say how many processes a node has.
        """
        if self.config.checkpointing:
            for owner, method in head.checkpointable():
                recompute(owner, method)
        if not self.places_head:
            return
        self._join()
        mesh = self._mesh()
        elsewhere = {parameter for decoder in head.decoders() for parameter in decoder.parameters()}
        if self.places_base:
            for decoder in head.decoders():
                self._shard_layers(decoder, mesh, set(head.parameters()))
            drop_views(head.base)
        _shard_head(head, mesh, PRECISIONS[self.config.precision], elsewhere)

    def settle(self, head: DraftHead) -> None:
        """After passes without a backward: free the whole weights that they gathered."""
        if isinstance(head, FSDPModule):
            head.reshard()

    def leave(self) -> None:
        """Part with the group that ``place`` made for a process on its own."""
        if self._own_group:
            dist.destroy_process_group()
            self._own_group = False

    def _join(self) -> None:
        if not dist.is_initialized():  # a process on its own is a mesh of one
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
            self._own_group = True

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
        """Shard the layers of ``decoder``, but for the head's parameters ``ours``; what is in no layer stays whole."""
        policy = OffloadPolicy()
        if self.config.offload_base:
            policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, offload_policy=policy, ignored_params=ours)
        # The root has nothing of its own; through it a layer is gathered while the one before it computes.
        fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()))


def _shard_head(head: DraftHead, mesh: DeviceMesh, precision: torch.dtype, elsewhere: set[nn.Parameter]) -> None:
    """Put the head under ``fully_shard`` as one unit: its loss reads all projections in turns, chunk by chunk."""
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # The backward pass follows at once, so nothing is freed between.
    fully_shard(head, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=elsewhere)
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
        whole = list(head.parameters())[ours[0]]
        return replace(out, loss_sum=out.loss_sum + 0.0 * whole.flatten()[0])

    return with_gradient


def whole(value: Any, keep: bool) -> Any:
    """A state_dict with every sharded tensor gathered onto the CPU, one at a time; all processes must call it.

    Args:
        value: tensors and plain containers of them.
        keep: whether this process wants them; elsewhere gathered tensors are left empty.
    """
    if isinstance(value, DTensor):
        gathered = value.full_tensor()
        return gathered.cpu() if keep else gathered.new_empty(0)
    if isinstance(value, Mapping):
        return {key: whole(inner, keep) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(inner, keep) for inner in value)
    return value


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Continue from ``whole(optimizer.state_dict())`` of any number of processes; each takes its own part.

    Settings such as the weight decay are those of ``optimizer``.

    Raises:
        ValueError: it was of other parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    of = dict(zip(places, parameters, strict=True))
    groups = zip(optimizer.state_dict()["param_groups"], state["param_groups"], strict=True)
    optimizer.load_state_dict(
        {
            "state": {place: _spread_as(values, of[place]) for place, values in state["state"].items()},
            "param_groups": [{**ours, "params": theirs["params"]} for ours, theirs in groups],
        }
    )


def _spread_as(values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """An optimiser's values for one parameter, those of its shape sharded like it."""
    if not isinstance(parameter, DTensor):
        return dict(values)
    mesh, placements = parameter.device_mesh, parameter.placements

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        # Every process has read the same file, so nothing is sent.
        return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)

    return {name: spread(value) for name, value in values.items()}
