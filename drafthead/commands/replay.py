"""Simulate the acceptance of any draft length and tree on the base's answers, without decoding.

usage: drafthead replay head=DIR [key=value ...]

drafthead replay head=outputs/medusa_smollm2/head suite=mt_bench 'nodes=[6,16,64]' 'chain=[1,2,3]'
drafthead replay head=outputs/medusa_smollm2/head save=answers.jsonl costs=false
drafthead replay head=outputs/medusa_smollm2/head texts=answers.jsonl sampler.temperature=0.7 sampler.top_p=0.9
drafthead replay head=outputs/medusa_smollm2/head texts=outputs/corpora/smollm2 stored_states=true
drafthead replay head=outputs/medusa_smollm2/head 'drafters=[prompt_lookup@6,head+prompt_lookup:4]'
drafthead replay head=outputs/tuned/head suite=mine.jsonl costs=false original_base=HuggingFaceTB/SmolLM2-135M-Instruct

The base's answers are generated with sampler.temperature only. For other samplers, give answers with texts=FILE.
"""

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from drafthead.commands.command import command
from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.loops import is_degenerate
from drafthead.data.answers.store import Answer
from drafthead.errors import UserError
from drafthead.eval.config import Split, SuiteConfig
from drafthead.eval.report.plots import interval_bars, save_png
from drafthead.eval.report.tables import ResultTable, context_table
from drafthead.eval.trees.acceptance_fit import calibration_error, calibration_rows, candidate_fates
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.eval.trees.finished_answers import BATCH_SIZE, base_answers, check_writable, read_texts, write_texts
from drafthead.eval.trees.replay import cost_row, length_ratio, own_row, row_of, rows_of
from drafthead.eval.trees.simulate import AcceptProbsConfig, simulate_texts, text_accept_probs
from drafthead.eval.trees.stored_answers import stored_accept_probs
from drafthead.files.local import same_base
from drafthead.models.base.base_config import EMBEDDED, BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.corpus import generate_answers
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.drafter import Drafter, DraftSampling
from drafthead.models.decoding.loop import check_ids, static_draft_config
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.combined import CombinedDrafter
from drafthead.models.drafters.expression import build_drafter, load_base_and_drafter, parse_drafter
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_head, load_parts_and_head
from drafthead.models.simulation.acceptance import simulate_acceptance
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import Positive, PositiveFloat, settings
from drafthead.system.display import Display

SHOWN_RANKS = 3  # of the table of predicted acceptance


