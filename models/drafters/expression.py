"""The grammar in which all commands name drafters.

``A+B`` drafts one tree from both, ``relay:A@2+B@4`` one path (first A, then B), and in ``nested:A@6+B`` model A drafts
for the base, sped up by B. ``@N`` sets the largest number of drafts on a path, but a head or a combination never drafts
more than without it. Parentheses nest. ``head`` is the command's head, and ``head:FOLDER`` loads another head. With
``:window=N``, a head that was trained without a window sees only the latest N tokens. The path of an existing folder
may contain ``+``; parentheses set it apart, as in ``(head:out/a+b)+prompt_lookup``.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from drafthead.errors import UserError
from drafthead.files.local import read_json
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import default_draft_config, static_draft_config
from drafthead.models.decoding.tree_names import TREES, UNMEASURED, parse_tree
from drafthead.models.drafters.combined import CombinedDrafter, union
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.experimental.words import WORDS
from drafthead.models.drafters.forced import ForcedTokens
from drafthead.models.drafters.kinds import Expression, Kind, Parts
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.parts.head_folder import read_tree
from drafthead.models.heads.parts.loading import load_base_and_head, load_head
from drafthead.models.heads.parts.windows import with_window
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import settings

DEFAULT_MEMORY = 16384
MOST_TOKENS = 256  # largest TOKENS or ``@N``, because the mask of a tree grows with the square of its nodes
LONGEST_MATCH = 3  # longest n-gram of prompt lookup, unless TOKENS drafts need a longer match because of ``PER_MATCH``


def _prompt_lookup(expression: Expression, base: BaseModel, parts: Parts) -> Drafter:
    tokens, numbers = expression.tokens, expression.numbers
    per_match = numbers[1] if len(numbers) > 1 else None
    longest = LONGEST_MATCH if per_match is None else max(LONGEST_MATCH, -(-tokens // per_match))
    return PromptLookup(tokens, longest, per_match=per_match)


def _suffix_memory(expression: Expression, base: BaseModel, parts: Parts) -> Drafter:
    numbers = expression.numbers
    return PromptLookup(expression.tokens, memory=numbers[1] if len(numbers) > 1 else DEFAULT_MEMORY)


def _model(expression: Expression, base: BaseModel, parts: Parts) -> Drafter:
    model = BaseModel.load(BaseConfig(name=expression.name), base.device)
    return ModelDrafter(model, base, num_tokens=expression.tokens)


def _head(expression: Expression, base: BaseModel, parts: Parts) -> Drafter:
    return load_head(expression.name, base)


def _forced(expression: Expression, base: BaseModel, parts: Parts) -> Drafter:
    return ForcedTokens(expression.tokens)


KINDS = {
    "prompt_lookup": Kind(form="prompt_lookup[:TOKENS[:PER_MATCH]]", build=_prompt_lookup, tokens=3, numbers=(0, 2)),
    "suffix_memory": Kind(form="suffix_memory[:TOKENS[:MEMORY]]", build=_suffix_memory, tokens=4, numbers=(0, 2)),
    "early_exit": Kind(
        form="early_exit:LAYERS[:TOKENS]",
        build=lambda e, base, parts: early_exit(base, e.numbers[0], num_tokens=e.tokens),
        tokens=3,
        numbers=(1, 2),
        tokens_at=1,
    ),
    "model": Kind(form="model:NAME[:TOKENS]", build=_model, tokens=5, numbers=(0, 1), takes_name=True, needs_name=True),
    "head": Kind(form="head[:FOLDER][:window=N]", build=_head, takes_name=True),
    "forced": Kind(form="forced[:TOKENS]", build=_forced, tokens=16, numbers=(0, 1)),
    **WORDS,
}
FORMS = ", ".join([*(kind.form for kind in KINDS.values()), "A+B"])


@settings(kw_only=True)
class DrafterConfig:
    """Settings of the drafter that is built around a command's head."""

    drafter: str = "head"
    """Drafter built around the head, such as ``head+prompt_lookup:8:2``; ``head`` is the head alone. Drafters without
    training: ``prompt_lookup[:TOKENS[:PER_MATCH]]`` (PER_MATCH: most drafts per matching token),
    ``suffix_memory[:TOKENS[:MEMORY]]`` (also searches earlier answers, up to MEMORY tokens), ``max_gram[:CORPUS]``
    (any match, else the corpus's bigrams), ``forced[:TOKENS]`` (tokens that a grammar forces, in ``custom_generate``),
    ``early_exit:LAYERS[:TOKENS]``, ``budget:POSITIONS[:POLICY]`` (TriForce).
    Others: ``model:NAME[:TOKENS]``, ``head:FOLDER`` (in parentheses if FOLDER contains ``+``), ``head:window=2048`` (a
    head that was trained without a window sees only the latest 2,048 tokens). Combinations: ``A+B`` in
    one tree, ``relay:A@2+B@4`` along one path (up to 2 drafts of A, then 4 of B), ``nested:A@6+B`` (B drafts for A, A
    for the base)."""
    tree_nodes: Annotated[int, Field(ge=2)] | None = None
    """Nodes up to which A's likeliest drafts fill the static tree of ``A+B``, root included. B drafts first, is never
    cut, and may leave A no room. With null, as many as A's own tree has. On a GPU, both draft their whole trees."""
    tree: str = "head"
    """Draft tree: head, static, cost[:NODES], chain[:K], expansion:1-1-3, dynamic:NODES[:WIDTH] or a tree.json.
    ``static`` is the head's own tree, calibrated in training, or else a chain. ``cost`` drafts in each step only what
    pays on this machine, up to NODES nodes (32). ``head`` is the one of the two that was expected to be faster when
    the head was trained.
    ``expansion`` lists the children of a node per level (SpecInfer). ``dynamic`` grows a tree of NODES nodes in each
    step, and expands WIDTH nodes per level (EAGLE-2)."""

    def __post_init__(self) -> None:
        parse_drafter(self.drafter)
        if self.tree in ("head", "static"):
            return
        tree = parse_tree(self.tree, 1, UNMEASURED)
        if tree is None and not Path(self.tree).exists():
            raise UserError(f"tree={self.tree} names neither a tree nor a file; give one of {TREES}")
        if tree is None:
            read_json(Path(self.tree))
        if isinstance(tree, CostTree) and not head_leads(parse_drafter(self.drafter)):
            raise UserError(f"tree={self.tree} is for drafter=head and drafter=head+B, not for {self.drafter}")
        if isinstance(tree, CostTree) and self.tree_nodes is not None:
            raise UserError(f"tree_nodes is for static trees; leave it out, and write tree=cost:{self.tree_nodes}")

    def by_cost(self, head: Drafter) -> bool:
        """Return True if trees of ``head`` are chosen by cost."""
        if self.tree == "head":
            return head.by_cost and self.tree_nodes is None and head_leads(parse_drafter(self.drafter))
        return isinstance(parse_tree(self.tree, 1, UNMEASURED), CostTree)

    def tree_of(self, head: Drafter, rows: int = 1) -> TokenTree | DynamicTree | CostTree:
        """Return the tree of ``head`` for a batch of ``rows``."""
        if self.tree in ("head", "static"):
            return (default_draft_config if self.by_cost(head) else static_draft_config)(head, rows).tree
        tree = parse_tree(self.tree, head.depth, head.tree_costs)
        return read_tree(Path(self.tree), head.depth) if tree is None else tree

    def with_tree(self, head: Drafter, head_config: DraftConfig, rows: int = 1) -> DraftConfig:
        """Return ``head_config`` with the tree of these settings for ``head`` and a batch of ``rows``."""
        tree = self.tree_of(head, rows)
        if self.tree == "head" and isinstance(tree, CostTree) == isinstance(head_config.tree, CostTree):
            return head_config
        threshold = head_config.confidence_threshold if isinstance(tree, TokenTree) else 0.0
        return replace(head_config, tree=tree, confidence_threshold=threshold)

    def build(self, base: BaseModel, head: Drafter, head_config: DraftConfig) -> tuple[Drafter, DraftConfig]:
        """Return the drafter of these settings, in which the word ``head`` stands for ``head``, and its draft
        config."""
        return build_drafter(parse_drafter(self.drafter), base, head, head_config, self.tree_nodes)


