"""Kangaroo (Liu et al., 2404.18911): the target's first layers and a small adapter draft for it.

The adapter is one attention layer without an MLP, ``norm(x + attention(norm(x)))``, over the output x of the base's
layer ``exit_layer``. The base's frozen output head maps its output to logits. Drafting stops after the first draft
whose probability is below ``confidence_threshold``.

Drafting runs the first layers, which writes the nodes' keys and values into the target's cache. Verification continues
from the exit states through the other layers only (early exit). Beyond the paper: trees, batches, sampling, a draft
vocabulary, and training on the base's own answers.

Shape legend: B rows, T time, F nodes of a tree level, D width.
"""

from dataclasses import replace

import torch
from torch import Tensor

from drafthead.data.batch import BaseHidden, HiddenStates, TrainBatch
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel, PartialForward
from drafthead.models.base.layers import first_layers
from drafthead.models.base.parity import PASSED, check_key, relative_error, tolerance
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, DynamicTree, Proposal, SessionPart
from drafthead.models.decoding.node_cache import LMSession, add_nodes, pending_shape
from drafthead.models.heads.parts.attention_layer import HeadAttention, HeadRMSNorm, Mask
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig, DraftPositions
from drafthead.models.heads.parts.head_session import HeadSession, LayerCache
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import BelowOne, Positive, settings
from drafthead.system.devices import is_host


