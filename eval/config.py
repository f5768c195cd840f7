"""Settings of an evaluation."""

import re
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json
from drafthead.data.utils.settings import BelowOne, NonNegative, Positive, PositiveFloat, require, settings
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import AdaptiveLength, DraftConfig, Drafter, DraftSampling, DynamicTree
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.expression import DrafterConfig
from drafthead.models.heads.parts.head_folder import read_tree
from drafthead.models.token_tree import TokenTree

Split = Literal["all", "dev", "test"]
"""Choices (trees, settings, recipes) are made on one half of a suite and reported on the other."""
TREES = "head, chain, chain:K, expansion:1-1-3, dynamic:NODES[:WIDTH], or a tree.json"
ENGINES = ("vllm", "llamacpp", "sglang")


@settings(kw_only=True)
class EngineConfig:
    """One serving engine: started here, or a server that runs already."""

    python: str = ""
    """The interpreter that has it. vLLM by default: of the environment that ``drafthead engines install=vllm`` makes;
    llama.cpp: this one (``pip install drafthead[llamacpp]``)."""
    url: str = ""
    """A running server that serves the exported head, instead of starting one. SGLang: needed."""
    plain_url: str = ""
    """A running server without the head; empty: with ``url`` the engine's plain decoding is not measured."""
    base_type: str = "f32"
    """llama.cpp: of the base's GGUF, f32, f16, bf16, q8_0, q4_0 or q4_1. Texts equal ours only with f32."""


@settings(kw_only=True)
class EnginesConfig:
    """What all engines of an evaluation share, and each one's own settings."""

    vllm: EngineConfig = field(default_factory=EngineConfig)
    llamacpp: EngineConfig = field(default_factory=EngineConfig)
    sglang: EngineConfig = field(default_factory=EngineConfig)
    drafts: Positive | None = None
    """Length of the chain that engines, and our own engine beside them, draft; null: the head's trained positions."""
    tolerance: PositiveFloat = 0.02
    """By how much acceptance may differ from ours: in the mean accepted length, as a share of it, and at each draft
    position, as a share of the steps."""
    tie: PositiveFloat = 0.01
    """Logits of our base closer than this may swap between engines: another order of sums, over all layers."""
    threads: int | None = None
    """Of each engine; null: as many as torch uses here."""
    start_timeout_s: PositiveFloat = 300.0
    answer_timeout_s: PositiveFloat = 300.0


