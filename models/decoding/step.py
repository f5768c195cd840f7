"""One speculative step of a batch (draft, verify, accept, commit), and the state of the rows between steps.

``loop.py`` runs steps to the end of the answers. The calls of a step that drafts with a head are::

    DecodeState.step
      StepwiseSession.draft    growth.py         a head's session is a HeadSession (heads/parts/head_session.py)
        start                  head_session.py   prepares the first level; a head that does not read its drafts (Medusa)
                                                 computes the logits of all levels here, by its ``all_inputs``
        grow                   growth.py         chooses the nodes of every level from the logits that it asks for by
          expand               head_session.py     the session's logits after a level: by the head's ``advance``, or
                                                   this level of the logits that ``start`` has computed
            attend             heads/eagle3.py     only heads that attend (EAGLE-3): by ``advance``, over the head's own
                                                   keys and values in a NodeCache (node_cache.py)
      BaseModel.verify_logits  base_model.py     the base's logits after all nodes, in one pass over the TreeCache
      greedy, or rule.verify   acceptance.py     accepts a path from the root, and adds the target's next token
      TreeCache.commit_path    kv_cache.py       keeps the keys and values of the path's nodes
      Session.commit           head_session.py   gives the session the path and the base's states after its nodes

Shape legend: B rows, T tokens, N tree nodes, V vocabulary, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, pad_rows
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.acceptance import Acceptance, AcceptanceRule, Target, greedy
from drafthead.models.decoding.candidates import root_only
from drafthead.models.decoding.cost_tree import CostTree, Pace
from drafthead.models.decoding.coupling import Coupling, Races
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, Proposal, Session, take_rows
from drafthead.models.decoding.random_source import DRAFT, VERIFY, PerRowRng, RandomSource
from drafthead.models.decoding.sampling import Contexts, TargetSampler
from drafthead.models.token_tree import TokenTree
from drafthead.system.devices import on_device, wide_dtype

ROOT_ONLY = DraftConfig(tree=TokenTree.chain(0))
KEPT = 32  # levels whose random numbers a single row keeps for the next step


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Settings of a decode step: drafting, sampling and acceptance."""

    draft_config: DraftConfig
    sampler: TargetSampler  # of the output
    rule: AcceptanceRule
    return_probs: bool = False  # ``Acceptance.probs``, for vertical cascades
    eos_ids: frozenset[int] = frozenset()  # nothing is committed after one of them
    with_entropy: bool = False  # measure ``StepRecord.entropy``
    timed: bool = False
    """Wait for the device after drafting and after verification, so that ``draft_s`` and ``verify_s`` are exact;
    ``total_s`` always is."""

    @property
    def greedy(self) -> bool:
        return self.sampler.plain_greedy and self.rule.name == "exact" and not self.return_probs

    @property
    def same_text(self) -> bool:
        """True if the answer equals that of decoding without drafts with the same seed, at any temperature. (With
        sampled drafts, the exact rule gives equal answers only at temperature 0.)"""
        return self.rule.name == "exact" and self.draft_config.draft_sampling is DraftSampling.TOP_K

    @property
    def coupled(self) -> bool:
        """True if drafts know the random numbers of the output."""
        return self.sampler.coupled and not self.sampler.greedy and self.same_text


@dataclass(frozen=True, kw_only=True)
class Step:
    """The result of one decode step, for all rows of a batch."""

    tokens: list[list[int]]  # to append to each row's answer: the accepted drafts, then the bonus
    records: list["StepRecord"]  # of each row, without ``total_s``
    proposal: Proposal
    acceptance: Acceptance
    logits: Tensor  # [B, N, V]: the base's, after every node of ``proposal``
    hidden: HiddenStates  # [B, 1 + depth, ...]: the base's, after the root and after the accepted drafts, then padding


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Numbers of one decode step of one sequence. Times are those of the whole batch, in seconds."""

    position: int  # tokens of the answer before the step
    rows: int = 1  # answers that the step continued, this one included
    proposed: int  # drafted nodes, without the root
    depth: int  # drafts on the longest path
    accepted: int  # drafts that the rule accepted; EOS or ``max_new_tokens`` may have cut some of them off afterwards
    committed: int  # tokens added to the answer: accepted drafts and the bonus, without those cut off
    expected: float = float("nan")  # tokens that a tree by cost expected to add; nan for other trees
    expected_s: float = float("nan")  # seconds that it expected of the step
    entropy: float = float("nan")  # in nats, of the target's first token, before temperature and top-p; or nan
    draft_s: float  # see ``DecodeConfig.timed``
    verify_s: float  # the base's pass over the tree
    total_s: float = 0.0  # the whole step, which also accepts, commits and records


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """One decoded answer with the records of its steps. Times in seconds."""

    tokens: list[int]  # of the answer; if EOS ended it, EOS is the last
    steps: list[StepRecord]
    prefill_s: float  # time to read the prompt, which gives the first token: it belongs to no step
    prefill_rows: int = 1  # prompts that were read in this time
    total_s: float
    text: str = ""  # the answer's text, from ``drafthead.generate``

    @property
    def mean_accepted_length(self) -> float:
        return mean_accepted_length(self.steps)

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.total_s


def mean_accepted_length(steps: Sequence[StepRecord]) -> float:
    """Return the mean number of tokens that ``steps`` added, the target's own included; 1 without steps."""
    return sum(step.committed for step in steps) / len(steps) if steps else 1.0


