"""``model.generate(..., custom_generate=drafthead.custom_generate(head))``: stock ``generate`` with drafts.

transformers prepares prompts, logits processors and stopping criteria. drafthead's decoding loop then answers all rows.

Shape legend: B rows, T tokens.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import RLock, get_ident
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.loop import DecodingSequence, prepare, static_draft_config
from drafthead.models.decoding.processed import ProcessedSampler, check_stateless
from drafthead.models.decoding.sampling import Contexts, Sampler, TargetSampler
from drafthead.models.drafters.expression import DrafterConfig, build_drafter, parse_drafter
from drafthead.models.drafters.forced import Constraint, bind
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.head_folder import resolve_folder
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.kernels import attention
from drafthead.models.kernels.private_apis import CACHE
from drafthead.system.devices import on_device, unchanged_rng

UNSUPPORTED = (
    *("num_beams", "num_beam_groups", "penalty_alpha", "guidance_scale", "dola_layers", "constraints"),
    *("force_words_ids", "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp"),
    *("token_healing", "output_attentions", "output_hidden_states", "cache_implementation", "synced_gpus"),
)
"""Arguments and settings of ``generate`` that are rejected, unless they have no effect."""
MODES = ("training", "attn_temperature_tuning")  # set to False in the model's modules during decoding
PREPARED = ("attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep")
"""Arguments of the model that ``generate`` itself adds to every call, so they are not rejected. ``attention_mask`` and
``position_ids`` must fit left-padded prompts; a user's own cache is refused; the others are ignored."""


def custom_generate(
    head: str | Path | DraftHead | None = None,
    *,
    revision: str | None = None,
    draft_config: DraftConfig | None = None,
    drafter: str = "head",
    tree: str = "head",
    coupled: bool = False,
) -> Callable[..., Any]:
    """Return a function for ``model.generate(..., custom_generate=...)`` that drafts with ``head``.

    Args:
        head: a folder or a Hub repository, or a loaded head; None if ``drafter`` does not use it.
        revision: branch, tag or commit of a repository.
        draft_config: the tree to draft with ``head``, instead of ``tree``.
        drafter: the drafter around the head, as in ``drafthead eval``. ``head+forced`` also drafts the tokens that
            ``prefix_allowed_tokens_fn`` or another logits processor forces.
        tree: the name of the tree, as in ``drafthead eval``. ``head`` is the one that was expected to be fastest when
            the head was trained; trees by cost take the costs that are stored with the head.
        coupled: with ``do_sample``, let drafts know the random numbers by which the output is drawn, so that more of
            them are accepted. The distribution stays the same, but a seed gives another text.
    """
    expression, settings = parse_drafter(drafter), DrafterConfig(drafter=drafter, tree=tree)
    if draft_config is not None and tree != "head":
        raise UserError(f"draft_config has a tree, and so has tree={tree!r}; give one of them")
    if head is None and any(part.kind == "head" and not part.name for part in expression.walk()):
        raise UserError(f"drafter={drafter!r} needs a head; give one, or a drafter such as prompt_lookup+forced")
    source = head if head is None or isinstance(head, DraftHead) else resolve_folder(head, revision)

    # transformers takes stop_strings out of the settings only because this signature has it. Otherwise it asks for
    # the tokenizer, which it has thrown away.
    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        call = _arguments_of_generate()
        if stop_strings is not None:
            if call.get("tokenizer") is None:
                raise UserError("stop_strings needs the model's tokenizer; give generate the argument tokenizer too")
            criterion = transformers.StopStringCriteria(stop_strings=stop_strings, tokenizer=call["tokenizer"])
            stopping_criteria = StoppingCriteriaList([*stopping_criteria, criterion])
        padding = _check_call(model, input_ids, generation_config, model_kwargs, call)
        check_stateless(logits_processor, input_ids, model.config.get_text_config().vocab_size)
        streamer = call.get("streamer")
        replay = Replay(input_ids, padding, logits_processor, stopping_criteria, generation_config, streamer)
        with attached(model, source) as (base, loaded):
            rows = len(input_ids)
            of_head = None if loaded is None else settings.with_tree(loaded, static_draft_config(loaded, rows), rows)
            replay.run(base, *build_drafter(expression, base, loaded, draft_config or of_head), coupled)
        return replay.output()

    return generate


