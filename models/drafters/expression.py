"""The grammar in which all commands name drafters.

``A+B`` drafts one tree from both, ``relay:A@2+B@4`` one path (first A, then B), and in ``nested:A@6+B`` model A drafts
for the base, sped up by B. ``@N`` sets the largest number of drafts on a path, but a head or a combination never drafts
more than without it. Parentheses nest. ``head`` is the command's head, and ``head:FOLDER`` loads another head. The path
of an existing folder may contain ``+``; parentheses set it apart, as in ``(head:out/a+b)+prompt_lookup``. Drafters of
``experimental/`` are imported only if an expression names them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from drafthead.data.answers.store import open_answers
from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling
from drafthead.models.decoding.loop import default_draft_config
from drafthead.models.drafters.combined import CombinedDrafter, union
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.parts.loading import load_base_and_head, load_head
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import settings


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Syntax of one kind of drafter in expressions: ``kind[:NAME][:NUMBER[:NUMBER]]``."""

    form: str
    """The syntax as messages show it, such as ``model:NAME[:TOKENS]``."""
    tokens: int = 0
    """Number of tokens to draft by default; 0 for kinds that have no number of tokens."""
    numbers: tuple[int, int] = (0, 0)
    """How many NUMBERs an expression must have, and how many it can have: (1, 2) for ``early_exit:LAYERS[:TOKENS]``."""
    tokens_at: int = 0
    """Index, from 0, of the NUMBER that is the number of tokens to draft. Without this NUMBER, ``tokens`` is used."""
    takes_name: bool = False
    """True if a NAME may follow ``kind:``."""
    needs_name: bool = False
    """True if the NAME is required."""
    combines: bool = False
    """True if ``kind:`` is followed by several drafters, joined by ``+``."""


KINDS = {
    "prompt_lookup": Kind(form="prompt_lookup[:TOKENS[:PER_MATCH]]", tokens=3, numbers=(0, 2)),
    "suffix_memory": Kind(form="suffix_memory[:TOKENS[:MEMORY]]", tokens=4, numbers=(0, 2)),
    "max_gram": Kind(form="max_gram[:CORPUS]", tokens=10, takes_name=True),
    "early_exit": Kind(form="early_exit:LAYERS[:TOKENS]", tokens=3, numbers=(1, 2), tokens_at=1),
    "model": Kind(form="model:NAME[:TOKENS]", tokens=5, numbers=(0, 1), takes_name=True, needs_name=True),
    "budget": Kind(form="budget:POSITIONS[:POLICY]", tokens=6, numbers=(1, 1), tokens_at=1),
    "head": Kind(form="head:FOLDER", takes_name=True),
    "relay": Kind(form="relay:A@2+B@4", combines=True),
    "nested": Kind(form="nested:A@6+B", combines=True),
}
FORMS = ", ".join([*(kind.form for kind in KINDS.values()), "A+B"])
DEFAULT_MEMORY = 16384
MOST_TOKENS = 256
"""Largest TOKENS or ``@N``, because the mask of a tree grows with the square of its nodes."""
LONGEST_MATCH = 3
"""Longest n-gram of prompt lookup, unless TOKENS drafts need a longer match because of ``PER_MATCH``."""
DEFAULT_POLICY = "retrieval:8"


@dataclass(frozen=True)
class Expression:
    """A drafter as parsed from its text, such as ``head+prompt_lookup:8``."""

    text: str
    kind: str
    """A key of ``KINDS``, or ``combine`` for ``A+B``."""
    name: str = ""
    """The NAME (a folder, model, corpus or policy), or ""."""
    numbers: tuple[int, ...] = ()
    most_tokens: int | None = None
    """The N of ``@N``: largest number of drafts on a path, which replaces TOKENS; None without ``@N``."""
    parts: tuple["Expression", ...] = ()
    """The drafters of a combination, in order."""

    @property
    def tokens(self) -> int:
        """Largest number of tokens to draft; only for single drafters other than heads."""
        kind = KINDS[self.kind]
        given = self.numbers[kind.tokens_at] if len(self.numbers) > kind.tokens_at else kind.tokens
        return self.most_tokens or given

    def walk(self) -> Iterator["Expression"]:
        """Yield this expression and all expressions in it."""
        yield self
        for operand in self.parts:
            yield from operand.walk()


