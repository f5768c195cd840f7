"""The memory of a training step, found by running the step on meta tensors, which have shapes but no memory."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.train.config import PhaseConfig
from drafthead.train.trainer.optim import head_optimizers
from drafthead.train.trainer.step import train_step

aten = torch.ops.aten
COUNTED = flop_registry | {  # operations by torch function; attention's backward pass on a CPU is absent (0)
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention]
}
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replace ``scaled_dot_product_attention`` (same arguments) without storing the matrix of attention scores."""
    mask = None if attn_mask is None else _on_meta(attn_mask)
    out: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
    )[0]
    return out


# On the meta device, torch itself takes the attention that stores the scores.
torch.library.impl("aten::scaled_dot_product_attention", "AutogradMeta", _fused_attention)


class FakeFloats(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that computes only the shapes of floating-point tensors, and counts bytes and operations. Floating-point
    tensors are on the meta device. Integers and booleans have values, because they decide how many positions are
    trained. torch's FakeTensorMode cannot be used, because its fake integers have no values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0  # bytes of the tensors that exist now
        self.operations = 0  # floating-point ones of matrix products and attention so far
        self.peak = 0  # of `live`
        self._sizes: dict[int, int] = {}

    def count(self, tensor: Tensor) -> None:
        """Add the bytes of ``tensor`` to ``live`` until it is freed. Views of counted tensors add nothing."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._discard, key)

    def _discard(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = _tensors(*args, *kwargs.values())
        if any(tensor.is_meta for tensor in tensors):
            if func is aten._local_scalar_dense.default:
                return 1.0
            if func is aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu":
                return torch.ones(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
            if func in INDEXING:
                args = (args[0], [number for index in args[1] for number in _numbers(index)], *args[2:])
            if not all(tensor.is_meta for tensor in tensors):
                args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
        elif torch.device(kwargs.get("device") or "cpu").type == "meta":
            dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
            kwargs["device"] = torch.device("meta" if dtype.is_floating_point else "cpu")
        result = func(*args, **kwargs)
        if count := COUNTED.get(func._overloadpacket):
            self.operations += count(*args, **kwargs, out_val=result)
        for tensor in _tensors(result):
            self.count(tensor)
        return result


def _tensors(*values: Any) -> list[Tensor]:
    items = (item for value in values for item in (value if isinstance(value, list | tuple) else (value,)))
    return [item for item in items if isinstance(item, Tensor)]


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _numbers(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Turn a boolean ``index`` into one of integers per dimension, as meta tensors need it; keep any other."""
    return (index,) if index is None or index.dtype != torch.bool else index.nonzero().unbind(1)


class StepMemory:
    """Floating-point operations of a training step, and its bytes in addition to the weights of head and base."""

    def __init__(self, head: DraftHead, phase: PhaseConfig, memory: FakeFloats, accumulates: bool) -> None:
        """Run one step of ``phase`` on a full micro-batch in the mode ``memory``, which has counted the weights. With
        ``accumulates``, gradients of an earlier micro-batch exist during the step."""
        weights = memory.live
        with memory:
            optimizers = head_optimizers(head, phase.optim)
            _make_gradients(head)
            for optimizer in optimizers:
                optimizer.step()  # makes the moments
                optimizer.zero_grad(set_to_none=True)
            self.optimiser = memory.live - weights
            memory.peak = held = memory.live
            if accumulates:
                _make_gradients(head)
            memory.operations = 0
            batches, optim = self._counted(micro_batches(head, phase), memory, held), phase.optim
            train_step(head, optimizers, batches, phase.loss, lr=optim.lr, clip_norm=optim.clip_norm)
            head.zero_grad(set_to_none=True)
        self.operations = memory.operations  # two per multiplication with its addition
        # Bytes at the peak of the step, with the optimiser's temporary tensors, without weights and moments.
        self.step = memory.peak - held

    def _counted(
        self, batches: Iterable[tuple[TrainBatch, HiddenStates]], memory: FakeFloats, held: int
    ) -> Iterator[tuple[TrainBatch, HiddenStates]]:
        """Yield ``batches``, which the base has read, and count before and after the head trains on each of them."""
        for batch in batches:
            self.base_operations = memory.operations  # of the base only
            yield batch
            self.loss = memory.peak - held  # peak bytes of both passes: hidden states, activations, gradients


def _make_gradients(head: nn.Module) -> None:
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def micro_batches(head: DraftHead, phase: PhaseConfig, share: float = 1.0) -> Iterator[tuple[TrainBatch, HiddenStates]]:
    """Yield one full micro-batch: random tokens, of which the last ``share`` is trained, and their hidden states."""
    base, shape = head.base, (phase.micro_batch_size, phase.seq_len)
    batch = TrainBatch(
        input_ids=torch.randint(0, base.vocab_size, shape, device="cpu"),
        position_ids=torch.arange(phase.seq_len, device="cpu").expand(shape),
        document_ids=torch.zeros(shape, dtype=torch.long, device="cpu"),
        loss_mask=(torch.arange(phase.seq_len, device="cpu") >= (1 - share) * phase.seq_len).expand(shape),
    )
    if not phase.store_hidden_states:
        yield batch, head.base_model.hidden_states(batch, head.spec)
        return
    width = base.hidden_size * (1 + len(head.spec.layers))
    stored = torch.zeros(*shape, width, dtype=torch.float16, device=base.device)
    yield batch, HiddenStates.split(stored, base.hidden_size)
