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

Decoder = Callable[[list[list[int]]], list[DecodeResult]]  # must synchronise the device before it stops its clock
PromptBuilder = Callable[[EvalPrompt, list[list[int]]], list[int]]  # ids of the next turn, after earlier answers


BATCHES_PER_BLOCK = 4  # larger blocks keep the batch full for longer; smaller blocks interleave more often


@dataclass(frozen=True)
class TimedResults:
    """Every turn of every prompt, answered with every method. Lists have one item per turn, in the suite's order."""

    prompts: list[EvalPrompt]
    turns: list[int]  # of the conversation, from 0
    ids: list[list[int]]  # prompt ids of each turn; empty if they could not be built
    results: dict[str, list[DecodeResult]]  # one failure fails all decoders at a turn: totals are over the same turns
    order: list[int]  # numbers of the prompts in the order of the run
    resumed: int = 0  # turns that an earlier run had answered
    other_processes_cores: float | None = None  # average while these answers were decoded

    @property
    def first_turns(self) -> list[list[int]]:
        """Prompt ids of the conversations' first turns that could be built."""
        return [ids for ids, turn in zip(self.ids, self.turns, strict=True) if turn == 0 and ids]


def run_interleaved(
    prompts: Sequence[EvalPrompt],
    build: PromptBuilder,
    decoders: dict[str, Decoder],
    log: Path | None,
    seed: int,
    on_progress: Callable[[int, int], None],
    composition: Mapping[str, str] | None = None,
    batch_size: int = 1,
) -> TimedResults:
    """Decode each conversation turn with all decoders before the next, so that drifting speed affects all equally.
    Prompts run in a random order, and decoders in a random order within each turn. Every decoder warms up on the first
    turn that the log lacks. Later turns follow the answers of "autoregressive", so that all decoders read the same
    context. With a ``batch_size`` above 1, decoders take turns over blocks of ``BATCHES_PER_BLOCK`` batches of prompts.
    Every finished (turn, decoder) is appended to the JSONL file ``log``. A block is skipped if the log has results of
    all decoders; otherwise all decode it again, so that compared times come from one process. The log does not record
    settings, so use one file per head, tree and settings; ``composition`` is as in ``ResultLog``."""
    wait_for_huge_pages()
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    count = sum(prompt.turns for prompt in prompts)
    total = len(decoders) * count
    run = _Run(decoders, ResultLog(log, composition), lambda done: on_progress(done, total), batch_size)
    orders = iter(_orders(list(decoders), count, seed))
    answered: dict[tuple[int, int], tuple[list[int], dict[str, DecodeResult]]] = {}
    size = batch_size * BATCHES_PER_BLOCK if batch_size > 1 else 1
    for block in (order[start : start + size] for start in range(0, len(order), size)):
        answers: dict[int, list[list[int]]] = {index: [] for index in block}
        errors: dict[int, str] = {}  # why an earlier turn could not be answered
        for turn in range(max(prompts[index].turns for index in block)):
            names, ids = next(orders), dict[int, list[int]]()
            for index in (index for index in block if turn < prompts[index].turns):
                try:
                    if index in errors:
                        reason = f"not decoded, because an earlier turn of this conversation failed: {errors[index]}"
                        raise UserError(reason)
                    ids[index] = build(prompts[index], answers[index])
                except UserError as problem:
                    answered[index, turn] = [], dict.fromkeys(decoders, failed(problem))
                    errors.setdefault(index, str(problem))
                    run.count(len(names))
            rows = run.answer_turn([prompts[index] for index in ids], turn, list(ids.values()), names) if ids else []
            for index, row in zip(ids, rows, strict=True):
                answered[index, turn] = ids[index], row
                first = row["autoregressive"]
                answers[index].append(first.tokens)
                if isinstance(first, FailedDecode):
                    errors[index] = first.error
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
    def __init__(
        self, decoders: dict[str, Decoder], log: ResultLog, progress: Callable[[int], None], batch_size: int
    ) -> None:
        self.decoders, self.log, self._progress, self._batch_size = decoders, log, progress, batch_size
        self.cold = set(decoders)  # decoders that have not been warmed up
        self.done = self.resumed = 0
        self.other_cpu_s: list[float | None] = []

    def answer_turn(
        self, prompts: list[EvalPrompt], turn: int, ids: list[list[int]], names: list[str]
    ) -> list[dict[str, DecodeResult]]:
        """Return each decoder's answers, decoded in the order of ``names`` or logged; one failure fails all."""
        keys = [prompt_key(prompt, prompt_ids, turn) for prompt, prompt_ids in zip(prompts, ids, strict=True)]
        if all((key, name) in self.log for key in keys for name in names):
            self.resumed += len(keys)
            self.count(len(names) * len(keys))
        else:
            for name in names:
                if name in self.cold:
                    first, *_ = _decode(self.decoders[name], ids[: self._batch_size])
                    if not isinstance(first, FailedDecode):
                        self.cold.discard(name)
            for name in names:
                with OtherProcesses() as others:
                    results = _decode(self.decoders[name], ids)
                cpu_s = None if others.cpu_s is None else others.cpu_s / len(keys)
                for key, prompt, result in zip(keys, prompts, results, strict=True):
                    self.log.add(key, name, prompt, result, turn, cpu_s)
                self.count(len(keys))
        return [self._row(key, names) for key in keys]

    def _row(self, key: str, names: list[str]) -> dict[str, DecodeResult]:
        row = {name: self.log[key, name] for name in self.decoders}
        if fault := next((result for result in row.values() if isinstance(result, FailedDecode)), None):
            return dict.fromkeys(row, fault)
        self.other_cpu_s += [self.log.other_cpu_s[key, name] for name in names]
        return row

    def count(self, decodings: int) -> None:
        self.done += decodings
        self._progress(self.done)


def _orders(names: list[str], count: int, seed: int) -> list[list[str]]:
    """Return random orders in which each name is in each position equally often: rotations of shuffles."""
    rng = random.Random(seed)
    orders: list[list[str]] = []
    while len(orders) < count:
        shuffled = rng.sample(names, k=len(names))
        orders += [shuffled[n:] + shuffled[:n] for n in range(len(names))]
    return orders[:count]


def one_by_one(answer: Callable[[list[int]], DecodeResult]) -> Decoder:
    return lambda prompts: [answer(ids) for ids in prompts]


def _decode(decoder: Decoder, ids: list[list[int]]) -> list[DecodeResult]:
    try:
        return decoder(ids)
    except UserError as error:
        return [failed(error)] * len(ids)


def failed(error: object) -> DecodeResult:
    return FailedDecode(tokens=[], steps=[], prefill_s=0.0, total_s=0.0, error=str(error))
