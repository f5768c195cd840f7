"""The output's distribution by transformers' logits processors, called with the arguments that ``generate`` gives them.

Shape legend: B rows of the batch, n rows that are not finished, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process

from drafthead.errors import UserError, one_line
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.generation_settings import CHANGE_TEXT, NEVER_APPLIED, changed_settings
from drafthead.models.decoding.sampling import WARPERS, Contexts, FastTopP, OutputSampler, Sampler, TargetSampler
from drafthead.settings.schema import check_temperature

WARPED = (  # processors that see only the values of the logits
    *(logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper),
    *(logits_process.TopPLogitsWarper, logits_process.TopHLogitsWarper, logits_process.MinPLogitsWarper),
    *(logits_process.TypicalLogitsWarper, logits_process.EpsilonLogitsWarper, logits_process.EtaLogitsWarper),
)
READ_LOGITS_ONLY = (  # not the tokens so far
    *WARPED,
    *(logits_process.InfNanRemoveLogitsProcessor, logits_process.LogitNormalization),
    logits_process.SuppressTokensLogitsProcessor,
)
WITH_STATE = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
"""transformers' own processors whose results depend on earlier calls."""


class ProcessedSampler:
    """A sampler of the decoding loop that applies transformers' logits processors.

    transformers' ``generate`` calls processors with a batch whose rows have one length: prompts are padded on the left,
    and finished rows on the right. In our loop, rows have different lengths. Processors are therefore called once for
    each length that occurs. Rows of other lengths are cut or padded on the right, and their results are not used.
    """

    plain_greedy = False
    coupled = False
    temperature = 1.0
    description = ""  # the settings of ``generate`` that the processors apply

    def __init__(self, processors: LogitsProcessorList, prompts: Tensor, padding: list[int], pad: int, sample: bool):
        """``prompts`` [B, T] have ``padding`` padding tokens on the left of each. ``pad`` is the token id for padding
        on the right. Without ``sample``, the argmax is taken."""
        self._prompts, self._padding, self._pad, self.greedy = prompts, padding, pad, not sample
        for processor in processors:
            if isinstance(processor, logits_process.TemperatureLogitsWarper):
                check_temperature(processor.temperature)
                self.temperature = float(processor.temperature)
        self.reads_context = any(type(processor) not in READ_LOGITS_ONLY for processor in processors)
        self._processors = [
            # Sorting a large vocabulary on a CPU costs more than the base's pass.
            FastTopP(p.top_p, p.filter_value, p.min_tokens_to_keep) if type(p) is logits_process.TopPLogitsWarper else p
            for p in processors
        ]

    def probs_after(self, logits: Tensor, contexts: Contexts | None) -> Tensor:
        # Processors may keep tensors, or write to their arguments: both fail later for tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            scores = logits.to(torch.float32, copy=True)
            asked = self._processors
            scores = (
                self._processed(None, scores, asked) if contexts is None else self._by_length(scores, contexts, asked)
            )
            if self.greedy:
                return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
            return scores.softmax(-1)

    def warp(self, scores: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            warpers = [processor for processor in self._processors if type(processor) in (*WARPED, FastTopP)]
            return self._processed(None, scores.clone(), warpers)

    def only_token(self, contexts: Contexts, vocab_size: int) -> Tensor:
        """Return the token [n] that the processors leave as the only one after each context, before the base's logits
        are known; -1 if they leave several. Processors that read logits only are not asked."""
        readers = [processor for processor in self._processors if type(processor) not in READ_LOGITS_ONLY]
        with torch.inference_mode(False), torch.no_grad():
            scores = torch.zeros(len(contexts.rows), vocab_size, device=contexts.tokens.device)
            left = self._by_length(scores, contexts, readers) > -torch.inf
        return torch.where(left.sum(-1) == 1, left.int().argmax(-1), -1)

    def _processed(self, ids: Tensor | None, scores: Tensor, processors: Sequence[Any]) -> Tensor:
        # A LogitsProcessorList inspects the signature of each processor in every call.
        for processor in processors:
            scores = processor(ids, scores)
        return scores

    def _by_length(self, scores: Tensor, contexts: Contexts, processors: Sequence[Any]) -> Tensor:
        width, rows = self._prompts.shape[1], contexts.rows
        if (nodes := rows.count(rows[0])) > 1:  # several nodes of each row, with equal or different lengths
            parts = [
                Contexts(contexts.tokens[n::nodes], contexts.lengths[n::nodes], rows[n::nodes]) for n in range(nodes)
            ]
            each = [self._by_length(scores[n::nodes], part, processors) for n, part in enumerate(parts)]
            return torch.stack(each, 1).flatten(0, 1)
        own = contexts.lengths.tolist()
        lengths = [length + self._padding[row] for length, row in zip(own, rows, strict=True)]
        ids = self._prompts.new_full((len(self._prompts), max(lengths)), self._pad)
        ids[:, :width] = self._prompts
        for n, row in enumerate(rows):
            ids[row, width : lengths[n]] = contexts.tokens[n, width - self._padding[row] : own[n]]
        if len(set(lengths)) == 1 and rows == list(range(len(ids))):
            return self._processed(ids, scores, processors)
        processed = torch.empty_like(scores)
        for length in set(lengths):
            every = scores.new_zeros(len(ids), scores.shape[1])
            every[rows] = scores
            wanted = [n for n, other in enumerate(lengths) if other == length]
            processed[wanted] = self._processed(ids[:, :length], every, processors)[[rows[n] for n in wanted]]
        return processed


def stock_sampler(base: BaseModel, ids: list[int], max_new_tokens: int, given: OutputSampler) -> TargetSampler:
    """Return a sampler with the distribution of transformers' ``generate`` for the prompt ``ids``. ``given`` overrides
    the base's generation config. transformers' ``generate`` is called without decoding, to get the processors. Those
    ``WITH_STATE`` are left out."""
    prompts, call = torch.tensor([ids], device=base.device), dict[str, Any]()

    def capture(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **_others: Any,
    ) -> Tensor:
        call.update(processors=logits_processor, config=generation_config)
        return input_ids

    eos = sorted(base.eos_ids)
    base.model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        custom_generate=capture,
        max_new_tokens=max_new_tokens,
        num_beams=1,
        eos_token_id=eos or None,
        pad_token_id=min(eos, default=0),
        **given.arguments(),
    )
    config = call["config"]
    processors = LogitsProcessorList(p for p in call["processors"] if type(p).__name__ not in WITH_STATE)
    if not config.do_sample and not processors:
        return Sampler()
    sampler = ProcessedSampler(processors, prompts, [0], 0, config.do_sample)
    keys = (*(WARPERS.values() if config.do_sample else ()), *CHANGE_TEXT)
    sampler.coupled, sampler.description = given.coupled, ", ".join(changed_settings(config, keys))
    return sampler