class DecodeState:
    """State of the rows being decoded: the base's cache, the drafter's session, and the last token of each row. The
    last token is committed, but the base and the drafter have not read it yet: it is the root of the next tree."""

    def __init__(
        self,
        base: BaseModel,
        drafter: Drafter | None,
        config: DecodeConfig,
        cache: TreeCache,
        session: Session | None,
        last_token: Tensor,
    ) -> None:
        """``cache`` and ``session`` have all tokens before ``last_token`` [B] int64."""
        self.base, self.drafter, self.config = base, drafter, config
        self.cache, self.session, self.last_token = cache, session, last_token
        self.spec = HiddenStatesSpec() if drafter is None else drafter.spec
        self._rows = list(range(len(last_token)))
        self._prefix: tuple[list[int], TreeCache, Tensor] | None = None
        self._pace = self._new_pace()
        self.races = Races() if config.coupled else None
        self._context: Tensor | None = None
        self._context_lengths = torch.zeros(len(last_token), dtype=torch.int64, device=base.device)

    @classmethod
    def empty(
        cls,
        base: BaseModel,
        drafter: Drafter | None,
        config: DecodeConfig,
        rows: int,
        capacity: int,
        nodes: int | None = None,
    ) -> "DecodeState":
        """Return a state of ``rows`` rows without tokens. ``capacity`` is the largest number of tokens in a row,
        including the nodes of one tree, of which there are up to ``nodes`` (None: those of the tree of ``config``)."""
        extra = 0 if drafter is None else drafter.cache_slots(config.draft_config)
        capacity, nodes = capacity + extra, (nodes or config.draft_config.nodes) + extra
        cache = base.new_cache(capacity, nodes, rows)
        last_token = torch.zeros(rows, dtype=torch.int64, device=base.device)
        session = None if drafter is None else drafter.open(rows, cache)
        decoding = cls(base, drafter, config, cache, session, last_token)
        if config.sampler.reads_context:
            decoding._context = torch.zeros(rows, capacity, dtype=torch.int64, device=base.device)
        return decoding

    def _new_pace(self) -> Pace:
        tree = self.config.draft_config.tree
        return Pace(tree.costs.prices(self.cache.rows).speedup if isinstance(tree, CostTree) else 1.0)

    def share_prefix(self, prompts: Sequence[list[int]]) -> None:
        """Run the base once over the common beginning of ``prompts``; ``read_prompts`` then copies its keys and values.
        It is shorter than every prompt, because each row must read a token itself. Only for decoding without a
        drafter."""
        if len(prompts) > 1 and (ids := list(commonprefix(prompts)[: min(map(len, prompts)) - 1])):
            cache = self.base.new_cache(len(ids))
            hidden = self.base.forward(torch.tensor([ids], device=self.base.device), cache).final
            self._prefix = ids, cache, hidden

    def read_prompts(
        self,
        prompts: list[list[int]],
        rng: RandomSource | None = None,
        first: Tensor | None = None,
        rows: list[int] | None = None,
    ) -> list[Tensor]:
        """Prefill the rows one by one, set each row's last token, and return the base's final states [T, D] of each
        prompt.

        ``rng`` draws the first answer tokens (None: greedy decoding) unless ``first`` [B] int64 has them already. The
        prompts replace the answers of ``rows``: a single one, or None for all.
        """
        rows = list(range(len(prompts))) if rows is None else rows
        if self.cache.rows == 1:  # an answer must not depend on the one before
            self._pace = self._new_pace()
        hidden_states = [self._prefill(row, ids) for row, ids in zip(rows, prompts, strict=True)]
        counts = torch.tensor([len(ids) for ids in prompts], device=self.base.device)
        tokens = pad_sequence([torch.tensor(ids, device=self.base.device) for ids in prompts], batch_first=True)
        if self._context is not None:
            # Padding repeats a token of the row, because a penalty depends only on the set of tokens.
            self._context[rows], self._context_lengths[rows] = tokens[:, :1], 0
            self._extend_contexts(tokens, counts, rows)
        if self.session is not None:
            self.session.reset(rows)
            lengths, size = dict(zip(rows, map(len, prompts), strict=True)), self.cache.rows
            # Rows that the prompts do not replace get no tokens: a single prompt's stand in as padding.
            hidden = pad_rows(hidden_states).map(lambda states: states.expand(size, -1, -1))
            self.session.commit(tokens.expand(size, -1), [lengths.get(row, 0) for row in range(size)], hidden)
        if first is None:
            logits = self.base.logits(torch.cat([states.final[:, -1] for states in hidden_states]))
            if self.config.sampler.plain_greedy:
                first = logits.argmax(-1)
            else:
                assert rng is not None
                probs = self.config.sampler.probs_after(logits, self._contexts(rows))
                first = rng.categorical(probs[:, None], offset=0)[:, 0]
        self.last_token = self.last_token.index_copy(0, torch.tensor(rows, device=first.device), first)
        self._extend_contexts(first[:, None], torch.ones_like(counts), rows)
        return [states.final[0] for states in hidden_states]

    def _prefill(self, row: int, ids: list[int]) -> HiddenStates:
        cache, start = self.cache.row(row), 0
        cache.crop([0])
        if self._prefix is not None and ids[: len(self._prefix[0])] == self._prefix[0]:
            start = len(self._prefix[0])
            cache.append(self._prefix[1])
        hidden = self.base.forward(torch.tensor([ids[start:]], device=self.base.device), cache, spec=self.spec)
        if start and self._prefix is not None:
            hidden = HiddenStates(final=torch.cat([self._prefix[2], hidden.final], 1))
        return hidden

    def _contexts(self, rows: list[int]) -> Contexts | None:
        if self._context is None:
            return None
        lengths = take_rows(self._context_lengths, rows)
        return Contexts(take_rows(self._context, rows), lengths, [self._rows[row] for row in rows])

    def step(
        self, seeds: list[int], positions: list[int], depth: int | None = None, most_tokens: list[int] | None = None
    ) -> Step:
        """Draft, verify, accept and commit for all rows. ``seeds`` and ``positions`` (tokens in each row's answer)
        decide the random numbers. ``depth`` and ``most_tokens`` limit the levels to draft, and the tokens to commit in
        each row; None: no limit."""
        started = perf_counter()
        if self.races is not None:
            self.races.forget(KEPT if len(seeds) == 1 else 0)
        proposal = self._draft(seeds, positions, depth)
        drafted = self._time()
        tree = proposal.tokens, proposal.shape
        hidden, logits = self.base.verify_logits(*tree, self.cache, self.spec, proposal.partial_forward)
        choices = logits.argmax(-1) if self.config.greedy else None
        verified = self._time()
        acceptance = self._accept(proposal, logits, choices, seeds, positions)
        path, tokens = _path(proposal, acceptance)
        counts = self._truncated(tokens, acceptance.accepted + 1, most_tokens)
        numbers = {"committed": counts, "accepted": acceptance.accepted, **_sizes(proposal)}  # [B] each
        if self.config.with_entropy:
            numbers["entropy"] = _entropy(logits[:, 0].float())
        hidden = hidden.map(lambda h: h.gather(1, acceptance.nodes[..., None].expand(-1, -1, h.shape[-1])))
        records, answers = _on_host(numbers, tokens)
        self._commit(acceptance.nodes, path, hidden, [len(answer) for answer in answers])
        if (forecast := proposal.forecast) is not None:
            self._pace.count(sum(map(len, answers)), forecast.cost)
            for expected, record in zip(forecast.tokens, records, strict=True):
                record |= {"expected": expected, "expected_s": forecast.seconds}
        self._extend_contexts(tokens, counts)
        self.last_token = tokens.gather(1, counts[:, None] - 1)[:, 0]
        return Step(
            tokens=answers,
            records=[
                StepRecord(position=position, draft_s=drafted - started, verify_s=verified - drafted, **record)
                for position, record in zip(positions, records, strict=True)
            ],
            proposal=proposal,
            acceptance=acceptance,
            logits=logits,
            hidden=hidden,
        )

    def _draft(self, seeds: list[int], positions: list[int], depth: int | None) -> Proposal:
        config = self.config.draft_config if depth is None else self.config.draft_config.truncate(depth)
        if self.session is None or config.depth == 0:
            return root_only(self.last_token)
        if isinstance(config.tree, CostTree):
            config = replace(config, speedup=self._pace.speedup)
        if self.races is not None:
            draws = PerRowRng(seeds, positions, VERIFY, self.base.device, self.races)
            known, sampler = partial(draws.exponentials, self.base.vocab_size), self.config.sampler
            config = replace(config, coupling=Coupling(known, sampler.warp, sampler.temperature))
        is_sampled = config.draft_sampling is not DraftSampling.TOP_K
        rng = PerRowRng(seeds, positions, DRAFT, self.base.device) if is_sampled else None
        return self.session.draft(self.last_token, config, rng)

    def _accept(
        self, proposal: Proposal, logits: Tensor, choices: Tensor | None, seeds: list[int], positions: list[int]
    ) -> Acceptance:
        # ``choices`` [B, N] are the target's argmax if decoding is greedy.
        if choices is not None:
            return greedy(proposal, choices)
        target = target_probs(logits, self.config.sampler, self._contexts(list(range(len(seeds)))), proposal)
        rng = PerRowRng(seeds, positions, VERIFY, self.base.device, self.races)
        return self.config.rule.verify(proposal, target, rng, return_probs=self.config.return_probs)

    def _commit(self, nodes: Tensor, path: Tensor, hidden: HiddenStates, counts: list[int]) -> None:
        self.cache.commit_path(nodes, counts)
        if self.session is not None:
            self.session.commit(path, counts, hidden, nodes)

    def _time(self) -> float:
        if self.config.timed:
            self.base.synchronise()
        return perf_counter()

    def _truncated(self, tokens: Tensor, counts: Tensor, most_tokens: list[int] | None) -> Tensor:
        """Return ``counts`` [B] of tokens to commit, cut to ``most_tokens`` and the first EOS."""
        if most_tokens is not None:
            counts = counts.clamp(max=on_device(most_tokens, counts.device))
        if self.config.eos_ids and tokens.shape[1] > 1:
            eos = torch.zeros_like(tokens, dtype=torch.bool)
            for token in self.config.eos_ids:
                eos |= tokens == token
            first = torch.where(eos.any(1), eos.int().argmax(1) + 1, tokens.shape[1])
            counts = torch.minimum(counts, first)
        return counts

    def _extend_contexts(self, tokens: Tensor, counts: Tensor, rows: list[int] | None = None) -> None:
        """Append each row's first ``counts`` of ``tokens`` [B, T] to the contexts of ``rows`` (None: all)."""
        if self._context is None:
            return
        index = on_device(range(len(self._context_lengths)) if rows is None else rows, tokens.device)
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        # Beyond a row's count, its last token is repeated, because a penalty depends only on the set of tokens.
        padded = tokens.gather(1, torch.minimum(offsets.expand_as(tokens), counts[:, None] - 1))
        self._context[index[:, None], self._context_lengths[index][:, None] + offsets] = padded
        self._context_lengths = self._context_lengths.index_add(0, index, counts)

    def clear(self, rows: list[int]) -> None:
        """Empty the cache of ended ``rows``, because steps still add tokens to it; keep a batch of one row."""
        if self.cache.rows > 1 and rows:
            self.cache.crop([0 if n in rows else length for n, length in enumerate(self.cache.lengths)])
            # 1, because a penalty writes the drafts of a context behind its last token.
            self._context_lengths.index_fill_(0, on_device(rows, self._context_lengths.device), 1)

    def select(self, rows: list[int]) -> None:
        self.cache.select(rows)
        if self.session is not None:
            self.session.select(rows)
        self.last_token = take_rows(self.last_token, rows)
        self._context = None if self._context is None else take_rows(self._context, rows)
        self._context_lengths = take_rows(self._context_lengths, rows)
        self._rows = [self._rows[row] for row in rows]


