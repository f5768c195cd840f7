"""Wall clock against plain decoding, in one process, with the prompts interleaved."""

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drafthead.data.utils.errors import UserError
from drafthead.eval.prompts.prompt import EvalPrompt
from drafthead.eval.timing.result_log import FailedDecode, ResultLog, prompt_key
from drafthead.models.decoding.step_log import DecodeResult

Decoder = Callable[[list[int]], DecodeResult]
"""Decodes an answer to prompt ids. Its times must include the device's work: synchronise before stopping a clock."""
PromptBuilder = Callable[[EvalPrompt, list[list[int]]], list[int]]
"""Token ids of a prompt's next turn after answers to its earlier ones; ``UserError`` when it cannot be asked."""


@dataclass(frozen=True)
class TimedResults:
    """Every turn of every prompt, answered in every way. Lists run over the turns, in the suite's order."""

    prompts: list[EvalPrompt]
    turns: list[int]
    """From 0."""
    ids: list[list[int]]
    """What each turn was asked with; empty where it could not be asked."""
    results: dict[str, list[DecodeResult]]
    """Per decoder. A turn that any decoder refused is ``FailedDecode`` in all, so that totals stay comparable."""
    order: list[int]
    """Numbers of the prompts as they were run."""
    resumed: int = 0
    """Turns that an earlier run had answered."""


def run_interleaved(
    prompts: Sequence[EvalPrompt],
    ask: PromptBuilder,
    decoders: dict[str, Decoder],
    log: Path | None,
    seed: int,
    on_progress: Callable[[int, int], None],
    reference: str = "drafthead",
    made_of: Mapping[str, str] | None = None,
) -> TimedResults:
    """Decode every turn with every decoder, one after the other, so that a drift of the machine hits all alike.

    Prompts run in a random order, decoders in a random order within each turn. Every decoder answers the first
    prompt once, untimed, before anything is measured. Later turns of a conversation follow the answer of ``reference``
    to the earlier ones, whichever decoder is timed: all of them read the same context.

    Args:
        prompts: the suite.
        ask: the token ids of a prompt's next turn, given the reference's answers to its earlier ones.
        decoders: by name.
        log: JSONL file that gets every finished (turn, decoder) at once. A turn that it holds of all decoders is
            not decoded again; any other is, by all of them, so that times that are compared come from one process.
            It knows prompts, decoders' names and marks only: one file per head, tree and settings.
        seed: of both orders.
        on_progress: called with (finished, all) pairs of turn and decoder.
        reference: the decoder whose answers a conversation goes on with.
        made_of: marks of decoders, such as a hash of weights; what the log holds of another mark is decoded again.

    Raises:
        UserError: the log is broken elsewhere than in its last line.
    """
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    rounds = _Rounds(
        decoders, ResultLog(log, made_of or {}), sum(prompt.turns for prompt in prompts), seed, on_progress
    )
    asked: dict[tuple[int, int], tuple[list[int], list[DecodeResult]]] = {}
    for place in order:
        prompt = prompts[place]
        answers: list[list[int]] = []
        lost: FailedDecode | None = None
        for turn in range(prompt.turns):
            ids, failure = _ask(ask, prompt, answers) if lost is None else ([], lost)
            row = rounds.answer(prompt, turn, ids, failure)
            asked[place, turn] = ids, row
            answer = dict(zip(decoders, row, strict=True))[reference]
            answers.append(answer.tokens)
            if isinstance(answer, FailedDecode):
                lost = failed(f"the turn before it failed: {answer.error}")
    keys = sorted(asked)
    return TimedResults(
        prompts=[prompts[place] for place, _ in keys],
        turns=[turn for _, turn in keys],
        ids=[asked[key][0] for key in keys],
        results={name: [asked[key][1][column] for key in keys] for column, name in enumerate(decoders)},
        order=[prompts[place].number for place in order],
        resumed=rounds.resumed,
    )


