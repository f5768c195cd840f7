"""Kangaroo (Liu et al., 2404.18911): the target's first layers and a small adapter draft for it.

The adapter is one attention layer without an MLP, ``norm(x + attention(norm(x)))``, over the output of layer
``exit_layer`` (the exit states). The base's frozen output head turns it into logits. Drafting stops after the first
draft whose confidence is below ``confidence_threshold``.

Drafting and verification share one pass (early exit). The shallow layers write the nodes' keys and values into the
target's cache, and verification continues from the exit states through the remaining layers only.

Beyond the paper: trees, batches, sampling, a reduced draft vocabulary, and training on the base's own answers.

Shape legend: B rows, T time, F frontier nodes, N nodes of a proposal, D width, W draft
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.settings import BelowOne, Positive, settings
from drafthead.models.base.base_model import BaseModel, PartialForward
from drafthead.models.base.layers import first_layers
from drafthead.models.base.parity import has_passed, note_passed, relative_error, tolerance
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.draft_cache import CachedDraftPass, DraftCache, PendingNodes, PendingTokens, TokenBuffer
from drafthead.models.decoding.drafter import DraftConfig, DraftState, DynamicTree, Proposal
from drafthead.models.decoding.growth import DraftPass, EarlyExit
from drafthead.models.heads.parts.attention_layer import HeadAttention, HeadRMSNorm
from drafthead.models.heads.parts.autoregressive import AutoregressiveConfig, AutoregressiveHead
from drafthead.models.heads.parts.draft_head import DraftPositions
from drafthead.models.heads.parts.layer_cache import LayerKVCache, PendingInputs
from drafthead.models.kernels.attention import document_mask
from drafthead.models.token_tree import TokenTree

UNREAD = -1
"""Index of a node that the shallow layers have not read."""


class ExitStatePass:
    """One step's nodes in the first layers of the target: a ``DraftPass`` that returns exit states instead of logits.

    Nodes are numbered in the order of reading. ``finish`` maps them to the order of the proposal.
    """

    def __init__(self, first: BaseModel, cache: TreeCache) -> None:
        """Start after the committed positions of the target's ``cache``; ``first`` is the target's first layers."""
        self._model, self._cache = first, cache.first_layers(first.num_layers)
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._nodes: PendingNodes | None = None
        self._level = 0  # number of the first node of the last level

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Read one more level of ``tokens`` [B, F] and return its exit states [B, F, D].

        ``parents`` [B, F] are indices on the level above.
        """
        level, self._level = self._level, sum(t.shape[1] for t in self._tokens)
        return self._read(tokens, parents + level if self._tokens else None)

    def _read(self, tokens: Tensor, above: Tensor | None) -> Tensor:
        rows, new = tokens.shape
        forest = self._nodes or PendingNodes.none(rows, tokens.device)
        self._nodes = forest.extend(rows, new, above)
        self._tokens.append(tokens)
        self._parents.append(torch.full_like(tokens, UNREAD) if above is None else above)
        self._hidden.append(self._model.verify(tokens, self._nodes.shape(), self._cache).final)
        return self._hidden[-1]

    def finish(self, proposal: Proposal) -> PartialForward:
        """Read the nodes of ``proposal`` that drafting has not read, and return all exit states in its order.

        Drafting reads a node only to draft below it, so the leaves of the tree are unread. A dynamic tree may also have
        read nodes that it did not select. Reordering the cache drops these, so that verification finds in the
        shallow layers exactly the keys and values of the proposal's nodes.
        """
        numbers = self._match(proposal)
        while bool((numbers == UNREAD).any()):
            self._read_missing(proposal, numbers)
        self._cache.commit_path(numbers, [numbers.shape[1]] * len(numbers))
        hidden = torch.cat(self._hidden, 1)
        return PartialForward(
            layers=self._model.num_layers,
            hidden=hidden.gather(1, numbers[..., None].expand(-1, -1, hidden.shape[-1])),
        )

    def _match(self, proposal: Proposal) -> Tensor:
        """Return the number of each node of the proposal, [B, N] int64; ``UNREAD`` if it was not read.

        A node is identified by its path's tokens: nodes with equal paths have equal states. So of equal nodes, which
        sampling with replacement can draw, the one read first stands for all.
        """
        tokens, above = torch.cat(self._tokens, 1).tolist(), torch.cat(self._parents, 1).tolist()
        proposed = proposal.tokens.tolist()
        parents = proposal.shape.parents.expand_as(proposal.tokens).tolist()
        numbers = []
        for row in range(len(proposed)):
            first: list[int] = []  # for each node, the first node with the same path
            by_path: dict[tuple[int, int], int] = {}  # (first node of the parent, token) -> first node
            for node, (a, t) in enumerate(zip(above[row], tokens[row], strict=True)):
                first.append(by_path.setdefault((a if a == UNREAD else first[a], t), node))
            row_numbers = [0]
            for node in range(1, len(proposed[row])):
                parent = parents[row][node]
                if parent < 0:
                    row_numbers.append(0)  # padding, which is not used
                elif row_numbers[parent] == UNREAD:
                    row_numbers.append(UNREAD)
                else:
                    row_numbers.append(by_path.get((row_numbers[parent], proposed[row][node]), UNREAD))
            numbers.append(row_numbers)
        return torch.tensor(numbers, device=proposal.tokens.device)

    def _read_missing(self, proposal: Proposal, numbers: Tensor) -> None:
        """Read in one pass the unread nodes of all rows whose parents are read, and set their ``numbers``."""
        parents = proposal.shape.parents.expand_as(proposal.tokens).clamp(min=0)
        ready = (numbers == UNREAD) & (numbers.gather(1, parents) != UNREAD)
        width = int(ready.sum(1).max())
        # Rows with fewer such nodes read other nodes again, and ignore them.
        nodes = ready.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
        is_ready = ready.gather(1, nodes)
        above = numbers.gather(1, parents.gather(1, nodes)).clamp(min=0)
        count = sum(t.shape[1] for t in self._tokens)
        self._read(proposal.tokens.gather(1, nodes), above)
        new_numbers = torch.arange(count, count + width, device=numbers.device).expand_as(nodes)
        numbers.scatter_(1, nodes, torch.where(is_ready, new_numbers, numbers.gather(1, nodes)))