def target_probs(logits: Tensor, sampler: TargetSampler, contexts: Contexts | None, proposal: Proposal) -> Target:
    """Return a function that maps nodes [B, M] to the target's distributions after them, [B, M, V]. ``logits`` [B, N,
    V] are those after all nodes. ``contexts`` has the tokens up to the roots, included."""
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]

    def after(nodes: Tensor) -> Tensor:
        node_logits = logits[rows, nodes]
        longer = None if contexts is None else _with_paths(contexts, proposal, nodes)
        return sampler.probs_after(node_logits.flatten(0, 1), longer).view(node_logits.shape)

    return after


def _with_paths(contexts: Contexts, proposal: Proposal, nodes: Tensor) -> Contexts:
    """Return the contexts of ``nodes`` [B, M], as B * M rows: a row of ``contexts``, which ends with the root, followed
    by the drafts on the path to the node."""
    shape, roots = proposal.shape, proposal.tokens[:, :1, None]
    (batch, per_row), rows = nodes.shape, torch.arange(len(nodes), device=nodes.device)[:, None]
    on_path = shape.ancestors.expand(batch, -1, -1)[rows, nodes]
    depths = shape.depths.expand(batch, -1)
    # A node of depth d is written d positions after the root. Nodes off the path write the root's token over the root.
    positions = contexts.lengths[:, None, None] - 1 + torch.where(on_path, depths[:, None], 0)
    path = torch.where(on_path, proposal.tokens[:, None], roots)
    before = contexts.tokens[:, None].expand(-1, per_row, -1)
    tokens = torch.cat([before, roots.expand(-1, per_row, shape.depth)], 2).scatter(2, positions, path)
    lengths = contexts.lengths[:, None] + depths.gather(1, nodes)
    return Contexts(tokens.flatten(0, 1), lengths.flatten(), [row for row in contexts.rows for _ in range(per_row)])


