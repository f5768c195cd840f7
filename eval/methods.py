"""The ways to answer that an evaluation times, by name."""

from dataclasses import replace

from drafthead.data.errors import UserError
from drafthead.data.token_tree import TokenTree
from drafthead.eval.baselines import transformers_generate
from drafthead.eval.config import EvalConfig
from drafthead.eval.decode import decode
from drafthead.eval.speed import Decoder
from drafthead.models.base import BaseModel
from drafthead.models.base_config import BaseConfig
from drafthead.models.drafter import Drafter, DraftPlan
from drafthead.models.merged import Merged, side_by_side
from drafthead.models.model_drafter import ModelDrafter, early_exit
from drafthead.models.prompt_lookup import PromptLookup

DRAFTERS = ("prompt_lookup", "early_exit", "model")
PEERS = (*DRAFTERS, "hf_prompt_lookup", "hf_assisted")
FORMS = "prompt_lookup[:TOKENS], early_exit:LAYERS[:TOKENS], model:NAME[:TOKENS]"
PEER_FORMS = f"{FORMS}, head+DRAFTER, hf_prompt_lookup[:TOKENS], hf_assisted:NAME"
WITH_HEAD = "head+"


def is_drafter(spec: str) -> bool:
    """Whether ``spec`` names a drafter that needs no head folder."""
    return spec.partition(":")[0] in DRAFTERS


def check_peers(peers: list[str]) -> None:
    """Refuse unknown peers before anything is loaded.

    Raises:
        UserError: an unknown name, or one without its argument.
    """
    for spec in peers:
        kind, _, detail = spec.removeprefix(WITH_HEAD).partition(":")
        known = DRAFTERS if spec.startswith(WITH_HEAD) else PEERS
        if kind not in known or (kind in ("early_exit", "model", "hf_assisted") and not detail):
            raise UserError(f"unknown peer {spec!r}; give any of {PEER_FORMS}")


def check_drafters(specs: list[str]) -> None:
    """Refuse unknown drafters to merge before anything is loaded.

    Raises:
        UserError: an unknown name, or one without its argument.
    """
    check_peers([WITH_HEAD + spec for spec in specs])


def make_drafter(spec: str, base: BaseModel) -> tuple[Drafter, DraftPlan]:
    """A drafter that needs no training, and a chain of its usual length.

    Raises:
        UserError: a number that is none, more layers than the base has, another vocabulary.
    """
    kind, _, detail = spec.partition(":")
    try:
        if kind == "prompt_lookup":
            return _with_chain(PromptLookup(num_tokens=int(detail or 3)))
        if kind == "early_exit":
            layers, _, length = detail.partition(":")
            return _with_chain(early_exit(base, int(layers), num_tokens=int(length or 3)))
        name, _, length = detail.rpartition(":") if detail.rpartition(":")[2].isdigit() else (detail, "", "")
        model = BaseModel.load(BaseConfig(name=name), base.device)
        return _with_chain(ModelDrafter(model, base, num_tokens=int(length or 5)))
    except ValueError as error:
        raise UserError(f"drafter {spec!r} cannot be read ({error}); give one of {FORMS}") from None


def merged(base: BaseModel, drafter: Drafter, plan: DraftPlan, specs: list[str]) -> tuple[Drafter, DraftPlan]:
    """``drafter`` with others whose trees join its own; ``plan``'s siblings hold for all that sample.

    Raises:
        UserError: a drafter that cannot be made, or a dynamic tree, of which the head would get a share only.
    """
    if not specs:
        return drafter, plan
    if not isinstance(plan.tree, TokenTree):
        raise UserError("trees are merged with a static tree of the head; set tree=head, chain:K or expansion:...")
    others = [make_drafter(spec, base)[0] for spec in specs]
    trees = [plan.tree, *(other.tree or TokenTree.chain(other.depth) for other in others)]
    union = Merged([drafter, *others], trees)
    return union, replace(plan, tree=side_by_side(trees))


def _with_chain(drafter: Drafter) -> tuple[Drafter, DraftPlan]:
    return drafter, DraftPlan(tree=TokenTree.chain(drafter.depth))


def decoders(base: BaseModel, drafter: Drafter, plan: DraftPlan, config: EvalConfig) -> dict[str, Decoder]:
    """Both plain baselines, the speculative decoder and the peers, under the names that the summary expects."""
    new, sampler, seed = config.max_new_tokens, config.sampler, config.seed
    found: dict[str, Decoder] = {
        "transformers": lambda ids: transformers_generate(base, ids, new, sampler, seed),
        "drafthead": lambda ids: decode(base, None, ids, max_new_tokens=new, sampler=sampler, seed=seed),
        "speculative": lambda ids: decode(
            base, drafter, ids, max_new_tokens=new, plan=plan, sampler=sampler, rule=config.rule, seed=seed
        ),
    }
    for spec in config.against:
        found[spec] = _peer(base, drafter, plan, spec, config)
    return found


def _peer(base: BaseModel, head: Drafter, head_plan: DraftPlan, spec: str, config: EvalConfig) -> Decoder:
    kind, _, detail = spec.partition(":")
    new, sampler, seed = config.max_new_tokens, config.sampler, config.seed
    if kind == "hf_prompt_lookup":
        tokens = int(detail or 10)
        return lambda ids: transformers_generate(base, ids, new, sampler, seed, prompt_lookup_num_tokens=tokens)
    if kind == "hf_assisted":
        assistant = BaseModel.load(BaseConfig(name=detail), base.device).model
        return lambda ids: transformers_generate(base, ids, new, sampler, seed, assistant_model=assistant)
    if spec.startswith(WITH_HEAD):
        drafter, plan = merged(base, head, head_plan, [spec.removeprefix(WITH_HEAD)])
    else:
        drafter, plan = make_drafter(spec, base)
    return lambda ids: decode(base, drafter, ids, max_new_tokens=new, plan=plan, sampler=sampler, seed=seed)