def generate_with_head(model: Any, **arguments: Any) -> GenerateDecoderOnlyOutput | Tensor:
    """Answer a running ``model.generate(custom_generate=FOLDER_OR_REPOSITORY, ...)`` with the head in that folder.

    The ``custom_generate/generate.py`` of saved heads calls this function.
    """
    source = _arguments_of_generate().get("custom_generate")
    if not isinstance(source, str):
        what = "the head of this call is unknown: custom_generate is not a folder or repository"
        raise UserError(f"{what}; use model.generate(..., custom_generate=drafthead.custom_generate(head))")
    decode = custom_generate(_folder(source, arguments.pop("revision", None)))
    return type(model).generate(model, **arguments, custom_generate=decode)


_folder = lru_cache(maxsize=8)(resolve_folder)  # looks up a Hub repository once per process


def _arguments_of_generate() -> dict[str, Any]:
    """Return the arguments of the running ``model.generate``, if one is running. transformers does not pass streamer,
    tokenizer and ``custom_generate`` to a custom function, so they are read from the stack. Keywords come from the
    frame that called ``generate``, because ``generate`` changes its own copy."""
    code = inspect.unwrap(transformers.GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return {}
    names = ("streamer", "assistant_model", "synced_gpus", "custom_generate")
    keywords = frame.f_back.f_locals.get("kwargs", {}) if frame.f_back is not None else {}
    return {**keywords, **{name: frame.f_locals.get(name) for name in names}}


def _check_call(
    model: Any, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any], call: dict[str, Any]
) -> list[int]:
    """Reject arguments of ``generate`` that drafting does not support; return each row's number of padding tokens."""
    values = {name: call.get(name) or getattr(config, name, None) for name in UNSUPPORTED}
    given = [name for name, value in values.items() if value is True or value not in (None, 0, 1)]
    if getattr(model_kwargs.get(CACHE), "_is_user_defined", False):
        given.append(CACHE)
    given += [name for name, value in model_kwargs.items() if value is not None and name not in PREPARED]
    if given:
        raise UserError(f"drafting does not support {', '.join(given)}; leave them out, or leave out custom_generate")
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1 or model.device.type == "meta":
        where = f"{len(devices)} devices" if devices else f'"{model.device}", which holds no values'
        raise UserError(f"drafting needs the whole model on one device, but it is on {where}; load it onto one")
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    if mask.shape != input_ids.shape or bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1:].all()):
        what = "attention_mask must be 0 for padding on the left and 1 for all other tokens"
        raise UserError(f"{what}; use a tokenizer with padding_side='left'")
    positions = model_kwargs.get("position_ids")
    if positions is not None and not torch.equal((positions.to(mask.device) + 1) * mask, mask.cumsum(1) * mask):
        raise UserError("position_ids must count each row's tokens from 0, without padding; leave position_ids out")
    return [input_ids.shape[1] - count for count in mask.sum(1).tolist()]


