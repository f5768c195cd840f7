"""Drafting for the requests of a serving engine, which come and go. Nothing here depends on any engine.

The engine gives the text of a request and the base's hidden states at the tokens that it read in a step. It gets a
chain of drafts back. Sessions of the drafters keep one row per request::

    rows = EngineRows([head, PromptLookup(8)], drafts=8)
    rows.feed([Read("a", text=[1, 5, 9], states=states)])  # a prompt, or a chunk of it
    rows.draft({"a": 7})                                   # {"a": [2, 4]}: drafts after 7, the answer's first token
    rows.feed([Read("a", text=[1, 5, 9, 7, 2], states=states, verified=2)])  # the engine accepted 2, but not 4
    rows.drop("a")

Every request must be fed after every step, also after steps without drafts: a head reads all states of a text once. If
the engine never computed some states (a cached prefix, a step near the end of its context), heads that attend continue
with an empty context, and other drafters read the tokens without states.

Shape legend: B rows, T tokens, K drafts, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates, pad_rows
from drafthead.errors import UserError
from drafthead.models.decoding.draft_lengths import DraftLengths
from drafthead.models.decoding.drafter import DraftConfig, Drafter, Session
from drafthead.models.token_tree import TokenTree

PADDED = 32  # texts with more new tokens are committed one by one: padding would cost every row as much
BINS = 10  # of likelihoods, for which shares of acceptance are counted
NO_TEXT = np.zeros(0, np.int64)
PRIOR = 8.0  # drafts for which a bin's own likelihood counts as much as what was observed


@dataclass(frozen=True)
class Read:
    """The text of a request that the base has read, and its states at the last tokens."""

    request: str
    text: Sequence[int] | npt.NDArray[np.integer]
    """All tokens that the base has read: the prompt and the answer, without the answer's last token."""
    states: HiddenStates  # [1, T, ...] at the last T tokens of ``text``
    verified: int = 0  # drafts that the engine verified in this step


class AcceptanceTable:
    """Shares of accepted drafts of one drafter by their likelihood, learnt from the engine's answers."""

    def __init__(self) -> None:
        self._seen = [PRIOR] * BINS
        self._accepted = [PRIOR * (n + 0.5) / BINS for n in range(BINS)]

    def rates(self, likelihoods: Sequence[float]) -> list[float]:
        bins = map(self._bin, likelihoods)
        return [self._accepted[n] / self._seen[n] for n in bins]

    def count(self, likelihoods: Sequence[float], accepted: int) -> None:
        """Count a verified chain, of which the first ``accepted`` drafts were accepted. Drafts after the first rejected
        one tell nothing."""
        for position, likelihood in enumerate(likelihoods[: accepted + 1]):
            self._seen[self._bin(likelihood)] += 1
            self._accepted[self._bin(likelihood)] += position < accepted

    @staticmethod
    def _bin(likelihood: float) -> int:
        return min(BINS - 1, int(likelihood * BINS))


@dataclass(frozen=True)
class Chain:
    """The drafts of one drafter for one request."""

    drafter: int  # its number
    tokens: list[int]
    likelihoods: list[float]

    def first(self, count: int) -> "Chain":
        return replace(self, tokens=self.tokens[:count], likelihoods=self.likelihoods[:count])


def expected_length(rates: Sequence[float]) -> float:
    """Return the expected number of accepted drafts of a chain whose drafts are accepted with these probabilities."""
    length, reached = 0.0, 1.0
    for rate in rates:
        reached *= rate
        length += reached
    return length


