"""The fingerprint that identifies a base in any dtype, of a loaded model or of some rows of its checkpoint."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ADAPTER_DIGEST = "drafthead_adapter"  # key of a model's config for the digest of the merged adapter


def _first_rows(layer: Any, count: int) -> Tensor:
    """Return the first rows of a linear layer's weight, with active LoRA adapters added as peft merges them."""
    rows: Tensor = layer.weight[:count].detach()
    if hasattr(layer, "get_delta_weight") and not layer.merged and not layer.disable_adapters:
        for name in layer.active_adapters:
            if name in layer.lora_A:
                rows = rows + layer.get_delta_weight(name)[:count].to(rows.dtype)
    return rows


def fingerprint(
    model: Any, digest: str | None = None, ends: Any = None, first_rows: Callable[[Any, int], Tensor] = _first_rows
) -> str:
    """Return the fingerprint of a stock model, which must not be fused or prepacked yet.

    It is two hashes, 16 hex digits each: one of the base's ends, and one of rows of all its linear layers. The first
    covers sizes, the final norm and 64 rows of the output head, and only it is known of quantised bases (see
    :func:`~drafthead.files.local.same_base`). The second tells a base from fine-tunes that kept these ends, such
    as merged LoRA adapters.

    With the ``digest`` of an adapter that is merged or live (None: as stored in the config, if any), the result is
    a fingerprint of the adapter and the ends, "=" and these two hashes, which differ by dtype because merging rounds.

    ``ends`` is the model with final norm and output head; None: ``model``. ``first_rows`` returns the first rows of a
    linear layer's weight. With both, ``model`` needs no weights.
    """
    ends, config, layers = ends or model, model.config, model.model.layers
    digest = digest or getattr(config, ADAPTER_DIGEST, None)
    sizes = f"{config.hidden_size},{config.vocab_size},{config.num_hidden_layers}".encode()
    norm = getattr(ends.model.norm, "weight", None)
    # Olmo's norm has no weights, so a weight of the first layer replaces it.
    outer = [sizes, _bytes(first_rows(next(_linear_layers(layers)), 64) if norm is None else norm)]
    weights = short_hash(*outer, _bytes(_first_rows(ends.get_output_embeddings(), 64)))
    is_quantised = getattr(ends, "is_quantized", False)
    if not is_quantised:
        weights += short_hash(*(_bytes(first_rows(layer, 8)) for layer in _linear_layers(layers)))
    if digest is None:
        return weights
    adapted = short_hash(*outer, digest[:16].encode()) + digest[16:]
    return adapted if is_quantised else f"{adapted}={weights}"


def _linear_layers(module: nn.Module) -> Iterator[Any]:
    """Yield the linear layers below ``module``; one with a live LoRA adapter is one layer."""
    for child in module.children():
        if isinstance(child, nn.Linear) or hasattr(child, "get_delta_weight"):
            yield child
        else:
            yield from _linear_layers(child)


def _bytes(weight: Tensor) -> bytes:
    """Return a weight rounded to bfloat16, so that a base loaded in another dtype has the same fingerprint."""
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return weight.detach().to(torch.bfloat16).float().cpu().numpy().tobytes()


def short_hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
