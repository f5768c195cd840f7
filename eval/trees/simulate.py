"""Acceptance simulated along finished answers: the base reads each answer once, the drafter drafts at every position.
Shape legend: B answers at a time, K draft positions, S candidates, n positions, W draft vocabulary, V vocabulary. T:
tokens in hidden states, start positions in acceptance probabilities. D: hidden size; in [T, D+1], tree depth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafthead.data.answers.store import Answer
from drafthead.data.batch import HiddenStates, TrainBatch, pad_rows
from drafthead.data.intervals import Floats
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, Proposal, Session
from drafthead.models.decoding.growth import StepwiseDrafter, StepwiseSession
from drafthead.models.decoding.loop import EXACT
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.simulation.acceptance import (
    AcceptProbs,
    LengthProbs,
    SimulatedAcceptance,
    block_accept_probs,
    candidate_accept_probs,
    simulate_acceptance,
    simulate_steps,
    top_k_accept_probs,
    trials_in_order,
)
from drafthead.models.simulation.ranks import Ranks, answer_ranks
from drafthead.models.token_tree import TokenTree
from drafthead.system.devices import wide

NEAR_TIES, IMPOSSIBLE_SHARE, Z_LIMIT, NATS_LIMIT = 2, 0.02, 6.0, 0.1
"""Limits of ``_check_likelihood``. Answers are rejected if more than NEAR_TIES + IMPOSSIBLE_SHARE * tokens have
probability 0, or if their mean surprisal deviates by more than Z_LIMIT standard errors and NATS_LIMIT nats. A few
impossible tokens are rounding: a pass of another shape may swap two nearly equal logits, above all in 16 bits."""
MAX_VALUES = 1 << 23  # probabilities in one tensor, to bound the memory (8 bytes each in float64)


def positions(
    drafter: Drafter, texts: list[Answer], base_hidden: list[HiddenStates], device: torch.device
) -> Iterator[tuple[list[int], Session, Tensor, int]]:
    """Walk through all answers at once: yield (rows, session, tokens, t) for each position t where a step may start.
    ``rows`` are the answers that have such a position, ``tokens`` [len(rows)] their answer tokens t. ``session`` has
    committed everything before these tokens. Example: of two answers with 5 and 3 tokens, t = 0 and 1 yield rows [0,
    1]; t = 2 and 3 yield row [0]."""
    prompts = pad_sequence([torch.tensor(text.ids[: text.boundary], device=device) for text in texts], batch_first=True)
    prompt_hidden = pad_rows([hidden.span(0, text.boundary) for hidden, text in zip(base_hidden, texts, strict=True)])
    session = drafter.open(len(texts))
    session.commit(prompts, [text.boundary for text in texts], prompt_hidden)
    rows = list(range(len(texts)))
    for t in range(max(text.positions for text in texts)):
        unfinished = [i for i, row in enumerate(rows) if t < texts[row].positions]
        if len(unfinished) < len(rows):
            rows = [rows[i] for i in unfinished]
            session.select(unfinished)
        last = torch.tensor([texts[row].ids[texts[row].boundary + t] for row in rows], device=device)
        yield rows, session, last, t
        now = pad_rows([base_hidden[row].span(texts[row].boundary + t, 1) for row in rows])
        session.commit(last[:, None], [1] * len(rows), now)


def read_hidden_states(base: BaseModel, drafter: Drafter, text: Answer) -> HiddenStates:
    """Return the base's hidden states [1, T, D] that the drafter reads: the stored ones if they suffice."""
    if text.hidden_states is None or drafter.spec.layers:
        return base.hidden_states(TrainBatch.of([text.ids], text.boundary), drafter.spec)
    stored = torch.from_numpy(text.hidden_states).to(base.device, base.dtype)
    return HiddenStates(final=F.pad(stored, (0, 0, 0, 1))[None])  # nothing is drafted after the last token


def text_ranks(head: DraftHead, texts: Sequence[Answer]) -> list[Ranks]:
    """Return per answer the ranks [T, K] of its tokens among the head's candidates; answers of one token have none."""
    ranks = []
    for text in texts:
        base_hidden = read_hidden_states(head.base_model, head, text)
        ranks += answer_ranks(head, TrainBatch.of([text.ids], text.boundary).to(head.base.device), base_hidden)
    return ranks


