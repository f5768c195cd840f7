"""Drafters by name, alone and put together: the one grammar of every command.

``A+B`` drafts one tree of both, ``relay:A@2+B@4`` drafts along one path (first A, then B), ``nested:A@6+B`` decodes A,
itself sped up by B, to draft for the base. ``@N`` is the most tokens of a part; parentheses nest. ``head`` alone is the
head of the command, ``head:FOLDER`` another one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from drafthead.data.answers.store import open_answers
from drafthead.data.utils.errors import UserError, check_limits
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling
from drafthead.models.decoding.loop import default_draft_config
from drafthead.models.drafters.combined import CombinedDrafter, union
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.experimental.horizontal_cascade import HorizontalCascade
from drafthead.models.drafters.experimental.triforce import Policy, TriForce
from drafthead.models.drafters.experimental.vertical_cascade import VerticalCascade
from drafthead.models.drafters.prompt_lookup import PromptLookup, bigram_table
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import default_device, load_base_and_head
from drafthead.models.token_tree import TokenTree

FORMS = (
    "prompt_lookup[:TOKENS[:PER_MATCH]], suffix_memory[:TOKENS[:MEMORY]], max_gram[:CORPUS], "
    "early_exit:LAYERS[:TOKENS], model:NAME[:TOKENS], budget:POSITIONS[:POLICY], head:FOLDER, A+B, "
    "relay:A@2+B@4, nested:A@6+B"
)
KINDS = {
    "prompt_lookup": (0, 2, 3),
    "suffix_memory": (0, 2, 4),
    "max_gram": (0, 0, 10),
    "early_exit": (1, 2, 3),
    "model": (0, 1, 5),
    "budget": (1, 1, 6),
    "head": (0, 0, 0),
}
"""Kinds of drafters: the fewest and the most numbers that each takes, and its tokens where none are given."""
TOKENS_AT = {"early_exit": 1, "budget": 1}
"""Kinds whose first number is not how many tokens they draft: where that stands."""
NAMED = {"model": True, "head": False, "max_gram": False}
"""Kinds that take a name; whether they need one."""
TOGETHER = ("relay", "nested")
DEFAULT_MEMORY = 16384
MOST_TOKENS = 256
"""Longest drafts: a tree's masks grow with their square."""
LONGEST_MATCH = 3
"""Tokens that prompt lookup looks for, or more where that many tokens only allow all of its drafts."""
DEFAULT_POLICY = "retrieval:8"


@dataclass(frozen=True)
class Expression:
    """A parsed drafter."""

    text: str
    kind: str
    """A kind of single drafter, or ``combine``, ``relay``, ``nested``."""
    name: str = ""
    numbers: tuple[int, ...] = ()
    tokens: int | None = None
    """Most tokens, from ``@N``."""
    parts: tuple["Expression", ...] = ()

    def walk(self) -> Iterator["Expression"]:
        """Itself and everything in it."""
        yield self
        for part in self.parts:
            yield from part.walk()


@dataclass(kw_only=True)
class DrafterConfig:
    """The drafter that is built around a command's head."""

    drafter: str = "head"
    """Expression of drafters in which ``head`` is the command's head: ``head+prompt_lookup:8:2``,
    ``relay:head@2+prompt_lookup@4`` or ``nested:early_exit:12@6+head``."""
    tree_nodes: int | None = None
    """Nodes of a combined tree (``A+B``), root included: the other drafters draft first, and the head's likeliest
    drafts fill the rest. null: as many nodes as the head's own tree has."""

    def __post_init__(self) -> None:
        check_limits(self, "eval.", tree_nodes="[2, inf)")
        parse_drafter(self.drafter)

    def build(self, base: BaseModel, head: Drafter, head_config: DraftConfig) -> tuple[Drafter, DraftConfig]:
        """Return ``drafter`` with ``head``, which drafts by ``head_config`` alone, and what the drafter drafts."""
        return build_drafter(parse_drafter(self.drafter), base, head, head_config, self.tree_nodes)


