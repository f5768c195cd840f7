"""The methods that an evaluation times, by name: autoregressive decoding, the drafter, and other methods."""

import hashlib
from dataclasses import replace
from typing import Any, NamedTuple

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.machine import hardware, versions
from drafthead.eval.config import EvalConfig
from drafthead.eval.engines.served import ServedEngines
from drafthead.eval.timing.interleaved import Decoder
from drafthead.eval.timing.transformers_generate import transformers_generate
from drafthead.eval.trees.calibrate import measured_with
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig
from drafthead.models.decoding.contract import DraftConfig, Drafter, DraftSampling
from drafthead.models.decoding.loop import EXACT, decode, default_draft_config
from drafthead.models.decoding.step_log import DecodeResult
from drafthead.models.drafters.combined import CombinedDrafter, union
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.token_tree import TokenTree

FORMS = "prompt_lookup[:TOKENS], early_exit:LAYERS[:TOKENS], model:NAME[:TOKENS], head:FOLDER"
METHOD_FORMS = f"{FORMS}, head, head+DRAFTER, hf_prompt_lookup[:TOKENS], hf_assisted:NAME"
DRAFTERS = ("prompt_lookup", "early_exit", "model", "head")
METHODS = (*DRAFTERS, "hf_prompt_lookup", "hf_assisted")
NAMED = ("model", "head", "hf_assisted")
WITH_HEAD = "head+"
HEAD_ALONE = "head"
"""The head with its own tree, where ``combine`` joins others to it."""


def is_drafter(spec: str) -> bool:
    """Whether ``spec`` names a drafter that needs no head folder."""
    return spec.partition(":")[0] in DRAFTERS


def _parse(spec: str, known: tuple[str, ...] = DRAFTERS) -> tuple[str, str, list[int]]:
    """``kind:NAME:1:2`` -> kind, NAME (empty where the kind has none), numbers."""
    kind, *details = spec.split(":")
    name = ""
    if kind in NAMED:
        # A name may hold colons; what follows the last one may be a number.
        last = [details.pop()] if len(details) > 1 and details[-1].isdigit() else []
        name, details = ":".join(details), last
    needed, most = {"early_exit": (1, 2), "model": (0, 1), "head": (0, 0), "hf_assisted": (0, 0)}.get(kind, (0, 1))
    fits = kind in known and needed <= len(details) <= most and bool(name) == (kind in NAMED)
    if not fits or not all(detail.isdigit() and int(detail) > 0 for detail in details):
        raise UserError(
            f"unknown drafter or method {spec!r}; give any of {METHOD_FORMS if known is METHODS else FORMS}"
        )
    return kind, name, [int(detail) for detail in details]


def check_methods(specs: list[str]) -> None:
    """Refuse unknown methods before anything is loaded."""
    for spec in specs:
        if spec != HEAD_ALONE:
            _parse(spec.removeprefix(WITH_HEAD), DRAFTERS if spec.startswith(WITH_HEAD) else METHODS)


def check_drafters(specs: list[str]) -> None:
    """Refuse unknown drafters before anything is loaded."""
    for spec in specs:
        _parse(spec)


def make_drafter(spec: str, base: BaseModel) -> Drafter:
    """A drafter by name: one that needs no training, or another head."""
    kind, name, numbers = _parse(spec)
    if kind == "prompt_lookup":
        return PromptLookup(num_tokens=numbers[0] if numbers else 3)
    if kind == "early_exit":
        return early_exit(base, numbers[0], num_tokens=numbers[1] if len(numbers) > 1 else 3)
    if kind == "head":
        return DraftHead.from_pretrained(name, base)
    model = BaseModel.load(BaseConfig(name=name), base.device)
    return ModelDrafter(model, base, num_tokens=numbers[0] if numbers else 5)


def combined(
    base: BaseModel, drafter: Drafter, draft_config: DraftConfig, specs: list[str], nodes: int | None = None
) -> tuple[Drafter, DraftConfig]:
    """``drafter`` with others whose drafts join its own in trees of ``nodes`` nodes, by default as many as its own has.

    The head's tree was sized for this machine, and a union that outgrows it pays for every node: on 36 Spec-Bench-like
    answers, six nodes shared by a head and prompt lookup had the same mean accepted length as the nine of both.
    """
    if not specs:
        return drafter, draft_config
    if not isinstance(draft_config.tree, TokenTree):
        raise UserError("only a static tree of the head can be combined; set tree=head, chain:K or expansion:1-1-3")
    others = [make_drafter(spec, base) for spec in specs]
    trees = [draft_config.tree, *(other.tree or TokenTree.chain(other.depth) for other in others)]
    return CombinedDrafter([drafter, *others], trees, nodes or draft_config.nodes), replace(
        draft_config, tree=union(trees)
    )


