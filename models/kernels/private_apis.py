"""Differences between versions of torch and transformers: renamed arguments, and undocumented names.

A release may drop an undocumented name without notice, so ``pyproject.toml`` bounds both versions. The list of all of
them, with the consequence of each loss, is in ``tests/models/kernels/test_private_apis.py``, which compares it with the
source and with the installed versions.
"""

import transformers
from torch import nn

NEWEST = 5, 24  # newest minor version of transformers that is tested
_INSTALLED = tuple(int(number) for number in transformers.__version__.split(".")[:2])
CACHE = "cache" if _INSTALLED >= (5, 24) else "past_key_values"
"""The name of the argument for keys and values in models, layers and attention, and of the field in outputs."""
_FUSED = {
    f"transformers.models.{family}.modeling_{family}.{family.capitalize()}{part}": part
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma")
    for part in ("Attention", "MLP", "RMSNorm")
}
"""Full names of the classes that can be fused -> the part that they are."""


def other_base() -> str:
    """Return the remedy for a base that cannot be run: another base, or a tested version of transformers."""
    if _INSTALLED <= NEWEST:
        return "choose another base (docs/reference/bases.md lists families)"
    major, minor = NEWEST
    untested = f"transformers {transformers.__version__} is newer than the tested {major}.{minor}"
    return f"{untested}; run: pip install 'transformers<{major}.{minor + 1}'"


def stock_part(module: nn.Module) -> str | None:
    """Return ``Attention``, ``MLP`` or ``RMSNorm`` if ``module`` is exactly this class of a family that can be fused.
    Classes are compared by name, so that no module of another family is imported. Subclasses give None, because they
    may compute something else."""
    return _FUSED.get(f"{type(module).__module__}.{type(module).__qualname__}")


def is_gemma_norm(module: nn.Module) -> bool:
    """Return True for Gemma's RMSNorm, whose stored weight is the difference from one."""
    return stock_part(module) == "RMSNorm" and type(module).__name__ == "GemmaRMSNorm"