def parse_drafter(text: str) -> Expression:
    """The expression in ``text``; a UserError if it is none."""
    parts = _split(text)
    if parts is None:
        raise _unknown(text)
    kind, colon, rest = parts[0].partition(":")
    if colon and kind in TOGETHER and not parts[0].startswith("("):
        parts = [rest, *parts[1:]]
        if len(parts) < 2:
            raise UserError(f"{text!r} has one part; a {kind} needs two or more, {kind}:A@4+B@4")
        if kind == "nested" and len(parts) > 2:  # the second is a model in between, too
            parts = [parts[0], f"(nested:{'+'.join(parts[1:])})"]
        return Expression(text, kind, parts=tuple(map(_part, parts)))
    if len(parts) > 1:
        return Expression(text, "combine", parts=tuple(map(_part, parts)))
    return _part(text)


def _split(text: str) -> list[str] | None:
    """``text`` at every ``+`` outside parentheses; None where these do not match."""
    parts, depth = [""], 0
    for sign in text:
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth < 0:
            return None
        if sign == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return None if depth else parts


def _part(text: str) -> Expression:
    """One part: a drafter, or an expression in parentheses; either with ``@N``."""
    body, tokens = text.strip(), None
    if found := re.fullmatch(r"(.+)@(\d+)", body):
        body, tokens = found[1], int(found[2])
    if tokens is not None:
        _check_tokens(text, tokens)
    if body.startswith("(") and body.endswith(")"):
        return replace(parse_drafter(body[1:-1]), tokens=tokens, text=text)
    kind, *details = body.split(":")
    name = ""
    if kind in NAMED:
        # A name may hold colons; what follows the last one may be a number.
        last = [details.pop()] if kind == "model" and len(details) > 1 and details[-1].isdigit() else []
        name, details = ":".join(details), last
    if kind == "budget":
        name, details = ":".join(details[1:]) or DEFAULT_POLICY, details[:1]
        Policy.parse(name)
    fewest, most, _ = KINDS.get(kind, (1, 0, 0))
    fits = fewest <= len(details) <= most and (bool(name) or not NAMED.get(kind, False))
    if not fits:
        raise _unknown(text)
    if not all(detail.isdigit() and int(detail) > 0 for detail in details):
        raise UserError(f"{text!r}: the numbers of {kind} are whole and at least 1; its form is one of {FORMS}")
    numbers = tuple(map(int, details))
    if len(numbers) > TOKENS_AT.get(kind, 0):
        _check_tokens(text, numbers[TOKENS_AT.get(kind, 0)])
    return Expression(text, kind, name, numbers, tokens)


def _check_tokens(text: str, tokens: int) -> None:
    if not 1 <= tokens <= MOST_TOKENS:
        raise UserError(f"{text!r} drafts at most {tokens} tokens; give 1 to {MOST_TOKENS}")


def _unknown(text: str) -> UserError:
    return UserError(f"unknown drafter or method {text!r}; give any of {FORMS}")


def is_drafter(spec: str) -> bool:
    """Whether ``spec`` is an expression of this grammar rather than the name of a head's folder or repository."""
    return "+" in spec or spec.startswith("(") or re.split("[:@]", spec)[0] in (*KINDS, *TOGETHER)


def build_drafter(
    expression: Expression,
    base: BaseModel,
    head: Drafter | None = None,
    head_config: DraftConfig | None = None,
    nodes: int | None = None,
) -> tuple[Drafter, DraftConfig]:
    """The drafter of an expression and what it drafts.

    Args:
        expression: what to build.
        base: the target.
        head: what ``head`` alone stands for.
        head_config: what that drafts; others sample their drafts as it does.
        nodes: of a combined tree, root included; by default as many as its first drafter's own tree has. The head's
            tree was sized for this machine, and a union that outgrows it pays for every node: on 36 Spec-Bench-like
            answers, six nodes shared by a head and prompt lookup had the same mean accepted length as the nine of both.
    """
    parts = [build_drafter(part, base, head, head_config, nodes) for part in expression.parts]
    if expression.kind == "combine":
        if any(not isinstance(config.tree, TokenTree) for _, config in parts):
            raise UserError("only a static tree of the head can be combined; set tree=head, chain:K or expansion:1-1-3")
        trees = [config.tree for _, config in parts if isinstance(config.tree, TokenTree)]
        size = nodes or parts[0][1].nodes
        found: Drafter = CombinedDrafter([drafter for drafter, _ in parts], trees, size)
        config = replace(parts[0][1], tree=union(trees))
    elif expression.kind == "relay":
        found = HorizontalCascade([drafter for drafter, _ in parts], [config.depth for _, config in parts])
        config = replace(parts[0][1], tree=TokenTree.chain(found.depth))
    elif expression.kind == "head" and not expression.name:
        if head is None or head_config is None:
            raise UserError(f"there is no head for {expression.text!r}; name its folder, head:outputs/NAME/head")
        found, config = head, head_config
    else:
        found = _nested(expression, base, *parts) if parts else _single(expression, base)
        config = default_draft_config(found)
        if head_config is not None and head_config.draft_sampling is not DraftSampling.TOP_K:
            kind, sampler = head_config.draft_sampling, head_config.sampler
            config = replace(config, draft_sampling=kind, sampler=sampler, confidence_threshold=0.0)
    return found, config if expression.tokens is None else config.at_most(expression.tokens)


