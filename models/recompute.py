"""Activation checkpointing: less memory for one more forward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(owner: nn.Module, method: str) -> None:
    """From now on ``owner.method`` keeps its inputs in training, and computes the rest again in the backward pass."""
    setattr(owner, method, partial(_recomputed, getattr(owner, method)))


def _recomputed(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():  # checkpoint would look up random states, which takes a wait for the device
        return method(*arguments, **named)
    return checkpoint(method, *arguments, use_reentrant=False, **named)