def parse_drafter(text: str) -> Expression:
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
        if KINDS[kind].nests and len(parts) > 2:
            parts = [parts[0], f"({kind}:{'+'.join(parts[1:])})"]
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
    window = None
    if windowed := re.fullmatch(r"(head(?::.+)?):window=(\d+)", body):
        body, window = windowed[1], int(windowed[2])
    kind_name, *details = body.split(":")
    kind, name = KINDS.get(kind_name), ""
    if kind is None or kind.combines:
        raise _unknown(text)
    if kind.name_last:
        name, details = ":".join(details[1:]), details[:1]
    elif kind.takes_name:
        # A name may contain colons, so only a number after the last one is separate.
        numbers = [details.pop()] if kind.numbers[1] and len(details) > 1 and details[-1].isdigit() else []
        name, details = ":".join(details), numbers
    kind.check_name(name)
    if not kind.numbers[0] <= len(details) <= kind.numbers[1] or (kind.needs_name and not name):
        raise _unknown(text)
    if not all(detail.isdigit() and int(detail) > 0 for detail in details):
        raise UserError(f"{text!r}: the numbers of {kind_name} are whole and at least 1; write {kind.form}")
    values, tokens = tuple(map(int, details)), kind.tokens
    if len(values) > kind.tokens_at:
        tokens = values[kind.tokens_at]
        _check_tokens(text, tokens)
    return Expression(text, kind_name, name, values, tokens, most_tokens, window=window)


