"""Wall clock against plain decoding, in one process, with the prompts interleaved."""

import math
import os
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafthead import __version__
from drafthead.data.contracts import DecodeResult
from drafthead.data.errors import UserError
from drafthead.eval import metrics
from drafthead.eval.journal import FailedDecode, Journal, prompt_key
from drafthead.eval.suites import EvalPrompt

Decoder = Callable[[list[int]], DecodeResult]
"""Decodes an answer to prompt ids. Its times must include the device's work: synchronise before stopping a clock."""

NEAR_TIE = 1e-4
"""Two logits closer than this may swap between two orders of the same float32 sums."""
BASELINES = ("transformers", "drafthead")
METHOD = "speculative"


@dataclass(frozen=True)
class Equality:
    """How an answer compares with plain decoding's, token for token."""

    same: bool
    position: int | None = None
    """First answer position that differs; None when the same."""
    tokens: tuple[int, int] | None = None
    """Reference's and the answer's token there; None when one answer ended before the other."""
    margin: float | None = None
    """Distance of the target's logits of the two tokens."""
    near_tie: bool = False
    """The margin is below ``NEAR_TIE``: rounding, not a wrong rule, explains the difference."""


def run_interleaved(
    prompts: Sequence[tuple[EvalPrompt, list[int]]],
    decoders: dict[str, Decoder],
    log: Path | None,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> dict[str, list[DecodeResult]]:
    """Decode every prompt with every decoder, prompt by prompt, so that a drift of the machine hits all alike.

    Every decoder answers the first prompt once, untimed, before anything is measured.

    Args:
        prompts: prompts and their token ids.
        decoders: by name.
        log: JSONL file that gets every finished (prompt, decoder) at once. A prompt that it holds of all decoders is
            not decoded again; any other is, by all of them, so that times that are compared come from one process.
            It knows prompts and decoder names only: one file per head, tree and settings.
        seed: order of the decoders within each prompt.
        on_progress: called with (finished, all) pairs of prompt and decoder.

    Returns:
        Per decoder one result per prompt, in order. A prompt that any decoder refused with ``UserError`` is
        ``FailedDecode`` in all of them, so that totals stay over the same prompts.

    Raises:
        UserError: the log is broken elsewhere than in its last line.
    """
    journal = Journal(log)
    keys = [prompt_key(prompt, ids) for prompt, ids in prompts]
    finished = [all((key, name) in journal for name in decoders) for key in keys]
    pending = [ids for whole, (_, ids) in zip(finished, prompts, strict=True) if not whole]
    for decoder in decoders.values():
        _warm_up(decoder, pending)
    total = len(prompts) * len(decoders)
    done = 0
    orders = _orders(list(decoders), len(prompts), seed)
    for key, whole, (prompt, ids), order in zip(keys, finished, prompts, orders, strict=True):
        for name in order:
            if not whole:
                journal.add(key, name, prompt, _decode(decoders[name], ids))
            done += 1
            on_progress(done, total)
    rows = [_spread_failure([journal[key, name] for name in decoders]) for key in keys]
    return {name: [row[column] for row in rows] for column, name in enumerate(decoders)}


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
        return FailedDecode(tokens=[], steps=[], prefill_s=0.0, total_s=0.0, error=str(error))


def _warm_up(decoder: Decoder, prompts: Sequence[list[int]]) -> None:
    for ids in prompts:
        if not isinstance(_decode(decoder, ids), FailedDecode):
            return


def _spread_failure(row: list[DecodeResult]) -> list[DecodeResult]:
    failed = next((result for result in row if isinstance(result, FailedDecode)), None)
    return row if failed is None else [failed] * len(row)


def speedup_interval(
    baseline: Sequence[DecodeResult], method: Sequence[DecodeResult], seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """Tokens per second of ``method`` over ``baseline``, both as ratios of totals, with a 95 % interval.

    The interval is the percentile bootstrap over prompts, drawn in pairs: a slow prompt is slow for both.

    Returns:
        ratio, low, high. The bounds are nan with fewer than two prompts, all are nan with none.
    """
    pairs = [(b, m) for b, m in zip(baseline, method, strict=True) if b.total_s > 0 and m.total_s > 0]
    if not pairs:
        return math.nan, math.nan, math.nan
    columns = np.array([[len(b.tokens), b.total_s, len(m.tokens), m.total_s] for b, m in pairs])
    ratio = float(_ratio_of_totals(columns[None])[0])
    if len(pairs) < 2:
        return ratio, math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(len(pairs), size=(resamples, len(pairs)))
    low, high = np.percentile(_ratio_of_totals(columns[drawn]), [2.5, 97.5])
    return ratio, float(low), float(high)


def _ratio_of_totals(columns: np.ndarray) -> np.ndarray:
    base_tokens, base_s, tokens, seconds = columns.sum(axis=1).T
    return np.asarray((tokens / seconds) / (base_tokens / base_s))


def compare_outputs(reference: list[int], tokens: list[int], margin: Callable[[int], float]) -> Equality:
    """Compare an answer with plain decoding's.

    Args:
        reference: plain decoding's tokens.
        tokens: the answer's.
        margin: given the first differing position, the distance of the target's logits of the two tokens there;
            called only when both answers have a token there.
    """
    if reference == tokens:
        return Equality(same=True)
    shared = min(len(reference), len(tokens))
    position = next((i for i in range(shared) if reference[i] != tokens[i]), shared)
    if position == shared:
        return Equality(same=False, position=position)
    distance = abs(margin(position))
    pair = (reference[position], tokens[position])
    return Equality(same=False, position=position, tokens=pair, margin=distance, near_tie=distance < NEAR_TIE)


def hardware() -> dict[str, Any]:
    """What the numbers were measured on: cpu, cores (usable), torch_threads, ram_gb, gpu (None without one)."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": usable,
        "torch_threads": torch.get_num_threads(),
        "ram_gb": round(ram / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    import transformers  # slow to import, and only its version is needed

    return {
        "drafthead": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def summarise(
    prompts: Sequence[EvalPrompt], results: dict[str, list[DecodeResult]], equalities: Sequence[Equality]
) -> dict[str, Any]:
    """Everything ``eval.json`` holds; plain JSON values, None where nothing was measured.

    Args:
        prompts: in the order of the results.
        results: of ``run_interleaved``, under the names "transformers", "drafthead" (the plain baselines) and
            "speculative".
        equalities: one per prompt, of the speculative answer; ignored for failed prompts.

    Returns:
        "tasks": per task, and "overall": the metrics; "failed": prompts left out of both, with the reason.
    """
    machine = {"hardware": hardware(), "versions": versions()}
    failed = {n for n, result in enumerate(results[METHOD]) if isinstance(result, FailedDecode)}

    def group(members: list[int]) -> dict[str, Any]:
        kept = [n for n in members if n not in failed]
        chosen = {name: [row[n] for n in kept] for name, row in results.items()}
        outputs = [(prompts[n], equalities[n]) for n in kept]
        return _measures(chosen) | {"identical_outputs": _identical(outputs)} | machine

    tasks: dict[str, list[int]] = {}
    for n, prompt in enumerate(prompts):
        tasks.setdefault(prompt.task, []).append(n)
    reasons = [
        {"prompt": prompts[n].number, "task": prompts[n].task, "message": result.error}
        for n, result in enumerate(results[METHOD])
        if isinstance(result, FailedDecode)
    ]
    return {
        "tasks": {task: group(members) for task, members in tasks.items()},
        "overall": group(list(range(len(prompts)))),
        "failed": reasons,
    }


def fastest_baseline(group: dict[str, Any]) -> tuple[str, float | None]:
    """Name and tokens per second of the faster plain decoding in a group of ``summarise``."""
    speeds: dict[str, float | None] = group["baseline_tokens_per_second"]
    name = max(speeds, key=lambda baseline: speeds[baseline] or 0.0)
    return name, speeds[name]


def speedup_of(group: dict[str, Any]) -> float | None:
    """Speedup over the faster plain decoding in a group of ``summarise``: the one to quote."""
    value: float | None = group["speedup"][f"vs_{fastest_baseline(group)[0]}"]
    return value


def _measures(results: dict[str, list[DecodeResult]]) -> dict[str, Any]:
    method = results[METHOD]
    speeds = {name: _number(metrics.tokens_per_second(results[name]).value) for name in BASELINES}
    intervals = {name: speedup_interval(results[name], method) for name in BASELINES}
    group: dict[str, Any] = {
        "mean_accepted_tokens": _number(metrics.mean_accepted_tokens(method).value),
        "acceptance_per_depth": [_number(ratio.value) for ratio in metrics.acceptance_per_depth(method)],
        "ctar": {str(width): _number(metrics.ctar(method, width).value) for width in metrics.CTAR_WIDTHS},
        "tokens_per_second": _number(metrics.tokens_per_second(method).value),
        "baseline_tokens_per_second": speeds,
        "speedup": {f"vs_{name}": _number(intervals[name][0]) for name in BASELINES},
    }
    # The faster baseline is the honest denominator.
    _, *bounds = intervals[fastest_baseline(group)[0]]
    group["speedup"]["interval_95"] = [_number(bound) for bound in bounds]
    return group


def _identical(outputs: list[tuple[EvalPrompt, Equality]]) -> dict[str, Any]:
    differing = [
        (e, {"prompt": p.number, "position": e.position, "tokens": e.tokens and list(e.tokens), "margin": e.margin})
        for p, e in outputs
        if not e.same
    ]
    return {
        "same": sum(e.same for _, e in outputs),
        "of": len(outputs),
        "near_ties": [entry for e, entry in differing if e.near_tie],
        "different": [entry for e, entry in differing if not e.near_tie],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
