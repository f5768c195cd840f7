"""Evaluate a drafter: interleaved timing against autoregressive decoding and other methods, metrics, report."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

from drafthead.data.answers.store import Answer
from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.prompts.prompt import EvalPrompt, conversation_ids
from drafthead.data.prompts.suites import load_suite
from drafthead.errors import UserError
from drafthead.eval.config import EvalConfig
from drafthead.eval.engines.load import measure_load
from drafthead.eval.engines.served import PLAIN, ServedEngines, serve
from drafthead.eval.lossless.certify import rule_total_variation
from drafthead.eval.lossless.equality import Equality, compare_outputs, draw_margin, logit_margin, recompute_tokens
from drafthead.eval.metrics.engine_comparison import compare_engines
from drafthead.eval.metrics.spans import answer_spans
from drafthead.eval.metrics.summary import method_names, retokenised, summarise
from drafthead.eval.report.report import write_report
from drafthead.eval.timing.interleaved import TimedResults, run_interleaved
from drafthead.eval.timing.methods import TRANSFORMERS, Method, engine_methods, methods, prompt_seed
from drafthead.eval.timing.result_log import FailedDecode
from drafthead.eval.trees.calibrate import Calibration
from drafthead.eval.trees.finished_answers import base_answers
from drafthead.eval.trees.simulate import simulate_texts
from drafthead.files.local import finite, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.generation_settings import CHANGE_TEXT, changed_settings
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling
from drafthead.models.decoding.growth import StepwiseDrafter
from drafthead.models.decoding.loop import check_ids
from drafthead.models.decoding.sampling import Sampler, with_own_penalty
from drafthead.models.decoding.step import DecodeConfig, DecodeResult
from drafthead.models.drafters.combined import CombinedDrafter
from drafthead.models.token_tree import TokenTree
from drafthead.system.display import Display

PREDICTED_ON = 36  # prompts of the dev half from which `predict` forecasts the results


def evaluate(
    base: BaseModel,
    drafter: Drafter,
    config: EvalConfig,
    folder: Path,
    display: Display,
    *,
    draft_config: DraftConfig | None = None,
    head: Drafter | None = None,
    candidates: Mapping[str, tuple[Drafter, DraftConfig]] = MappingProxyType({}),
    calibration: Calibration | None = None,
    costs: CostModel | None = None,
    costs_after: Callable[[], CostModel] | None = None,
    training_log: Sequence[dict[str, Any]] = (),
    development: Sequence[Answer] | None = None,
    training_data: str | None = None,
) -> dict[str, Any]:
    """Answer a suite autoregressively, with drafts and with the baselines; write ``eval.json`` and ``report.html``.
    Finished prompts are stored in ``eval-log-*.jsonl``, from which an interrupted evaluation resumes. ``head`` is the
    drafter that "head" means in ``config.baselines`` (default: ``drafter``). ``candidates`` are more drafters to time
    in the same run with the same rule, by name. ``costs`` and ``development``, the base's answers to the dev half, are
    for the prediction; missing answers are generated. ``costs_after`` measures the costs again after the timed run, and
    their mean counts, because the speed of a machine may change. ``calibration``, ``training_log`` (rows of
    ``metrics.jsonl``) and ``training_data`` (one line of text) are for the report. Return the contents of
    ``eval.json``, and "resumed": [turns that an earlier run had answered, all turns]."""
    draft_config = draft_config or config.draft_config(drafter)
    config.rule.check(draft_config)
    if not config.engines:  # which are asked for answers without a penalty
        config = replace(config, sampler=with_own_penalty(config.sampler, base.model.generation_config))
    with serve(base, drafter, config, folder, lambda line: display.line(f"   {line}")) as served:
        compared = methods(base, drafter, draft_config, config, head or drafter, candidates)
        compared |= engine_methods(base, served, config)
        timed = _timed(base, config, compared, folder, display)
    if costs is not None and costs_after is not None:
        with display.stage("step costs on this machine, again"):
            costs = costs.mean_with(costs_after())
    load = measure_load(base, head or drafter, timed.first_turns, config, folder, display)
    equalities = _equalities(base, drafter, draft_config, timed, set(served.methods), config)
    order = calibration.order if calibration else None
    spans = partial(answer_spans, base.tokenizer)
    evaluation = summarise(
        timed, equalities, partial(retokenised, base.tokenizer), base.dtype, costs, order, spans=spans
    )
    evaluation |= _settings(base, drafter, config, draft_config, timed)
    predicted = None
    if costs and config.split == "test":
        with display.stage("forecast from answers to the suite's dev half"):
            predicted = predict(base, drafter, draft_config, config, costs, development)
    optional = {
        "engines": finite(served_as_trained(base, served, timed, equalities, config)) if served.facts else None,
        "load": load or None,
        "predicted": predicted,
        "calibration": calibration and calibration.to_json(),
        "costs": costs and costs.to_json(),
    }
    evaluation |= {key: value for key, value in optional.items() if value is not None}
    write_json(folder / "eval.json", evaluation)
    write_report(folder, evaluation, training_log, training_data)
    # Not in the file, which must not depend on how often the evaluation was interrupted.
    return evaluation | {"resumed": [timed.resumed, len(timed.prompts)]}


def _timed(
    base: BaseModel, config: EvalConfig, compared: dict[str, Method], folder: Path, display: Display
) -> TimedResults:
    """Answer the suite with all ``compared`` methods, interleaved. Finished answers of an earlier run are used again if
    ``Method.composition`` is unchanged."""
    timed = run_interleaved(
        load_suite(config.suite, config.limit, config.seed, config.tasks, config.split),
        lambda prompt, answers: _prompt_ids(base, prompt, answers, config.max_new_tokens),
        {name: method.answer for name, method in compared.items()},
        folder / f"eval-log-{_digest(compared['speculative'].composition, config)}.jsonl",
        config.seed,
        lambda done, total: display.progress("decoding, answers by all methods", done, total),
        # The log's name contains the mark of the evaluated drafter.
        composition={name: m.composition for name, m in compared.items() if m.composition and name != "speculative"},
        batch_size=config.batch_size,
    )
    answers = timed.results["speculative"]
    errors = [answer.error for answer in answers if isinstance(answer, FailedDecode)]
    if len(errors) == len(answers):
        first = errors[0] if errors else "the suite is empty"
        raise UserError(f"none of {len(answers)} prompts could be answered; the first error: {first}")
    return timed


def predict(
    base: BaseModel,
    drafter: Drafter,
    draft_config: DraftConfig,
    config: EvalConfig,
    costs: CostModel,
    texts: Sequence[Answer] | None = None,
) -> dict[str, Any] | None:
    """Return the performance expected on ``config``'s test half, simulated on the answers ``texts`` to its dev half.
    None if the simulation is impossible: the split is not ``test``, the rule is lossy, the sampler has settings other
    than the temperature, prompts are answered in batches, or a combined drafter samples its drafts."""
    sampler = config.sampler
    if config.split != "test" or not config.rule.lossless or sampler != Sampler(temperature=sampler.temperature):
        return None
    if config.batch_size > 1:  # ``costs`` are those of one row
        return None
    if draft_config.draft_sampling is not DraftSampling.TOP_K and not isinstance(drafter, StepwiseDrafter):
        return None
    texts = texts or development_answers(base, config, PREDICTED_ON, drafter.spec)
    # One by one, as in decoding: a combined drafter divides its nodes among the rows of a batch.
    simulated = simulate_texts(base, drafter, texts, draft_config, sampler, config.rule, in_order=True)
    tau = simulated.mean_accepted_length
    length = mean(len(text.ids) - text.boundary for text in texts)
    prompt = mean(text.boundary for text in texts)
    nodes = simulated.nodes or {draft_config.nodes: 1.0}
    plain, cost = costs.step(1, 0), simulated.cost
    step = costs.mean_step(nodes, draft_config.depth) if cost is None else plain * cost
    speedup = costs.answer_speedup(tau, step, length, prompt)
    average = sum(n * share for n, share in nodes.items())
    expected = {"mean_accepted_length": tau, "interval_95": simulated.interval, "speedup": speedup, "nodes": average}
    return expected | {"answers": len(texts)}


def development_answers(base: BaseModel, config: EvalConfig, limit: int, spec: HiddenStatesSpec) -> list[Answer]:
    """Return the base's answers to ``limit`` prompts of the dev half of ``config.tasks``. If the drafter reads only
    final hidden states, the answers keep those of decoding, which saves a second pass."""
    settings, keep_hidden_states = replace(config, limit=limit), not spec.layers
    return base_answers(base, settings, config.sampler.temperature, config.tasks, "dev", keep_hidden_states)


def development_prompts(base: BaseModel, config: EvalConfig, limit: int) -> list[list[int]]:
    """Return token ids of ``limit`` prompts of the dev half; none if the evaluation does not use the test half."""
    if config.split != "test":
        return []
    suite = load_suite(config.suite, limit, config.seed, config.tasks, "dev")
    return [_prompt_ids(base, prompt, [], config.max_new_tokens) for prompt in suite]


def _prompt_ids(base: BaseModel, prompt: EvalPrompt, answers: list[list[int]], max_new_tokens: int) -> list[int]:
    """Return the prompt's ids after the earlier ``answers``; reject ids that the base lacks, or too many for it."""
    ids = conversation_ids(base.tokenizer, prompt, answers, base.config.chat_template_kwargs)
    check_ids(base, ids, max_new_tokens, prompt.where(len(answers)))
    return ids