def _check_tokens(text: str, tokens: int) -> None:
    if not 1 <= tokens <= MOST_TOKENS:
        raise UserError(f"{text!r} drafts up to {tokens} tokens; give 1 to {MOST_TOKENS}")


def _unknown(text: str) -> UserError:
    return UserError(f"{text!r} names neither a folder nor a known drafter or method; give any of {FORMS}")


def head_leads(expression: Expression) -> bool:
    """Return True for the command's head alone and for ``head+B``, whose trees can be chosen by cost."""
    first = expression.parts[0] if expression.kind == "combine" else expression
    limited = first.most_tokens is not None and first is not expression
    return first.kind == "head" and not first.name and not limited


def is_drafter(spec: str) -> bool:
    # The path of an existing folder may look like an expression.
    is_expression = "+" in spec or spec.startswith("(") or re.split("[:@]", spec)[0] in KINDS
    return is_expression and not Path(spec).is_dir()


def build_drafter(
    expression: Expression,
    base: BaseModel,
    head: Drafter | None = None,
    head_config: DraftConfig | None = None,
    nodes: int | None = None,
) -> tuple[Drafter, DraftConfig]:
    """Return the drafter of an expression and its draft config; raise a UserError if drafters or base do not fit.

    The word ``head`` stands for ``head``, and None rejects it. The other drafters use the draft sampling of
    ``head_config``. The first drafter fills a combined tree up to ``nodes`` nodes, root included (None: the size of its
    own tree). A head's tree was sized for this machine, and more nodes cost time: on 36 Spec-Bench-like answers, a head
    and prompt lookup had the same mean accepted length with six nodes together as with the nine nodes of both trees.
    """
    parts = [build_drafter(operand, base, head, head_config, nodes) for operand in expression.parts]
    if expression.kind == "combine":
        first_config = parts[0][1]
        if isinstance(first_config.tree, CostTree):
            parts[0] = parts[0][0], static_draft_config(parts[0][0])
        trees = [config.tree for _, config in parts if isinstance(config.tree, TokenTree)]
        if len(trees) < len(parts):
            known = "tree=static, tree=cost, tree=chain:K or tree=expansion:1-1-3"
            raise UserError(f"only a head with a static tree or a tree by cost can be combined; set {known}")
        names = [operand.text.strip() for operand in expression.parts]
        drafter: Drafter = CombinedDrafter([operand for operand, _ in parts], trees, nodes or parts[0][1].nodes, names)
        tree: TokenTree | CostTree = union(trees)
        if isinstance(first_config.tree, CostTree):
            tree = replace(first_config.tree, depth=drafter.depth)
        drafter.prefers_cost = nodes is None and parts[0][0].by_cost and expression.parts[0].most_tokens is None
        config = replace(first_config, tree=tree)
    elif expression.kind == "head" and not expression.name:
        if head is None or head_config is None:
            raise UserError(
                f"{expression.text!r} stands for the command's head, but this command has none; give the folder of "
                "a head, such as head:outputs/NAME/head"
            )
        drafter, config = head, head_config
    else:
        drafter = KINDS[expression.kind].build(expression, base, parts)
        config = static_draft_config(drafter)
        if parts:
            config = replace(parts[0][1], tree=drafter.tree or TokenTree.chain(drafter.depth))
        elif head_config is not None and head_config.draft_sampling is not DraftSampling.TOP_K:
            sampling, sampler = head_config.draft_sampling, head_config.sampler
            config = replace(config, draft_sampling=sampling, sampler=sampler, confidence_threshold=0.0)
    if expression.window is not None:
        drafter = with_window(drafter, expression.window)
    return drafter, config if expression.most_tokens is None else config.truncate(expression.most_tokens)


def load_base_and_drafter(spec: str, config: BaseConfig) -> tuple[BaseModel, Drafter, DraftConfig]:
    """Return the base, the drafter and its draft config. ``spec`` is a head's folder or repository, or an expression
    such as ``model:NAME+prompt_lookup``. If ``config`` names no base, that of the (first) head is loaded."""
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
