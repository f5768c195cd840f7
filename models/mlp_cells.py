"""The recurrent cells of MLP speculators: what one more token makes of a state.

The RNN is IBM's (2404.19124), the LSTM Snowflake's (Arctic). A state is added to the token's embedding with the weight
``e / s`` on the latter: by the last position half of the state's magnitude, in expectation, still is the base's.

Shape legend: D base width, E inner width, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6
GATES = ("forget", "input", "output", "cell")

CellState = tuple[Tensor, ...]
"""The state [..., E] that projections read, then what else the cell remembers."""
Embed = Callable[[], nn.Module]
"""Makes one more embedding: a module from tokens [...] int64 to [..., E]."""


class ScaledShiftedRMSNorm(nn.Module):
    """Root-mean-square norm with a scale and a shift; no mean is taken off."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS) + self.bias


class BaseEmbedding(nn.Module):
    """The base's own embedding, frozen, through a trained matrix (ours).

    It is read at unit norm: what comes out starts as large as an embedding of one's own does.
    """

    def __init__(self, table: Tensor, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(table.shape[1], width, bias=False)
        self._table = (table,)  # the base's: in a tuple, it is no part of this module

    def _dtype(self) -> torch.dtype:
        # A packed layer has no weight to ask; it is float32.
        return self.linear.weight.dtype if isinstance(self.linear, nn.Linear) else torch.float32

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., E]."""
        embedded = F.normalize(F.embedding(tokens, self._table[0]), dim=-1)
        return cast(Tensor, self.linear(embedded.to(self._dtype())))


def embedding_weight(positions: int, width: int) -> float:
    """``e / s``: ``s = 0.5 ** (0.5 / K)``, ``e = sqrt((1 - s^2) E / 2)``."""
    kept = 0.5 ** (0.5 / positions)
    return float(math.sqrt((1 - kept**2) * width / 2) / kept)


class RNNCells(nn.Module):
    """``GELU(norm(P_k state + e/s E_k[x]))``; tied: all positions share everything but the first projection."""

    def __init__(self, embed: Embed, hidden_size: int, width: int, positions: int, tied: bool) -> None:
        super().__init__()
        stages = 1 if tied else positions
        self.emb = nn.ModuleList(embed() for _ in range(stages))
        self.proj = nn.ModuleList(
            nn.Linear(width if i else hidden_size, width, bias=False) for i in range(2 if tied else positions)
        )
        self.ln = nn.ModuleList(ScaledShiftedRMSNorm(width) for _ in range(stages))
        self._weight = embedding_weight(positions, width)
        _start(self, lambda shape: 1 / math.sqrt(width))

    def first(self, hidden: Tensor) -> CellState:
        """The state before any token is read, of [..., D]."""
        return (hidden,)

    def forward(self, k: int, state: CellState, tokens: Tensor) -> CellState:
        """The state after position k (0-based) has read ``tokens`` ([...])."""
        mixed = torch.add(_at(self.proj, k)(state[0]), _at(self.emb, k)(tokens), alpha=self._weight)
        return (F.gelu(_at(self.ln, k)(mixed)),)


class LSTMCells(nn.Module):
    """Arctic's cell, shared by all positions but for the projections that read the base's state."""

    def __init__(self, embed: Embed, hidden_size: int, width: int, positions: int, one_embedding: bool) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({gate: embed() for gate in (GATES[:1] if one_embedding else GATES)})
        self.proj = nn.ModuleDict(
            {gate: nn.ModuleList(nn.Linear(size, width, bias=False) for size in (hidden_size, width)) for gate in GATES}
        )
        self.cell_ln, self.state_ln = ScaledShiftedRMSNorm(width), ScaledShiftedRMSNorm(width)
        self._width, self._weight = width, embedding_weight(positions, width)
        _start(self, lambda shape: 1 / math.sqrt(min(shape)))

    def first(self, hidden: Tensor) -> CellState:
        """The state and the cell before any token is read, of [..., D]."""
        return hidden, hidden.new_zeros(*hidden.shape[:-1], self._width)

    def forward(self, k: int, state: CellState, tokens: Tensor) -> CellState:
        """The state and the cell after position k (0-based) has read ``tokens`` ([...])."""
        read, cell = state
        embedded = {gate: self.emb[gate](tokens) for gate in self.emb}
        forget, admit, show, new = (
            torch.add(
                _at(cast(nn.ModuleList, self.proj[gate]), k)(read),
                embedded.get(gate, embedded[GATES[0]]),
                alpha=self._weight,
            )
            for gate in GATES
        )
        cell = cell * forget.sigmoid() + F.gelu(self.cell_ln(new)) * admit.sigmoid()
        return F.gelu(self.state_ln(cell)) * show.sigmoid(), cell


def _at(modules: nn.ModuleList, k: int) -> nn.Module:
    """That of position k, or the last one there is."""
    return modules[min(k, len(modules) - 1)]


def _start(cells: nn.Module, deviation: Callable[[torch.Size], float]) -> None:
    """Weights of embeddings and projections from a normal law, as the reference code does; norms start as ones."""
    for module in cells.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0, deviation(module.weight.shape))