@settings(kw_only=True)
class ReplayConfig(SuiteConfig):
    """Settings of ``drafthead replay``."""

    head: str
    """Head folder (``outputs/NAME/head``), Hub repository (``user/name``), or a drafter such as ``prompt_lookup:3``."""
    base: BaseConfig = field(default_factory=BaseConfig)
    texts: str | None = None
    """Answers to replay instead of generating them. Give a JSONL file that ``save`` wrote, or the folder of a corpus of
    answers (``outputs/corpora/NAME``). ``limit`` takes the first answers."""
    stored_states: bool = False
    """Read the hidden states that a run stored for the corpus ``texts``, and load none of the base's layers. Draft
    lengths and trees are simulated for greedy answers, without costs."""
    split: Split = "all"
    """Part of the suite whose prompts the base answers. Trees by cost are fitted on ``dev``."""
    save: str | None = None
    """JSONL file to which the base's answers are written."""
    sampler: Sampler = field(default_factory=Sampler)
    nodes: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] = field(
        default_factory=lambda: [6, 16, 64]
    )
    """Tree sizes to simulate, root included."""
    chain: Annotated[list[Positive], Field(min_length=1)] = field(default_factory=lambda: [1, 2, 3])
    """Chain lengths to simulate."""
    draft_sampling: Literal["top_k", "with_replacement", "without_replacement"] = "top_k"
    """Selection of the drafted tokens at each node. ``top_k`` takes the most likely tokens; the other two sample."""
    draft_temperature: PositiveFloat = 1.0
    """Temperature of sampled drafts; ``top_k`` ignores it."""
    rule: Literal["exact", "block"] = "exact"
    """Acceptance rule. ``block`` applies block verification to chains."""
    drafters: list[str] = field(default_factory=list)
    """More drafters to simulate, such as ``[prompt_lookup@6,head+prompt_lookup:4]``. Write them as in ``drafthead eval
    drafter=...``; ``head`` is this head. A suffix memory also searches earlier answers."""
    tree_nodes: Annotated[int, Field(ge=2)] | None = None
    """Number of nodes, root included, up to which A's drafts fill the tree of ``A+B`` in ``drafters``. B's drafts come
    first and are never cut. With null, as many as A's own tree has. On a GPU, both draft their whole trees."""
    costs: bool = True
    """Measure the costs of a step, two minutes on a CPU, to predict speedups. With false, simulate acceptance only."""
    original_base: str | None = None
    """Base that a head was trained for before `drafthead import` attached it to a fine-tune. It answers the same
    prompts, to show what the head keeps of its acceptance and so what adapting it can win back."""
    plot: str | None = None
    """PNG file for a figure of the mean accepted lengths."""

    def __post_init__(self) -> None:
        if self.sampler.coupled:
            raise ValueError("sampler.coupled is not simulated; measure it with drafthead eval")
        if DraftSampling(self.draft_sampling) is not DraftSampling.TOP_K and self.drafters:
            raise ValueError("drafters are simulated with draft_sampling=top_k only; leave one of the two out")
        if self.stored_states and (self.texts is None or self.drafters or self.save or not self._is_greedy):
            other = "texts=FOLDER, and without drafters, save, and other than greedy settings"
            raise ValueError(f"stored_states needs {other}; leave it out to load the base")
        if self.texts is None and self.sampler != Sampler(temperature=self.sampler.temperature):
            raise ValueError("sampler: replay generates answers with sampler.temperature only; else give texts=FILE")
        if self.original_base is not None and (self.stored_states or not self._is_greedy):
            raise ValueError("original_base needs greedy settings, without stored_states; leave one of them out")
        for spec in self.drafters:
            parse_drafter(spec)

    @property
    def _is_greedy(self) -> bool:
        return self.draft_sampling == "top_k" and self.rule == "exact" and self.sampler.greedy


@command("replay", ReplayConfig, __doc__)
def main(config: ReplayConfig) -> None:
    if config.stored_states:
        replay_stored(config, Display())
        return
    texts = read_texts(Path(config.texts), config.limit) if config.texts else []
    save = Path(config.save) if config.save else None
    if save:
        check_writable(save)
    display = Display()
    with display.stage(f"head {config.head}"):
        base, head, head_config = load_base_and_drafter(config.head, config.base)
    if isinstance(head, DraftHead):
        check_lengths(head, config)
    original = load_original(head, base, config, display) if config.original_base is not None else None
    if not texts:
        with display.stage(f"the base's answers: {config.suite}"):
            texts = base_answers(base, config, config.sampler.temperature, split=config.split)
    for number, text in enumerate(texts):
        check_ids(base, text.ids, 0, f"answer {number}")
    if save:
        write_texts(save, texts)
    rows = head_rows(base, head, texts, config, display) if isinstance(head, DraftHead) else []
    others = [*([] if rows else [config.head]), *config.drafters]
    for spec in others:
        with display.stage(f"{spec}, drafted at every position"):
            of_head = static_draft_config(head) if head.by_cost else head_config
            drafter, draft_config = build_drafter(parse_drafter(spec), base, head, of_head, config.tree_nodes)
            simulated = simulate_texts(
                base, drafter, texts, draft_config, config.sampler, seed=config.seed, in_order=True
            )
            nodes = drafter.nodes if isinstance(drafter, CombinedDrafter) and drafter.nodes else draft_config.nodes
            rows.append(row_of(spec, nodes, simulated, boundaries=prompt_lengths(texts)))
    title = f"simulated acceptance, draft_sampling {config.draft_sampling}, rule {config.rule}"
    print_rows(rows, title, texts, config, display)
    if isinstance(head, DraftHead) and head.tree_costs and config.draft_sampling == "top_k" and config.costs:
        print_calibration(base, head, texts, config, display)
    if original is not None:
        assert isinstance(head, DraftHead)
        print_kept(head, original, texts, config, display)


