"""Acceptance simulated along finished answers: the base reads each answer once, the drafter drafts at every position.

Shape legend: B answers at a time, K draft positions, S candidates, n positions, W draft vocabulary, V vocabulary. T:
tokens in hidden states, start positions of steps in acceptance probabilities. D: hidden size; in [T, D+1], tree depth.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.store import open_answers
from drafthead.data.batch import FinishedAnswer, HiddenStates, TrainBatch, pad_rows
from drafthead.data.intervals import Floats
from drafthead.data.prompts.prompt import conversation_ids
from drafthead.data.prompts.suites import load_suite
from drafthead.data.text.readers import json_object, read_lines
from drafthead.errors import UserError
from drafthead.files.local import make_folder
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.corpus import generate_answers
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

MAX_VALUES = 1 << 23
"""Largest number of probabilities in one tensor, to bound the memory (8 bytes each in float64)."""
NEAR_TIES, IMPOSSIBLE_SHARE, Z_LIMIT, NATS_LIMIT = 2, 0.02, 6.0, 0.1
"""Limits of ``check_likelihood``. Answers are rejected if more than NEAR_TIES + IMPOSSIBLE_SHARE * tokens have
probability 0, or if their mean surprisal deviates by more than Z_LIMIT standard errors and NATS_LIMIT nats. A few
impossible tokens are rounding: a forward pass of another shape may swap two nearly equal logits, above all in 16 bits.
"""
BATCH_SIZE = 32


def base_answers(
    base: BaseModel,
    *,
    suite: str,
    limit: int | None,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    tasks: Sequence[str] | None = None,
    split: str = "all",
    keep_hidden_states: bool = False,
) -> list[FinishedAnswer]:
    """Let the base answer ``limit`` prompts (None: all) of a suite; return its answers in order of prompt and turn.

    ``split`` is the half of the suite: "dev", "test", or "all" for both. ``tasks`` None means all tasks. Later turns
    follow the base's earlier answers. A conversation ends before a turn that is too long for the base's context. If
    nothing can be answered, a ``UserError`` is raised.
    """
    sampler = SamplerConfig(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    prompts = load_suite(suite, limit, seed, tasks, split)
    answers_of: dict[int, list[FinishedAnswer]] = {prompt.number: [] for prompt in prompts}
    for turn in range(max(prompt.turns for prompt in prompts)):
        asked = []
        for prompt in prompts:
            before = [text.ids[text.boundary :] for text in answers_of[prompt.number]]
            if len(before) == turn < prompt.turns:
                ids = conversation_ids(base.tokenizer, prompt, before, base.config.chat_template_kwargs)
                if len(ids) <= base.max_context - max_new_tokens:
                    asked.append((prompt.number, ids))
        if not asked:
            break
        limits = {"batch_size": BATCH_SIZE, "max_prompt_tokens": max(len(ids) for _, ids in asked)}
        for answer in generate_answers(base, asked, sampler, **limits, keep_hidden_states=keep_hidden_states):
            final = None if answer.hidden_states is None else torch.from_numpy(answer.hidden_states)
            finished = FinishedAnswer(answer.input_ids.tolist(), answer.boundary, final)
            answers_of[answer.prompt_number].append(finished)
    texts = [text for _, answers in sorted(answers_of.items()) for text in answers]
    if not texts:
        raise UserError(
            f"no prompt of {suite} leaves {max_new_tokens} tokens free in a context of {base.max_context}; lower "
            "max_new_tokens"
        )
    return texts


def write_texts(path: Path, texts: Sequence[FinishedAnswer]) -> None:
    """Write a JSONL file with a line {"ids": [...], "boundary": n} per answer; hidden states are not written."""
    try:
        path.write_text("".join(json.dumps({"ids": t.ids, "boundary": t.boundary}) + "\n" for t in texts))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another file (save=...)") from None


def check_writable(path: Path) -> None:
    """Reject a path to which ``write_texts`` could not write, before the base answers; create its folder."""
    if path.is_dir():
        raise UserError(f"save={path} is a folder; name a file in it, say {path / 'texts.jsonl'}")
    make_folder(path.parent, "save")


def read_texts(path: Path, limit: int | None = None) -> list[FinishedAnswer]:
    """Read the first ``limit`` answers (None: all) from a file of ``write_texts`` or from the folder of a corpus."""
    if path.is_dir():
        answers = open_answers(path).read(with_hidden_states=False)
        return [FinishedAnswer(a.input_ids.tolist(), a.boundary) for a in islice(answers, limit)]
    texts = []
    for line, content in read_lines(path):
        try:
            row = json_object(content)
            text = FinishedAnswer([int(i) for i in row["ids"]], int(row["boundary"]))
            if not 1 <= text.boundary < len(text.ids):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            expected = '{"ids": [...], "boundary": n} with n in [1, number of ids)'
            raise UserError(f"{path} {line} is not an answer; it needs {expected}") from None
        texts.append(text)
    if not texts:
        raise UserError(f"{path} is empty; give the file that save=FILE wrote")
    return texts[:limit]


def positions(
    drafter: Drafter, texts: list[FinishedAnswer], base_hidden: list[HiddenStates], device: torch.device
) -> Iterator[tuple[list[int], Session, Tensor, int]]:
    """Walk through all answers at once: yield (rows, session, tokens, t) for each position t where a step may start.

    ``rows`` are the indices of the answers that have such a position, ``tokens`` [len(rows)] their answer tokens t
    (from 0). ``session`` is the drafter's, always the same object; it has committed everything before these tokens, and
    commits them when the loop continues. Example: of two answers with 5 and 3 tokens, t = 0 and 1 yield rows [0, 1];
    t = 2 and 3 yield row [0].
    """
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


def read_hidden_states(base: BaseModel, drafter: Drafter, text: FinishedAnswer) -> HiddenStates:
    """Return the base's hidden states [1, T, D] at all T ids of ``text``, of all layers that the drafter reads.

    Stored ones are used if the drafter reads only final hidden states. Otherwise the base reads the answer again.
    """
    if text.final is None or drafter.spec.layers:
        return base.hidden_states(TrainBatch.of([text.ids], text.boundary).to(base.device), drafter.spec)
    stored = text.final.to(base.device, base.dtype)
    return HiddenStates(final=F.pad(stored, (0, 0, 0, 1))[None])  # nothing is drafted after the last token


def text_ranks(head: DraftHead, texts: Sequence[FinishedAnswer]) -> list[Ranks]:
    """Return per answer the ranks [T, K], from 0, of its tokens among the head's candidates (``answer_ranks``).

    Answers of one token, in which no step starts, are left out.
    """
    ranks = []
    for text in texts:
        base_hidden = read_hidden_states(head.base_model, head, text)
        ranks += answer_ranks(head, TrainBatch.of([text.ids], text.boundary).to(head.base.device), base_hidden)
    return ranks


def _target_probs(base: BaseModel, hidden: Tensor, contexts: list[list[int]], sampler: Sampler) -> Tensor:
    """Return the base's next-token probabilities [positions, V] with the settings of ``sampler``.

    ``hidden`` [positions, D] are the base's final hidden states. ``contexts`` are the token ids up to each, for
    penalties.
    """
    logits = base.logits(hidden)
    if not sampler.reads_context:
        return sampler.probs(logits)
    rows = zip(logits, contexts, strict=True)
    return torch.cat([sampler.probs(row[None], torch.tensor([ids], device=row.device)) for row, ids in rows])


def surprisal_sums(
    base: BaseModel, texts: Sequence[FinishedAnswer], base_hidden: list[HiddenStates], sampler: Sampler
) -> Tensor:
    """Return sums over the answers' tokens, [4] float64, by which :func:`check_likelihood` judges the answers.

    They are the number of tokens, the number of impossible tokens (probability 0), and over the possible tokens the sum
    of surprisal minus entropy and the sum of the surprisal's variance.
    """
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


def check_likelihood(sums: Tensor, sampler: Sampler) -> None:
    """Reject answers that ``sampler`` is very unlikely to have drawn from the base, by their ``surprisal_sums``."""
    tokens, impossible, excess, variance = sums.tolist()
    off, z = excess / max(1, tokens), abs(excess) / max(variance, 1e-12) ** 0.5
    if impossible > NEAR_TIES + IMPOSSIBLE_SHARE * tokens or (z > Z_LIMIT and abs(off) > NATS_LIMIT):
        raise UserError(
            f"the answers are not samples of the target at {sampler}: {impossible:.0f} of {tokens:.0f} "
            f"tokens have probability 0, and the mean surprisal of the other tokens is {off:+.2f} nats from the "
            "target's entropy. Simulate with the sampler that made the answers, or on answers that this sampler made"
        )


@dataclass(frozen=True, kw_only=True)
class AcceptProbsConfig:
    """Settings of :func:`text_accept_probs`, whose result holds for all static trees within ``depth`` and ``width``."""

    draft_sampling: DraftSampling = DraftSampling.TOP_K
    sampler: Sampler = Sampler(temperature=1.0)
    """Sampler of the drafts (temperature and so on); not used by ``DraftSampling.TOP_K``."""
    depth: int | None = None
    """Number of draft positions; None: all of the drafter."""
    width: int = 10
    """Number of candidates of each node."""
    rule: AcceptanceRule = EXACT
    """Acceptance rule. It must be lossless."""
    seed: int = 0
    """Seed of the draws that sampling without replacement needs."""


def simulate_texts(
    base: BaseModel,
    drafter: Drafter,
    texts: Sequence[FinishedAnswer],
    draft_config: DraftConfig,
    sampler: Sampler,
    rule: AcceptanceRule = EXACT,
    seed: int = 0,
    in_order: bool = False,
) -> SimulatedAcceptance:
    """Return the acceptance that decoding these answers with ``drafter`` and ``draft_config`` would have.

    With top-k drafting, any drafter drafts its static or dynamic tree at every position. Sampled drafting needs a
    drafter that grows trees level by level (``StepwiseDrafter``). The answers must be the base's own under ``sampler``,
    and the rule must be lossless. ``seed`` seeds the bootstrap and the draws without replacement. With ``in_order``
    (top-k drafting only) answers are processed one by one, so that a drafter with a memory knows all earlier answers.
    """
    draft_config = draft_config.at_most(drafter.depth)
    rule.check(draft_config)
    if not rule.lossless:
        raise UserError(
            f"acceptance with the lossy rule {rule.name!r} cannot be simulated on finished answers, because the answer "
            "depends on the drafts; measure it with drafthead eval"
        )
    if draft_config.draft_sampling is DraftSampling.TOP_K:
        answers, sizes = _drafted_length_probs(base, drafter, texts, draft_config, sampler, in_order)
        return simulate_steps(answers, seed, sizes)
    tree = draft_config.tree
    assert isinstance(tree, TokenTree)  # sampled drafts have no other
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
    base: BaseModel, drafter: Drafter, texts: Sequence[FinishedAnswer], sampler: Sampler, config: AcceptProbsConfig
) -> list[AcceptProbs]:
    """Return per answer the acceptance probabilities [T, K, S] from which any static tree can be simulated.

    The axes are the positions where a step may start, the draft positions and the candidates; values are NaN beyond the
    answer's end. Answers of one token are left out. If siblings are sampled, pass a tree through ``trials_in_order``
    before its simulation. A drafter that is not a ``StepwiseDrafter`` raises a ``UserError``.
    """
    if not isinstance(drafter, StepwiseDrafter):
        raise UserError(
            f"{type(drafter).__name__} drafts without distributions, so only the acceptance of the tree that it drafts "
            "can be simulated; use draft_sampling=top_k and simulate one tree at a time"
        )
    depth = min(config.depth or drafter.depth, drafter.depth)
    generator = torch.Generator(base.device).manual_seed(config.seed)
    accept_probs: list[AcceptProbs] = []
    for batch, base_hidden in _batches(base, drafter, texts, sampler, MAX_VALUES // (depth * base.vocab_size)):
        tables = [np.full((text.positions, depth, config.width), np.nan) for text in batch]
        for rows, session, last, t in positions(drafter, batch, base_hidden, base.device):
            logits = forced_logits(session, last, [batch[row] for row in rows], t, depth)
            # Index in the answer of every draft position k (0-based), as far as the answer goes.
            targets = [(i, k, batch[row].boundary + t + 1 + k) for i, row in enumerate(rows) for k in range(depth)]
            targets = [(i, k, at) for i, k, at in targets if at < len(batch[rows[i]].ids)]
            draft = torch.stack([logits[k][i] for i, k, _ in targets])
            tokens = torch.tensor([batch[rows[i]].ids[at] for i, _, at in targets], device=base.device)
            lengths = [min(depth, batch[row].positions - t) for row in rows]
            if config.draft_sampling is DraftSampling.TOP_K:
                probs = top_k_accept_probs(draft, tokens, drafter.d2t, config.width)
            else:
                hidden = torch.stack([base_hidden[rows[i]].final[0, at - 1] for i, _, at in targets])
                p = _target_probs(base, hidden, [batch[rows[i]].ids[:at] for i, _, at in targets], sampler)
                q = config.sampler.probs(draft)
                if q.shape[1] < p.shape[1]:
                    q = torch.zeros_like(p).index_copy_(1, drafter.d2t, q)
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


def forced_logits(session: Session, last: Tensor, texts: Sequence[FinishedAnswer], t: int, depth: int) -> list[Tensor]:
    """Return the drafter's logits [B, draft vocabulary] at each of ``depth`` draft positions of one step.

    The step starts after answer token ``t`` (from 0); ``last`` [B] are these tokens. At later draft positions the
    drafter reads the next tokens of the answers instead of its own drafts.
    """
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
    texts: Sequence[FinishedAnswer],
    draft_config: DraftConfig,
    sampler: Sampler,
    in_order: bool,
) -> tuple[list[LengthProbs], list[Floats]]:
    """Draft at every position of each answer; return numbers of accepted drafts (one-hot [T, D+1]) and of nodes [T].

    A top-k draft is accepted exactly if it is the token that the target samples: the answer's next token. Answers of
    one token are left out. ``in_order``: draft one answer at a time, and let the drafter remember it before the next.
    """
    length_probs, sizes = [], []
    at_a_time = 1 if in_order else MAX_VALUES // (draft_config.depth * base.vocab_size + 1)
    for batch, base_hidden in _batches(base, drafter, texts, sampler, at_a_time):
        accepted = [np.zeros(text.positions, dtype=np.int64) for text in batch]
        nodes = [np.ones(text.positions) for text in batch]
        for rows, session, last, t in positions(drafter, batch, base_hidden, base.device):
            proposal = session.draft(last, draft_config)
            counts = _matching_drafts(proposal, [batch[row] for row in rows], t)
            for row, count in zip(rows, counts.tolist(), strict=True):
                accepted[row][t], nodes[row][t] = count, len(proposal.shape)
        sizes += nodes
        length_probs += [np.eye(int(a.max()) + 1)[a] for a in accepted]
        for text in batch if in_order else ():
            drafter.remember(text.ids)
    return length_probs, sizes


def _matching_drafts(proposal: Proposal, texts: list[FinishedAnswer], t: int) -> Tensor:
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


def _batches(
    base: BaseModel, drafter: Drafter, texts: Sequence[FinishedAnswer], sampler: Sampler, size: int
) -> Iterator[tuple[list[FinishedAnswer], list[HiddenStates]]]:
    """Yield batches of up to ``size`` answers with their hidden states, without the answers of one token.

    After the last batch, raise a UserError if ``sampler`` is very unlikely to have drawn the answers.
    """
    with_steps = [text for text in texts if text.positions]
    if not with_steps:
        raise UserError("no text has two answer tokens, so there is no step to simulate; give longer answers")
    size, sums = max(1, size), torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(with_steps), size):
        batch = with_steps[start : start + size]
        base_hidden = [read_hidden_states(base, drafter, text) for text in batch]
        sums += surprisal_sums(base, batch, base_hidden, sampler)
        yield batch, base_hidden
    check_likelihood(sums, sampler)