@dataclass(frozen=True, kw_only=True)
class AcceptProbsConfig:
    """Settings of :func:`text_accept_probs`, whose result holds for all static trees within ``depth`` and ``width``."""

    draft_sampling: DraftSampling = DraftSampling.TOP_K
    sampler: Sampler = Sampler(temperature=1.0)  # of the drafts; not used by top-k drafting
    depth: int | None = None  # number of draft positions; None: all of the drafter
    width: int = 10  # number of candidates of each node
    rule: AcceptanceRule = EXACT  # must be lossless
    seed: int = 0  # of the draws that sampling without replacement needs


def simulate_texts(
    base: BaseModel,
    drafter: Drafter,
    texts: Sequence[Answer],
    draft_config: DraftConfig,
    sampler: Sampler,
    rule: AcceptanceRule = EXACT,
    seed: int = 0,
    in_order: bool = False,
) -> SimulatedAcceptance:
    """Return the acceptance that decoding these answers with ``drafter`` and ``draft_config`` would have. The answers
    must be the base's own under ``sampler``, and the rule must be lossless. Sampled drafts need a ``StepwiseDrafter``.
    With ``in_order`` (top-k drafts only) a drafter with a memory knows all earlier answers."""
    draft_config = draft_config.truncate(drafter.depth)
    rule.check(draft_config)
    if not rule.lossless:
        raise UserError(f"answers of the lossy rule {rule.name!r} depend on the drafts; use drafthead eval")
    if draft_config.draft_sampling is DraftSampling.TOP_K:
        answers, sizes, costs = _drafted_length_probs(base, drafter, texts, draft_config, sampler, in_order)
        return simulate_steps(answers, seed, sizes, costs)
    tree = draft_config.tree
    if not isinstance(tree, TokenTree):
        raise UserError("sampled drafts in a tree by cost are not simulated; use draft_sampling=top_k")
    config = AcceptProbsConfig(
        draft_sampling=draft_config.draft_sampling,
        sampler=draft_config.sampler,
        depth=draft_config.depth,
        width=max(tree.parents.count(n) for n in range(len(tree))),
        rule=rule,
        seed=seed,
    )
    return simulate_acceptance(text_accept_probs(base, drafter, texts, sampler, config), trials_in_order(tree), seed)