def print_calibration(
    base: BaseModel, head: DraftHead, texts: Sequence[Answer], config: ReplayConfig, display: Display
) -> None:
    """Print the predicted and the real acceptance of the likeliest drafts, by which trees by cost are chosen."""
    assert head.tree_costs is not None
    model = head.tree_costs.acceptance
    with display.stage("acceptance predicted for trees by cost"):
        fates = candidate_fates(base, head, texts, config.sampler)
    if fates is not None:
        rows = [row for row in calibration_rows(model, fates) if row["rank"] < SHOWN_RANKS]
        display.console.print(ResultTable.of("acceptance of drafts whose parents were accepted", rows).console())
        display.line(f"calibration error of all candidates: {calibration_error(model, fates):.4f}")


def load_original(head: Drafter | None, base: BaseModel, config: ReplayConfig, display: Display) -> DraftHead:
    """Return the head again, attached to ``config.original_base``; reject a base that it cannot have been trained for,
    before anything is answered."""
    name = config.original_base or ""
    if not isinstance(head, DraftHead):
        raise UserError(f"original_base needs a head that was trained, not {config.head}; leave it out")
    with display.stage(f"original base {name}"):
        original = BaseModel.load(BaseConfig(name=name, dtype=base.config.dtype), base.device)
    if same_base(original.fingerprint, base.fingerprint):
        raise UserError(f"original_base={name} is the base of {config.head} itself; name the one before fine-tuning")
    try:
        return load_head(config.head, original, any_base=True)
    except UserError as error:
        raise UserError(f"original_base={name} has other sizes than the base of the head: {error}") from None


def print_kept(
    head: DraftHead, before: DraftHead, texts: Sequence[Answer], config: ReplayConfig, display: Display
) -> None:
    """Print which share of its acceptance on its original base the head keeps on this one, for the same prompts.
    ``before`` is the head on the original base."""
    own, original = head.base_model, before.base_model
    asked = list(enumerate(text.ids[: text.boundary] for text in texts))
    with display.stage(f"the answers of {config.original_base}"):
        sampler = SamplerConfig(max_new_tokens=config.max_new_tokens, seed=config.seed)
        longest = max(len(ids) for _, ids in asked)
        answered = generate_answers(original, asked, sampler, batch_size=BATCH_SIZE, max_prompt_tokens=longest)
        there = {answer.prompt_number: answer for answer in answered}
    chosen = [n for n, text in enumerate(texts) if text.positions and n in there and there[n].positions]
    length = max(config.chain)
    if not chosen:
        raise UserError("no answer of both bases has two tokens; raise max_new_tokens")
    candidates = AcceptProbsConfig(width=1)
    with display.stage(f"one pass over {len(chosen)} pairs of answers"):
        pairs = [(head, own, [texts[n] for n in chosen]), (before, original, [there[n] for n in chosen])]
        here, originally = (
            simulate_acceptance(
                text_accept_probs(base, drafter, each, config.sampler, candidates), TokenTree.chain(length)
            )
            for drafter, base, each in pairs
        )
    ratio, (low, high) = length_ratio(here, originally, config.seed)
    display.line(
        f"a chain of {length}: tau {here.mean_accepted_length:.2f} on this base and "
        f"{originally.mean_accepted_length:.2f} on {config.original_base}, for {len(chosen)} equal prompts: the head "
        f"keeps {100 * ratio:.0f} % ({100 * low:.0f}-{100 * high:.0f})"
    )
    if low >= 1:
        why = "it was adapted already, or these answers are easier to draft"
        display.line(f"it loses nothing: {why}. Adapting may still gain")
        return
    gain = f"adapting it can win back about {100 * (1 / ratio - 1):.0f} %"
    if high >= 1:
        gain = "whether it loses anything is not certain; a larger limit tells"
    display.line(f"{gain}. Adapting gains more, because it also fits the head to your prompts. What that costs:")
    recipe = "adapt_head_smollm2" if own.config.name == EMBEDDED else f"adapt_head base.name={own.config.name}"
    adapter = f" base.adapter={own.config.adapter}" if own.config.adapter else ""
    display.line(
        f"   drafthead train recipe={recipe}{adapter} init_from={config.head} data.prompts=PROMPTS.jsonl name=adapted "
        "mode=estimate"
    )


