"""Recurrent layers in a cache: their state after the committed tokens, and what pending nodes would add to it.

A layer keeps the last inputs of its convolution and, unless it is a short convolution alone, a recurrent state in
float32. There is one state per row, however long the text is. A pass over committed tokens computes the new state with
the stock code. A pass over tree nodes leaves the state as it is, and keeps the inputs and factors of every node
(``kernels/recurrence.py``). A commit computes the state after the accepted path. A state cannot go back, except to the
empty text.

Shape legend: B rows, C channels, W taps of a convolution, N nodes, P pending nodes.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from drafthead.errors import UserError
from drafthead.models.cache.layers import Layers, LayerShape, Pass, Row
from drafthead.models.kernels.recurrence import NodeInputs, TreeState, note, paths_to_inputs, take_nodes
from drafthead.models.token_tree import TokenTree, TreeShape, causal_mask
from drafthead.system.devices import on_device


@dataclass(frozen=True)
class RecurrentShape(LayerShape):
    """Sizes of a recurrent layer."""

    channels: int
    taps: int  # of the convolution, with the token's own
    state: tuple[int, ...] | None  # of a row's recurrent state; None: a short convolution has none
    step_limits: tuple[float, float]  # of Mamba-2's time steps

    @property
    def kind(self) -> Hashable:
        return RecurrentShape

    @staticmethod
    def new(
        shapes: Sequence["RecurrentShape"], rows: list[Row], capacity: int, zeros: Callable[..., Tensor]
    ) -> "RecurrentLayers":
        memory = [
            Memory(
                zeros((len(rows), shape.channels, shape.taps - 1)),
                None if shape.state is None else zeros((len(rows), *shape.state), dtype=torch.float32),
            )
            for shape in shapes
        ]
        return RecurrentLayers(shapes, memory, rows)


def recurrent_shape_of(stock: Any, layer: nn.Module) -> RecurrentShape | None:
    """Return the recurrent shape of ``layer`` from its part of transformers' cache after a pass; None: it has none."""
    inputs: Tensor | None = getattr(stock, "conv_states", {}).get(0)
    if inputs is None:
        return None
    if stock.number_of_states > 1:
        what = f"{type(layer).__name__} has {stock.number_of_states} convolutions"
        raise UserError(f"{what}, of which drafthead can follow one through a tree of drafts; choose another base")
    state: Tensor | None = stock.recurrent_states[0]
    modules: list[Any] = [module for module in layer.modules() if hasattr(module, "time_step_limit")]
    low, high = modules[0].time_step_limit if modules else (0.0, math.inf)
    sizes = None if state is None else tuple(state.shape[1:])
    return RecurrentShape(inputs.shape[1], inputs.shape[2], sizes, (low, high))


@dataclass(frozen=True)
class Memory:
    """State of a layer after the committed tokens."""

    inputs: Tensor  # [B, C, W - 1] of the convolution, the latest last
    state: Tensor | None  # [B, ...] float32

    @property
    def tensors(self) -> list[Tensor]:
        return [self.inputs] if self.state is None else [self.inputs, self.state]


@dataclass
class Pending:
    """Inputs and factors of a layer's pending nodes."""

    inputs: Tensor | None = None  # [B, C, P]
    tree: TreeState | None = None

    def reorder(self, nodes_BN: Tensor) -> None:
        assert self.inputs is not None
        self.inputs = take_nodes(self.inputs, nodes_BN)
        if self.tree is not None and self.tree.factors is not None:
            self.tree.factors = type(self.tree.factors)(*(take_nodes(each, nodes_BN) for each in self.tree.factors))


