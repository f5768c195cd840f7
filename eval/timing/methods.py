"""The ways to answer that an evaluation times, by name."""

import hashlib
from dataclasses import replace
from typing import Any, NamedTuple

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.machine import hardware, versions
from drafthead.eval.config import EvalConfig
from drafthead.eval.timing.interleaved import Decoder
from drafthead.eval.timing.transformers_generate import transformers_generate
from drafthead.eval.trees.calibrate import measured_with
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.contract import DraftConfig, Drafter, DraftSampling
from drafthead.models.decoding.loop import EXACT, decode, default_draft_config
from drafthead.models.drafters.combined import CombinedDrafter, union
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.token_tree import TokenTree

FORMS = "prompt_lookup[:TOKENS], early_exit:LAYERS[:TOKENS], model:NAME[:TOKENS], head:FOLDER"
PEER_FORMS = f"{FORMS}, head+DRAFTER, hf_prompt_lookup[:TOKENS], hf_assisted:NAME"
DRAFTERS = ("prompt_lookup", "early_exit", "model", "head")
PEERS = (*DRAFTERS, "hf_prompt_lookup", "hf_assisted")
NAMED = ("model", "head", "hf_assisted")
WITH_HEAD = "head+"


def is_drafter(spec: str) -> bool:
    """Whether ``spec`` names a drafter that needs no head folder."""
    return spec.partition(":")[0] in DRAFTERS


def _parse(spec: str, known: tuple[str, ...] = DRAFTERS) -> tuple[str, str, list[int]]:
    """``kind:NAME:1:2`` -> kind, NAME (empty where the kind has none), numbers.

    Raises:
        UserError: an unknown kind, a missing name or number, a number below 1.
    """
    kind, *details = spec.split(":")
    name = ""
    if kind in NAMED:
        # A name may hold colons; what is behind the last one may be a number.
        last = [details.pop()] if len(details) > 1 and details[-1].isdigit() else []
        name, details = ":".join(details), last
    needed, most = {"early_exit": (1, 2), "model": (0, 1), "head": (0, 0), "hf_assisted": (0, 0)}.get(kind, (0, 1))
    fits = kind in known and needed <= len(details) <= most and bool(name) == (kind in NAMED)
    if not fits or not all(detail.isdigit() and int(detail) > 0 for detail in details):
        raise UserError(f"unknown drafter or peer {spec!r}; give any of {PEER_FORMS if known is PEERS else FORMS}")
    return kind, name, [int(detail) for detail in details]


def check_peers(peers: list[str]) -> None:
    """Refuse unknown peers before anything is loaded.

    Raises:
        UserError: an unknown name, or wrong arguments.
    """
    for spec in peers:
        _parse(spec.removeprefix(WITH_HEAD), DRAFTERS if spec.startswith(WITH_HEAD) else PEERS)


def check_drafters(specs: list[str]) -> None:
    """Refuse unknown drafters before anything is loaded.

    Raises:
        UserError: an unknown name, or wrong arguments.
    """
    for spec in specs:
        _parse(spec)


def make_drafter(spec: str, base: BaseModel) -> Drafter:
    """A drafter by name: one that needs no training, or another head.

    Raises:
        UserError: wrong arguments, more layers than the base has, another vocabulary.
    """
    kind, name, numbers = _parse(spec)
    if kind == "prompt_lookup":
        return PromptLookup(num_tokens=numbers[0] if numbers else 3)
    if kind == "early_exit":
        return early_exit(base, numbers[0], num_tokens=numbers[1] if len(numbers) > 1 else 3)
    if kind == "head":
        return DraftHead.from_pretrained(name, base)
    model = BaseModel.load(BaseConfig(name=name), base.device)
    return ModelDrafter(model, base, num_tokens=numbers[0] if numbers else 5)


