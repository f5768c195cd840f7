"""Baselines that run transformers' ``generate``: over our modules, over stock modules, and its speculative methods."""

from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from drafthead.errors import UserError, one_line
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeResult, StepRecord


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
    original, model.generation_config = model.generation_config, _settings(base, max_new_tokens, sampler)
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


def _settings(base: BaseModel, max_new_tokens: int, sampler: Sampler) -> GenerationConfig:
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
