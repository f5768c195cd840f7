"""Skinny products at memory speed: linear layers prepacked for few input rows on a CPU.

Decoding and verifying multiply 1 to 64 rows by every weight of the base, so they should cost one read of the
weights. ``F.linear`` picks a general GEMM there and pays about 1.7 times that from two rows on; oneDNN with
weights reordered once into its blocked layout does not (``benchmarks/decode.py`` measures both).
"""

import torch
from torch import Tensor, nn

ROWS_HINT = 8
"""Input rows that the packed layout is chosen for; any number works."""


class PrepackedLinear(nn.Module):
    """Inference-only float32 CPU linear layer over oneDNN's blocked weight layout. No gradient passes through."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Not buffers: an opaque oneDNN tensor cannot be saved, moved or cast.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``: [..., in] -> [..., out], float32."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN can prepack this weight here: a dense float32 matrix on a CPU built with oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.ndim == 2
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


def prepack_linears(module: nn.Module) -> int:
    """Replace every ``nn.Linear`` below ``module`` by its prepacked form, in place; returns how many.

    The original weights are released unless something else holds them (a tied embedding does).
    """
    replaced = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and can_prepack(child.weight):
            setattr(module, name, PrepackedLinear(child.weight, child.bias))
            replaced += 1
        else:
            replaced += prepack_linears(child)
    return replaced