class RecurrentLayers(Layers):
    """The recurrent layers of a cache."""

    def __init__(self, shapes: Sequence[RecurrentShape], memory: Sequence[Memory], rows: list[Row]) -> None:
        self.shapes, self.memory, self.rows = list(shapes), list(memory), rows
        self._pending = [Pending() for _ in shapes]
        self._shares_pending = False  # with a cache of more layers, which commits
        self._coming: Pass | None = None
        self._tree: TreeShape | None = None  # of the pending nodes; None: the pass's tokens change the state at once
        self._path: Tensor | None = None
        self._windows: dict[int, Tensor] = {}  # by number of taps

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for memory in self.memory for tensor in memory.tensors)

    # Passes ----------------------------------------------------------------------------------------------------

    def begin(self, coming: Pass) -> None:
        self._coming, self._windows, self._path = coming, {}, None
        self._tree = coming.shape
        # A single token is a tree of one node: some families compute it differently from a text's last token.
        if coming.committed:
            device = self.memory[0].inputs.device
            self._tree = TokenTree.chain(0).shape_on(device) if coming.new == 1 else None
        elif coming.shape is None:
            raise AssertionError("a pass over nodes needs their tree")

    def update(self, number: int, *states: Tensor) -> tuple[Any, ...]:
        """Add the inputs [B, C, N] of a layer's convolution; return what the convolution reads: a tensor of the last
        and the new inputs, or ``NodeInputs``."""
        (inputs,), memory, shape = states, self.memory[number], self.shapes[number]
        assert self._coming is not None
        if self._tree is None:
            whole = torch.cat([memory.inputs, inputs], 2)
            memory.inputs.copy_(whole[:, :, inputs.shape[2] :])
            return (whole,)
        pending, before = self._pending[number], self._coming.pending
        if before:
            assert pending.inputs is not None
            inputs = torch.cat([pending.inputs[:, :, :before], inputs], 2)
        pending.inputs = inputs
        whole, index = torch.cat([memory.inputs, inputs], 2), self._window(shape.taps)
        if len(index) == 1:
            return (NodeInputs(whole[:, :, index[0]]),)
        index = index[:, None].expand(-1, whole.shape[1], -1, -1)
        return (NodeInputs(whole.gather(2, index.flatten(2)).view(index.shape)),)

    def _window(self, taps: int) -> Tensor:
        assert self._coming is not None and self._tree is not None
        if taps not in self._windows:
            tree = self._tree
            self._windows[taps] = paths_to_inputs(tree.ancestors, tree.depths, self._coming.new, taps)
        return self._windows[taps]

    def state(self, number: int) -> Tensor | TreeState | None:
        """Return a layer's recurrent state; None before the first token, if the pass changes it at once."""
        state = self.memory[number].state
        assert self._coming is not None and state is not None
        is_mamba1 = state.ndim == 3  # [B, C, K]; its function for texts gets no state from the layer
        if self._tree is None:
            if not any(row.length for row in self.rows):
                return None
            if is_mamba1:
                causal = causal_mask(self._coming.new, state.device)[None]
                note(TreeState(state, causal, None, self.shapes[number].step_limits))
            return state
        pending = self._pending[number]
        factors = pending.tree.factors if self._coming.pending and pending.tree is not None else None
        pending.tree = TreeState(state, self._tree.ancestors, factors, self.shapes[number].step_limits)
        if is_mamba1:
            note(pending.tree)
        return pending.tree

    def set_state(self, number: int, new: Tensor) -> None:
        """Store the state that a layer has computed. Over a tree, the state changes only with a commit."""
        state = self.memory[number].state
        assert state is not None
        if self._tree is None:
            state.copy_(new)

    # Commits ---------------------------------------------------------------------------------------------------

    def move(self, nodes_BP: Tensor, counts: list[int], in_place: bool) -> None:
        if self._shares_pending and not in_place:
            for pending in self._pending:
                pending.reorder(nodes_BP)
        self._path = None if in_place else nodes_BP

    def commit(self, counts: list[int]) -> None:
        """Compute the state after the path of ``move``, or after the first ``counts[b]`` nodes of row b."""
        most, tree, self._tree = max(counts), self._tree, None
        if tree is None or self._shares_pending or not most:
            return
        device = self.memory[0].inputs.device
        path = torch.arange(most, device=device)[None] if self._path is None else self._path[:, :most]
        path, ends = path.expand(len(counts), -1), on_device(counts, device)[:, None]
        inside = None if min(counts) == most else torch.arange(most, device=device) < ends
        latest: dict[int, Tensor] = {}
        for memory, pending, shape in zip(self.memory, self._pending, self.shapes, strict=True):
            assert pending.inputs is not None
            kept = shape.taps - 1
            if kept not in latest:  # indices of the last inputs before each row's end
                order = torch.cat([torch.arange(kept, device=device).expand(len(counts), -1), kept + path], 1)
                latest[kept] = order.gather(1, ends + torch.arange(kept, device=device))
            memory.inputs.copy_(take_nodes(torch.cat([memory.inputs, pending.inputs], 2), latest[kept]))
            if memory.state is not None:
                assert pending.tree is not None and pending.tree.factors is not None
                pending.tree.factors.advance(memory.state, path, inside)

    def crop(self, lengths: list[int]) -> None:
        self._tree = None
        for number, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            if length == 0:
                for memory in self.memory:
                    for tensor in memory.tensors:
                        tensor[number].zero_()
            elif length < row.length:
                what = f"the cache cannot go back from {row.length} to {length} positions"
                raise UserError(f"{what}: recurrent layers keep only their latest state; start again at 0")

    def append(self, number: int, source: Layers, other: int, start: int, stop: int) -> None:
        assert isinstance(source, RecurrentLayers)
        self._tree = None  # nothing is pending
        for memory, copied in zip(self.memory[number].tensors, source.memory[other].tensors, strict=True):
            memory.copy_(copied)

    # Views and copies -------------------------------------------------------------------------------------------

    def take(self, index: slice | Tensor, rows: list[Row]) -> Self:
        memory = [Memory(*(tensor[index] for tensor in m.tensors), *[None] * (m.state is None)) for m in self.memory]
        return type(self)(self.shapes, memory, rows)

    def first(self, count: int, rows: list[Row]) -> Self:
        view = type(self)(self.shapes[:count], self.memory[:count], rows)
        view._pending, view._shares_pending = self._pending[:count], True
        return view

    def grow(self, capacity: int) -> Self:
        return self
