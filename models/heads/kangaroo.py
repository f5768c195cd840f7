"""Kangaroo (Liu et al., 2404.18911): the target's first layers and a small adapter draft for it.

The adapter is one attention layer without an MLP, ``norm(x + attention(norm(x)))``, over what leaves layer
``exit_layer``; the base's output head, frozen, reads it. Drafting stops after the first draft whose confidence is
below ``confidence_threshold``, and verification resumes from the exit states through the remaining layers only: the
shallow layers are part of the target's own pass and share its cache.

Beyond the paper: trees, batches of rows, sampling, a reduced draft vocabulary, and training on the base's own answers.

Shape legend: B rows, T time, F frontier nodes, D width, W draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.data.utils.errors import UserError, check_limits
from drafthead.models.base.base_model import BaseModel, PartialForward
from drafthead.models.base.layers import first_layers
from drafthead.models.base.parity import has_passed, note_passed, relative_error, tolerance
from drafthead.models.cache.kv_cache import KVCache, RaggedCache
from drafthead.models.decoding.draft_cache import CachedDraftPass, DraftCache, PendingNodes, PendingTokens, TokenBuffer
from drafthead.models.decoding.drafter import DraftConfig, DraftState, DynamicTree, Proposal
from drafthead.models.decoding.growth import DraftPass, EarlyExit
from drafthead.models.heads.parts.attention_layer import HeadAttention, HeadRMSNorm
from drafthead.models.heads.parts.autoregressive import AutoregressiveConfig, AutoregressiveHead
from drafthead.models.heads.parts.layer_cache import LayerKVCache, PendingInputs
from drafthead.models.kernels.attention import document_mask
from drafthead.models.token_tree import TokenTree

UNREAD = -1


class ExitStatePass:
    """One step's nodes in the first layers of the target: a ``DraftPass`` of exit states instead of logits."""

    def __init__(self, first: BaseModel, cache: KVCache | RaggedCache) -> None:
        """Start after what is committed in the target's ``cache``; ``first`` is the target cut to its first layers."""
        self._model, self._cache = first, cache.first_layers(first.num_layers)
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._nodes: PendingNodes | None = None
        self._level = 0  # node where the level before starts

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Read one more level ([B, F]); ``parents`` are places on the level before. Exit states [B, F, D]."""
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
        """Read the nodes of ``proposal`` that drafting has not read (its leaves), and put all in its order."""
        places = self._match(proposal)
        while bool((places == UNREAD).any()):
            self._read_missing(proposal, places)
        self._cache.commit_path(places, torch.full((len(places),), places.shape[1], device=places.device))
        hidden = torch.cat(self._hidden, 1)
        return PartialForward(
            layers=self._model.num_layers,
            hidden=hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])),
        )

    def _match(self, proposal: Proposal) -> Tensor:
        """Where each node was read, [B, N] int64; ``UNREAD`` where it was not.

        A node is known by the tokens of its path: with the same ones, two nodes have the same state.
        """
        tokens, above = torch.cat(self._tokens, 1).tolist(), torch.cat(self._parents, 1).tolist()
        wanted = proposal.tokens.tolist()
        parents = proposal.shape.parents.expand_as(proposal.tokens).tolist()
        places = []
        for row in range(len(wanted)):
            first: list[int] = []  # the first node read with the same path
            known: dict[tuple[int, int], int] = {}
            for node, (a, t) in enumerate(zip(above[row], tokens[row], strict=True)):
                first.append(known.setdefault((a if a == UNREAD else first[a], t), node))
            found = [0]
            for node in range(1, len(wanted[row])):
                parent = parents[row][node]
                if parent < 0:
                    found.append(0)  # padding, which nothing looks at
                elif found[parent] == UNREAD:
                    found.append(UNREAD)
                else:
                    found.append(known.get((found[parent], wanted[row][node]), UNREAD))
            places.append(found)
        return torch.tensor(places, device=proposal.tokens.device)

    def _read_missing(self, proposal: Proposal, places: Tensor) -> None:
        """Read in one pass the unread nodes of all rows whose parents are read; sets their ``places``."""
        parents = proposal.shape.parents.expand_as(proposal.tokens).clamp(min=0)
        ready = (places == UNREAD) & (places.gather(1, parents) != UNREAD)
        width = int(ready.sum(1).max())
        # A row with fewer reads others again, which nothing looks at.
        nodes = ready.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
        chosen = ready.gather(1, nodes)
        above = places.gather(1, parents.gather(1, nodes)).clamp(min=0)
        count = sum(t.shape[1] for t in self._tokens)
        self._read(proposal.tokens.gather(1, nodes), above)
        read = torch.arange(count, count + width, device=places.device).expand_as(nodes)
        places.scatter_(1, nodes, torch.where(chosen, read, places.gather(1, nodes)))


def check_early_exit(base: BaseModel, first: BaseModel) -> None:
    """Refuse a base whose pass, begun by its first layers alone, computes something else than the whole one."""
    what = f"early exit after {first.num_layers}"
    if base.device.type == "meta" or has_passed(base, what):
        return
    shape = TokenTree.from_paths([(0,), (1,), (0, 0)]).shape_on(base.device)
    tokens = torch.arange(3, 15, device=base.device)[None]
    nodes, cache = tokens[:, -len(shape) :], KVCache(base.cache_shape, 16)
    base.forward(tokens[:, : -len(shape)], cache)
    wanted = base.verify(nodes, shape, cache).final
    cache.crop()
    hidden = first.verify(nodes, shape, cache.first_layers(first.num_layers)).final
    begun = PartialForward(layers=first.num_layers, hidden=hidden)
    found = base.verify(nodes, shape, cache, partial_forward=begun).final
    if (error := relative_error(base, found, wanted)) > tolerance(base):
        raise UserError(
            f"the layers of {base.model.config.model_type} after the first {first.num_layers} compute something else "
            f"when they are run alone (by {error:.1%} of the largest state); choose a head without an exit layer"
        )
    note_passed(base, what)


@dataclass(kw_only=True)
class KangarooConfig(AutoregressiveConfig):
    """Settings of :class:`KangarooHead`."""

    exit_layer: int = 2
    """Layers of the base that draft (the paper: 2 of 32 for 7B, 3 of 40 for 13B)."""
    num_draft_tokens: int = 6
    confidence_threshold: float = 0.6
    """Nothing is drafted after a draft with less confidence, unless decoding sets another one; 0 never stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, "head.", exit_layer="[1, inf)", confidence_threshold="[0, 1)")

    def check_layers(self, num_layers: int) -> None:
        if self.exit_layer >= num_layers:
            raise UserError(f"head.exit_layer must be below the base's {num_layers} layers, got {self.exit_layer}")

    def build(self, base: BaseModel, d2t: Tensor | None = None) -> "KangarooHead":
        return KangarooHead(self, base, d2t)