def check_early_exit(base: BaseModel, first: BaseModel) -> None:
    """Raise a UserError if a base's pass differs when its first layers run alone and the others continue."""
    check = f"early exit after {first.num_layers}"
    if base.device.type == "meta" or has_passed(base, check):
        return
    shape = TokenTree.from_paths([(0,), (1,), (0, 0)]).shape_on(base.device)
    tokens = torch.arange(3, 15, device=base.device)[None]
    nodes, cache = tokens[:, -len(shape) :], TreeCache.empty(base.cache_shape, 16)
    base.forward(tokens[:, : -len(shape)], cache)
    whole = base.verify(nodes, shape, cache).final
    cache.crop()
    hidden = first.verify(nodes, shape, cache.first_layers(first.num_layers)).final
    partial = PartialForward(layers=first.num_layers, hidden=hidden)
    continued = base.verify(nodes, shape, cache, partial_forward=partial).final
    if (error := relative_error(base, continued, whole)) > tolerance(base):
        raise UserError(
            f"the layers of {base.model.config.model_type} after the first {first.num_layers} give another result when "
            f"they run alone (by {error:.1%} of the largest state); choose a head without an exit layer"
        )
    note_passed(base, check)


@settings(kw_only=True)
class KangarooConfig(AutoregressiveConfig):
    """Settings of :class:`KangarooHead`."""

    exit_layer: Positive = 2
    """First layers of the base that draft. The paper uses 2 of 32 (7B) and 3 of 40 (13B)."""
    num_draft_tokens: DraftPositions = 6
    confidence_threshold: BelowOne = 0.6
    """Stop drafting after a draft with a lower probability. 0 never stops. The setting of the same name in decoding
    overrides it."""

    def check_layers(self, num_layers: int) -> None:
        if self.exit_layer >= num_layers:
            raise UserError(f"head.exit_layer must be below the base's {num_layers} layers, got {self.exit_layer}")

    def build(self, base: BaseModel, d2t: Tensor | None = None) -> "KangarooHead":
        return KangarooHead(self, base, d2t)


