"""Wall-clock times of several decoders in one process, interleaved prompt by prompt."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.errors import UserError
from drafthead.eval.timing.result_log import FailedDecode, ResultLog, prompt_key
from drafthead.models.decoding.step import DecodeResult
from drafthead.models.kernels.huge_pages import wait_for_huge_pages
from drafthead.system.machine import OtherProcesses, cores_used

Decoder = Callable[[list[int]], DecodeResult]
"""Decodes an answer to prompt ids. It must synchronise the device before it stops its clock."""
PromptBuilder = Callable[[EvalPrompt, list[list[int]]], list[int]]
"""Returns the prompt ids of the next turn, from a prompt and its earlier answers."""


@dataclass(frozen=True)
class TimedResults:
    """Every turn of every prompt, answered with every method. Lists have one item per turn, in the suite's order."""

    prompts: list[EvalPrompt]
    turns: list[int]  # of the conversation, from 0
    ids: list[list[int]]  # prompt ids of each turn; empty if they could not be built
    results: dict[str, list[DecodeResult]]
    """If one decoder failed at a turn, every decoder's result is ``FailedDecode``, so that all totals are over the same
    turns."""
    order: list[int]  # numbers of the prompts in the order of the run
    resumed: int = 0  # turns that an earlier run had answered
    other_processes_cores: float | None = None  # average while these answers were decoded


def run_interleaved(
    prompts: Sequence[EvalPrompt],
    build: PromptBuilder,
    decoders: dict[str, Decoder],
    log: Path | None,
    seed: int,
    on_progress: Callable[[int, int], None],
    made_of: Mapping[str, str] | None = None,
) -> TimedResults:
    """Decode each conversation turn with all decoders before the next, so that drifting speed affects all equally.

    Prompts run in a random order, and decoders in a random order within each turn. Every decoder warms up on the first
    turn that the log lacks. Later turns follow the answers of "autoregressive" for every decoder, so that all decoders
    read the same context.

    Every finished (turn, decoder) is appended to the JSONL file ``log``. A turn is skipped if the log has results of
    all decoders; otherwise all decode it again, so that compared times come from one process. The log does not record
    settings, so use one file per head, tree and settings; ``made_of`` is as in ``ResultLog``.
    """
    wait_for_huge_pages()
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    count = sum(prompt.turns for prompt in prompts)
    run = _Run(decoders, ResultLog(log, made_of), lambda done: on_progress(done, len(decoders) * count))
    orders = iter(_orders(list(decoders), count, seed))
    answered: dict[tuple[int, int], tuple[list[int], dict[str, DecodeResult]]] = {}
    for index in order:
        answers: list[list[int]] = []
        error = ""  # why an earlier turn could not be answered
        for turn in range(prompts[index].turns):
            names = next(orders)
            try:
                if error:
                    raise UserError(f"not decoded, because an earlier turn of this conversation failed: {error}")
                ids = build(prompts[index], answers)
            except UserError as problem:
                ids, row = [], dict.fromkeys(decoders, failed(problem))
                run.count(len(names))
            else:
                row = run.answer_turn(prompts[index], turn, ids, names)
            answered[index, turn] = ids, row
            first = row["autoregressive"]
            answers.append(first.tokens)
            if isinstance(first, FailedDecode):
                error = error or first.error
    keys = sorted(answered)
    results = {name: [answered[key][1][name] for key in keys] for name in decoders}
    others = [seconds for seconds in run.other_cpu_s if seconds is not None]
    decoded_s = sum(result.total_s for row in results.values() for result in row)
    is_known = others and len(others) == len(run.other_cpu_s)
    return TimedResults(
        prompts=[prompts[index] for index, _ in keys],
        turns=[turn for _, turn in keys],
        ids=[answered[key][0] for key in keys],
        results=results,
        order=[prompts[index].number for index in order],
        resumed=run.resumed,
        other_processes_cores=cores_used(sum(others), decoded_s) if is_known else None,
    )


class _Run:
    def __init__(self, decoders: dict[str, Decoder], log: ResultLog, progress: Callable[[int], None]) -> None:
        self.decoders, self.log, self._progress = decoders, log, progress
        self.cold = set(decoders)  # decoders that have not been warmed up
        self.done = self.resumed = 0
        self.other_cpu_s: list[float | None] = []

    def answer_turn(self, prompt: EvalPrompt, turn: int, ids: list[int], names: list[str]) -> dict[str, DecodeResult]:
        """Return each decoder's answer, decoded in the order of ``names`` or logged; one failure fails all."""
        key = prompt_key(prompt, ids, turn)
        if all((key, name) in self.log for name in names):
            self.resumed += 1
            self.count(len(names))
        else:
            for name in names:
                if name in self.cold and not isinstance(_decode(self.decoders[name], ids), FailedDecode):
                    self.cold.discard(name)
            for name in names:
                with OtherProcesses() as others:
                    result = _decode(self.decoders[name], ids)
                self.log.add(key, name, prompt, result, turn, others.cpu_s)
                self.count(1)
        row = {name: self.log[key, name] for name in self.decoders}
        if fault := next((result for result in row.values() if isinstance(result, FailedDecode)), None):
            return dict.fromkeys(row, fault)
        self.other_cpu_s += [self.log.other_cpu_s[key, name] for name in names]
        return row

    def count(self, decodings: int) -> None:
        self.done += decodings
        self._progress(self.done)


def _orders(names: list[str], count: int, seed: int) -> list[list[str]]:
    """Return ``count`` random orders of ``names``, in which each name is in each position equally often.

    The orders are all rotations of a shuffle, then all rotations of another shuffle, and so on.
    """
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
        return failed(error)


def failed(error: object) -> DecodeResult:
    return FailedDecode(tokens=[], steps=[], prefill_s=0.0, total_s=0.0, error=str(error))
