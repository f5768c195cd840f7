"""What a head adds to the contract of every head when it can train its base, too: two mixins, one for its settings."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drafthead.models.base.lora import LoraSettings


class TrainsBaseConfig(ABC):
    """Settings of a head that can train its base."""

    @abstractmethod
    def lora(self) -> LoraSettings:
        """The settings of the base's adapters."""


class TrainsBase(ABC):
    """A head that can train its base, through adapters."""

    @abstractmethod
    def train_base(self, now: bool) -> None:
        """Make ready to train the base; ``now`` says whether the next phase does. The first call makes the adapters."""

    @abstractmethod
    def tuned_decoders(self) -> list[nn.Module]:
        """Stacks of base layers with adapters, which training runs beside the frozen ones; none before they exist."""

    @abstractmethod
    def lr_mult(self, parameter: nn.Parameter) -> float:
        """What the phase's learning rate is multiplied by for a parameter."""

    @abstractmethod
    def saved_weights(self) -> dict[str, Tensor]:
        """What ``model.safetensors`` holds: the head's weights without the adapters."""

    @abstractmethod
    def save_base(self, folder: Path) -> dict[str, Any] | None:
        """Write the adapters into the head's folder; returns the trained base's identity, None without adapters."""
