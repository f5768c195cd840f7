"""Methods that an evaluation times, by name: autoregressive decoding, the drafter, and baselines. Those of transformers
run its ``generate``: over our modules, over stock modules, and its speculative methods."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from drafthead.errors import UserError, one_line
from drafthead.eval.config import METHOD, EvalConfig
from drafthead.eval.engines.served import ServedEngines
from drafthead.eval.timing.interleaved import Decoder, one_by_one
from drafthead.eval.trees.calibrate import measured_with
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.loop import EXACT, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeResult, StepRecord
from drafthead.models.drafters.draft_model import ModelDrafter
from drafthead.models.drafters.expression import build_drafter, head_leads, parse_drafter

TRANSFORMERS = "hf_"  # prefix of transformers' own speculative methods


def check_methods(specs: list[str]) -> None:
    """Reject names in ``eval.baselines`` that are neither drafters nor methods of transformers; load nothing."""
    for spec in specs:
        if _transformers_method(spec) is None:
            parse_drafter(spec)


def _transformers_method(spec: str) -> tuple[str, str] | None:
    """Split the name of transformers' own method into kind and detail (a number of tokens, or a model)."""
    kind, _, detail = spec.partition(":")
    if kind == "hf_prompt_lookup" and (not detail or (detail.isdigit() and int(detail) > 0)):
        return kind, detail
    return (kind, detail) if kind == "hf_assisted" and detail else None


class Method(NamedTuple):
    """A decoder to time."""

    answer: Decoder
    composition: str = ""  # hash of everything that can change although the name does not, such as weights


def methods(
    base: BaseModel,
    drafter: Drafter,
    draft_config: DraftConfig,
    config: EvalConfig,
    head: Drafter,
    candidates: Mapping[str, tuple[Drafter, DraftConfig]] = MappingProxyType({}),
) -> dict[str, Method]:
    """Return the autoregressive baselines, ``drafter``, ``candidates`` and the config's baselines, by name. ``head`` is
    the drafter that "head" means in ``config.baselines``. ``candidates`` are more drafters with the same rule;
    baselines always have the rule ``exact``. Transformers answers single prompts, so it is left out of batches."""
    exact = replace(config, rule=EXACT)
    compared = {}
    if config.batch_size == 1:
        if config.stock_baseline:
            compared["transformers_stock"] = _generated(base, config, model=base.stock())
        compared["transformers"] = _generated(base, config)
    compared |= {
        "autoregressive": _decoded(base, None, None, exact),
        "speculative": _decoded(base, drafter, draft_config, config),
    }
    compared |= {name: _decoded(base, *candidate, config) for name, candidate in candidates.items()}
    return compared | {spec: _baseline(base, head, spec, exact) for spec in config.baselines}


def engine_methods(base: BaseModel, served: ServedEngines, config: EvalConfig) -> dict[str, Method]:
    """Return each engine with the head and without it, and our decoder drafting a chain with the served head."""
    engines = {name: Method(one_by_one(answer), version) for name, (answer, version) in served.methods.items()}
    if served.head is not None and served.chain != METHOD:
        engines[served.chain] = _decoded(base, served.head, served.chain_config, replace(config, rule=EXACT))
    return engines