@torch.inference_mode()
def text_accept_probs(
    base: BaseModel, drafter: Drafter, texts: Sequence[Answer], sampler: Sampler, config: AcceptProbsConfig
) -> list[AcceptProbs]:
    """Return per answer the acceptance probabilities [T, K, S] from which any static tree can be simulated. Values are
    NaN beyond the answer's end. Answers of one token are left out. If siblings are sampled, pass a tree through
    ``trials_in_order`` before its simulation."""
    if not isinstance(drafter, StepwiseDrafter):
        raise UserError(f"{type(drafter).__name__} drafts without distributions; use draft_sampling=top_k")
    depth = min(config.depth or drafter.depth, drafter.depth)
    generator = torch.Generator(base.device).manual_seed(config.seed)
    accept_probs: list[AcceptProbs] = []
    for batch, base_hidden in batches(base, drafter, texts, sampler, MAX_VALUES // (depth * base.vocab_size)):
        tables = [np.full((text.positions, depth, config.width), np.nan) for text in batch]
        for rows, session, last, t in positions(drafter, batch, base_hidden, base.device):
            assert isinstance(session, StepwiseSession)
            logits = forced_logits(session, last, [batch[row] for row in rows], t, depth)
            # Index in the answer of every draft position k (0-based), as far as the answer goes.
            targets = [(i, k, batch[row].boundary + t + 1 + k) for i, row in enumerate(rows) for k in range(depth)]
            targets = [(i, k, at) for i, k, at in targets if at < len(batch[rows[i]].ids)]
            draft = torch.stack([logits[k][i] for i, k, _ in targets])
            tokens = torch.tensor([batch[rows[i]].ids[at] for i, _, at in targets], device=base.device)
            lengths = [min(depth, batch[row].positions - t) for row in rows]
            if config.draft_sampling is DraftSampling.TOP_K:
                probs = top_k_accept_probs(draft, tokens, session.d2t, config.width)
            else:
                hidden = torch.stack([base_hidden[rows[i]].final[0, at - 1] for i, _, at in targets])
                p = _target_probs(base, hidden, [batch[rows[i]].ids[:at] for i, _, at in targets], sampler)
                q = config.sampler.probs(draft)
                q = torch.zeros_like(p).index_copy_(1, session.d2t, q)
                if config.rule.name == "block":
                    on_text = torch.stack([x.gather(1, tokens[:, None])[:, 0] for x in (p, q)])
                    chains = torch.split(on_text, lengths, dim=1)
                    probs = torch.cat([block_accept_probs(a[None], b[None])[0] for a, b in chains])[:, None]
                else:
                    probs = candidate_accept_probs(p, q, tokens, config.draft_sampling, config.width, generator)
            for row, values in zip(rows, torch.split(probs.cpu(), lengths), strict=True):
                tables[row][t, : len(values)] = values
        accept_probs += tables
    return accept_probs


def forced_logits(session: Session, last: Tensor, texts: Sequence[Answer], t: int, depth: int) -> list[Tensor]:
    """Return the drafter's logits [B, draft vocabulary] at each of ``depth`` draft positions after answer token ``t``.
    ``last`` [B] are these tokens. Instead of its own drafts, the drafter reads the next tokens of the answers."""
    assert isinstance(session, StepwiseSession)
    session.start(last, DraftConfig(tree=TokenTree.chain(depth)))
    logits, tokens = [], last[:, None]
    for k in range(1, depth + 1):
        logits.append(session.expand(tokens, torch.zeros_like(tokens))[:, 0].float())
        # After the end any token will do, because nothing reads what follows.
        ids = [text.ids[min(text.boundary + t + k, len(text.ids) - 1)] for text in texts]
        tokens = torch.tensor(ids, device=last.device)[:, None]
    return logits


@torch.inference_mode()
def _drafted_length_probs(
    base: BaseModel,
    drafter: Drafter,
    texts: Sequence[Answer],
    draft_config: DraftConfig,
    sampler: Sampler,
    in_order: bool,
) -> tuple[list[LengthProbs], list[Floats], list[Floats] | None]:
    """Draft at every position of each answer; return numbers of accepted drafts (one-hot [T, D+1]) and of nodes [T].
    Trees by cost also have the times of steps, in tokens of plain decoding [T]. A top-k draft is accepted exactly if it
    is the answer's next token."""
    length_probs, sizes, costs = list[LengthProbs](), list[Floats](), list[Floats]()
    one_by_one = in_order or isinstance(draft_config.tree, CostTree)  # whose rows would share the price of time
    at_a_time = 1 if one_by_one else MAX_VALUES // (draft_config.depth * base.vocab_size + 1)
    for batch, base_hidden in batches(base, drafter, texts, sampler, at_a_time):
        accepted = [np.zeros(text.positions, dtype=np.int64) for text in batch]
        nodes, times = ([np.ones(text.positions) for text in batch] for _ in range(2))
        for rows, session, last, t in positions(drafter, batch, base_hidden, base.device):
            proposal = session.draft(last, draft_config)
            counts = matching_drafts(proposal, [batch[row] for row in rows], t)
            for row, count in zip(rows, counts.tolist(), strict=True):
                accepted[row][t], nodes[row][t] = count, len(proposal.shape)
                if proposal.forecast is not None:
                    times[row][t] = proposal.forecast.cost
        sizes, costs = [*sizes, *nodes], [*costs, *times]
        length_probs += [np.eye(int(a.max()) + 1)[a] for a in accepted]
        for text in batch if in_order else ():
            drafter.remember(text.ids)
    return length_probs, sizes, costs if isinstance(draft_config.tree, CostTree) else None


def matching_drafts(proposal: Proposal, texts: list[Answer], t: int) -> Tensor:
    """Return the length [B] of the longest drafted path that agrees with each answer after its token ``t`` (from 0)."""
    tokens, depths = proposal.tokens, proposal.shape.depths.expand_as(proposal.tokens)
    ahead = int(depths.max()) + 1
    starts = [text.boundary + t for text in texts]
    following = [torch.tensor(text.ids[start : start + ahead]) for text, start in zip(texts, starts, strict=True)]
    expected = F.pad(pad_sequence(following, batch_first=True, padding_value=-1), (0, ahead), value=-1)
    wrong = tokens != expected.to(tokens.device).gather(1, depths)
    wrong[:, 1:] |= proposal.shape.parents.expand_as(tokens)[:, 1:] < 0  # padding
    # A node fails if it or any ancestor differs from the answer. Example: if the answer goes x y, path x z counts 1.
    failed = (proposal.shape.ancestors.expand(len(texts), -1, -1) & wrong[:, None, :]).any(-1)
    return torch.where(failed, 0, depths).amax(1)


def batches(
    base: BaseModel, drafter: Drafter, texts: Sequence[Answer], sampler: Sampler, size: int
) -> Iterator[tuple[list[Answer], list[HiddenStates]]]:
    """Yield batches of answers with their hidden states, without answers of one token; reject another model's."""
    with_steps = [text for text in texts if text.positions]
    if not with_steps:
        raise UserError("no text has two answer tokens, so there is no step to simulate; give longer answers")
    size, sums = max(1, size), torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(with_steps), size):
        batch = with_steps[start : start + size]
        base_hidden = [read_hidden_states(base, drafter, text) for text in batch]
        sums += _surprisal_sums(base, batch, base_hidden, sampler)
        yield batch, base_hidden
    _check_likelihood(sums, sampler)


