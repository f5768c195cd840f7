"""Comparison of a serving engine with our decoder on one head: acceptance by draft position, and answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from drafthead.data.prompts.suites import suite_label
from drafthead.eval.config import METHOD
from drafthead.eval.engines.served import PLAIN, ServedEngines
from drafthead.eval.lossless.equality import Equality
from drafthead.eval.metrics import steps
from drafthead.eval.timing.interleaved import TimedResults


def compare_engines(
    served: ServedEngines,
    timed: TimedResults,
    equalities: Mapping[str, Sequence[Equality]],
    against_plain: Mapping[str, Sequence[Equality]],
    tolerance: float,
) -> dict[str, dict[str, Any]]:
    """Return the comparison of each engine with our decoder, by engine: the key "engines" of ``eval.json``. "failures"
    has a line for everything that deviates by more than ``tolerance``. ``equalities`` compares each method's answers
    with our autoregressive answers. ``against_plain`` compares each engine's answers with and without drafts, if both
    were measured."""
    table = steps.step_table(timed.results, timed.prompts, timed.turns)
    runs = {name: table[table.method == name] for name in timed.results}
    ours = _acceptance(runs[served.chain])
    by_engine = {}
    for name, facts in served.facts.items():
        plain, theirs = runs.get(name + PLAIN), _acceptance(runs[name])
        texts = against_plain.get(name) or equalities[name]
        row = {
            **facts,
            "drafts": served.drafts,
            "chain": served.chain,
            "prompts": int((runs[name].step == 0).sum()),
            "tokens_per_second": {
                "plain": None if plain is None else steps.tokens_per_second(plain),
                "speculative": steps.tokens_per_second(runs[name]),
            },
            "speedup": None if plain is None else steps.speedup(runs[name], plain),
            "interval_95": None if plain is None else steps.speedup_interval(runs[name], plain),
            "acceptance": {"engine": theirs, "ours": ours},
            "texts": {
                "compared_with": "its own without drafts" if name in against_plain else "our autoregressive ones",
                "same": sum(one.same for one in texts),
                "of": len(texts),
                "near_ties": sum(one.near_tie for one in texts),
                "same_as_ours": sum(one.same for one in equalities[name]),
                "near_ties_with_ours": sum(one.near_tie for one in equalities[name]),
            },
        }
        others = {n.partition(":")[2]: n for n in runs if n.startswith(f"{name}:")}
        compared = {spec: _other(runs[n], plain, equalities[n]) for spec, n in others.items()}
        by_engine[name] = {**row, "compared": compared, "failures": _failures(row, tolerance)}
    return by_engine


def _other(rows: steps.Rows, plain: "steps.Rows | None", texts: Sequence[Equality]) -> dict[str, Any]:
    """Return the numbers of an entry of ``engine.vllm.compare``; ``texts`` compares it with our autoregressive ones."""
    return {
        "tokens_per_second": steps.tokens_per_second(rows),
        "speedup": None if plain is None else steps.speedup(rows, plain),
        "acceptance": _acceptance(rows),
        "texts": {
            "same": sum(one.same for one in texts),
            "near_ties": sum(one.near_tie for one in texts),
            "of": len(texts),
        },
    }


def _acceptance(rows: steps.Rows) -> dict[str, Any]:
    """Return "steps" (how many drafted), "accepted" (how many accepted draft 1, 2, ...) and "mean_accepted_length"."""
    return {
        "steps": len(steps.drafting(rows)),
        "accepted": steps.accepted_by_depth(rows),
        "mean_accepted_length": steps.mean_accepted_length(rows),
    }


def _failures(row: dict[str, Any], tolerance: float) -> list[str]:
    """Return a line per acceptance that deviates by more than ``tolerance``, and one if answers differ beyond ties."""
    theirs, ours = row["acceptance"]["engine"], row["acceptance"]["ours"]
    name, texts, failures = row["engine"], row["texts"], []
    lengths = theirs["mean_accepted_length"], ours["mean_accepted_length"]
    # Written so that NaN fails.
    if not abs(lengths[0] - lengths[1]) <= tolerance * lengths[1]:
        failures.append(f"{name} accepts {lengths[0]:.3f} tokens per step, our decoder {lengths[1]:.3f}")
    if theirs["accepted"] or not theirs["steps"]:
        for position, count in enumerate(ours["accepted"]):
            our_share = count / max(1, ours["steps"])
            other = theirs["accepted"][position] if position < len(theirs["accepted"]) else 0
            share = other / max(1, theirs["steps"])
            if not abs(share - our_share) <= tolerance:
                failures.append(
                    f"{name} accepts draft {position + 1} in {share:.1%} of the steps, our decoder in {our_share:.1%}"
                )
    if wrong := texts["of"] - texts["same"] - texts["near_ties"]:
        failures.append(
            f"{wrong} of {texts['of']} answers of {name} differ from {texts['compared_with']}, beyond near-ties"
        )
    return failures


def prompts_line(evaluation: dict[str, Any]) -> str:
    """Return a phrase with the prompts of ``eval.json``, such as "on 12 prompts of mt_bench (test half)"."""
    failed, half = {entry["prompt"] for entry in evaluation["failed"]}, evaluation.get("split", "all")
    count = len(set(evaluation.get("prompt_order", [])) - failed)
    return f"on {count} prompts of {suite_label(evaluation['suite'])}{'' if half == 'all' else f' ({half} half)'}"


def engine_lines(evaluation: dict[str, Any]) -> list[str]:
    """Return lines about every engine of ``eval.json``, first its speedup over its own decoding without the head."""
    lines = []
    for row in evaluation.get("engines", {}).values():
        speeds, texts, counts = row["tokens_per_second"], row["texts"], row["acceptance"]
        shown = [
            f"{' / '.join(map(str, one['accepted'])) or 'not counted'} of {one['steps']} steps"
            for one in (counts["engine"], counts["ours"])
        ]
        options = f"with {row['options']} " if row.get("options") else ""
        dtype = row.get("dtype") or "its dtype is not known"
        tau, ratio = counts["engine"]["mean_accepted_length"], row.get("speedup")
        gain = f"{speeds['speculative']:.1f} tokens/s with the head, not measured without it"
        if ratio is not None:
            around = row["interval_95"]
            interval = "" if None in around else f" (95 %: {around[0]:.2f} to {around[1]:.2f})"
            gain = f"{ratio:.2f}x with the head over without it{interval}, "
            gain += f"{speeds['speculative']:.1f} over {speeds['plain']:.1f} tokens/s"
        lines.append(
            f"in {row['engine']} {row['version']} ({dtype}): {gain}, tau {tau:.2f}, {prompts_line(evaluation)}"
        )
        chain = row.get("chain", METHOD)
        ours = "our decoder" + f" ({chain}, with the exported weights)" * (chain != METHOD)
        lines.append(
            f"   {options}{row['format']}, chain of {row['drafts']}: {tau:.2f} tokens per step against "
            f"{counts['ours']['mean_accepted_length']:.2f} of {ours}; accepted by position {shown[0]}, ours "
            f"{shown[1]}; answers equal to {texts['compared_with']}: {texts['same']} of {texts['of']}, near-ties: "
            f"{texts['near_ties']}"
        )
        lines += [_compared_line(spec, other) for spec, other in row.get("compared", {}).items()]
        lines += [f"   failed: {failure}" for failure in row["failures"]]
    return lines


def _compared_line(spec: str, row: Mapping[str, Any]) -> str:
    texts, counts, ratio = row["texts"], row["acceptance"], row["speedup"]
    gain = "" if ratio is None else f"{ratio:.2f}x, "
    return (
        f"   {spec}: {gain}{row['tokens_per_second']:.1f} tokens/s, tau {counts['mean_accepted_length']:.2f} in "
        f"{counts['steps']} steps that drafted; answers equal to our autoregressive ones: {texts['same']} of "
        f"{texts['of']}, near-ties: {texts['near_ties']}"
    )


def engine_failures(evaluation: dict[str, Any]) -> list[str]:
    return [failure for row in evaluation.get("engines", {}).values() for failure in row["failures"]]
