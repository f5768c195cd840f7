"""Multi-stage MLP speculators (Wertheimer et al., 2404.19124; the LSTM of Snowflake's Arctic): a small recurrent head.

Position k mixes the state of position k - 1 with the embedding of the token drafted last, and its projection reads the
result. ``cell: rnn`` is the published MLPSpeculator, tied or untied; ``cell: lstm`` is the Arctic variant.

Beyond the papers: a draft vocabulary, targets that stay in their document, and all kinds of trees. Two options train
fewer parameters. ``own_embedding: false`` reads the base's embedding through a trained matrix. ``own_lm_head: false``
adds a linear map of the head's state to the base's last hidden state, and projects the sum with the base's frozen
projection. Untrained, such a head equals the base's next-token head.

Shape legend: K draft positions, D base width, E inner width.
"""

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.parts import BaseParts
from drafthead.models.heads.parts.draft_head import Attend, DraftHead, DraftHeadConfig, States
from drafthead.models.heads.parts.head_session import HeadSession
from drafthead.models.kernels.linear import reads_in
from drafthead.settings.schema import NonNegative, settings

NORM_EPS = 1e-6
GATES = ("forget", "input", "output", "cell")
CellState = tuple[Tensor, ...]
"""The state that the projections read, [..., E], and for an LSTM its cell, [..., E]. At first, the state is the base's,
[..., D]."""
Embed = Callable[[], nn.Module]  # creates a module that maps tokens [...] int64 to [..., E]


class ScaledShiftedRMSNorm(nn.Module):
    """RMSNorm with a scale and a shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS) + self.bias


class BaseEmbedding(nn.Module):
    """The base's frozen embedding, scaled to norm 1, as a new embedding is, and mapped by a trained matrix (our
    addition)."""

    def __init__(self, table: Tensor, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(table.shape[1], width, bias=False)
        self._table = (table,)  # the base's: in a tuple, so that it is not a parameter of this module

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = F.normalize(F.embedding(tokens, self._table[0]), dim=-1)
        return cast(Tensor, self.linear(embedded.to(reads_in(self.linear))))


def embedding_weight(positions: int, width: int) -> float:
    """Return the published factor by which the embedding is multiplied before it is added to the state: ``e / s`` with
    K = ``positions``, E = ``width``, ``s = 0.5 ** (0.5 / K)`` and ``e = sqrt((1 - s^2) E / 2)``."""
    decay = 0.5 ** (0.5 / positions)
    return float(math.sqrt((1 - decay**2) * width / 2) / decay)


class RNNCells(nn.Module):
    """The MLPSpeculator's cells: position k maps state and token x to ``GELU(norm(P_k state + e/s E_k[x]))``. P_k is a
    projection and E_k an embedding. ``tied`` cells share all weights except P_0. The factor e/s is
    ``embedding_weight``."""

    def __init__(self, embed: Embed, hidden_size: int, width: int, positions: int, tied: bool) -> None:
        super().__init__()
        stages = 1 if tied else positions
        self.emb = nn.ModuleList(embed() for _ in range(stages))
        sizes = [hidden_size, *[width] * ((2 if tied else positions) - 1)]
        self.proj = nn.ModuleList(nn.Linear(size, width, bias=False) for size in sizes)
        self.ln = nn.ModuleList(ScaledShiftedRMSNorm(width) for _ in range(stages))
        self._weight = embedding_weight(positions, width)
        _start(self, lambda shape: 1 / math.sqrt(width))

    def forward(self, k: int, state: CellState, tokens: Tensor) -> CellState:
        """Return the state [..., E] after draft position k (0-based) has read ``tokens`` [...]."""
        mixed = torch.add(_at(self.proj, k)(state[0]), _at(self.emb, k)(tokens), alpha=self._weight)
        return (F.gelu(_at(self.ln, k)(mixed)),)


class LSTMCells(nn.Module):
    """Arctic's LSTM cell, shared by all positions; only the first position projects its state by other matrices."""

    def __init__(self, embed: Embed, hidden_size: int, width: int, positions: int, one_embedding: bool) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({gate: embed() for gate in (GATES[:1] if one_embedding else GATES)})
        self.proj = nn.ModuleDict(
            {gate: nn.ModuleList(nn.Linear(size, width, bias=False) for size in (hidden_size, width)) for gate in GATES}
        )
        self.cell_ln, self.state_ln = ScaledShiftedRMSNorm(width), ScaledShiftedRMSNorm(width)
        self._weight = embedding_weight(positions, width)
        _start(self, lambda shape: 1 / math.sqrt(min(shape)))

    def forward(self, k: int, state: CellState, tokens: Tensor) -> CellState:
        """Return state and cell, [..., E] each, after draft position k (0-based) has read ``tokens`` [...]."""
        hidden, cell = state
        embedded = {gate: self.emb[gate](tokens) for gate in self.emb}
        forget_gate, input_gate, output_gate, update = (
            torch.add(
                _at(cast(nn.ModuleList, self.proj[gate]), k)(hidden),
                embedded.get(gate, embedded[GATES[0]]),
                alpha=self._weight,
            )
            for gate in GATES
        )
        cell = cell * forget_gate.sigmoid() + F.gelu(self.cell_ln(update)) * input_gate.sigmoid()
        return F.gelu(self.state_ln(cell)) * output_gate.sigmoid(), cell