class KangarooHead(AutoregressiveHead, EarlyExit):
    """Adapter over an exit state of the base."""

    config: KangarooConfig

    def __init__(self, config: KangarooConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        config.check_layers(base.num_layers)
        self.spec = HiddenStatesSpec(layers=(config.exit_layer,))
        self.confidence_threshold = config.confidence_threshold
        self.early_exit_layers = config.exit_layer
        self.input_layernorm = HeadRMSNorm(base)
        self.self_attn = HeadAttention(base)
        self.norm = HeadRMSNorm(base)
        self._first = first_layers(base, config.exit_layer)
        check_early_exit(base, self._first)

    def checkpointable(self) -> list[tuple[nn.Module, str]]:
        return [(self.self_attn, "forward")]

    def hidden_states(self, batch: TrainBatch, base_hidden: HiddenStates) -> Tensor:
        # Features of positions that were not stored are NaN; zeros there carry no value and no gradient.
        x = base_hidden.layer(0).to(self.dtype).nan_to_num()
        mask = document_mask(batch.document_ids, x.dtype)
        return self.adapter(x, batch.position_ids, mask)

    def adapter(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache | None = None) -> Tensor:
        """Map exit states [B, T, D] to [B, T, D]. See ``HeadAttention.forward`` for the other arguments."""
        normed: Tensor = self.norm(x + self.self_attn(self.input_layernorm(x), positions, mask, cache))
        return normed

    # Drafting ------------------------------------------------------------------------------------------------

    def init_state(self, batch: int) -> "KangarooState":
        adapter, shape = self.inference().adapter, self.self_attn.cache_shape(torch.float32, self.base.device)
        cache = LayerKVCache(lambda x, *rest: adapter(x.float(), *rest), shape)
        shallow = PendingTokens(text=TokenBuffer.none(batch), cache=DraftCache(self._first))
        return KangarooState(adapter=PendingInputs.none(cache, batch, self.norm.weight), shallow=shallow, target=None)

    def attach(self, state: "KangarooState", cache: TreeCache) -> "KangarooState":
        return KangarooState(adapter=state.adapter, shallow=None, target=cache)

    def update(
        self, state: "KangarooState", tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> "KangarooState":
        assert base_hidden is not None
        with torch.inference_mode():
            return KangarooState(
                adapter=state.adapter.append(base_hidden.layer(0), counts),
                shallow=None if state.shallow is None else state.shallow.append(tokens, counts),
                target=state.target,
            )

    def start(self, state: "KangarooState", last_token: Tensor, draft_config: DraftConfig) -> "_KangarooDraftPass":
        exit_states: DraftPass
        if state.shallow is None:
            assert state.target is not None
            exit_states = ExitStatePass(self._first, state.target)
        else:
            text = state.shallow.text.append(last_token[:, None])
            exit_states = CachedDraftPass(state.shallow.cache, text, draft_config, lambda hidden: hidden)
        return _KangarooDraftPass(exit_states, state.adapter, self.projection.logits)

    def finish(self, draft_pass: DraftPass, proposal: Proposal) -> Proposal:
        assert isinstance(draft_pass, _KangarooDraftPass)
        if not isinstance(draft_pass.exit_states, ExitStatePass):
            return proposal
        return replace(proposal, partial_forward=draft_pass.exit_states.finish(proposal))

    def extra_cache_slots(self, draft_config: DraftConfig) -> int:
        # A dynamic tree may expand nodes that it does not select.
        tree = draft_config.tree
        return tree.width * tree.depth + 1 if isinstance(tree, DynamicTree) else 0


@dataclass
class KangarooState(DraftState):
    """Context of the adapter, and the cache of the shallow layers."""

    adapter: PendingInputs
    shallow: PendingTokens | None
    """Tokens and cache of the shallow layers, used without a target's cache (replay, calibration)."""
    target: TreeCache | None
    """The target's cache; None if there is none, or until ``attach`` after rows were selected."""

    def select(self, rows: list[int]) -> "KangarooState":
        # The owner of the target's cache selects its rows and calls ``attach`` again.
        shallow = None if self.shallow is None else self.shallow.select(rows)
        return KangarooState(adapter=self.adapter.select(rows), shallow=shallow, target=None)


class _KangarooDraftPass:
    """Draft pass whose levels run the shallow layers, the adapter over their exit states, and the output head."""

    def __init__(self, exit_states: DraftPass, context: PendingInputs, logits: Callable[[Tensor], Tensor]) -> None:
        self.exit_states, self._read, self._logits = exit_states, context.reader(), logits

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._logits(self._read(self.exit_states.step(tokens, parents), parents))