@settings(kw_only=True)
class DrafterConfig:
    """Settings of the drafter that is built around a command's head."""

    drafter: str = "head"
    """Drafter built around the head, such as ``head+prompt_lookup:8:2``; ``head`` is the head alone. Drafters without
    training: ``prompt_lookup[:TOKENS[:PER_MATCH]]`` (PER_MATCH: most drafts per matching token),
    ``suffix_memory[:TOKENS[:MEMORY]]`` (also searches earlier answers, up to MEMORY tokens), ``max_gram[:CORPUS]``
    (any match, else the corpus's bigrams), ``early_exit:LAYERS[:TOKENS]``, ``budget:POSITIONS[:POLICY]`` (TriForce).
    Others: ``model:NAME[:TOKENS]``, ``head:FOLDER`` (in parentheses if FOLDER contains ``+``). Combinations: ``A+B`` in
    one tree, ``relay:A@2+B@4`` along one path (up to 2 drafts of A, then 4 of B), ``nested:A@6+B`` (B drafts for A, A
    for the base)."""
    tree_nodes: Annotated[int, Field(ge=2)] | None = None
    """Nodes up to which A's likeliest drafts fill the combined tree of ``A+B``, root included. B drafts first, is never
    cut, and may leave A no room. With null, as many as A's own tree has. On a GPU, both draft their whole trees."""

    def __post_init__(self) -> None:
        parse_drafter(self.drafter)

    def build(self, base: BaseModel, head: Drafter, head_config: DraftConfig) -> tuple[Drafter, DraftConfig]:
        """Build the drafter of these settings; return the drafter and its draft config.

        ``head``, with the draft config ``head_config``, is the drafter that the word ``head`` stands for.
        """
        return build_drafter(parse_drafter(self.drafter), base, head, head_config, self.tree_nodes)


def parse_drafter(text: str) -> Expression:
    """Return the expression in ``text``.

    Raises:
        UserError: ``text`` is not a drafter, or a number in it is out of range.
    """
    kind, colon, first = text.partition(":")
    if kind == "head" and "+" in first and Path(first).is_dir():
        return Expression(text, kind, first)
    parts = _split(text)
    if parts is None:
        raise _unknown(text)
    kind, colon, first = parts[0].partition(":")
    if colon and kind in KINDS and KINDS[kind].combines:
        parts = [first, *parts[1:]]
        if len(parts) < 2:
            raise UserError(f"{text!r} has one part; a {kind} needs two or more drafters, such as {kind}:A@4+B@4")
        if kind == "nested" and len(parts) > 2:  # nested:A+B+C is nested:A+(nested:B+C)
            parts = [parts[0], f"(nested:{'+'.join(parts[1:])})"]
        return Expression(text, kind, parts=tuple(map(_part, parts)))
    if len(parts) > 1:
        return Expression(text, "combine", parts=tuple(map(_part, parts)))
    return _part(text)