def _settings(
    base: BaseModel, drafter: Drafter, config: EvalConfig, draft_config: DraftConfig, timed: TimedResults
) -> dict[str, Any]:
    # At temperature 0 every rule accepts the target's own choice and nothing else.
    lossless = config.rule.lossless or config.sampler.greedy
    rule: dict[str, Any] = {"name": config.rule.name, "lossless": lossless}
    if not lossless:
        rule["total_variation"] = rule_total_variation(config.rule, draft_config.draft_sampling)
    ignored = changed_settings(base.generation_config, [key for key in CHANGE_TEXT if key != "repetition_penalty"])
    by_cost = isinstance(draft_config.tree, CostTree)
    spec = "cost" if by_cost and config.tree == "head" else config.tree
    tree = _tree_json(draft_config) | {"spec": spec}
    if by_cost:
        answers = [answer for answer in timed.results["speculative"] if isinstance(answer, DecodeResult)]
        sizes = Counter(1 + step.proposed for answer in answers for step in answer.steps)
        tree["steps"] = {str(n): sizes[n] for n in sorted(sizes)}
    if isinstance(drafter, CombinedDrafter) and not by_cost:
        parts = zip(drafter.names, drafter.draft_configs(draft_config), strict=True)
        tree["drafters"] = [{"drafter": name} | _tree_json(part) for name, part in parts]
    return {
        "suite": config.suite,
        "split": config.split,
        "max_new_tokens": config.max_new_tokens,
        **({"batch_size": config.batch_size} if config.batch_size > 1 else {}),
        "tree": tree,
        "draft_sampling": config.draft_sampling,
        "sampler": vars(config.sampler) | {"repetition_penalty": config.sampler.repetition_penalty or 1.0},
        "rule": rule,
        "prompt_order": timed.order,
        "seed": config.seed,
        **({"kernels": base.kernels.by_rows} if base.kernels else {}),
        **({"not_applied": ignored} if ignored else {}),
    }