def _path(proposal: Proposal, acceptance: Acceptance) -> tuple[Tensor, Tensor]:
    """Return the tokens of the accepted nodes, and the tokens to append to the answers, [B, P] each.

    The base read the root in this step, but the root was committed in the step before. The bonus is committed in this
    step, but will be read in the next. With two accepted drafts x1 and x2::

        path    root  x1  x2     (pad)    nodes whose keys, values and states are committed
        tokens  x1    x2  bonus  (pad)    tokens that are appended to the answer
    """
    path = proposal.tokens.gather(1, acceptance.nodes)
    tokens = torch.cat([path[:, 1:], path[:, :1]], 1)  # the last column only makes room for the bonus
    return path, tokens.scatter_(1, acceptance.accepted[:, None], acceptance.bonus[:, None])


def _entropy(scores: Tensor) -> Tensor:  # [B, V] logits -> [B] nats
    # Not by softmax, which a CPU computes with one thread per row.
    below = scores - scores.max(-1, keepdim=True).values
    weights = below.exp()
    total = weights.sum(-1)
    entropy: Tensor = total.log() - torch.linalg.vecdot(weights, below) / total
    return entropy


def _on_host(numbers: dict[str, Tensor], tokens: Tensor) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return each row's ``numbers`` and committed tokens on the host: the step's only wait."""
    wide = wide_dtype(tokens.device)
    columns = [number.to(wide)[:, None] for number in numbers.values()]
    records, answers = [], []
    for row in torch.cat([*columns, tokens.to(wide)], 1).tolist():
        record = {name: n if name == "entropy" else int(n) for name, n in zip(numbers, row, strict=False)}
        records.append(record)
        answers.append([int(token) for token in row[len(numbers) :][: record["committed"]]])
    return records, answers


def _sizes(proposal: Proposal) -> dict[str, Tensor]:
    """Return each row's number of drafted nodes, and of drafts on the longest path, [B]."""
    shape, roots = proposal.shape, proposal.tokens[:, 0]
    if shape.tree is not None:
        return {"proposed": torch.full_like(roots, len(shape) - 1), "depth": torch.full_like(roots, shape.tree.depth)}
    drafted, deepest = (shape.parents >= 0).sum(1), shape.depths.max(1).values
    return {"proposed": drafted.expand(len(roots)), "depth": deepest.expand(len(roots))}