def _split(text: str) -> list[str] | None:
    """Split ``text`` at every ``+`` outside parentheses; return None if parentheses do not match."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            return None
        if character == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return None if depth else parts


def _part(text: str) -> Expression:
    """Parse one operand of ``+``: a single drafter or an expression in parentheses, with an optional ``@N``."""
    body, most_tokens = text.strip(), None
    if limited := re.fullmatch(r"(.+)@(\d+)", body):
        body, most_tokens = limited[1], int(limited[2])
        _check_tokens(text, most_tokens)
    if body.startswith("(") and body.endswith(")"):
        inner = parse_drafter(body[1:-1])
        limits = [limit for limit in (inner.most_tokens, most_tokens) if limit is not None]
        return replace(inner, most_tokens=min(limits, default=None), text=text)
    kind_name, *details = body.split(":")
    kind, name = KINDS.get(kind_name), ""
    if kind is None or kind.combines:
        raise _unknown(text)
    if kind.takes_name:
        # A name may contain colons, so only a number after the last one is separate.
        numbers = [details.pop()] if kind.numbers[1] and len(details) > 1 and details[-1].isdigit() else []
        name, details = ":".join(details), numbers
    if kind_name == "budget":
        name, details = ":".join(details[1:]) or DEFAULT_POLICY, details[:1]
        from drafthead.models.drafters.experimental.triforce import Policy

        Policy.parse(name)  # reject unknown policies before a model is loaded
    if not kind.numbers[0] <= len(details) <= kind.numbers[1] or (kind.needs_name and not name):
        raise _unknown(text)
    if not all(detail.isdigit() and int(detail) > 0 for detail in details):
        raise UserError(f"{text!r}: the numbers of {kind_name} are whole and at least 1; write {kind.form}")
    expression = Expression(text, kind_name, name, tuple(map(int, details)), most_tokens)
    if len(details) > kind.tokens_at:
        _check_tokens(text, expression.numbers[kind.tokens_at])
    return expression


def _check_tokens(text: str, tokens: int) -> None:
    """Reject a number of tokens outside 1 to ``MOST_TOKENS``."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise UserError(f"{text!r} drafts up to {tokens} tokens; give 1 to {MOST_TOKENS}")


def _unknown(text: str) -> UserError:
    return UserError(f"{text!r} names neither a folder nor a known drafter or method; give any of {FORMS}")


def is_drafter(spec: str) -> bool:
    """Return True if ``spec`` is written like an expression; all else is taken for a head's folder or repository.

    An existing folder is a head even if its path contains ``+`` or starts with ``(``.
    """
    is_expression = "+" in spec or spec.startswith("(") or re.split("[:@]", spec)[0] in KINDS
    return is_expression and not Path(spec).is_dir()


def build_drafter(
    expression: Expression,
    base: BaseModel,
    head: Drafter | None = None,
    head_config: DraftConfig | None = None,
    nodes: int | None = None,
) -> tuple[Drafter, DraftConfig]:
    """Return the drafter of an expression and its draft config.

    Args:
        expression: the drafter to build.
        base: the target.
        head: the drafter that the word ``head`` stands for. With None, ``head`` alone is rejected.
        head_config: the draft config of ``head``. The other drafters use its kind of draft sampling.
        nodes: nodes up to which the first drafter fills a combined tree, root included; None: the size of its own tree.
            A head's tree was sized for this machine, and more nodes cost time. On 36 Spec-Bench-like answers, a head
            and prompt lookup had the same mean accepted length with six nodes together as with the nine nodes of both
            trees.

    Raises:
        UserError: the drafters do not fit together or do not fit the base.
    """
    parts = [build_drafter(operand, base, head, head_config, nodes) for operand in expression.parts]
    if expression.kind == "combine":
        trees = [config.tree for _, config in parts if isinstance(config.tree, TokenTree)]
        if len(trees) < len(parts):
            raise UserError(
                "only a head with a static tree can be combined; set tree=head, tree=chain:K or tree=expansion:1-1-3"
            )
        names = [operand.text.strip() for operand in expression.parts]
        drafter: Drafter = CombinedDrafter([operand for operand, _ in parts], trees, nodes or parts[0][1].nodes, names)
        config = replace(parts[0][1], tree=union(trees))
    elif expression.kind == "relay":
        from drafthead.models.drafters.experimental.horizontal_cascade import HorizontalCascade

        drafter = HorizontalCascade([operand for operand, _ in parts], [config.depth for _, config in parts])
        config = replace(parts[0][1], tree=TokenTree.chain(drafter.depth))
    elif expression.kind == "head" and not expression.name:
        if head is None or head_config is None:
            raise UserError(
                f"{expression.text!r} stands for the command's head, but this command has none; give the folder of "
                "a head, such as head:outputs/NAME/head"
            )
        drafter, config = head, head_config
    else:
        drafter = _nested(expression, base, *parts) if parts else _single(expression, base)
        config = default_draft_config(drafter)
        if head_config is not None and head_config.draft_sampling is not DraftSampling.TOP_K:
            sampling, sampler = head_config.draft_sampling, head_config.sampler
            config = replace(config, draft_sampling=sampling, sampler=sampler, confidence_threshold=0.0)
    return drafter, config if expression.most_tokens is None else config.at_most(expression.most_tokens)


