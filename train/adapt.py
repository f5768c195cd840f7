"""A draft head that learns while it answers (Online Speculative Decoding, 2310.07177).

``Recorder`` wraps the head. It compares the drafts with the committed tokens to find rejected drafts, and stores the
base's hidden states. The base's LM head turns these states into the target's distributions, so no second pass is
needed. ``OnlineLearner`` updates the head every few answers on the rejected positions. Weights change only between
answers, and every answer starts with new caches. The output stays exact, because a proposal carries the distributions
from which its drafts were drawn.

The reference code trains one position later, also counts the bonus token after full acceptance as rejected, supports
only independent draft models, and does not clip gradients. Shapes: T tokens of a commit, n tokens of an answer with its
prompt.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from drafthead.data.answers.store import Answer
from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.errors import UserError
from drafthead.files.local import difference
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import DraftConfig, Drafter, Proposal, Session
from drafthead.models.decoding.loop import GREEDY, decode, static_draft_config
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeResult
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, accepted_length_probs, start_probs
from drafthead.models.simulation.ranks import WIDTH, answer_ranks
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import Positive, settings
from drafthead.train.distributed.sharding import full_state_dict, load_optimizers
from drafthead.train.trainer.checkpoint import capture_rng, load_latest, restore_rng, save_checkpoint
from drafthead.train.trainer.optim import OptimConfig, head_optimizers
from drafthead.train.trainer.step import train_step

OBJECTIVES = {  # by ``OnlineConfig.objective``; the code of Online Speculative Decoding calls ``kl_mixture`` JSD
    "ce": LossConfig(ce=1.0, decay=1.0),
    "kl": LossConfig(ce=0.0, kl=1.0, decay=1.0),
    "reverse_kl": LossConfig(ce=0.0, reverse_kl=1.0, decay=1.0),
    "jsd": LossConfig(ce=0.0, jsd=1.0, decay=1.0),
    "kl_mixture": LossConfig(ce=0.0, kl=0.9, reverse_kl=0.1, decay=1.0),
}


@settings(kw_only=True)
class OnlineConfig:
    """Settings of online learning from a head's own answers."""

    interval: Positive = 8
    """Number of answers between two updates."""
    positions: Literal["rejected", "all"] = "rejected"
    """Trained positions: the first ``rejected`` draft of each step, or ``all`` tokens of answers. The former is that of
    Online Speculative Decoding (2310.07177)."""
    objective: Literal["ce", "kl", "reverse_kl", "jsd", "kl_mixture"] = "kl"
    """Loss of the updates. ``kl_mixture`` is 0.9 forward and 0.1 reverse KL."""
    steps: Positive = 1
    """Optimiser steps per update."""
    max_tokens: Positive = 8192
    """Largest number of tokens, prompts included, to keep for an update. Old answers are dropped, never the latest."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=3e-4, schedule="constant"))

    def __post_init__(self) -> None:
        if self.optim.schedule != "constant":
            raise UserError(
                f"optim.schedule={self.optim.schedule} needs a last step, which a stream lacks; set it to constant"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineExample:
    """A finished answer as training data."""

    text: Answer
    hidden: HiddenStates  # [1, n, ...] at all tokens, without a gradient; those of the last token may be zeros
    rejected: list[tuple[int, int]]  # (index in ``text.ids``, draft position from 1) of each token that was not drafted

    def batch(self, depth: int, positions: str) -> TrainBatch:
        """Return the answer as one row; with ``positions`` "rejected", all tokens but rejected ones have weight 0."""
        batch = TrainBatch.of([self.text.ids], self.text.boundary)
        if positions == "all":
            return batch
        weights = torch.zeros(*batch.input_ids.shape, depth)
        for index, k in self.rejected:
            weights[0, index, k - 1] = 1.0
        return replace(batch, weights=weights)


class Recorder(Drafter):
    """Drafter that drafts like ``head`` for one row at a time, and records what training on the answer needs."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self.tree, self.spec, self.reads_base = head.tree, head.spec, head.reads_base
        self.confidence_threshold, self.base_fingerprint = head.confidence_threshold, head.base_fingerprint
        self.depth, self.vocab_size = head.depth, head.vocab_size

    def identity(self) -> tuple[object, ...]:
        return self.head.identity()

    def open(self, rows: int, cache: TreeCache | None = None) -> "RecorderSession":
        self.session = RecorderSession(self.head.open(rows, cache))
        return self.session

    def cache_slots(self, draft_config: DraftConfig) -> int:
        return self.head.cache_slots(draft_config)

    def example(self, tokens: list[int]) -> OnlineExample:  # ``tokens`` of prompt and answer
        hidden = self.session.hidden
        failed = (first_undrafted(p, tokens[n + 1 : n + count], n) for p, n, count in self.session.steps)
        # A last step that EOS or the limit cut short accepted more than it committed.
        rejected = [(i, k) for i, k, drafted in filter(None, failed) if i < len(tokens) and tokens[i] not in drafted]
        text = Answer.of(tokens, hidden[0].final.shape[1])  # the prompt is committed first
        return OnlineExample(text=text, hidden=join(hidden, len(tokens)), rejected=rejected)