@settings(kw_only=True)
class EvalConfig(DrafterConfig):
    """Prompts, lengths, trees, the distribution of the output and how drafts are accepted."""

    suite: str = "smoke"
    """``smoke``, ``mt_bench``, ``mt_bench_turns``, ``spec_bench_like``, ``long_context``, ``long_questions``, ``code``,
    ``builtin``, a path to a JSONL file of prompts, or ``hf:NAME[:SPLIT[:COLUMN]]``."""
    tasks: list[str] = field(default_factory=list)
    """Only these tasks of the suite; empty: all."""
    split: Split = "all"
    """``test``: the half of the suite that recipes choose nothing on; ``dev``: the other; ``all``."""
    limit: Positive | None = None
    """At most so many prompts, spread over the suite's tasks."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 128
    tree: str = "head"
    """``head`` (calibrated on held-out answers and this machine), ``chain``, ``chain:K``, ``expansion:1-1-3``
    (SpecInfer), ``dynamic:NODES`` or ``dynamic:NODES:WIDTH`` (EAGLE-2), or a path to a ``tree.json``."""
    draft_sampling: Literal["top_k", "with_replacement", "without_replacement"] = "top_k"
    """``top_k``, ``with_replacement`` or ``without_replacement``: how a node's children are drawn."""
    draft_temperature: PositiveFloat = 1.0
    """Of sampled children."""
    confidence_threshold: float | None = None
    """Nothing is drafted after a draft with less confidence (Kangaroo's threshold); 0: never stop; null: the head's own
    threshold, where drafts are top-k in a static tree."""
    prefix_threshold: float = 0.0
    """Nothing is drafted below a node whose path the head's own confidences, multiplied, put under this (DSpark); for
    sampled children too. 0: never stop. Needs ``head.confidence``."""
    length: Literal["constant", "heuristic"] = "constant"
    """``constant``, or ``heuristic``: two drafts more after a step that accepted all, one less after any other."""
    sampler: Sampler = field(default_factory=Sampler)
    """The distribution of the output; temperature 0 is greedy decoding."""
    rule: AcceptanceRule = field(default_factory=AcceptanceRule)
    """How drafts are accepted: ``exact`` or ``block`` (lossless), ``typical`` or ``lenient`` (lossy)."""
    baselines: list[str] = field(default_factory=list)
    """Other methods in the same interleaved run: drafters by the grammar of ``models/drafters/expression.py``
    (``prompt_lookup``, ``early_exit:24``, ``model:NAME``, ``head+prompt_lookup:3``, ``relay:head@2+prompt_lookup@4``;
    ``head`` is the head alone), and transformers'
    ``hf_prompt_lookup:3``, ``hf_assisted:NAME``. Three kinds of autoregressive decoding are always among them: our
    loop, and transformers' ``generate`` over our modules and over the stock ones."""
    stock_baseline: bool = True
    """Time transformers' ``generate`` over the stock modules too: needs memory for the base twice."""
    engines: list[str] = field(default_factory=list)
    """Serving engines that answer the same prompts with the exported head, plainly and speculatively, in the same
    interleaved run: ``vllm``, ``llamacpp``, ``sglang``. Greedy decoding with a head alone."""
    engine: EnginesConfig = field(default_factory=EnginesConfig)
    """How engines are reached, and how near they must come."""
    seed: int = 0
    """Of the prompt order, sampling and the bootstrap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(set(self.engines) <= set(ENGINES), "engines", f"of {', '.join(ENGINES)}", self.engines)
        if self.engines and not (self.sampler.greedy and self.rule.lossless and self.drafter == "head"):
            raise ValueError("eval.engines compares greedy decoding with a head alone: leave sampler, rule and drafter")
        if parse_tree(self.tree, depth=1) is None and self.tree != "head":
            read_json(Path(self.tree))

    def draft_config(self, drafter: Drafter) -> DraftConfig:
        """Return the draft config for ``drafter``."""
        tree: TokenTree | DynamicTree
        if self.tree == "head":
            tree = drafter.tree or TokenTree.chain(drafter.depth)
        else:
            tree = parse_tree(self.tree, drafter.depth) or read_tree(Path(self.tree), drafter.depth)
        if isinstance(tree, TokenTree) and tree.depth > drafter.depth:
            raise UserError(
                f"tree {self.tree} is {tree.depth} deep, but the drafter drafts {drafter.depth} positions; choose a "
                "shallower one"
            )
        draft_sampling, confidence_threshold = DraftSampling(self.draft_sampling), self.confidence_threshold
        if confidence_threshold is None:
            static = isinstance(tree, TokenTree) and draft_sampling is DraftSampling.TOP_K
            confidence_threshold = drafter.confidence_threshold if static else 0.0
        try:
            return DraftConfig(
                tree=tree,
                draft_sampling=draft_sampling,
                sampler=Sampler(temperature=self.draft_temperature),
                confidence_threshold=confidence_threshold,
                prefix_threshold=self.prefix_threshold,
                adaptive=AdaptiveLength(start=min(5, tree.depth)) if self.length == "heuristic" else None,
            )
        except ValueError as error:
            raise UserError(f"{error} (tree={self.tree} draft_sampling={self.draft_sampling})") from None


def parse_tree(spec: str, depth: int) -> TokenTree | DynamicTree | None:
    """Parse ``chain``, ``chain:K``, ``expansion:1-1-3`` or ``dynamic:NODES[:WIDTH]``; return None for other values."""
    kind, _, detail = spec.partition(":")
    try:
        if kind == "chain":
            length = int(detail) if detail else depth
            if length < 1:
                raise ValueError("a chain needs at least one draft")
            return TokenTree.chain(length)
        if kind == "expansion":
            return TokenTree.expansion([int(width) for width in re.split("[-,]", detail)])
        if kind == "dynamic":
            nodes, _, width = detail.partition(":")
            return DynamicTree(nodes=int(nodes), width=int(width or 8), depth=depth)
    except ValueError as error:
        raise UserError(f"tree {spec!r} cannot be read ({error}); give one of {TREES}") from None
    return None


@settings(kw_only=True)
class GridConfig:
    """Combinations that ``drafthead eval`` decodes in one interleaved run; the fastest becomes its head's default."""

    heads: list[str] = field(default_factory=list)
    """Head folders of the same base to compare with ``head``, for example of several exit layers."""
    confidence_threshold: list[BelowOne] = field(default_factory=list)
    """Confidence thresholds; empty: each head's own."""
    drafts: list[NonNegative] = field(default_factory=list)
    """Lengths of chains; 0 is a head's own tree, and so is an empty list."""

    def __bool__(self) -> bool:
        return bool(self.heads or self.confidence_threshold or self.drafts)


@settings(kw_only=True)
class EvalRunConfig(EvalConfig):
    """``drafthead eval``: a saved head, or a drafter that needs no training, on a suite."""

    head: str = ""
    """A head folder (``outputs/NAME/head``), a Hub repository, or a drafter as in ``baselines``."""
    base: BaseConfig = field(default_factory=BaseConfig)
    """By default the base that the head names."""
    out: str = ""
    """Folder of ``eval.json`` and ``report.html``; by default ``eval-<suite>`` beside the head."""
    resume: bool = True
    """Keep the prompts that an interrupted evaluation has finished; false measures all again."""
    grid: GridConfig = field(default_factory=GridConfig)
    """Heads, draft lengths and thresholds to choose from by measured speed."""
    dry: bool = False
    """Measure a grid, but leave the heads as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head:
            raise UserError("name a head: head=outputs/NAME/head or head=user/repo")
        varied = self.tree != "head" or self.confidence_threshold is not None or self.drafter != "head"
        if self.grid and (varied or not self.rule.lossless):
            raise UserError(
                "a grid varies tree and threshold of a head; leave tree, confidence_threshold, drafter, rule"
            )
