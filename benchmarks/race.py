"""Answers of a head, of autoregressive decoding and of other methods in one interleaved run, repeated."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from common import finite
from transformers import PreTrainedTokenizerBase

from drafthead.data.utils.errors import UserError
from drafthead.eval.config import EvalConfig
from drafthead.eval.metrics.acceptance import mean_accepted_length
from drafthead.eval.metrics.speed import loop_overhead, speedup_interval, tokens_per_second
from drafthead.eval.metrics.summary import METHOD
from drafthead.eval.prompts.prompt import EvalPrompt, conversation_ids
from drafthead.eval.timing.interleaved import Decoder, run_interleaved
from drafthead.eval.timing.methods import METHOD_FORMS, check_methods, methods
from drafthead.eval.timing.result_log import FailedDecode
from drafthead.eval.timing.transformers_generate import transformers_generate
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig, Drafter
from drafthead.models.decoding.step_log import DecodeResult

AUTOREGRESSIVE = ("autoregressive", "transformers", "stock")
"""Our loop without a drafter, ``generate`` over our modules, ``generate`` over stock modules."""
STRIDE = 10**6
"""Between the numbers of one prompt's repetitions: ``run_interleaved`` answers a prompt number once."""

Runs = dict[str, list[list[DecodeResult]]]
"""Per method and prompt that all methods answered, its repetitions."""


def check_baselines(specs: Sequence[str]) -> None:
    """Refuse what cannot be run, before anything is loaded."""
    check_methods([spec for spec in specs if spec not in AUTOREGRESSIVE])
    if not set(specs) & set(AUTOREGRESSIVE):
        raise UserError(
            f"--baselines {','.join(specs)} has no autoregressive decoding to divide by; add one of "
            f"{', '.join(AUTOREGRESSIVE)} (others: {METHOD_FORMS})"
        )


def decoders(
    base: BaseModel,
    stock: BaseModel | None,
    drafter: Drafter,
    draft_config: DraftConfig,
    specs: Sequence[str],
    config: EvalConfig,
) -> dict[str, Decoder]:
    """The head's decoder, and one for each of ``specs``; "stock" needs ``stock``, the model without our modules."""
    others = [spec for spec in specs if spec not in AUTOREGRESSIVE]
    known = {n: m.answer for n, m in methods(base, drafter, draft_config, replace(config, baselines=others)).items()}
    if stock is not None:
        known["stock"] = lambda ids: transformers_generate(stock, ids, config.max_new_tokens)
    return {name: known[name] for name in (METHOD, *specs)}


def run_race(
    ways: dict[str, Decoder],
    tokenizer: PreTrainedTokenizerBase,
    suite: Sequence[EvalPrompt],
    repeats: int,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> tuple[Runs, dict[str, str]]:
    """Answer the first turn of every prompt ``repeats`` times in every way; also the prompts left out, with reasons."""
    prompts = [
        replace(prompt, number=prompt.number + STRIDE * repeat, later_turns=())
        for repeat in range(repeats)
        for prompt in suite
    ]
    results = run_interleaved(
        prompts,
        lambda prompt, answers: conversation_ids(tokenizer, prompt, answers),
        ways,
        log=None,
        seed=seed,
        on_progress=on_progress,
        reference=METHOD,
    ).results
    failed: dict[str, str] = {}
    for number, run in enumerate(results[METHOD]):
        if isinstance(run, FailedDecode):
            failed.setdefault(suite[number % len(suite)].where(), run.error)
    kept = [place for place, prompt in enumerate(suite) if prompt.where() not in failed]
    if not kept:
        raise UserError(f"no prompt could be answered: {next(iter(failed.values()))}")
    return {name: [found[place :: len(suite)] for place in kept] for name, found in results.items()}, failed


def race_record(runs: Runs, failed: dict[str, str], seed: int) -> dict[str, Any]:
    """The race in numbers. A prompt counts with the median time of its repetitions.

    "interval_95" is a bootstrap over prompts; "same" counts the prompts answered like "reference" in every repetition.
    """
    typical = {
        name: [replace(found[0], total_s=median(run.total_s for run in found)) for found in prompts]
        for name, prompts in runs.items()
    }
    speeds = {name: tokens_per_second(results).value for name, results in typical.items()}
    reference, *others = [name for name in AUTOREGRESSIVE if name in speeds]
    fastest = max((reference, *others), key=lambda name: speeds[name])
    wanted = [found[0].tokens for found in runs[reference]]
    found = {}
    for name, results in typical.items():
        ratio, low, high = speedup_interval(typical[fastest], results, seed=seed)
        same = (all(run.tokens == ids for run in runs) for runs, ids in zip(runs[name], wanted, strict=True))
        found[name] = {
            "tokens_per_second": finite(speeds[name]),
            "ratio_to_autoregressive": finite(ratio),
            "interval_95": [finite(low), finite(high)],
            "mean_accepted_length": finite(mean_accepted_length(results).value),
            "same": sum(same),
            "overhead": loop_share(runs, name),
        }
    about = {"fastest_autoregressive": fastest, "reference": reference, "prompts": len(wanted), "failed": failed}
    return about | {"methods": found}


def loop_share(runs: Runs, name: str) -> float | None:
    """Share of a method's step time outside base and drafter; None where transformers runs the loop."""
    if name in ("transformers", "stock") or name.startswith("hf_"):
        return None
    return finite(loop_overhead([run for found in runs[name] for run in found]).value)
