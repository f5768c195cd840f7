"""Settings of an evaluation."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import AdaptiveLength, DraftConfig, Drafter, DraftSampling
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.expression import DrafterConfig
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import (
    BelowOne,
    NonNegative,
    Positive,
    PositiveFloat,
    Seed,
    Temperature,
    require,
    settings,
)

Split = Literal["all", "dev", "test"]  # trees, settings and recipes are chosen on dev; results are reported on test
ENGINES = ("vllm", "llamacpp", "sglang")
CONTEXTS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Edges of the bins of context lengths, in tokens before a step."""
METHOD = "speculative"  # method of the evaluated drafter, which the headline numbers describe if it ran


@settings(kw_only=True)
class EngineConfig:
    """Settings of one serving engine, which the evaluation starts or which already runs."""

    python: str = ""
    """Python interpreter of the engine's environment. For vLLM, by default the environment of ``drafthead engines
    install=vllm``. For llama.cpp, the current environment (``pip install drafthead[llamacpp]``)."""
    url: str = ""
    """Address of a running server with the exported head. If empty, the evaluation starts a server. SGLang requires an
    address."""
    plain_url: str = ""
    """Address of a running server without the head. If it is empty and ``url`` is set, the engine's decoding without
    drafts is not measured."""
    proposer: bool | None = None
    """Draft by drafthead's own code inside the engine, without an export; only for vLLM. With null, only if vLLM loads
    no format of the head."""
    compare: list[str] = field(default_factory=list)
    """More ways to draft in vLLM, each in a server of its own; with ``engine.load``, only measured there. Give vLLM's
    own ``ngram`` and ``suffix``, with its defaults, or drafters that are joined by ``+`` and drafted by drafthead's
    code, such as ``head+prompt_lookup:8:2``. Only for servers that the evaluation starts."""
    base_type: str = "f32"
    """Weight type of the base's GGUF file, for llama.cpp: f32, f16, bf16, q8_0, q4_0 or q4_1. Answers equal ours only
    with f32."""


@settings(kw_only=True)
class LoadConfig:
    """Settings of the measurement of vLLM under load, which follows the interleaved run."""

    requests: list[Positive] = field(default_factory=list)
    """Numbers of concurrent requests, for example [1,2,4,8]. At each one, vLLM without drafts, with the head and with
    every entry of ``engine.vllm.compare`` answers the suite's first turns. The servers run one after another, each
    alone. Empty: not measured."""
    rounds: Positive = 3
    """Number of rounds. Each one starts every server once."""
    temperature: Temperature = 0.0
    """Temperature of these answers."""
    fit_length: bool = True
    """Let drafthead's code in vLLM draft only as far as it pays, as `drafthead serve` does. With false, every step
    drafts as far as it can."""


