"""The one speculative decoding loop. It knows ``DraftHead`` and ``BaseModel``, and no head by name.

Every step drafts a token tree after the last committed token, reads it in one pass of the base, accepts a path by
the rule of ``eval/verify.py`` and commits it with the target's own next token. Plain decoding is the same loop with
a tree that is only its root.
"""

from collections.abc import Callable
from time import perf_counter

import torch

from drafthead.data.contracts import DecodeResult, Features, Proposal, Siblings, StepRecord, TokenTree
from drafthead.data.errors import UserError
from drafthead.eval.verify import greedy
from drafthead.models.base import BaseModel
from drafthead.models.draft_head import DraftHead
from drafthead.models.kv_cache import KVCache

OnTokens = Callable[[list[int]], None]


@torch.inference_mode()
def decode(
    base: BaseModel,
    head: DraftHead | None,
    input_ids: list[int],
    *,
    max_new_tokens: int,
    tree: TokenTree | None = None,
    on_tokens: OnTokens | None = None,
    ignore_eos: bool = False,
) -> DecodeResult:
    """Greedy decoding of one prompt; with a head it commits several tokens a step, and the same ones as without.

    Args:
        base: the target.
        head: a draft head attached to ``base``, or None for plain decoding.
        input_ids: the prompt's token ids.
        max_new_tokens: stop after so many; EOS stops earlier and is kept as the last token.
        tree: what to draft; by default the head's calibrated tree, or a chain over all its positions.
        on_tokens: called with the tokens of every commit, as soon as they are final.
        ignore_eos: go on after EOS (for timing at a fixed length).

    Raises:
        UserError: an empty prompt, or one that does not leave room for ``max_new_tokens`` in the context.
    """
    if head is None:
        tree = TokenTree.chain(0)
    else:
        tree = tree or head.tree or TokenTree.chain(head.depth)
    _check_prompt(base, input_ids, max_new_tokens)
    eos = frozenset() if ignore_eos else base.eos_ids
    started = perf_counter()  # allocating the cache is part of decoding, as it is in transformers' generate
    session = _Session(base, head, tree, len(input_ids) + max_new_tokens + len(tree))
    answer = [session.read_prompt(input_ids)]
    prefill_s = perf_counter() - started
    if on_tokens:
        on_tokens(answer)
    steps: list[StepRecord] = []
    while len(answer) < max_new_tokens and answer[-1] not in eos:
        record, tokens = session.step(len(answer), max_new_tokens - len(answer), eos)
        steps.append(record)
        answer += tokens
        if on_tokens:
            on_tokens(tokens)
    return DecodeResult(tokens=answer, steps=steps, prefill_s=prefill_s, total_s=perf_counter() - started)


class _Session:
    """State of one sequence: the base's cache, the head's state, and the last committed token (not yet read)."""

    def __init__(self, base: BaseModel, head: DraftHead | None, tree: TokenTree, capacity: int) -> None:
        self.base, self.head, self.tree = base, head, tree
        self.cache: KVCache = base.new_cache(capacity)
        self.state = head.init_state(1) if head else None
        self.last = torch.empty(0)

    def read_prompt(self, input_ids: list[int]) -> int:
        """Prefill; returns the first answer token."""
        tokens = torch.tensor([input_ids], device=self.base.device)
        hidden = self.base.read(tokens, self.cache)
        if self.head and self.state:
            self.state = self.head.observe(self.state, tokens, Features(final=hidden))
        self.last = self.base.logits(hidden[:, -1]).argmax(-1)
        return int(self.last)

    def step(self, position: int, room: int, eos: frozenset[int]) -> tuple[StepRecord, list[int]]:
        """Draft, verify, commit. Returns the record and the committed tokens, cut at ``room`` and after EOS."""
        t0 = perf_counter()
        if self.head and self.state:
            proposal = self.head.draft(self.state, self.last, self.tree)
        else:
            proposal = Proposal(tokens=self.last[:, None], tree=self.tree, siblings=Siblings.DETERMINISTIC)
        self.base.synchronise()
        t1 = perf_counter()
        hidden = self.base.verify(proposal.tokens, self.tree, self.cache)
        target = self.base.logits(hidden).argmax(-1)
        self.base.synchronise()
        t2 = perf_counter()
        if len(self.tree) == 1:
            accepted, committed = 0, target[0].tolist()
            self.cache.commit()
        else:
            accepted, committed, hidden = self._accept(proposal, target, hidden)
        if self.head and self.state:
            self.state = self.head.observe(self.state, proposal.tokens, Features(final=hidden))
        kept = cut(committed, room, eos)
        self.last = torch.tensor(kept[-1:], device=self.base.device)
        record = StepRecord(
            position=position,
            proposed=len(self.tree) - 1,
            depth=self.tree.depth,
            accepted=accepted,
            committed=len(kept),
            draft_s=t1 - t0,
            verify_s=t2 - t1,
            total_s=perf_counter() - t0,
        )
        return record, kept

    def _accept(
        self, proposal: Proposal, target: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[int, list[int], torch.Tensor]:
        verdict = greedy(proposal, target)
        accepted = int(verdict.accepted)
        path = verdict.nodes[0, : accepted + 1]
        self.cache.keep(path)
        committed = [*proposal.tokens[0, path[1:]].tolist(), int(verdict.bonus)]
        return accepted, committed, hidden[:, path]


def cut(tokens: list[int], room: int, eos: frozenset[int]) -> list[int]:
    """The committed tokens up to ``room`` and up to the first EOS, which is kept."""
    for index, token in enumerate(tokens[:room]):
        if token in eos:
            return tokens[: index + 1]
    return tokens[:room]


def _check_prompt(base: BaseModel, input_ids: list[int], max_new_tokens: int) -> None:
    if not input_ids:
        raise UserError("the prompt is empty; give at least one token")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if len(input_ids) + max_new_tokens > base.max_context:
        raise UserError(
            f"the prompt has {len(input_ids)} tokens and {max_new_tokens} new ones are wanted, but {base.name} "
            f"reads at most {base.max_context}; shorten the prompt or lower max_new_tokens"
        )
    bad = [i for i in input_ids if not 0 <= i < base.vocab_size]
    if bad:
        raise UserError(f"the prompt holds token id {bad[0]}, outside the base's vocabulary of {base.vocab_size}")