def _single(expression: Expression, base: BaseModel) -> Drafter:
    numbers, kind = expression.numbers, expression.kind
    place = TOKENS_AT.get(kind, 0)
    tokens = expression.tokens or (numbers[place] if len(numbers) > place else KINDS[kind][2])
    if kind == "head":
        return DraftHead.from_pretrained(expression.name, base)
    if kind == "prompt_lookup":
        if len(numbers) < 2:
            return PromptLookup(tokens)
        per_match = numbers[1]
        return PromptLookup(tokens, max(LONGEST_MATCH, -(-tokens // per_match)), per_match=per_match)
    if kind == "suffix_memory":
        return PromptLookup(tokens, memory=numbers[1] if len(numbers) > 1 else DEFAULT_MEMORY)
    if kind == "max_gram":
        return PromptLookup(tokens, None, bigrams=_bigrams(expression.name, base) if expression.name else None)
    if kind == "budget":
        return TriForce(base, numbers[0], expression.name, num_tokens=tokens)
    if kind == "early_exit":
        return early_exit(base, numbers[0], num_tokens=tokens)
    return ModelDrafter(BaseModel.load(BaseConfig(name=expression.name), base.device), base, num_tokens=tokens)


def _nested(
    expression: Expression, base: BaseModel, first: tuple[Drafter, DraftConfig], second: tuple[Drafter, DraftConfig]
) -> Drafter:
    """The decoding of the first part, which the second one speeds up."""
    (between, _), (inner, config), part = first, second, expression.parts[0]
    if isinstance(between, TriForce):
        return TriForce(base, between.budget, part.name, num_tokens=between.depth, drafter=inner, draft_config=config)
    if not isinstance(between, ModelDrafter):
        raise UserError(
            f"in {expression.text!r} {part.text!r} is no model in between; give early_exit:LAYERS, budget:POSITIONS or "
            "model:NAME"
        )
    return VerticalCascade(between.model, inner, num_tokens=between.depth, draft_config=config, target=base)


def _bigrams(folder: str, base: BaseModel) -> Tensor:
    """The bigram table of a corpus of answers: a run's corpus folder, or its folder ``answers``."""
    answers = open_answers(Path(folder)).read(with_hidden_states=False)
    return bigram_table((a.input_ids[a.boundary - 1 :].tolist() for a in answers), base.vocab_size)


def load_base_and_drafter(spec: str, config: BaseConfig) -> tuple[BaseModel, Drafter, DraftConfig]:
    """The base and what drafts for it: a head's folder or repository, or an expression."""
    if not is_drafter(spec):
        base, head = load_base_and_head(spec, config)
        return base, head, default_draft_config(head)
    expression = parse_drafter(spec)
    folders = [part.name for part in expression.walk() if part.kind == "head"]
    if folders and folders[0] and not config.name:
        base, _ = load_base_and_head(folders[0], config)
    elif config.name or config.random:
        base = BaseModel.load(config, default_device())
    else:
        raise UserError(f"{spec} names no base; give one: base=embedded:smollm2")
    return base, *build_drafter(expression, base)