@settings(kw_only=True)
class EnginesConfig:
    """Settings shared by all serving engines of an evaluation, and settings of each engine."""

    vllm: EngineConfig = field(default_factory=EngineConfig)
    llamacpp: EngineConfig = field(default_factory=EngineConfig)
    sglang: EngineConfig = field(default_factory=EngineConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    drafts: Positive | None = None
    """Length of the chain that engines and our decoder draft. With null, the number of positions the head was trained
    for."""
    tolerance: PositiveFloat = 0.02
    """Largest accepted deviation of an engine's acceptance from our decoder's. For the mean accepted length it is
    relative, and for each draft position it is a share of the steps."""
    tie: PositiveFloat = 0.01
    """If our base's logits of two tokens differ by less than this, an engine may choose either token. Engines sum in
    another order in every layer."""
    threads: int | None = None
    """CPU threads of each engine. With null, as many as torch uses."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds to wait for an engine to start."""
    answer_timeout_s: PositiveFloat = 300.0
    """Seconds to wait for an engine's answer."""


@settings(kw_only=True)
class SuiteConfig:
    """Settings of the prompts and of the length of their answers."""

    suite: str = "smoke"
    """Evaluation prompts: a packaged suite, a JSONL file, or ``hf:NAME[:SPLIT[:COLUMN]]``. Packaged suites are
    ``smoke``, ``mt_bench``, ``mt_bench_turns``, ``spec_bench_like``, ``long_context``, ``long_questions``, ``code`` and
    ``builtin``. A line of a file holds ``prompt``, ``messages``, ``turns`` or ``input_ids``, and optionally ``task``.
    NAME may be a local folder. In a run, ``own:SUITE`` takes conversations of ``data.prompts`` or ``data.transcripts``
    that are not trained on. Without such data, or with fewer than 40 conversations, it is the suite SUITE."""
    limit: Positive | None = None
    """Number of prompts, drawn by ``seed`` and spread evenly over the suite's tasks. With null, all prompts."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 128
    """Largest number of tokens of an answer."""
    seed: Seed = 0
    """Seed of the choice of prompts by ``limit``, of their order, of sampling and, in ``replay``, of the bootstrap."""


@settings(kw_only=True)
class EvalConfig(SuiteConfig, DrafterConfig):
    """Settings of an evaluation: prompts, lengths, trees, the distribution of the output and the acceptance rule."""

    tasks: list[str] = field(default_factory=list)
    """Tasks of the suite to answer. Empty: all."""
    split: Split = "all"
    """Part of the suite to measure on: all of it, or one half. Trees and settings are chosen on ``dev``; results are
    reported on ``test``."""
    draft_sampling: Literal["top_k", "with_replacement", "without_replacement"] = "top_k"
    """Selection of the drafted tokens at each node. ``top_k`` takes the most likely tokens; the other two sample."""
    draft_temperature: PositiveFloat = 1.0
    """Temperature of sampled drafts; ``top_k`` ignores it."""
    confidence_threshold: float | None = None
    """Stop drafting after a draft whose probability is below this threshold (Kangaroo). 0 never stops. With null, the
    head's own threshold applies to top-k drafts in a static tree."""
    prefix_threshold: float = 0.0
    """Stop drafting below a node if the confidence of its path is below this threshold (DSpark). A path's confidence is
    the product of the head's confidences along it. The threshold also applies to sampled drafts. 0 never stops. Needs
    ``head.confidence``."""
    length: Literal["constant", "heuristic"] = "constant"
    """Draft length. ``heuristic`` drafts 2 more after a fully accepted step and 1 less after any other step."""
    sampler: Sampler = field(default_factory=Sampler)
    """The distribution of the output; temperature 0 is greedy decoding."""
    rule: AcceptanceRule = field(default_factory=AcceptanceRule)
    """How drafts are accepted: ``exact`` or ``block`` (lossless), ``typical`` or ``lenient`` (lossy)."""
    baselines: list[str] = field(default_factory=list)
    """Other methods to time in the same interleaved run, such as ``prompt_lookup:3``. They are drafters as in
    ``drafter`` (``head`` is the head alone), and transformers' own ``hf_prompt_lookup[:TOKENS]`` and
    ``hf_assisted:NAME``. Three kinds of autoregressive decoding are included by default: our loop, transformers'
    ``generate`` over our modules of the base, and ``generate`` over transformers' own modules."""
    stock_baseline: bool = True
    """Also time ``generate`` over transformers' own modules, not ours. This loads the base a second time."""
    batch_size: Positive = 1
    """Prompts to answer at once. When an answer ends, the next prompt takes its row. An answer's time is then its share
    of the time of each step, so tokens per second are those of the whole batch. Without transformers' baselines."""
    engines: list[str] = field(default_factory=list)
    """Serving engines to measure with the exported head: ``vllm``, ``llamacpp``, ``sglang``. Each answers the same
    prompts with and without drafts, in the same interleaved run, and is compared with our decoder, which drafts an
    equal chain. The evaluation fails if they differ beyond the limits in ``engine``. Requires greedy decoding, a
    lossless rule and ``drafter=head``."""
    engine: EnginesConfig = field(default_factory=EnginesConfig)
    """Addresses of the engines, and how far they may deviate from our decoder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(set(self.engines) <= set(ENGINES), "engines", f"of {', '.join(ENGINES)}", self.engines)
        if self.engines and not (self.sampler.greedy and self.rule.lossless and self.drafter == "head"):
            what = "engines=[...] needs greedy decoding, a lossless rule, drafter=head; remove other values"
            raise ValueError(f"{what}. engine.load.temperature samples, under load")
        if self.sampler.coupled and (self.rule.name != "exact" or self.draft_sampling != "top_k"):
            raise ValueError("sampler.coupled is for rule.name=exact and draft_sampling=top_k; leave other values out")
        one_prompt = self.engines or self.length != "constant" or any(spec.startswith("hf_") for spec in self.baselines)
        if self.batch_size > 1 and one_prompt:
            raise ValueError("engines, hf_ baselines and length=heuristic take one prompt at a time; drop batch_size")

    def by_cost(self, head: Drafter) -> bool:
        if self.tree == "head" and (
            self.draft_sampling != "top_k"
            or self.confidence_threshold is not None
            or self.prefix_threshold
            or self.length != "constant"
            or self.rule.name == "block"
        ):
            return False  # settings of static trees
        return super().by_cost(head)

    def draft_config(self, drafter: Drafter) -> DraftConfig:
        """Return the draft config for ``drafter``; raise a ``UserError`` if it drafts less deep than the tree."""
        tree = self.tree_of(drafter, self.batch_size)
        if isinstance(tree, TokenTree) and tree.depth > drafter.depth:
            raise UserError(f"tree={self.tree} is {tree.depth} deep, but the drafter drafts {drafter.depth} positions")
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


@settings(kw_only=True)
class GridConfig:
    """Heads, thresholds and chain lengths whose combinations ``drafthead eval`` times in one interleaved run."""

    heads: list[str] = field(default_factory=list)
    """Folders of more heads for the same base to compare with ``head``, for example with other exit layers. The fastest
    combination's tree and threshold become its head's default if the whole 95 % interval of its speedup is above the
    speedup of the head's present default."""
    confidence_threshold: list[BelowOne] = field(default_factory=list)
    """Confidence thresholds to compare. Empty: each head's own threshold."""
    drafts: list[NonNegative] = field(default_factory=list)
    """Chain lengths to compare. 0 or an empty list: the head's own tree."""

    def __bool__(self) -> bool:
        return bool(self.heads or self.confidence_threshold or self.drafts)


@settings(kw_only=True)
class EvalRunConfig(EvalConfig):
    """Settings of ``drafthead eval``: an evaluation of a saved head, or of a drafter that needs no training."""

    head: str = ""
    """Head folder (``outputs/NAME/head``), Hub repository (``user/name``), or a drafter such as ``prompt_lookup:3``."""
    base: BaseConfig = field(default_factory=BaseConfig)
    """Base model. By default the base that the head was trained for, with its adapter."""
    out: str = ""
    """Folder of ``eval.json`` and ``report.html``. By default ``eval-SUITE`` next to the head. Results with other
    settings are moved to ``earlier-N`` in this folder."""
    resume: bool = True
    """Keep the finished prompts of an interrupted evaluation. With false, all prompts are measured again."""
    costs: bool = True
    """Measure the costs of a step, one or two minutes on a CPU, to explain the speedup and to forecast it. With false,
    only answers are timed. Trees by cost measure theirs in any case."""
    grid: GridConfig = field(default_factory=GridConfig)
    """Heads, draft lengths and thresholds to choose from by measured speed."""
    dry: bool = False
    """Measure a grid without changing the heads' defaults."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head:
            raise UserError("name a head: head=outputs/NAME/head or head=user/repo")
        varied = self.tree != "head" or self.confidence_threshold is not None or self.drafter != "head"
        if self.grid and (varied or not self.rule.lossless):
            raise UserError("a grid chooses the tree; remove tree, confidence_threshold, drafter and rule")