def _at(modules: nn.ModuleList, k: int) -> nn.Module:
    """Return module k (from 0), or the last one: later draft positions share it."""
    return modules[min(k, len(modules) - 1)]


def _start(cells: nn.Module, deviation: Callable[[torch.Size], float]) -> None:
    """Initialise all but the norms with normal weights, as the reference code does; ``deviation`` maps shapes."""
    for module in cells.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0, deviation(module.weight.shape))


@settings(kw_only=True)
class MLPSpeculatorConfig(DraftHeadConfig):
    """Settings of :class:`MLPSpeculatorHead`."""

    can_have_more_positions: ClassVar[bool] = False  # ``embedding_weight`` depends on their number
    num_draft_tokens: Annotated[int, Field(ge=1, le=8)] = 3
    own_lm_head: bool = True
    """Train a projection from the head's state to the vocabulary for each position. With false, all positions share the
    base's frozen projection, which reads the sum of the base's last hidden state and a trained linear map of the head's
    state (our addition)."""
    inner_dim: NonNegative = 0
    """Width of the state. 0 takes the base's hidden size."""
    tie_weights: bool = False
    """Share embedding, norm and projections among all positions. Only the first position's projection of the base's
    state is separate."""
    scale_input: bool = False
    """Scale the base's state to an RMS of ``1 / sqrt(2)``."""
    cell: Literal["rnn", "lstm"] = "rnn"
    """Recurrent cell: ``rnn`` (IBM) or ``lstm`` (Arctic). ``lstm`` needs ``tie_weights``."""
    tie_lstm_embs: bool = False
    """Share one embedding among the gates of the LSTM."""
    own_embedding: bool = True
    """Train an embedding. With false, use the base's frozen embedding and a trained matrix (our addition)."""

    def __post_init__(self) -> None:
        if self.cell == "lstm" and not self.tie_weights:
            raise ValueError("head.cell: lstm needs head.tie_weights: true; its positions share their weights")
        if self.tie_lstm_embs and self.cell != "lstm":
            raise ValueError("head.tie_lstm_embs is for head.cell: lstm; leave it false")
        if self.tie_weights and self.num_draft_tokens == 1:
            what = "head.tie_weights needs head.num_draft_tokens of at least 2"
            raise ValueError(f"{what}: one position has nothing to share")


class MLPSpeculatorHead(DraftHead):
    """An MLP speculator: each draft position is one step of a recurrent cell over the tokens before it."""

    config: MLPSpeculatorConfig
    session_class = HeadSession

    def __init__(self, config: MLPSpeculatorConfig, base: BaseParts, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        width, stages = config.inner_dim or base.hidden_size, 1 if config.tie_weights else config.num_draft_tokens

        def embed() -> nn.Module:
            return (
                nn.Embedding(base.vocab_size, width) if config.own_embedding else BaseEmbedding(base.embedding, width)
            )

        self.cells: RNNCells | LSTMCells
        with torch.device(base.device):
            if config.cell == "lstm":
                self.cells = LSTMCells(embed, base.hidden_size, width, config.num_draft_tokens, config.tie_lstm_embs)
            else:
                self.cells = RNNCells(embed, base.hidden_size, width, config.num_draft_tokens, config.tie_weights)
            shared = 0 if config.own_lm_head else stages
            self.outputs = nn.ModuleList(nn.Linear(width, base.hidden_size, bias=False) for _ in range(shared))
        for output in self.outputs.parameters():
            nn.init.zeros_(output)
        if config.own_lm_head:
            # The state's width may differ from the base's, so the projections do not start as the base's.
            blank = torch.zeros(1, 1, device=base.device).expand(len(self.d2t), width)
            self.projections = self.lm_heads(stages, LMHead(weight=blank))
            for weight in self.projections.weights:
                nn.init.normal_(weight, 0, min(width, len(self.d2t) if config.cell == "lstm" else width) ** -0.5)
        else:
            self.projections = self.lm_heads(0)

    @property
    def projection_width(self) -> int:
        return (self.config.own_lm_head and self.config.inner_dim) or self.base.hidden_size

    @property
    def scaling(self) -> LMHead:
        return LMHead(weight=self.target_lm_head.weight) if self.config.own_lm_head else self.target_lm_head

    def first_states(self, hidden: Tensor) -> States:
        config = self.config
        scaled = F.rms_norm(hidden, hidden.shape[-1:], eps=NORM_EPS) / 2**0.5 if config.scale_input else hidden
        states: States = (scaled,)
        if config.cell == "lstm":
            states = scaled, hidden.new_zeros(*hidden.shape[:-1], config.inner_dim or hidden.shape[-1])
        return states if config.own_lm_head else (*states, hidden)

    def advance(self, k: int, states: States, tokens: Tensor, attend: Attend) -> tuple[Tensor, States]:
        if not len(self.outputs):
            states = self.cells(k, states, tokens)
            return states[0], states
        *state, hidden = states
        states = (*self.cells(k, tuple(state), tokens), hidden)
        return hidden + _at(self.outputs, k)(states[0]), states