@dataclass
class Replay:
    """Calls stopping criteria, streamer and processors as stock ``generate`` does: once per token, with all rows. The
    decoding loop answers rows by several tokens per step, so a row may be ahead of these calls."""

    ids: Tensor  # [B, T] left-padded prompts, then the tokens of earlier steps if criteria or scores need them
    padding: list[int]  # padding tokens of each prompt
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList  # without those that ``max_new_tokens`` and ``eos_ids`` replace
    config: GenerationConfig
    streamer: Any

    def __post_init__(self) -> None:
        config, (count, self.width) = self.config, self.ids.shape
        lengths = [c.max_length for c in self.criteria if type(c) is transformers.MaxLengthCriteria]
        self.max_new_tokens = max(1, min(lengths) - self.width)
        eos = [c.eos_token_id.tolist() for c in self.criteria if type(c) is transformers.EosTokenCriteria]
        self.eos_ids = frozenset(token for tokens in eos for token in tokens)
        # Without a token that ends rows, rows that a criterion ended continue until all have ended, as in stock.
        pad = config._pad_token_tensor if any(hasattr(c, "eos_token_id") for c in self.criteria) else None
        if self.eos_ids and pad is None:
            raise UserError("a stopping criterion with eos_token_id needs a pad_token_id; give generate one")
        self.pad = None if pad is None else int(pad)
        self.criteria = StoppingCriteriaList(
            c for c in self.criteria if type(c) not in (transformers.MaxLengthCriteria, transformers.EosTokenCriteria)
        )
        # As in stock generate, torch's generator decides sampled answers, and greedy ones leave it alone.
        seeds = torch.randint(2**62, (count,), device=self.ids.device).tolist() if config.do_sample else [0] * count
        prompts = [row[padding:] for row, padding in zip(self.ids.tolist(), self.padding, strict=True)]
        self.rows = [
            DecodingSequence(number=n, prompt=prompts[n], seed=seeds[n], on_tokens=self.advance) for n in range(count)
        ]
        self.finished = [False] * count
        self.tokens: list[list[int]] = []  # [step][row]; for rows that have ended, the pad token if there is one
        wanted = bool(config.return_dict_in_generate)
        self.scores: list[Tensor] | None = [] if wanted and config.output_scores else None
        self.logits: list[Tensor] | None = [] if wanted and config.output_logits else None

    def run(self, base: BaseModel, drafter: Drafter, draft_config: DraftConfig, coupled: bool) -> None:
        sampler: TargetSampler = Sampler()
        only_token = _nothing_forced
        if self.config.do_sample or self.processors:
            sampled, prompts = bool(self.config.do_sample), self.ids.to(base.device)
            sampler = ProcessedSampler(self.processors, prompts, self.padding, self.pad or 0, sampled)
            sampler.coupled = coupled
            only_token = partial(sampler.only_token, vocab_size=base.vocab_size)
        bind(drafter, Constraint(only_token, self.eos_ids))
        loop = prepare(
            base,
            drafter,
            [row.prompt for row in self.rows],
            max_new_tokens=self.max_new_tokens,
            draft_config=draft_config,
            name="row {} of input_ids",
            sampler=sampler,
            eos_ids=self.eos_ids,
        )
        loop.record_steps, loop.keep_logits = False, self.scores is not None or self.logits is not None
        for _ in loop.run(self.rows):
            pass
        if self.streamer is not None:
            self.streamer.end()

    def advance(self, _tokens: Sequence[int]) -> None:
        """Make the calls for every step whose tokens are known in all rows; it is called after each row's new tokens.
        Ended rows get the pad token if there is one; otherwise, their tokens must be known too."""
        while not all(self.finished):
            padded = [done and self.pad is not None for done in self.finished]
            if any(not pad and len(row.answer) <= len(self.tokens) for pad, row in zip(padded, self.rows, strict=True)):
                return
            # Users' criteria and processors run outside inference mode, as in stock generate.
            with torch.inference_mode(False), torch.no_grad():
                self._step(padded)

    def _step(self, padded: list[bool]) -> None:  # True for rows that have ended and get the pad token
        step = len(self.tokens)
        if self.scores is not None or self.logits is not None:
            # 0 for finished rows, which the base does not read any more
            logits = torch.zeros(len(self.rows), len(self.rows[0].logits[0]), device=self.ids.device)
            for n, row in enumerate(self.rows):
                if not padded[n]:
                    logits[n] = row.logits[step]
            if self.logits is not None:
                self.logits.append(logits)
            if self.scores is not None:
                self.scores.append(self.processors(self.ids, logits.clone()))
        pairs = zip(padded, self.rows, strict=True)
        tokens = [self.pad if pad and self.pad is not None else row.answer[step] for pad, row in pairs]
        self.tokens.append(tokens)
        stops = [False] * len(tokens)
        if self.criteria or self.scores is not None:
            self.ids = torch.cat([self.ids, on_device(tokens, self.ids.device)[:, None]], 1)
        if self.criteria:
            stops = self.criteria(self.ids, None if self.scores is None else tuple(self.scores)).tolist()
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens))
        for n, (stop, token) in enumerate(zip(stops, tokens, strict=True)):
            self.finished[n] |= stop or token in self.eos_ids or step + 1 == self.max_new_tokens
        for row, done in zip(self.rows, self.finished, strict=True):
            row.ended |= all(self.finished) or (done and self.pad is not None)

    def output(self) -> GenerateDecoderOnlyOutput | Tensor:
        answers = on_device(self.tokens, self.ids.device).T
        sequences = torch.cat([self.ids[:, : self.width], answers], 1)
        if not self.config.return_dict_in_generate:
            return sequences
        lists = {"scores": self.scores, "logits": self.logits}
        values = {name: None if steps is None else tuple(steps) for name, steps in lists.items()}
        return GenerateDecoderOnlyOutput(sequences=sequences, **values)