def _single(expression: Expression, base: BaseModel) -> Drafter:
    """Return the drafter for ``base`` of an expression that is not a combination."""
    numbers, kind, tokens = expression.numbers, expression.kind, expression.tokens
    if kind == "head":
        return load_head(expression.name, base)
    if kind == "prompt_lookup":
        if len(numbers) < 2:
            return PromptLookup(tokens)
        per_match = numbers[1]
        return PromptLookup(tokens, max(LONGEST_MATCH, -(-tokens // per_match)), per_match=per_match)
    if kind == "suffix_memory":
        return PromptLookup(tokens, memory=numbers[1] if len(numbers) > 1 else DEFAULT_MEMORY)
    if kind == "max_gram":
        from drafthead.models.drafters.experimental.max_gram import MaxGram, bigram_table

        if not expression.name:
            return MaxGram(tokens)
        # A run's corpus folder, or its folder ``answers``.
        answers = open_answers(Path(expression.name)).read(with_hidden_states=False)
        return MaxGram(tokens, bigram_table((a.input_ids[a.boundary - 1 :].tolist() for a in answers), base.vocab_size))
    if kind == "budget":
        from drafthead.models.drafters.experimental.triforce import TriForce

        return TriForce(base, numbers[0], expression.name, num_tokens=tokens)
    if kind == "early_exit":
        return early_exit(base, numbers[0], num_tokens=tokens)
    return ModelDrafter(BaseModel.load(BaseConfig(name=expression.name), base.device), base, num_tokens=tokens)


def _nested(
    expression: Expression, base: BaseModel, middle: tuple[Drafter, DraftConfig], inner: tuple[Drafter, DraftConfig]
) -> Drafter:
    """Return the drafter of ``nested:A@6+B``: model A drafts for ``base``, sped up by drafter B.

    ``middle`` and ``inner`` are A and B with their draft configs.
    """
    from drafthead.models.drafters.experimental.triforce import TriForce
    from drafthead.models.drafters.experimental.vertical_cascade import VerticalCascade

    (model, _), (drafter, config), named = middle, inner, expression.parts[0]
    if isinstance(model, TriForce):
        return TriForce(base, model.budget, named.name, num_tokens=model.depth, drafter=drafter, draft_config=config)
    if not isinstance(model, ModelDrafter):
        raise UserError(
            f"in {expression.text!r}, {named.text!r} is not a model; as the first drafter, give early_exit:LAYERS, "
            "budget:POSITIONS or model:NAME"
        )
    return VerticalCascade(model.model, drafter, num_tokens=model.depth, draft_config=config, target=base)


def load_base_and_drafter(spec: str, config: BaseConfig) -> tuple[BaseModel, Drafter, DraftConfig]:
    """Return the base, the drafter and its draft config.

    ``spec`` is a head's folder or repository, or an expression such as ``model:NAME+prompt_lookup``. If ``config``
    names no base, the base of the head is loaded: in an expression, that of the first ``head:FOLDER``.
    """
    if not is_drafter(spec):
        base, head = load_base_and_head(spec, config)
        return base, head, default_draft_config(head)
    expression = parse_drafter(spec)
    folders = [operand.name for operand in expression.walk() if operand.kind == "head"]
    if folders and folders[0] and not config.name:
        base, _ = load_base_and_head(folders[0], config)
    elif config.name or config.random:
        base = BaseModel.load(config)
    else:
        raise UserError(f"{spec} does not name a base; give one, such as base=embedded:smollm2")
    return base, *build_drafter(expression, base)