def sampling_lines(base: BaseModel, sampler: TargetSampler) -> list[str]:
    """Return lines for the user: the settings that ``sampler`` applies, and the base's settings that are ignored."""
    used, ignored = (
        getattr(sampler, "description", ""),
        ", ".join(changed_settings(base.generation_config, NEVER_APPLIED)),
    )
    lines = {
        f"sampled as by transformers' generate, with {used} (sampler.temperature=0 is greedy)": used,
        f"not applied, of the base's generation_config.json: {ignored}": ignored,
    }
    return [line for line, shown in lines.items() if shown]


def check_stateless(processors: LogitsProcessorList, ids: Tensor, vocab_size: int) -> None:
    """Reject processors whose results depend on earlier calls, because calls for rejected drafts would change them. A
    processor that is not transformers' own is tried: for the prompt, for a longer text, and for the prompt again, which
    must give the first result."""
    for processor in processors:
        name = type(processor).__name__
        if name in WITH_STATE:
            raise UserError(f"the logits processor {name} has state, which drafts would change; leave it out")
        if type(processor).__module__ == logits_process.__name__:
            continue
        trial = copy(processor)
        scores = torch.linspace(-4, 4, vocab_size, device=ids.device).expand(len(ids), -1)
        first = trial(ids, scores.clone())
        before = _sizes(trial)
        try:
            trial(torch.cat([ids, first.argmax(-1, keepdim=True)], 1), scores.clone())
            equal = torch.equal(trial(ids, scores.clone()), first) and _sizes(trial) == before
            why = "" if equal else "its results or attributes change from call to call"
        except Exception as error:  # a processor with state may raise any error for the earlier text
            why = f"it cannot return to an earlier text: {type(error).__name__}: {one_line(error)}"
        if why:
            what = f"the logits processor {name} has state ({why}), which drafts would change"
            raise UserError(f"{what}; make it a function of input_ids and scores, or leave out custom_generate")


def _sizes(processor: Any) -> dict[str, object]:
    """Return a processor's attributes that are numbers, strings or None, and the lengths of its containers."""
    attributes = getattr(processor, "__dict__", {})
    plain = {key: value for key, value in attributes.items() if isinstance(value, bool | int | float | str | None)}
    return plain | {k: len(v) for k, v in attributes.items() if isinstance(v, list | dict | set | bytearray)}