class RecorderSession(Session):
    """The head's session ``inner`` for one row, with a record of the base's hidden states and the head's proposals."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self.hidden: list[HiddenStates] = []  # [1, T, ...] at the tokens of each commit; the first one is the prompt
        self.steps: list[tuple[Proposal, int, int]] = []
        """For each step: the proposal, the number of tokens committed before the step, and of those committed in it.
        The host reads the proposals after the answer has ended, so that no step waits for the device."""
        self._proposal: Proposal | None = None

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self._inner.lengths

    def commit(
        self, tokens: Tensor, counts: list[int], base_hidden: HiddenStates | None, nodes: Tensor | None = None
    ) -> None:
        assert base_hidden is not None
        if self._proposal is not None:
            self.steps.append((replace(self._proposal, probs=None, prob_index=None), self.lengths[0], counts[0]))
        self._proposal = None
        self.hidden.append(base_hidden.map(lambda part: part[:, : counts[0]].clone()))
        self._inner.commit(tokens, counts, base_hidden, nodes)

    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        self._proposal = self._inner.draft(last_token, draft_config, rng)
        return self._proposal

    def select(self, rows: list[int]) -> None:
        self._inner.select(rows)

    def rollback(self, lengths: list[int]) -> None:
        self._inner.rollback(lengths)
        self.hidden, self.steps = [], []  # the row starts again, with another prompt


def join(parts: list[HiddenStates], length: int) -> HiddenStates:
    """Concatenate hidden states [1, T, ...] along T, then cut or zero-pad the result to [1, length, ...]."""
    pad = torch.nn.functional.pad
    return HiddenStates.join(parts).map(lambda states: pad(states, (0, 0, 0, length - states.shape[1])))  # < 0 cuts


def first_undrafted(proposal: Proposal, accepted: list[int], length: int) -> tuple[int, int, tuple[int, ...]] | None:
    """Return where a step left the drafted tree: (index, draft position, drafts) of the first undrafted token, or None.
    ``index`` counts the tokens of prompt and answer, and the draft position counts from 1. ``length`` is the root's
    index, and ``accepted`` are the ids committed after it, maybe from another drafter's tree. Example: the root has
    drafts a and b, and a has draft c. If a and x are committed, the result is (length + 2, 2, (c,))."""
    tokens, parents = torch.stack([proposal.tokens[0], proposal.shape.parents[0]]).tolist()
    node, depth = 0, 0
    while True:
        depth += 1
        # Siblings with one token: the first one is followed, hence the reversed order.
        children = {tokens[n]: n for n in range(len(parents) - 1, 0, -1) if parents[n] == node}
        if not children:
            return None
        if depth > len(accepted) or accepted[depth - 1] not in children:
            return length + depth, depth, tuple(children)
        node = children[accepted[depth - 1]]


class OnlineLearner:
    """Online training of ``head``: it answers prompts and is updated on the answers. Its base must be frozen."""

    def __init__(self, head: DraftHead, config: OnlineConfig) -> None:
        if head.config.trains_base:
            raise UserError(
                f"{type(head).__name__} was trained with its base and cannot learn online; use a head on a frozen base"
            )
        self.head, self.config = head, config
        self.recorder = Recorder(head)
        self.optimizers = head_optimizers(head, config.optim)
        self.buffer: deque[OnlineExample] = deque()
        self.answered = self.updates = 0
        self.decode_s = self.update_s = 0.0

    def answer(
        self,
        ids: list[int],
        *,
        max_new_tokens: int,
        draft_config: DraftConfig | None = None,
        sampler: Sampler = GREEDY,
        seed: int = 0,
    ) -> tuple[DecodeResult, OnlineExample]:
        """Answer the prompt ``ids`` exactly, and learn from the answer; return it and its training example."""
        base, tree = self.head.base_model, draft_config or static_draft_config(self.head)
        result = decode(
            base, self.recorder, ids, max_new_tokens=max_new_tokens, draft_config=tree, sampler=sampler, seed=seed
        )
        self.decode_s += result.total_s
        lesson = self.recorder.example([*ids, *result.tokens])
        self.learn(lesson)
        return result, lesson

    def learn(self, lesson: OnlineExample) -> None:
        """Buffer an answer, drop the oldest beyond ``max_tokens``, and update the head every ``interval`` answers."""
        self.buffer.append(lesson)
        while len(self.buffer) > 1 and sum(len(each.text.ids) for each in self.buffer) > self.config.max_tokens:
            self.buffer.popleft()
        self.answered += 1
        if self.answered % self.config.interval == 0:
            self.update()

    def update(self) -> None:
        """Train the head on the buffered answers that have trained positions, and empty the buffer."""
        started = perf_counter()
        with torch.inference_mode(False), torch.enable_grad():
            positions, optim, loss = self.config.positions, self.config.optim, OBJECTIVES[self.config.objective]
            lessons = [each for each in self.buffer if positions == "all" or each.rejected]
            rows = [
                (each.batch(self.head.depth, positions).to(self.head.base.device), each.hidden.map(torch.clone))
                for each in lessons
            ]
            self.head.train()  # drops the copies that it drafts with
            for _ in range(self.config.steps if rows else 0):
                train_step(self.head, self.optimizers, rows, loss, lr=optim.lr, clip_norm=optim.clip_norm)
            self.head.eval()
        self.updates += 1
        self.buffer.clear()
        self.update_s += perf_counter() - started

    # What survives a kill ------------------------------------------------------------------------------------

    def save(self, folder: Path, made_by: dict[str, Any]) -> None:
        """Save a checkpoint with weights, optimiser moments, random states and times. Call it after an update.
        ``made_by`` holds the settings of the run, which must be equal when ``restore`` resumes. A resumed run generates
        the answers after its latest checkpoint again."""
        progress = {"answered": self.answered, "updates": self.updates, "seconds": [self.decode_s, self.update_s]}
        states = full_state_dict(self.head, self.optimizers)
        save_checkpoint(folder, self.answered, progress, *states, rng=[capture_rng()], manifests={"stream": made_by})

    def restore(self, folder: Path, made_by: dict[str, Any]) -> bool:
        """Load the newest checkpoint of ``folder``; return False if there is none, and reject other settings."""
        checkpoint = load_latest(folder)
        if checkpoint is None:
            return False
        if "answered" not in checkpoint.state:
            raise UserError(f"{checkpoint.path} is not of this version's adapt; start over with resume=false")
        if (other := difference(checkpoint.manifests.get("stream"), made_by)) is not None:
            key, was, now = other
            raise UserError(f"{folder} was made with {key} = {was}, this command has {now}; set another out=...")
        self.head.load_state_dict(checkpoint.head)
        self.head.eval()
        load_optimizers(self.head, self.optimizers, checkpoint.optimizer)
        restore_rng(checkpoint.rng[0])
        self.answered, self.updates = checkpoint.state["answered"], checkpoint.state["updates"]
        self.decode_s, self.update_s = checkpoint.state["seconds"]
        return True


def simulated_steps(head: DraftHead, tree: TokenTree, text: Answer, hidden: HiddenStates) -> float:
    """Return how many steps greedy decoding with ``head`` and ``tree`` takes for an answer. The head reads the finished
    answer once; nothing is decoded. ``hidden`` are the base's states at its tokens."""
    ranks = answer_ranks(head, TrainBatch.of([text.ids], text.boundary).to(head.base.device), hidden)
    lengths = [accepted_length_probs(accept_probs_of_ranks(each, WIDTH), tree) for each in ranks]
    return float(sum(starts.sum() for starts in start_probs(lengths)))


def frozen_copy(head: DraftHead) -> DraftHead:
    """Return a copy of the head on the same base, with only its tree for one row; training does not change it."""
    whole = len(head.d2t) == head.base.vocab_size
    copy = head.config.build(head.base, None if whole else head.d2t, start=False)
    copy.load_state_dict(head.state_dict())
    copy.tree, copy.confidence_threshold = head.tree, head.confidence_threshold
    return copy.eval()
