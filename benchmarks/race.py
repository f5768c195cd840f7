"""Answers of a head, of autoregressive decoding and of other methods in one interleaved run, repeated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from common import finite

from drafthead.data.utils.errors import UserError
from drafthead.eval.config import EvalConfig
from drafthead.eval.metrics.acceptance import mean_accepted_length
from drafthead.eval.metrics.speed import loop_overhead, speedup_interval, tokens_per_second
from drafthead.eval.prompts.prompt import EvalPrompt, conversation_ids
from drafthead.eval.timing.interleaved import Decoder, run_interleaved
from drafthead.eval.timing.methods import METHOD_FORMS, check_methods, methods
from drafthead.eval.timing.result_log import FailedDecode
from drafthead.eval.timing.transformers_generate import transformers_generate
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig, Drafter
from drafthead.models.decoding.step_log import DecodeResult

HEAD = "head"
PLAIN = ("plain", "transformers", "stock")
"""Autoregressive decoding: our loop, ``generate`` over our modules, ``generate`` over stock modules."""
METHODS_NAME = {"plain": "autoregressive", "transformers": "transformers", HEAD: "speculative"}
"""What ``eval/timing/methods.py`` calls them."""
STRIDE = 10**6
"""Between the numbers of one prompt's repetitions: ``run_interleaved`` answers a prompt number once."""


@dataclass(frozen=True)
class Race:
    """Every repetition of every prompt that all methods answered."""

    runs: dict[str, list[list[DecodeResult]]]
    """Per method and prompt, its repetitions."""
    failed: dict[str, str]
    """Prompts left out, with the reason."""


def check_against(specs: Sequence[str]) -> None:
    """Refuse what cannot be run, before anything is loaded.

    Raises:
        UserError: an unknown name, or none that decodes plainly.
    """
    check_methods([spec for spec in specs if spec not in PLAIN])
    if not set(specs) & set(PLAIN):
        raise UserError(
            f"--against {','.join(specs)} has no autoregressive decoding to divide by; add one of {', '.join(PLAIN)} "
            f"(peers: {METHOD_FORMS})"
        )


@dataclass(frozen=True, kw_only=True)
class Runners:
    """Who runs, and how."""

    base: BaseModel
    stock: BaseModel | None
    """The same model without our modules; may be missing where ``specs`` has no "stock"."""
    drafter: Drafter
    draft_config: DraftConfig
    specs: Sequence[str]
    """Names of ``PLAIN`` and peers of ``eval/timing/methods.py``; the head runs always."""
    config: EvalConfig
    """``max_new_tokens`` and ``seed``."""

    def ways(self) -> dict[str, Decoder]:
        """A decoder per name, the head's first."""
        peers = [spec for spec in self.specs if spec not in PLAIN]
        known = methods(self.base, self.drafter, self.draft_config, replace(self.config, baselines=peers))
        names = {spec: METHODS_NAME.get(spec, spec) for spec in (HEAD, *self.specs)}
        return {spec: self._stock if spec == "stock" else known[name].answer for spec, name in names.items()}

    def _stock(self, ids: list[int]) -> DecodeResult:
        assert self.stock is not None
        return transformers_generate(self.stock, ids, self.config.max_new_tokens)


def run_race(
    runners: Runners, suite: Sequence[EvalPrompt], repeats: int, on_progress: Callable[[int, int], None]
) -> Race:
    """Answer the first turn of every prompt ``repeats`` times in every way; greedily.

    Raises:
        UserError: no prompt could be answered by all.
    """
    prompts = [
        replace(prompt, number=prompt.number + STRIDE * repeat, later_turns=())
        for repeat in range(repeats)
        for prompt in suite
    ]
    timing = run_interleaved(
        prompts,
        lambda prompt, answers: conversation_ids(runners.base.tokenizer, prompt, answers),
        runners.ways(),
        log=None,
        seed=runners.config.seed,
        on_progress=on_progress,
        reference=HEAD,
    )
    failed: dict[str, str] = {}
    kept = []
    for place, prompt in enumerate(suite):
        bad = [run.error for run in timing.results[HEAD][place :: len(suite)] if isinstance(run, FailedDecode)]
        if bad:
            failed[prompt.where()] = bad[0]
        else:
            kept.append(place)
    if not kept:
        raise UserError(f"no prompt could be answered: {next(iter(failed.values()))}")
    runs = {name: [found[place :: len(suite)] for place in kept] for name, found in timing.results.items()}
    return Race(runs, failed)


def race_record(race: Race, seed: int) -> dict[str, Any]:
    """The race in numbers. A prompt counts with the median time of its repetitions.

    Returns:
        "fastest_plain", "reference" (whose tokens the others are compared with), "prompts", "failed", and "methods":
        per method "tokens_per_second", "ratio_to_fastest_plain", "interval_95" (bootstrap over prompts),
        "mean_accepted_length", "same" (prompts answered like the reference in every repetition), "overhead" (None
        where only transformers knows).
    """
    typical = {
        name: [replace(runs[0], total_s=median(run.total_s for run in runs)) for runs in prompts]
        for name, prompts in race.runs.items()
    }
    speeds = {name: tokens_per_second(results).value for name, results in typical.items()}
    plain = [name for name in PLAIN if name in speeds]
    fastest = max(plain, key=lambda name: speeds[name])
    reference = race.runs[plain[0]]
    methods = {}
    for name, results in typical.items():
        ratio, low, high = speedup_interval(typical[fastest], results, seed=seed)
        methods[name] = {
            "tokens_per_second": finite(speeds[name]),
            "ratio_to_fastest_plain": finite(ratio),
            "interval_95": [finite(low), finite(high)],
            "mean_accepted_length": finite(mean_accepted_length(results).value),
            "same": sum(map(_same, race.runs[name], reference)),
            "overhead": loop_share(race, name),
        }
    return {
        "fastest_plain": fastest,
        "reference": plain[0],
        "prompts": len(reference),
        "failed": race.failed,
        "methods": methods,
    }


def loop_share(race: Race, name: str) -> float | None:
    """Share of a method's step time outside base and drafter; None where transformers runs the loop."""
    if name in ("transformers", "stock") or name.startswith("hf_"):
        return None
    return finite(loop_overhead([run for runs in race.runs[name] for run in runs]).value)


def _same(runs: Sequence[DecodeResult], reference: Sequence[DecodeResult]) -> bool:
    return all(run.tokens == reference[0].tokens for run in runs)