def _tree_json(draft_config: DraftConfig) -> dict[str, Any]:
    """Return as JSON values the largest number of nodes of a tree (root included), and its paths if it is static."""
    tree = draft_config.tree
    choices = {"choices": [list(path) for path in tree.paths[1:]]} if isinstance(tree, TokenTree) else {}
    return {"nodes": draft_config.nodes, **choices}


def _digest(drafter: str, config: EvalConfig) -> str:
    """Return a hash of ``drafter`` (a ``Method.composition``) and all settings that determine a prompt's result. It is
    part of the name of the log from which an evaluation resumes."""
    # The seed orders the decoders. With another order, times of one prompt could come from two processes.
    settings = {
        f.name: getattr(config, f.name)
        for f in fields(EvalConfig)
        if f.name not in ("baselines", "limit", "engines", "engine")
    }
    if config.batch_size == 1:
        del settings["batch_size"]  # logs of earlier versions lack it
    return hashlib.sha256(repr((drafter, settings)).encode()).hexdigest()[:8]


def _equalities(
    base: BaseModel,
    drafter: Drafter,
    draft_config: DraftConfig,
    timed: TimedResults,
    engines: set[str],
    config: EvalConfig,
) -> dict[str, list[Equality]]:
    """Compare the answers of each method, turn by turn, with those of our autoregressive decoding. Sampled answers of
    transformers are not compared, because transformers draws other random numbers. If drafts may change sampled
    answers, the result is empty."""
    decode_config = DecodeConfig(draft_config=draft_config, sampler=config.sampler, rule=config.rule)
    if not (config.sampler.greedy or decode_config.same_text):
        return {}
    recompute = partial(recompute_tokens, base, drafter, decode_config)
    equalities = {}
    for name in method_names(timed.results):
        if config.sampler.greedy or not name.startswith(TRANSFORMERS):
            tie = config.engine.tie if name in engines else None
            # The tree of a baseline's step is unknown.
            again = recompute if name == "speculative" and config.sampler.greedy else None
            equalities[name] = _compared(base, timed, "autoregressive", name, config, tie, again)
    return equalities


def _compared(
    base: BaseModel,
    timed: TimedResults,
    expected: str,
    method: str,
    config: EvalConfig,
    tie: float | None,
    recompute: Callable[..., tuple[int | None, int | None]] | None = None,
) -> list[Equality]:
    """Compare the answers of two methods, turn by turn; two logits closer than ``tie`` are a tie. ``recompute`` takes
    prompt ids, result and the first differing position, to explain other differences."""
    equalities = []
    for ids, before, after in zip(timed.ids, timed.results[expected], timed.results[method], strict=True):
        margin = partial(logit_margin, base, ids, before.tokens, after.tokens)
        if not config.sampler.greedy:
            seed = prompt_seed(config, ids)
            margin = partial(draw_margin, base, config.sampler, seed, ids, before.tokens, after.tokens)
        again = recompute and partial(recompute, ids, after)
        equalities.append(compare_outputs(before.tokens, after.tokens, margin, again, base.rounding_dtype, tie))
    return equalities


def served_as_trained(
    base: BaseModel,
    served: ServedEngines,
    timed: TimedResults,
    equalities: dict[str, list[Equality]],
    config: EvalConfig,
) -> dict[str, Any]:
    """Return the key "engines" of ``eval.json``: each engine's comparison with our decoder, and its failures."""
    plain = {
        engine: _compared(base, timed, engine + PLAIN, engine, config, config.engine.tie)
        for engine in served.facts
        if engine + PLAIN in timed.results
    }
    return compare_engines(served, timed, equalities, plain, config.engine.tolerance)