class ExitStates(SessionPart):
    """The pass of one step's tree nodes through the target's first layers, which writes into the target's cache. Nodes
    are numbered in the order in which the layers read them, as in ``Proposal.slots``."""

    def __init__(self, first: BaseModel, target: TreeCache) -> None:
        self._model, self._target = first, target

    def start(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        self._cache = self._target.first_layers(self._model.num_layers)
        self._hidden: list[Tensor] = []
        self._ancestors: Tensor | None = None
        self._level = self._count = 0  # number of the first node of the last level; nodes read so far
        self._is_static = isinstance(draft_config.tree, TokenTree)

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        pass

    def rollback(self, lengths: list[int]) -> None:
        pass

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the last layer's outputs [B, F, D] for the next tree level; ``parents`` [B, F] are indices on the
        level above."""
        level, self._level = self._level, self._count
        return self._read(tokens, parents + level)

    def _read(self, tokens: Tensor, above: Tensor) -> Tensor:
        self._ancestors = add_nodes(self._ancestors, above)
        self._count += tokens.shape[1]
        self._hidden.append(self._model.verify(tokens, pending_shape(self._ancestors), self._cache).final)
        return self._hidden[-1]

    def drafted(self, proposal: Proposal) -> Proposal:
        """Run the layers over the nodes of ``proposal`` that drafting has not read; add the outputs for all its nodes.

        Drafting reads a node only to draft after it, so the tree's leaves are unread. In a dynamic tree, it may have
        read nodes that are not in the proposal. The cache then loses these nodes and gets the proposal's order, as
        verification expects.
        """
        if proposal.slots is None:  # the root alone
            return proposal
        numbers = proposal.slots.expand_as(proposal.tokens).clone()
        parents = proposal.shape.parents.expand_as(proposal.tokens)
        numbers[:, 1:].masked_fill_(parents[:, 1:] < 0, 0)  # padding, which is not used
        unread = numbers < 0
        if is_host(unread.device):
            width = int(unread.sum(1).max())
        else:  # drafting has not stopped early, so it has read the root and every inner node of a static tree
            width = unread.shape[1] - (self._count if self._is_static else 1)
        if width:
            # Rows with fewer unread nodes read other nodes again; these results are not used.
            nodes = unread.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
            above = numbers.gather(1, parents.gather(1, nodes).clamp(min=0)).clamp(min=0)
            new_numbers = torch.arange(self._count, self._count + width, device=numbers.device).expand_as(nodes)
            self._read(proposal.tokens.gather(1, nodes), above)
            numbers.scatter_(1, nodes, torch.where(unread.gather(1, nodes), new_numbers, numbers.gather(1, nodes)))
        self._cache.commit_path(numbers, [numbers.shape[1]] * len(numbers))
        hidden = torch.cat(self._hidden, 1)
        read = hidden.gather(1, numbers[..., None].expand(-1, -1, hidden.shape[-1]))
        return replace(proposal, partial_forward=PartialForward(layers=self._model.num_layers, hidden=read))


def check_early_exit(base: BaseModel, first: BaseModel) -> None:
    """Reject ``base``, once, if its states differ when the layers ``first`` run alone and the others continue."""
    check = f"early exit after {first.num_layers}"
    if base.device.type == "meta" or check_key(base, check) in PASSED:
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
    if (error := relative_error(base.rounding_dtype, continued, whole)) > tolerance(base.rounding_dtype):
        what = f"the layers of {base.model_config.model_type} after the first {first.num_layers} give another result"
        raise UserError(f"{what} if those run separately (by {error:.1%} of the largest state); choose another head")
    PASSED.add(check_key(base, check))


@settings(kw_only=True)
class KangarooConfig(DraftHeadConfig):
    """Settings of :class:`KangarooHead`."""

    one_prediction = True
    needs_layers = True
    exit_layer: Positive = 2
    """Number of the base's first layers that draft. The paper uses 2 of 32 (7B) and 3 of 40 (13B)."""
    num_draft_tokens: DraftPositions = 6
    confidence_threshold: BelowOne = 0.6
    """Stop drafting after a draft less probable than this. Only for static trees with ``draft_sampling=top_k``. 0 turns
    it off. ``eval.confidence_threshold`` overrides this default, and ``eval.grid`` may replace it by a faster one."""

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        return (self.exit_layer,)

    def check_layers(self, num_layers: int) -> None:
        if self.exit_layer >= num_layers:
            raise UserError(f"head.exit_layer must be below the base's {num_layers} layers, got {self.exit_layer}")


class KangarooHead(DraftHead):
    """The adapter: one attention layer over the output of the base's layer ``exit_layer``."""

    config: KangarooConfig
    base: BaseModel

    def __init__(self, config: KangarooConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.confidence_threshold = config.confidence_threshold
        self.early_exit_layers = config.exit_layer
        self.input_layernorm = HeadRMSNorm(base)
        self.self_attn = HeadAttention(base)
        self.norm = HeadRMSNorm(base)
        self.projections = self.lm_heads(0)
        self.first_layers = first_layers(base, config.exit_layer)
        check_early_exit(base, self.first_layers)

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        # States that were not stored are NaN; zeros have no effect on values and gradients.
        x = base_hidden.layer(0).to(self.dtype).nan_to_num()
        return self.adapter(x, batch.position_ids, draft_targets.mask).flatten(0, 1)[draft_targets.last_read]

    def adapter(self, x: Tensor, positions: Tensor, mask: Mask, cache: TreeCache | None = None) -> Tensor:
        """Map outputs ``x`` [B, T, D] of the exit layer to inputs of the output head; see ``HeadAttention.forward``."""
        normed: Tensor = self.norm(x + self.self_attn(self.input_layernorm(x), positions, mask, cache))
        return normed

    def open(self, rows: int, cache: TreeCache | None = None) -> "KangarooSession":
        return KangarooSession(self, rows, cache)

    def cache_slots(self, draft_config: DraftConfig) -> int:
        # A tree that is chosen in each step may read nodes that it does not select.
        tree = draft_config.tree
        return tree.width * tree.depth + 1 if isinstance(tree, DynamicTree | CostTree) else 0


class KangarooSession(HeadSession):
    """A session that runs the base's first layers, the adapter and the base's output head for each tree level. The
    first layers write into the target's cache. Without one (replay, calibration), they have a cache of their own."""

    def __init__(self, head: KangarooHead, rows: int, target: TreeCache | None) -> None:
        adapter, shape = head.inference().adapter, head.self_attn.cache_shape(torch.float32, head.base.device)
        self.context = LayerCache(
            [lambda x, *rest: adapter(x.float(), *rest)], shape, rows, lambda base_hidden: base_hidden.layer(0)
        )
        first = head.first_layers
        self._exit = LMSession(head, first, rows, lambda x: x) if target is None else ExitStates(first, target)
        super().__init__(head, rows, self.context, self._exit)

    def start_levels(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        self._exit.start(last_token, draft_config)

    def level(self, k: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        states = self._exit.expand(tokens, parents)
        x = self.context.expand(states, parents) if k else self.context.start(states)
        return x, self.draft_logits(x, k)