def merged(
    base: BaseModel, drafter: Drafter, draft_config: DraftConfig, specs: list[str], nodes: int | None = None
) -> tuple[Drafter, DraftConfig]:
    """``drafter`` with others whose drafts join its own in trees of ``nodes`` nodes, by default as many as its own has.

    The head's tree was sized for this machine, and a union that outgrows it pays for every node: of 36 Spec-Bench-like
    answers, six nodes shared by a head and a look-up gave as many tokens a step as the nine that both have.
    ``plan``'s siblings hold for all that sample.

    Raises:
        UserError: a drafter that cannot be made, or a dynamic tree, of which the head would get a share only.
    """
    if not specs:
        return drafter, draft_config
    if not isinstance(draft_config.tree, TokenTree):
        raise UserError("trees are merged with a static tree of the head; set tree=head, chain:K or expansion:...")
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
    """Both plain baselines, the speculative decoder and the peers, under the names that the summary expects."""
    new, sampler = config.max_new_tokens, config.sampler
    found = {
        "transformers": Method(lambda ids: transformers_generate(base, ids, new, sampler, _seed(config, ids))),
        "drafthead": Method(
            lambda ids: decode(base, None, ids, max_new_tokens=new, sampler=sampler, seed=_seed(config, ids))
        ),
        "speculative": _drafted(base, drafter, draft_config, config, config.rule),
    }
    for spec in config.against:
        found[spec] = _peer(base, drafter, draft_config, spec, config)
    return found


def made_of(base: BaseModel, drafter: Drafter, draft_config: DraftConfig) -> str:
    """Hash of what drafts: weights, plan, the base, this machine and these versions."""
    return hashlib.sha256(repr((_weights(base, drafter), draft_config)).encode()).hexdigest()[:8]


def _weights(base: BaseModel, drafter: Drafter) -> str:
    if isinstance(drafter, DraftHead):
        return measured_with(drafter)
    if isinstance(drafter, CombinedDrafter):
        return f"{drafter.nodes} nodes: " + " + ".join(_weights(base, part) for part in drafter.drafters)
    model = drafter.model.identity() if isinstance(drafter, ModelDrafter) else None
    return repr((type(drafter).__name__, drafter.depth, model, base.identity(), hardware(), versions()))


def _seed(config: EvalConfig, ids: list[int]) -> int:
    """Random numbers of a prompt's own: with the same ones for all, the bootstrap's prompts were not independent."""
    digest = hashlib.sha256(repr((config.seed, ids)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _drafted(
    base: BaseModel, drafter: Drafter, draft_config: DraftConfig, config: EvalConfig, rule: AcceptanceRule = EXACT
) -> Method:
    """Speculative decoding."""
    return Method(
        lambda ids: decode(
            base,
            drafter,
            ids,
            max_new_tokens=config.max_new_tokens,
            draft_config=draft_config,
            sampler=config.sampler,
            rule=rule,
            seed=_seed(config, ids),
        ),
        made_of(base, drafter, draft_config),
    )


def _peer(base: BaseModel, head: Drafter, head_draft_config: DraftConfig, spec: str, config: EvalConfig) -> Method:
    if spec.startswith(WITH_HEAD):
        drafter, draft_config = merged(
            base, head, head_draft_config, [spec.removeprefix(WITH_HEAD)], config.merge_nodes
        )
        return _drafted(base, drafter, draft_config, config)
    kind, name, numbers = _parse(spec, PEERS)
    if kind == "hf_prompt_lookup":
        return _generated(base, config, prompt_lookup_num_tokens=numbers[0] if numbers else 3)
    if kind == "hf_assisted":
        assistant = BaseModel.load(BaseConfig(name=name), base.device)
        ModelDrafter(assistant, base)  # refuses another vocabulary
        found = _generated(base, config, assistant_model=assistant.model)
        return found._replace(made_of=assistant.fingerprint)
    drafter = make_drafter(spec, base)
    draft_config = default_draft_config(drafter)
    if head_draft_config.draft_sampling is not DraftSampling.TOP_K:  # a peer may draft as the head does
        draft_config = replace(
            draft_config, draft_sampling=head_draft_config.draft_sampling, sampler=head_draft_config.sampler
        )
    return _drafted(base, drafter, draft_config, config)


def _generated(base: BaseModel, config: EvalConfig, **options: Any) -> Method:
    """transformers' own ``generate`` with a drafter of its own."""
    new, sampler = config.max_new_tokens, config.sampler
    return Method(lambda ids: transformers_generate(base, ids, new, sampler, _seed(config, ids), **options))