class KangarooHead(AutoregressiveHead, EarlyExit):
    """An adapter over an exit state of the base."""

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
        # A kept feature is missing (NaN) where no token was read: there it has no value and no gradient.
        x = base_hidden.layer(0).to(self.dtype).nan_to_num()
        mask = document_mask(batch.document_ids, x.dtype)
        return self.adapter(x, batch.position_ids, mask)

    def adapter(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | RaggedCache | None = None
    ) -> Tensor:
        """[B, T, D] exit states -> [B, T, D], with the arguments of ``HeadAttention``."""
        normed: Tensor = self.norm(x + self.self_attn(self.input_layernorm(x), positions, mask, cache))
        return normed

    # Drafting ------------------------------------------------------------------------------------------------

    def init_state(self, batch: int) -> "KangarooState":
        adapter, shape = self.inference().adapter, self.self_attn.cache_shape(torch.float32, self.base.device)
        cache = LayerKVCache(lambda x, *rest: adapter(x.float(), *rest), shape)
        own = PendingTokens(text=TokenBuffer.none(batch), cache=DraftCache(self._first))
        return KangarooState(adapter=PendingInputs.none(cache, batch, self.norm.weight), own=own, target=None)

    def attach(self, state: DraftState, cache: KVCache | RaggedCache) -> "KangarooState":
        assert isinstance(state, KangarooState)
        return KangarooState(adapter=state.adapter, own=None, target=cache)

    def update(
        self, state: DraftState, tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> "KangarooState":
        assert isinstance(state, KangarooState) and base_hidden is not None
        with torch.inference_mode():
            return KangarooState(
                adapter=state.adapter.append(base_hidden.layer(0), counts),
                own=None if state.own is None else state.own.append(tokens, counts),
                target=state.target,
            )

    def start(self, state: DraftState, last_token: Tensor, draft_config: DraftConfig) -> "_KangarooDraftPass":
        assert isinstance(state, KangarooState)
        shallow: DraftPass
        if state.own is None:
            assert state.target is not None
            shallow = ExitStatePass(self._first, state.target)
        else:
            text = state.own.text.append(last_token[:, None])
            shallow = CachedDraftPass(state.own.cache, text, draft_config, lambda hidden: hidden)
        return _KangarooDraftPass(shallow, state.adapter, self.projection.logits)

    def finish(self, draft_pass: DraftPass, proposal: Proposal) -> Proposal:
        assert isinstance(draft_pass, _KangarooDraftPass)
        if not isinstance(draft_pass.shallow, ExitStatePass):
            return proposal
        return replace(proposal, partial_forward=draft_pass.shallow.finish(proposal))

    def extra_cache_slots(self, draft_config: DraftConfig) -> int:
        # Expanded nodes of a dynamic tree need not be among those it keeps.
        tree = draft_config.tree
        return tree.width * tree.depth + 1 if isinstance(tree, DynamicTree) else 0


@dataclass
class KangarooState(DraftState):
    """What the adapter has read, and where the shallow layers keep their states."""

    adapter: PendingInputs
    own: PendingTokens | None
    """Shallow states of its own: when led along a text without a target's cache."""
    target: KVCache | RaggedCache | None
    """The target's cache; None: none, or not attached again since rows were selected."""

    def select(self, rows: list[int]) -> "KangarooState":
        # ``attach`` follows wherever there is a target: its cache is selected by whom it belongs to.
        own = None if self.own is None else self.own.select(rows)
        return KangarooState(adapter=self.adapter.select(rows), own=own, target=None)


class _KangarooDraftPass:
    """Every level: the shallow layers, the adapter over their exit states, the output head."""

    def __init__(self, shallow: DraftPass, text: PendingInputs, logits: Callable[[Tensor], Tensor]) -> None:
        self.shallow, self._read, self._logits = shallow, text.reader(), logits

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._logits(self._read(self.shallow.step(tokens, parents), parents))