class _Rounds:
    """One turn after the other, answered by all decoders or taken from the journal."""

    def __init__(
        self,
        decoders: dict[str, Decoder],
        journal: ResultLog,
        turns: int,
        seed: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._decoders, self._journal, self._on_progress = decoders, journal, on_progress
        self._orders = iter(_orders(list(decoders), turns, seed))
        self._cold = set(decoders)
        self._total, self._done = len(decoders) * turns, 0
        self.resumed = 0
        """Turns that the journal held."""

    def answer(self, prompt: EvalPrompt, turn: int, ids: list[int], failure: FailedDecode | None) -> list[DecodeResult]:
        """The answers to ``ids``, one of each decoder; ``failure``: why this turn cannot be asked."""
        names, key = next(self._orders), prompt_key(prompt, ids, turn)
        if failure is None and not all((key, name) in self._journal for name in names):
            self._warm_up(names, ids)
            for name in names:
                self._journal.add(key, name, prompt, _decode(self._decoders[name], ids), turn)
                self._report(1)
        else:
            self.resumed += failure is None
            self._report(len(names))
        return _spread_failure([failure or self._journal[key, name] for name in self._decoders])

    def _warm_up(self, names: list[str], ids: list[int]) -> None:
        for name in names:
            if name in self._cold and not isinstance(_decode(self._decoders[name], ids), FailedDecode):
                self._cold.discard(name)

    def _report(self, answers: int) -> None:
        self._done += answers
        self._on_progress(self._done, self._total)


def _ask(ask: PromptBuilder, prompt: EvalPrompt, answers: list[list[int]]) -> tuple[list[int], FailedDecode | None]:
    try:
        return ask(prompt, answers), None
    except UserError as error:
        return [], failed(str(error))


def _orders(names: list[str], count: int, seed: int) -> list[list[str]]:
    """Rotations of a fresh shuffle every ``len(names)`` prompts: each name takes each place equally often."""
    rng = random.Random(seed)
    orders: list[list[str]] = []
    while len(orders) < count:
        shuffled = rng.sample(names, k=len(names))
        orders += [shuffled[n:] + shuffled[:n] for n in range(len(names))]
    return orders[:count]


def _decode(decoder: Decoder, ids: list[int]) -> DecodeResult:
    try:
        return decoder(ids)
    except UserError as error:
        return failed(str(error))


def failed(error: str) -> FailedDecode:
    """The result of a prompt that could not be answered."""
    return FailedDecode(tokens=[], steps=[], prefill_s=0.0, total_s=0.0, error=error)


def _spread_failure(row: list[DecodeResult]) -> list[DecodeResult]:
    failed = next((result for result in row if isinstance(result, FailedDecode)), None)
    return row if failed is None else [failed] * len(row)


def speedup_interval(
    baseline: Sequence[DecodeResult],
    method: Sequence[DecodeResult],
    groups: Sequence[Hashable] | None = None,
    seed: int = 0,
    resamples: int = 2000,
) -> tuple[float, float, float]:
    """Tokens per second of ``method`` over ``baseline``, both as ratios of totals, with a 95 % interval.

    The interval is the percentile bootstrap over prompts, drawn in pairs: a slow prompt is slow for both. ``groups``
    names the prompt that every result belongs to, so that the turns of one conversation are drawn together.

    Returns:
        ratio, low, high. The bounds are nan with fewer than two prompts, all are nan with none.
    """
    totals: dict[Hashable, np.ndarray] = {}
    for group, b, m in zip(groups or range(len(baseline)), baseline, method, strict=True):
        if b.total_s > 0 and m.total_s > 0:
            row = np.array([len(b.tokens), b.total_s, len(m.tokens), m.total_s])
            totals[group] = totals.get(group, 0) + row
    if not totals:
        return math.nan, math.nan, math.nan
    columns = np.array(list(totals.values()))
    ratio = float(_ratio_of_totals(columns[None])[0])
    if len(columns) < 2:
        return ratio, math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(len(columns), size=(resamples, len(columns)))
    low, high = np.percentile(_ratio_of_totals(columns[drawn]), [2.5, 97.5])
    return ratio, float(low), float(high)


def _ratio_of_totals(columns: np.ndarray) -> np.ndarray:
    base_tokens, base_s, tokens, seconds = columns.sum(axis=1).T
    return np.asarray((tokens / seconds) / (base_tokens / base_s))