class EngineRows:
    """The sessions of one or several drafters with one row per request. Of several chains, the one with the largest
    expected accepted length is drafted. Memory is that of the requests' rows, and is freed when there are none."""

    def __init__(self, drafters: Sequence[Drafter], drafts: int, lengths: DraftLengths | None = None) -> None:
        """Draft up to ``drafts`` tokens with each of ``drafters``, or as many as it can. ``lengths`` shortens the
        chains to what pays; None: whole chains."""
        for drafter in drafters:
            if drafter.early_exit_layers:
                what = f"{type(drafter).__name__} drafts with the base's first layers, which an engine does not share"
                raise UserError(f"{what}; serve another head")
        self.drafters, self.drafts, self.lengths = tuple(drafters), drafts, lengths
        self._tables = [AcceptanceTable() for _ in drafters]
        self._requests: list[str] = []  # of each row
        self._texts: dict[str, npt.NDArray[np.int64]] = {}
        self._proposed: dict[str, Chain] = {}
        self._waiting: dict[str, list[Read]] = {}  # read while drafting was paused; the sessions do not have them yet
        self._feeding = 0.0  # seconds of the latest ``feed``
        self._sessions: list[Session] = []
        self._device = torch.device("cpu")  # of the states

    @property
    def requests(self) -> list[str]:
        return list(self._requests)

    def drop(self, requests: Sequence[str]) -> None:
        """Forget ended requests; unknown ones are ignored."""
        gone = [request for request in requests if request in self._texts]
        for request in gone:
            del self._texts[request]
            self._proposed.pop(request, None)
            self._waiting.pop(request, None)
        if gone:
            self._arrange([request for request in self._requests if request in self._texts], [])

    @torch.inference_mode()
    def feed(self, reads: Sequence[Read]) -> None:
        """Add what the base has read in a step. A text that does not continue the request's known text starts the
        request again, such as the first part of a prompt that is read again after a preemption. While drafting is
        paused, the answers' tokens wait, so that a step costs next to nothing."""
        started, paused = perf_counter(), self.lengths is not None and self.lengths.is_paused
        for read in reads:
            known = self._texts.get(read.request, NO_TEXT)
            if not np.array_equal(read.text[: len(known)], known):
                self.drop([read.request])
            elif (chain := self._proposed.pop(read.request, None)) is not None and read.verified:
                accepted = len(read.text) - len(known) - 1
                if 0 <= accepted <= read.verified:  # no step was left out
                    self._tables[chain.drafter].count(chain.likelihoods[: read.verified], accepted)
        new = [read.request for read in reads if read.request not in self._texts]
        if new:
            self._texts.update((request, NO_TEXT) for request in new)
            self._arrange([request for request in self._requests if request in self._texts], new)
        few = []
        for read in reads:
            count = len(read.text) - len(self._texts[read.request])
            if count > PADDED:
                self._commit([self._with_waiting(read)])
            elif count > 0 and paused:
                self._wait(read)
            elif count > 0:
                few.append(self._with_waiting(read))
        if few:
            self._commit(few)
        self._feeding = perf_counter() - started

    @torch.inference_mode()
    def draft(self, last_tokens: Mapping[str, int]) -> dict[str, list[int]]:
        """Return the drafts of requests after their last tokens, which the base has not read; [] for unknown ones."""
        known = [request for request in last_tokens if request in self._texts]
        drafts: dict[str, list[int]] = {request: [] for request in last_tokens}
        if not known or (self.lengths is not None and not self.lengths.drafts_now()):
            return drafts
        started = perf_counter()
        if waiting := [self._with_waiting(self._waiting[request][-1]) for request in known if request in self._waiting]:
            self._commit(waiting)
        chains = self._chains(last_tokens)
        best = {request: max(chains[request], key=self._expected) for request in known}
        if self.lengths is not None:
            self.lengths.record_drafting(self._feeding + perf_counter() - started)
            counts = self.lengths.choose([self._rates(chain) for chain in best.values()])
            best = {r: chain.first(count) for (r, chain), count in zip(best.items(), counts, strict=True)}
        self._proposed |= best
        return drafts | {request: chain.tokens for request, chain in best.items()}

    def _chains(self, last_tokens: Mapping[str, int]) -> dict[str, list[Chain]]:
        """Return the chains that the drafters draft for every request; they mean nothing without a last token."""
        roots = torch.tensor([last_tokens.get(request, 0) for request in self._requests], device=self._device)
        chains: dict[str, list[Chain]] = {request: [] for request in self._requests}
        for number, (drafter, session) in enumerate(zip(self.drafters, self._sessions, strict=True)):
            depth = min(self.drafts, drafter.depth)
            proposal = session.draft(roots, DraftConfig(tree=TokenTree.chain(depth), likelihoods=True))
            drafted = proposal.shape.parents[:, 1:].expand(len(roots), -1) >= 0
            likelihoods = proposal.likelihoods
            chances = torch.ones_like(drafted, dtype=torch.float32) if likelihoods is None else likelihoods[:, 1:]
            counts, tokens = drafted.sum(1).tolist(), proposal.tokens[:, 1:].tolist()
            for request, count, ids, chance in zip(self._requests, counts, tokens, chances.tolist(), strict=True):
                chains[request].append(Chain(number, ids[:count], chance[:count]))
        return chains

    def _rates(self, chain: Chain) -> list[float]:
        return self._tables[chain.drafter].rates(chain.likelihoods)

    def _expected(self, chain: Chain) -> float:
        return expected_length(self._rates(chain))

    def _arrange(self, kept: list[str], new: list[str]) -> None:
        """Give every request of ``kept`` and ``new`` a row; empty the rows of ``new``."""
        if not kept:
            rows = len(new)
            self._sessions = [drafter.open(rows) for drafter in self.drafters] if rows else []
        elif kept + new != self._requests:
            order = [self._requests.index(request) for request in kept] + [0] * len(new)
            for session in self._sessions:
                session.select(order)
                if new:
                    session.reset(list(range(len(kept), len(order))))
        self._requests = kept + new

    def _wait(self, read: Read) -> None:
        """Keep a copy of ``read``, whose text and states are the engine's memory."""
        earlier = self._waiting.setdefault(read.request, [])
        if (new := self._new_states(read)) is None:
            earlier.clear()
        states = (read.states if new is None else new).map(torch.clone)
        earlier.append(Read(read.request, np.array(read.text, np.int64), states))

    def _with_waiting(self, read: Read) -> Read:
        """Return ``read`` with the states of earlier steps that wait, if its states continue them."""
        new = self._new_states(read)
        earlier = self._waiting.pop(read.request, [])
        if new is None:
            return read
        return replace(read, states=HiddenStates.join([*(one.states for one in earlier), new]))

    def _new_states(self, read: Read) -> HiddenStates | None:
        """Return the states of ``read`` after those that wait; None if nothing waits, or some between are missing."""
        if not (earlier := self._waiting.get(read.request)):
            return None
        new, given = len(read.text) - len(earlier[-1].text), read.states.final.shape[1]
        return read.states.span(given - new, new) if 0 <= new <= given else None

    def _commit(self, reads: Sequence[Read]) -> None:
        """Commit the new tokens of some requests; the other rows stay as they are."""
        self._device, size = reads[0].states.final.device, len(self._requests)
        for session in self._sessions:
            new = {self._requests.index(read.request): self._unread(session, read) for read in reads}
            counts = [len(new[row][0]) if row in new else 0 for row in range(size)]
            session.commit(*_padded(new, counts, self._device))
        for read in reads:
            self._texts[read.request] = np.array(read.text, np.int64)

    def _unread(self, session: Session, read: Read) -> tuple[list[int], HiddenStates]:
        """Return the tokens of a request that its row of ``session`` has not read, and the states [1, T, ...] there.
        Tokens without states get zeros, or are left out with all tokens before them if the session needs the states."""
        row, known = self._requests.index(read.request), len(self._texts[read.request])
        tokens, given = np.asarray(read.text[known:]).tolist(), read.states.final.shape[1]
        if len(tokens) > given and session.reads_all_states:
            if session.lengths[row]:
                session.reset([row])
            tokens = tokens[-given:]
        missing = max(0, len(tokens) - given)
        states = read.states.span(max(0, given - len(tokens)), given)
        return tokens, states.map(lambda value: torch.nn.functional.pad(value, (0, 0, missing, 0)))


def _padded(
    new: Mapping[int, tuple[list[int], HiddenStates]], counts: list[int], device: torch.device
) -> tuple[Tensor, list[int], HiddenStates]:
    """Return the arguments of ``Session.commit`` for the tokens and states of some rows, by their numbers."""
    (ids, hidden), size = next(iter(new.values())), len(counts)
    if len(new) == 1:  # the other rows have a count of 0, so the same tokens serve as padding, without a copy
        tokens = torch.tensor([ids], device=device).expand(size, -1)
        return tokens, counts, hidden.map(lambda value: value.expand(size, -1, -1))
    width, empty = max(counts), hidden.span(0, 0)
    rows = [new.get(row, ([], empty)) for row in range(size)]
    tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in rows], device=device)
    return tokens, counts, pad_rows([states for _, states in rows])