def _target_probs(base: BaseModel, hidden: Tensor, contexts: list[list[int]], sampler: Sampler) -> Tensor:
    """Return the base's next-token probabilities [positions, V]; ``contexts`` are the ids so far, for penalties."""
    logits = base.logits(hidden)
    if not sampler.reads_context:
        return sampler.probs(logits)
    rows = zip(logits, contexts, strict=True)
    return torch.cat([sampler.probs(row[None], torch.tensor([ids], device=row.device)) for row, ids in rows])


def _surprisal_sums(
    base: BaseModel, texts: Sequence[Answer], base_hidden: list[HiddenStates], sampler: Sampler
) -> Tensor:
    """Return sums over the answers' tokens, [4] float64, by which ``_check_likelihood`` judges the answers. They are
    the tokens, the impossible ones (probability 0), and over the possible ones surprisal minus entropy, and the
    surprisal's variance."""
    size, sums = max(1, MAX_VALUES // base.vocab_size), torch.zeros(4, dtype=torch.float64)
    for text, states in zip(texts, base_hidden, strict=True):
        for start in range(text.boundary, len(text.ids), size):
            span = range(start, min(start + size, len(text.ids)))
            hidden = states.final[0, span.start - 1 : span.stop - 1]
            probs = wide(_target_probs(base, hidden, [text.ids[:at] for at in span], sampler))
            tokens = torch.tensor([[text.ids[at]] for at in span], device=base.device)
            surprisal = -probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
            possible = probs.gather(1, tokens)[:, 0] > 0
            mean = (probs * surprisal).sum(-1)
            variance = (probs * (surprisal - mean[:, None]) ** 2).sum(-1)
            excess = surprisal.gather(1, tokens)[:, 0] - mean
            counted = [possible.new_ones(len(tokens)), ~possible, excess * possible, variance * possible]
            sums += torch.stack([wide(each).sum() for each in counted]).cpu()
    return sums


def _check_likelihood(sums: Tensor, sampler: Sampler) -> None:
    """Reject answers that ``sampler`` is very unlikely to have drawn from the base, by their ``_surprisal_sums``."""
    tokens, impossible, excess, variance = sums.tolist()
    off, z = excess / max(1, tokens), abs(excess) / max(variance, 1e-12) ** 0.5
    if impossible > NEAR_TIES + IMPOSSIBLE_SHARE * tokens or (z > Z_LIMIT and abs(off) > NATS_LIMIT):
        raise UserError(
            f"the answers are not samples of the target at {sampler}: {impossible:.0f} of {tokens:.0f} tokens have "
            f"probability 0, and the mean surprisal of the others is {off:+.2f} nats from the target's entropy; "
            "simulate with the sampler that made the answers"
        )
