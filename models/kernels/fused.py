"""Fused attention, MLP and norm for Llama-like layers on a CPU: fewer, larger products and fewer small operations.

At one to eight rows, a third of a small base's forward pass is spent on small operations between the products, not on
reading weights. These inference-only modules replace the stock ones inside stock decoder layers and compute the same
up to float32 rounding. Heads that have decoder layers draft with them too.

Shape legend: B batch, T time, D width, H query heads, G key/value heads, E head width.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.errors import UserError
from drafthead.models.kernels import attention
from drafthead.models.kernels.linear import KernelTable, PrepackedLinear, can_prepack, joined_linear
from drafthead.models.kernels.private_apis import CACHE, is_gemma_norm, stock_part


class FusedRMSNorm(nn.Module):
    """RMSNorm in four operations for float32 on a CPU: ``x * w * sqrt(D) / hypot(|x|, sqrt(D * eps))``. ``F.rms_norm``
    would run a dozen operations there. Other devices, which have a kernel for it, and lower precisions, which need its
    float32 arithmetic, use ``F.rms_norm``."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        weight: Tensor = (1.0 + norm.weight if is_gemma_norm(norm) else norm.weight).detach()
        self._width = len(weight)
        self._eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        self._by_length = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._weight = weight * self._width**0.5 if self._by_length else weight
        self._floor = torch.tensor((self._width * self._eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if not self._by_length:
            return F.rms_norm(x, (self._width,), None, self._eps) * self._weight
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self._weight).div_(length.hypot_(self._floor))


class FusedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` with gate and up as one matrix product, packed if possible."""

    def __init__(self, mlp: Any, dtype: torch.dtype | None = None, table: KernelTable | None = None) -> None:
        """Copy the weights of ``mlp`` as ``dtype`` (None: as they are), for kernels of ``table`` (None: oneDNN's)."""
        super().__init__()
        self._gate_up = joined_linear([mlp.gate_proj, mlp.up_proj], dtype, table)
        self._down = joined_linear([mlp.down_proj], dtype, table)
        self._act = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return cast(Tensor, self._down(self._act(gate) * up))


class FusedAttention(nn.Module):
    """Grouped-query attention with one product for queries, keys and values; queries and keys are rotated together."""

    def __init__(self, stock: Any, dtype: torch.dtype | None = None, table: KernelTable | None = None) -> None:
        super().__init__()
        self.layer_idx: int = stock.layer_idx
        self.scaling: float = stock.scaling
        self.head_dim: int = stock.head_dim
        self._compiled = table is not None  # of a base for which kernels are measured
        self._queries = stock.q_proj.out_features // self.head_dim
        self._rotated = self._queries + stock.k_proj.out_features // self.head_dim
        self._qkv = joined_linear([stock.q_proj, stock.k_proj, stock.v_proj], dtype, table)
        self._out = joined_linear([stock.o_proj], dtype, table)
        self._normed = hasattr(stock, "q_norm")
        if self._normed:
            self.q_norm, self.k_norm = FusedRMSNorm(stock.q_norm), FusedRMSNorm(stock.k_norm)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend: [B, T, D] -> [B, T, D], and None, since attention weights are not returned. ``options``: keywords of
        our attention, which refuses those that it does not know, and older names of ``cache``."""
        cache = options.pop(CACHE, cache)
        batch, time, _width = hidden_states.shape
        states_BTHE = self._qkv(hidden_states).view(batch, time, -1, self.head_dim)
        value = states_BTHE[:, :, self._rotated :].transpose(1, 2)
        states_BTHE = states_BTHE[:, :, : self._rotated]
        if self._normed:
            query, key = states_BTHE[:, :, : self._queries], states_BTHE[:, :, self._queries :]
            states_BTHE = torch.cat((self.q_norm(query), self.k_norm(key)), 2)
        states_BHTE = rotate(states_BTHE, *position_embeddings).transpose(1, 2)
        query, key = states_BHTE[:, : self._queries], states_BHTE[:, self._queries :]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        options |= {"scaling": self.scaling, "compiled": self._compiled}
        out, _weights = attention.grouped_sdpa(self, query, key, value, attention_mask, **options)
        return self._out(out.reshape(batch, time, -1)), None


def rotate(x_BTHE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    """Apply rotary position embeddings, which pair the first half of a head with its second half, as in Llama."""
    first, second = x_BTHE.chunk(2, -1)
    sin_first, sin_second = sin_BTE.unsqueeze(2).chunk(2, -1)
    out = x_BTHE * cos_BTE.unsqueeze(2)
    half = first.shape[-1]
    # narrow(), not chunk(): autograd forbids in-place writes to one of several views.
    out.narrow(-1, 0, half).addcmul_(second, sin_first, value=-1)
    out.narrow(-1, half, half).addcmul_(first, sin_second)
    return out


def _can_join(module: nn.Module, *names: str) -> bool:
    """Return True if these children are plain linear layers that can be packed, all with or all without a bias."""
    children: list[Any] = [getattr(module, name, None) for name in names]
    plain = all(type(child) is nn.Linear and can_prepack(child.weight) for child in children)
    return plain and len({child.bias is None for child in children}) == 1


def fuse_modules(module: nn.Module, dtype: torch.dtype | None = None, table: KernelTable | None = None) -> int:
    """Replace stock float32 CPU attention, MLP and norm modules below ``module`` by fused ones, in place. Weights are
    stored as ``dtype`` (None: unchanged), and the original ones released. Return the number of replaced
    ``nn.Linear``."""
    replaced = 0
    for name, stock in list(module.named_children()):
        child: Any = stock
        part = stock_part(child)
        fused: nn.Module | None = None
        if part == "RMSNorm" and child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
            fused = FusedRMSNorm(child)
        elif part == "MLP" and _can_join(child, "gate_proj", "up_proj") and _can_join(child, "down_proj"):
            fused = FusedMLP(child, dtype, table)
        elif (
            part == "Attention"
            and child.is_causal
            and child.config._attn_implementation == attention.NAME
            and _can_join(child, "q_proj", "k_proj", "v_proj")
            and _can_join(child, "o_proj")
        ):
            fused = FusedAttention(child, dtype, table)
        if fused is None:
            replaced += fuse_modules(child, dtype, table)
        else:
            replaced += sum(type(layer) is nn.Linear for layer in child.children())
            setattr(module, name, fused)
    return replaced


def fresh_copy(layer: nn.Module, config: Any, layer_idx: int, source: int | None = None) -> nn.Module:
    """Return a trainable float32 stock decoder layer with the weights of ``layer`` of a base, which may be fused.
    ``layer_idx`` is its index in a cache. The config chooses the kind of layer, such as sliding-window attention, by
    the index ``source`` of ``layer`` in the base."""
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))  # packed layers have no parameters
    try:
        with torch.device(device):
            stock: nn.Module = type(layer)(config, layer_idx=layer_idx if source is None else source)
        copy_weights(layer, stock)
    except AttributeError:  # Bamba's layers get their type from the decoder
        what = f"the layers of {config.model_type} cannot be built one by one, as this head needs"
        raise UserError(f"{what}; choose another head") from None
    module: Any
    for module in stock.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = layer_idx
    return stock.float().requires_grad_(True)


@torch.no_grad()
def copy_weights(source: nn.Module, stock: Any) -> None:
    """Copy the weights of ``source``, a stock or fused module, into ``stock``."""
    if isinstance(source, PrepackedLinear):
        _fill([stock], source)
    elif isinstance(source, FusedMLP):
        _fill([stock.gate_proj, stock.up_proj], source._gate_up)
        _fill([stock.down_proj], source._down)
    elif isinstance(source, FusedAttention):
        _fill([stock.q_proj, stock.k_proj, stock.v_proj], source._qkv)
        _fill([stock.o_proj], source._out)
        if source._normed:
            copy_weights(source.q_norm, stock.q_norm)
            copy_weights(source.k_norm, stock.k_norm)
    elif isinstance(source, FusedRMSNorm):
        weight = source._weight / source._weight.shape[0] ** 0.5
        stock.weight.copy_(weight - 1 if is_gemma_norm(stock) else weight)
    else:
        for name, tensor in (*source.named_parameters(recurse=False), *source.named_buffers(recurse=False)):
            getattr(stock, name).copy_(tensor)
        for name, child in source.named_children():
            copy_weights(child, getattr(stock, name))


def _fill(linears: list[Any], packed: nn.Module) -> None:
    """Copy weight and bias of ``packed``, whose outputs are those of all ``linears`` concatenated."""
    assert isinstance(packed, PrepackedLinear)
    bias = torch.zeros(packed.out_features) if packed._bias is None else packed._bias
    rows, start = packed.dense(), 0
    for linear in linears:
        outputs = slice(start, start + linear.out_features)
        linear.weight.copy_(rows[outputs])
        if linear.bias is not None:
            linear.bias.copy_(bias[outputs])
        start = outputs.stop
