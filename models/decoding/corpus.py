"""The base's answers for a corpus, by batched decoding without drafts."""

from collections.abc import Iterable, Iterator

import torch

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.store import Answer, Prompt
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.loop import EXACT, DecodeLoop, DecodingSequence
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import ROOT_ONLY, DecodeConfig

# An answer's seed: the corpus's seed times this, plus the prompt's number. Other seeds share no random numbers.
SEED_STRIDE = 1_000_003


def generate_answers(
    base: BaseModel,
    prompts: Iterable[Prompt],
    sampler: SamplerConfig,
    *,
    batch_size: int,
    keep_hidden_states: bool = False,
    max_prompt_tokens: int = 512,
) -> Iterator[Answer]:
    """Yield answers in the order in which they finish. Up to rounding, an answer depends on its seed and prompt only.
    Empty prompts and those longer than ``max_prompt_tokens`` are skipped. With ``keep_hidden_states``, answers have the
    final hidden states that decoding computes anyway, float16 [len(input_ids) - 1, width]."""
    config = DecodeConfig(
        draft_config=ROOT_ONLY,
        sampler=Sampler(temperature=sampler.temperature, top_k=sampler.top_k, top_p=sampler.top_p),
        rule=EXACT,
        eos_ids=frozenset() if sampler.ignore_eos else base.eos_ids,
    )
    loop = DecodeLoop(
        base=base,
        drafter=None,
        config=config,
        max_new_tokens=sampler.max_new_tokens,
        batch_size=batch_size,
        capacity=check_context(base, max_prompt_tokens, sampler),
        record_steps=False,
        keep_hidden_states=keep_hidden_states,
    )
    rows = [
        DecodingSequence(number=number, prompt=ids, seed=sampler.seed * SEED_STRIDE + number)
        for number, ids in prompts
        if 0 < len(ids) <= max_prompt_tokens
    ]
    for row in loop.run(rows):
        hidden = torch.cat(row.hidden).cpu() if keep_hidden_states else None
        if hidden is not None and not bool(hidden.isfinite().all()):
            what = f"a hidden state of {base.name} is not finite in float16 (up to 65504), the dtype of stored answers"
            raise UserError(f"{what}; set store_hidden_states=false in the phases on answers to compute it in training")
        yield Answer(
            prompt_number=row.number,
            input_ids=torch.tensor(row.prompt + row.answer, dtype=torch.int32).numpy(),
            boundary=len(row.prompt),
            finished=row.answer[-1] in config.eos_ids,
            hidden_states=None if hidden is None else hidden.numpy(),
        )
        row.hidden.clear()


def check_context(base: BaseParts, max_prompt_tokens: int, sampler: SamplerConfig) -> int:
    needed = max_prompt_tokens + sampler.max_new_tokens
    if needed > base.max_context:
        what = f"prompts of {max_prompt_tokens} and answers of {sampler.max_new_tokens} tokens exceed {base.name}'s"
        raise UserError(f"{what} context of {base.max_context}; lower max_prompt_tokens or max_new_tokens")
    return needed