def _nothing_forced(contexts: Contexts) -> Tensor:
    return torch.full_like(contexts.lengths, -1)


class _Attached:
    """The base and the head that a model keeps between calls of ``generate``. A copied or pickled model has none."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.base: BaseModel | None = None
        self.weights: tuple[object, ...] = ()  # address and dtype of each weight when ``base`` was made
        self.heads: dict[tuple[str, int], DraftHead] = {}  # the last, by folder and mtime (ns) of its weights or 0

    def __reduce__(self) -> tuple[type["_Attached"], tuple[()]]:
        return _Attached, ()


@contextmanager
def attached(model: Any, source: Path | DraftHead | None) -> Iterator[tuple[BaseModel, DraftHead | None]]:
    """Yield a base that wraps ``model``, and the head of ``source``, a saved head's folder or a loaded head (None: no
    head).

    The first call compares the model with stock transformers and loads the head. Later calls do so again only if
    weights have moved or have another dtype. The head is also loaded again for another folder, or if its
    ``model.safetensors`` has changed. A loaded head of this model is used with its own base, without a comparison.
    Afterwards, the model has its own attention, modes and ``requires_grad`` again.
    """
    state: _Attached = vars(model).setdefault("_drafthead", _Attached())
    own = source if isinstance(source, DraftHead) and source.base_model.model is model else None
    with state.lock:
        stock = model.config._attn_implementation
        if stock == attention.NAME and own is None:
            what = "the model is already the base of a drafthead.BaseModel"
            raise UserError(f"{what}; give custom_generate a head loaded for that (load_head(head, base))")
        modes = [(module, name) for module in model.modules() for name in MODES if vars(module).get(name)]
        thread = get_ident()

        def refuse_others(*_: object) -> None:
            if get_ident() != thread:
                what = "another thread drafts with this model (custom_generate), which changes its attention"
                raise UserError(f"{what}; give custom_generate here too, to take turns, or load the model twice")

        trained = [(parameter, "requires_grad") for parameter in model.parameters() if parameter.requires_grad]
        guard = model.register_forward_pre_hook(refuse_others)
        try:
            for owner, name in modes:
                setattr(owner, name, False)
            yield _attach(state, model, source) if own is None else (own.base_model, own)
        finally:
            guard.remove()
            if model.config._attn_implementation != stock:
                model.set_attn_implementation(stock)
            for owner, name in (*modes, *trained):
                setattr(owner, name, True)


def _attach(state: _Attached, model: Any, source: Path | DraftHead | None) -> tuple[BaseModel, DraftHead | None]:
    weights = tuple((parameter.data_ptr(), parameter.dtype) for parameter in model.parameters())
    if state.base is None or weights != state.weights:
        state.base, state.weights, state.heads = BaseModel.wrap(model, None), weights, {}
    else:
        model.set_attn_implementation(attention.register())
    base = state.base
    if source is None:
        return base, None
    if isinstance(source, DraftHead):
        if (source.base.device, source.base.dtype) != (base.device, base.dtype):
            what = f"the head was loaded for a base on {source.base.device} in {source.base.dtype}"
            raise UserError(f"{what}, but the model is on {base.device} in {base.dtype}; give the head's folder")
        return base, source
    file = source / "model.safetensors"
    key = str(source.resolve()), file.stat().st_mtime_ns if file.exists() else 0
    if key not in state.heads:
        with unchanged_rng():  # new layers are random at first
            state.heads = {key: load_head(source, base)}
    return base, state.heads[key]