class Method(NamedTuple):
    """A way to answer."""

    answer: Decoder
    made_of: str = ""
    """Hash of what it drafts with where that may change under one name: weights and trees."""


def methods(base: BaseModel, drafter: Drafter, draft_config: DraftConfig, config: EvalConfig) -> dict[str, Method]:
    """All kinds of autoregressive decoding, ``drafter`` and the config's baselines, by the summary's names."""
    exact = replace(config, rule=EXACT)
    found = {
        **({"transformers_stock": _generated(base, config, model=base.stock())} if config.stock_baseline else {}),
        "transformers": _generated(base, config),
        "autoregressive": _decoded(base, None, None, exact),
        "speculative": _decoded(base, drafter, draft_config, config),
    }
    return found | {spec: _baseline(base, drafter, draft_config, spec, exact) for spec in config.baselines}


def engine_methods(base: BaseModel, served: ServedEngines, config: EvalConfig) -> dict[str, Method]:
    """Engines that are ready, each with the head and without, and our own chain with the head that they serve."""
    found = {name: Method(answer, served.marks[name]) for name, answer in served.methods.items()}
    if served.head is not None:
        chain = DraftConfig(tree=TokenTree.chain(served.drafts))
        found[served.chain] = _decoded(base, served.head, chain, replace(config, rule=EXACT))
    return found


def made_of(base: BaseModel, drafter: Drafter, draft_config: DraftConfig) -> str:
    """Hash of what drafts: weights, settings, the base, this machine and these versions."""
    return hashlib.sha256(repr((_weights(base, drafter), draft_config)).encode()).hexdigest()[:8]


def _weights(base: BaseModel, drafter: Drafter) -> str:
    if isinstance(drafter, DraftHead):
        return measured_with(drafter)
    if isinstance(drafter, CombinedDrafter):
        return f"{drafter.nodes} nodes: " + " + ".join(_weights(base, part) for part in drafter.drafters)
    model = drafter.model.identity() if isinstance(drafter, ModelDrafter) else None
    return repr((type(drafter).__name__, drafter.depth, model, base.identity(), hardware(), versions()))


def _seed(config: EvalConfig, ids: list[int]) -> int:
    """Random numbers of a prompt's own: the bootstrap needs independent prompts."""
    digest = hashlib.sha256(repr((config.seed, ids)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _decoded(base: BaseModel, drafter: Drafter | None, draft_config: DraftConfig | None, config: EvalConfig) -> Method:
    """Our loop, speculative with a drafter."""

    def answer(ids: list[int]) -> DecodeResult:
        return decode(
            base,
            drafter,
            ids,
            max_new_tokens=config.max_new_tokens,
            draft_config=draft_config,
            sampler=config.sampler,
            rule=config.rule,
            seed=_seed(config, ids),
        )

    return Method(answer, "" if drafter is None or draft_config is None else made_of(base, drafter, draft_config))


def _generated(base: BaseModel, config: EvalConfig, **speculation: Any) -> Method:
    """transformers' own ``generate``, speculative with ``speculation``."""
    new, sampler = config.max_new_tokens, config.sampler
    return Method(lambda ids: transformers_generate(base, ids, new, sampler, _seed(config, ids), **speculation))


def _baseline(base: BaseModel, head: Drafter, head_config: DraftConfig, spec: str, config: EvalConfig) -> Method:
    if spec == HEAD_ALONE:
        alone = head.drafters[0] if isinstance(head, CombinedDrafter) else head
        return _decoded(base, alone, config.draft_config(alone), config)
    if spec.startswith(WITH_HEAD):
        return _decoded(
            base, *combined(base, head, head_config, [spec.removeprefix(WITH_HEAD)], config.combine_nodes), config
        )
    kind, name, numbers = _parse(spec, METHODS)
    if kind == "hf_prompt_lookup":
        return _generated(base, config, prompt_lookup_num_tokens=numbers[0] if numbers else 3)
    if kind == "hf_assisted":
        assistant = BaseModel.load(BaseConfig(name=name), base.device)
        ModelDrafter(assistant, base)  # refuses another vocabulary
        return _generated(base, config, assistant_model=assistant.model)._replace(made_of=assistant.fingerprint)
    drafter = make_drafter(spec, base)
    draft_config = default_draft_config(drafter)
    if head_config.draft_sampling is not DraftSampling.TOP_K:  # the others may draft as the head does
        draft_config = replace(draft_config, draft_sampling=head_config.draft_sampling, sampler=head_config.sampler)
    return _decoded(base, drafter, draft_config, config)
