"""Evaluate a drafter: interleaved timing against both plain baselines and its peers, metrics, report."""

import hashlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.eval.config import EvalConfig
from drafthead.eval.lossless.check_lossless import total_variation
from drafthead.eval.lossless.equality import Equality, compare_outputs, logit_margin, probe_tokens
from drafthead.eval.metrics.summary import RunInfo, method_names, summarise
from drafthead.eval.prompts.prompt import EvalPrompt, conversation_ids
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.report.report import write_report
from drafthead.eval.timing.interleaved import TimedResults, run_interleaved
from drafthead.eval.timing.methods import methods
from drafthead.eval.timing.result_log import FailedDecode
from drafthead.eval.trees.calibrate import Calibration
from drafthead.eval.trees.cost_model import StepCosts
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig, Drafter
from drafthead.models.decoding.loop import check_ids
from drafthead.models.decoding.step import DecodeConfig
from drafthead.models.decoding.step_log import DecodeResult
from drafthead.models.token_tree import TokenTree

Progress = Callable[[str, int, int], None]


def evaluate(
    base: BaseModel,
    drafter: Drafter,
    config: EvalConfig,
    folder: Path,
    progress: Progress,
    *,
    draft_config: DraftConfig | None = None,
    calibration: Calibration | None = None,
    costs: StepCosts | None = None,
    training_log: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Answer a suite plainly (transformers and ours), speculatively and with the peers; write ``eval.json`` and a page.

    An interrupted evaluation continues: finished prompts are kept in ``eval-log-*.jsonl``.

    Returns:
        The contents of ``eval.json``, and "resumed": how many of how many turns an earlier run had answered.

    Raises:
        UserError: an unknown suite, a tree deeper than the head, no prompt that could be decoded.
    """
    draft_config = draft_config or config.draft_config(drafter)
    config.rule.check(draft_config.draft_sampling, draft_config.tree)
    suite = load_suite(config.suite, config.limit, config.seed, config.tasks)
    ways = methods(base, drafter, draft_config, config)
    timing = run_interleaved(
        suite,
        lambda prompt, answers: _ask(base, prompt, answers, config.max_new_tokens),
        {name: way.answer for name, way in ways.items()},
        folder / f"eval-log-{_digest(ways['speculative'].made_of, config)}.jsonl",
        config.seed,
        lambda done, total: progress("decoding", done, total),
        made_of={name: ways[name].made_of for name in config.against if ways[name].made_of},
    )
    _require_answers(timing)
    equalities: dict[str, list[Equality]] = {}
    if config.sampler.greedy:
        policy = DecodeConfig(draft_config=draft_config, sampler=config.sampler, rule=config.rule)
        equalities = _equalities(base, drafter, policy, timing)
    known = RunInfo(
        turns=timing.turns,
        retokenised=lambda tokens: _retokenised(base, tokens),
        costs=costs,
        draft_s=costs.draft_at if costs else None,
        order=calibration.order if calibration else None,
        dtype=base.dtype,
    )
    evaluation = summarise(timing.prompts, timing.results, equalities, known)
    evaluation |= _described(config, draft_config, timing)
    if calibration is not None:
        evaluation["calibration"] = calibration.to_json()
    if costs is not None:
        evaluation["costs"] = costs.to_json()
    write_json(folder / "eval.json", evaluation)
    latency = None if costs is None else sorted(costs.verify.items())
    tree = draft_config.tree if isinstance(draft_config.tree, TokenTree) else None
    write_report(folder, evaluation, latency=latency, tree=tree, training_log=training_log, title=folder.name)
    # Not in the file: measured or taken over, the numbers are the same.
    return evaluation | {"resumed": [timing.resumed, len(timing.prompts)]}


def _ask(base: BaseModel, prompt: EvalPrompt, answers: list[list[int]], max_new_tokens: int) -> list[int]:
    ids = conversation_ids(base.tokenizer, prompt, answers)
    check_ids(
        ids,
        vocab_size=base.vocab_size,
        max_context=base.max_context,
        max_new_tokens=max_new_tokens,
        where=prompt.where(len(answers)),
    )
    return ids


def _require_answers(timing: TimedResults) -> None:
    results = timing.results["speculative"]
    if all(isinstance(result, FailedDecode) for result in results):
        first = next((r.error for r in results if isinstance(r, FailedDecode)), "the suite is empty")
        raise UserError(f"none of {len(results)} prompts could be answered; the first: {first}")


def _described(config: EvalConfig, draft_config: DraftConfig, timing: TimedResults) -> dict[str, Any]:
    """What was run, beside the numbers."""
    # At temperature 0 every rule accepts the target's own choice and nothing else.
    lossless = config.rule.lossless or config.sampler.greedy
    rule: dict[str, Any] = {"name": config.rule.name, "lossless": lossless}
    if not lossless:
        rule["total_variation"] = total_variation(config.rule, draft_config.draft_sampling)
    tree: dict[str, Any] = {"nodes": draft_config.nodes, "spec": config.tree}
    if isinstance(draft_config.tree, TokenTree):
        tree["choices"] = [list(path) for path in draft_config.tree.paths[1:]]
    return {
        "suite": config.suite,
        "max_new_tokens": config.max_new_tokens,
        "tree": tree,
        "draft_sampling": config.draft_sampling,
        "sampler": vars(config.sampler),
        "rule": rule,
        "prompt_order": timing.order,
        "seed": config.seed,
    }


def _digest(drafter: str, config: EvalConfig) -> str:
    """Hash of all that decides a finished prompt's result, peers aside, so that a log continues only itself."""
    # The seed orders the decoders: with another order, a prompt that was cut off could be completed piecemeal.
    settings = {f.name: getattr(config, f.name) for f in fields(EvalConfig) if f.name not in ("against", "limit")}
    return hashlib.sha256(repr((drafter, settings)).encode()).hexdigest()[:8]


def _retokenised(base: BaseModel, tokens: list[int]) -> int:
    """Tokens of an answer as Spec-Bench counts them for its baseline: those of the decoded text."""
    text = base.tokenizer.decode(tokens, skip_special_tokens=True)
    return len(base.tokenizer(text, add_special_tokens=False).input_ids)


def _equalities(
    base: BaseModel, drafter: Drafter, policy: DecodeConfig, timing: TimedResults
) -> dict[str, list[Equality]]:
    """Per method and turn, how its answer compares with our plain loop's."""

    def compared(name: str, number: int, result: DecodeResult) -> Equality:
        ids, plain = timing.ids[number], timing.results["drafthead"][number].tokens

        def margin(position: int) -> float:
            return logit_margin(base, ids, plain, result.tokens, position)

        def probe(position: int) -> tuple[int | None, int | None]:
            return probe_tokens(base, drafter, policy, ids, result, position)

        own = probe if name == "speculative" else None  # of a peer only the target's own view is known
        return compare_outputs(plain, result.tokens, margin, own, base.dtype)

    return {
        name: [compared(name, number, result) for number, result in enumerate(timing.results[name])]
        for name in method_names(timing.results)
    }