def replay_stored(config: ReplayConfig, display: Display) -> None:
    """Print the acceptance of the head along the answers of a corpus, without the base's layers."""
    with display.stage(f"head {config.head}"):
        _, head = load_parts_and_head(config.head, config.base)
    check_lengths(head, config)
    with display.stage("drafts at every position of the answers with stored states"):
        answers, texts = stored_accept_probs(Path(config.texts or ""), head, config.limit)
    if not answers:
        raise UserError(f"no answer in {config.texts} has stored states and two tokens; store the states of more")
    rows = rows_of(answers, None, config.chain, config.nodes, DraftSampling.TOP_K, config.seed, prompt_lengths(texts))
    print_rows(rows, f"simulated acceptance on {len(answers)} answers with stored states", texts, config, display)


def prompt_lengths(texts: Sequence[Answer]) -> list[int]:
    """Return the prompt lengths of the answers that have steps."""
    return [text.boundary for text in texts if text.positions]


def check_lengths(head: DraftHead, config: ReplayConfig) -> None:
    if max(config.chain) > head.depth:
        raise UserError(f"chain={config.chain}: the head drafts 1 to {head.depth} positions; choose such lengths")


def print_rows(
    rows: list[dict[str, Any]], title: str, texts: Sequence[Answer], config: ReplayConfig, display: Display
) -> None:
    contexts = {row["draft"]: row.pop("by context") for row in rows if "by context" in row}
    depths = {row["draft"]: row.pop("by depth") for row in rows if "by depth" in row}
    if not config.costs or config.stored_states:
        rows = [{key: value for key, value in row.items() if key != "predicted speedup"} for row in rows]
    display.console.print(ResultTable.of(title, rows).console())
    for draft, shares in depths.items():
        shown = " ".join(f"{share:.2f}" for share in shares)
        display.line(f"{draft}: accepted by draft position, given the one before: {shown}")
    if (by_context := context_table(contexts)) is not None:
        display.console.print(by_context.console())
    if looping := sum(is_degenerate(text.ids[text.boundary :]) for text in texts):
        display.line(f"warning: {looping} of {len(texts)} answers repeat themselves, which flatters acceptance")
    if config.plot:
        bars = [
            (f"{row['draft']}, {row['nodes']} nodes", row["mean accepted length"], *(row["95 %"] or (None, None)))
            for row in rows
        ]
        save_png(interval_bars(bars, "mean accepted length, simulated"), Path(config.plot))
        display.line(f"figure: {config.plot}")


def head_rows(
    base: BaseModel, head: DraftHead, texts: Sequence[Answer], config: ReplayConfig, display: Display
) -> list[dict[str, Any]]:
    """Return the rows of ``head``: chains, trees of ``config.nodes`` and, if it has a threshold, its own tree."""
    probs_config = AcceptProbsConfig(
        draft_sampling=DraftSampling(config.draft_sampling),
        sampler=Sampler(temperature=config.draft_temperature),
        width=1 if config.rule == "block" else 10,
        rule=AcceptanceRule(name=config.rule),
        seed=config.seed,
    )
    with display.stage(f"one pass over {len(texts)} answers"):
        answers = text_accept_probs(base, head, texts, config.sampler, probs_config)
    costs: CostModel | None = None
    if config.costs:
        with display.stage("step costs on this machine"):
            costs = measure_costs(base, head, progress=display.progress)
    sizes = [] if config.rule == "block" else config.nodes
    kind, lengths = probs_config.draft_sampling, prompt_lengths(texts)
    table = rows_of(answers, costs, config.chain, sizes, kind, config.seed, lengths)
    top_k = probs_config.draft_sampling is DraftSampling.TOP_K and config.rule == "exact"
    if head.confidence_threshold and top_k:
        with display.stage("the head's own tree with its confidence threshold, drafted at every position"):
            table.append(own_row(base, head, texts, config.sampler, config.seed))
    if head.tree_costs is not None and top_k and config.costs:
        with display.stage("trees by cost, drafted at every position"):
            table.append(cost_row(base, head, texts, config.sampler, config.seed))
    return table