def prompt_seed(config: EvalConfig, ids: list[int]) -> int:
    """Return the seed for answering ``ids``. It differs by prompt, because the bootstrap needs independent answers."""
    digest = hashlib.sha256(repr((config.seed, ids)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _decoded(base: BaseModel, drafter: Drafter | None, draft_config: DraftConfig | None, config: EvalConfig) -> Method:
    """Return our decoding loop as a method, autoregressive if ``drafter`` is None."""

    def answer(prompts: list[list[int]]) -> list[DecodeResult]:
        results = decode_batch(
            base,
            drafter,
            prompts,
            max_new_tokens=config.max_new_tokens,
            draft_config=draft_config,
            sampler=config.sampler,
            rule=config.rule,
            seeds=[prompt_seed(config, ids) for ids in prompts],
            timed=True,
            batch_size=config.batch_size,
        )
        return results if config.batch_size == 1 else [shared_times(result) for result in results]

    return Method(answer, "" if drafter is None else measured_with(base, drafter.identity(), draft_config)[:8])


def shared_times(result: DecodeResult) -> DecodeResult:
    """Return ``result`` with its share of the batch's time: each step's and prefill's time, divided by its answers.
    Times of answers that were decoded together then add up to the time of all, apart from the loop around the steps.
    Tokens per second are the throughput of the whole batch."""
    names = ("draft_s", "verify_s", "total_s")
    steps = [replace(step, **{name: getattr(step, name) / step.rows for name in names}) for step in result.steps]
    prefill_s = result.prefill_s / result.prefill_rows
    return replace(result, steps=steps, prefill_s=prefill_s, total_s=prefill_s + sum(step.total_s for step in steps))


def _generated(base: BaseModel, config: EvalConfig, **speculation: Any) -> Method:
    new, sampler = config.max_new_tokens, config.sampler
    return Method(
        one_by_one(lambda ids: transformers_generate(base, ids, new, sampler, prompt_seed(config, ids), **speculation))
    )


def _baseline(base: BaseModel, head: Drafter, spec: str, config: EvalConfig) -> Method:
    if (stock_method := _transformers_method(spec)) is None:
        expression, nodes = parse_drafter(spec), config.tree_nodes
        settings = replace(config, tree="static") if config.by_cost(head) and not head_leads(expression) else config
        return _decoded(base, *build_drafter(expression, base, head, settings.draft_config(head), nodes), config)
    kind, detail = stock_method
    if kind == "hf_prompt_lookup":
        return _generated(base, config, prompt_lookup_num_tokens=int(detail or 3))
    assistant = BaseModel.load(BaseConfig(name=detail), base.device)
    ModelDrafter(assistant, base)  # refuses another vocabulary
    return _generated(base, config, assistant_model=assistant.model)._replace(composition=assistant.fingerprint)


class _StepClock(BaseStreamer):  # type: ignore[misc]
    """Streamer that records when ``generate`` emits tokens, and how many. The first call passes the prompt."""

    def __init__(self) -> None:
        self.chunks: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.chunks.append((perf_counter(), value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        pass


@torch.inference_mode()
def transformers_generate(
    base: BaseModel,
    ids: list[int],
    max_new_tokens: int,
    sampler: Sampler | None = None,
    seed: int = 0,
    model: Any = None,
    **speculation: Any,
) -> DecodeResult:
    """Answer the prompt ``ids`` by transformers' ``generate``, over ``model`` (None: the base's own modules).
    ``speculation`` has arguments such as ``prompt_lookup_num_tokens=10``. Only accepted tokens are known, so steps have
    depth 0 and no acceptance rates. Tokens that the first pass accepts with the prompt count as prefill."""
    inputs, clock, sampler = torch.tensor([ids], device=base.device), _StepClock(), sampler or Sampler()
    model = base.model if model is None else model
    if not sampler.greedy:
        torch.manual_seed(seed)
    started = perf_counter()
    # Exactly these settings: missing ones would come from the model's own config, such as a repetition penalty.
    original, model.generation_config = model.generation_config, _generation_config(base, max_new_tokens, sampler)
    try:
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), streamer=clock, **speculation)
    except (ValueError, RuntimeError) as error:
        how = f" with {', '.join(sorted(speculation))}" if speculation else ""
        raise UserError(f"transformers' generate{how} failed: {one_line(error)}") from error
    finally:
        model.generation_config = original
    tokens = output[0, len(ids) :].tolist()
    total = perf_counter() - started
    steps: list[StepRecord] = []
    position = clock.chunks[0][1]
    for (before, _), (after, count) in zip(clock.chunks, clock.chunks[1:], strict=False):
        count = min(count, len(tokens) - position)
        if count > 0:
            counts = {"proposed": 0, "depth": 0, "accepted": count - 1, "committed": count}
            steps.append(
                StepRecord(position=position, **counts, draft_s=0.0, verify_s=after - before, total_s=after - before)
            )
        position += count
    return DecodeResult(tokens=tokens, steps=steps, prefill_s=clock.chunks[0][0] - started, total_s=total)


def _generation_config(base: BaseModel, max_new_tokens: int, sampler: Sampler) -> GenerationConfig:
    sampled: dict[str, Any] = {}
    if not sampler.greedy:
        sampled = {name: getattr(sampler, name) for name in ("temperature", "top_k", "top_p", "typical_p")}
        sampled |= {"min_p": sampler.min_p or None, "eta_cutoff": sampler.eta}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=not sampler.greedy,
        repetition_penalty=sampler.repetition_penalty or 1.0,
        eos_token_id=sorted(base.eos_ids) or None,
        pad_token_id=min(base.eos_ids, default=0),
        **sampled,
    )
