"""What a model card says of a head's training, its base and the engines that load it, as rows of Markdown tables."""

from pathlib import Path

from drafthead.data.generations import GenerationStats
from drafthead.data.sources import SourceConfig
from drafthead.models.draft_head import DraftHead
from drafthead.models.formats import FORMATS
from drafthead.models.formats.contract import published_name
from drafthead.models.formats.obstacles import adapter_obstacles
from drafthead.models.loss_terms import TERMS
from drafthead.train.config import PhaseConfig, RunConfig


def formats(head: DraftHead) -> tuple[list[tuple[str, str, str]], bool]:
    """The formats for heads of this kind, who loads them, and whether they can hold this head.

    Returns:
        (format, engines whose current release loads it, what of this head it cannot say), and whether any current
        engine loads this head in any format.
    """
    rows, loaded = [], False
    for found in FORMATS.values():
        if isinstance(head, found.head):
            current = [f"{engine.name} ({engine.support})" for engine in found.engines_for(head) if engine.current]
            obstacles = [*found.obstacles(head), *adapter_obstacles(head)]
            fits = f"no: {'; '.join(obstacle.found for obstacle in obstacles)}" if obstacles else "yes"
            rows.append((f"`{found.name}`", "; ".join(current).replace("|", "\\|") or "none", fits))
            loaded = loaded or (bool(current) and not obstacles)
    return rows, loaded


def facts(run: RunConfig, head: DraftHead, answers: GenerationStats) -> list[tuple[str, str]]:
    """What there is to say of the training, one line each."""
    identity, sampler = head.base_identity, run.data.generations.sampler
    drawn = "greedy" if sampler.temperature == 0 else f"temperature {sampler.temperature:g}"
    drawn += f", top-k {sampler.top_k}" if sampler.top_k else ""
    drawn += f", top-p {sampler.top_p:g}" if sampler.top_p < 1 else ""
    commit = getattr(head.base.model.config, "_commit_hash", None)
    revision = run.base.revision or commit or "not fixed"
    text = any(phase.corpus == "text" for phase in run.phases.values())
    vocabulary = f"{len(head.d2t):,} of {head.vocab_size:,} ids"
    adapter = " and the adapter in `adapter/`" if head.base.config.adapter is not None else ""
    rows = [
        ("base", f"{base_link(head)}{adapter}, revision {revision}, read in {str(head.base.dtype).split('.')[-1]}"),
        ("fingerprint of the base", f"`{identity['fingerprint']}`; drafthead refuses another base"),
        ("draft vocabulary", "the base's own" if len(head.d2t) == head.vocab_size else vocabulary),
    ]
    if text:
        limit = "read while training" if run.data.text.stream else f"at most {run.data.text.max_tokens:,} tokens"
        rows.append(("text", f"{_sources(run.data.text.sources)}; {limit}"))
    written = run.data.generations.synthesised
    prompts = [_sources(run.data.generations.sources)] if run.data.generations.prompts else []
    prompts += [f"up to {written:,} written by the base itself"] if written else []
    rows.append(("prompts", "; ".join(prompts)))
    said = (
        f"{answers.rows:,} of the base's own, {answers.tokens:,} tokens: {drawn}, at most {sampler.max_new_tokens} each"
    )
    return [*rows, ("answers", said), ("seed", str(run.seed))]


def _sources(sources: list[SourceConfig]) -> str:
    return ", ".join(_source(s) + ("" if s.weight is None else f" (weight {s.weight:g})") for s in sources) or "none"


def _source(source: SourceConfig) -> str:
    """A data set's name for readers elsewhere: of local files no more than that, their names."""
    if source.kind != "hf":
        return f"{source.kind} `{Path(source.name).name}`"
    if Path(source.name).exists():
        return f"local data set `{Path(source.name).name}`"
    details = [source.subset or "", source.split, f"revision {source.revision}" if source.revision else ""]
    return f"[{source.name}](https://huggingface.co/datasets/{source.name}) ({', '.join(filter(None, details))})"


def phase_row(name: str, phase: PhaseConfig, processes: int) -> tuple[str, ...]:
    """A phase: its name, data, steps, tokens a step, learning rate and loss.

    Args:
        name: of the phase.
        phase: its settings.
        processes: that the run began with, which set the rows of a step; others may have finished it.
    """
    optim, loss = phase.optim, phase.loss
    tokens = phase.row_length * phase.batch_rows * phase.accumulate * processes
    rate = f"{optim.lr:g}, {optim.schedule}, {optim.warmup_steps} steps of {optim.warmup} warm-up"
    terms = " + ".join(f"{getattr(loss, term):g} {term}" for term in TERMS if getattr(loss, term))
    weights = f"decay {loss.decay:g}" if loss.depth_weights is None else f"weights {loss.depth_weights}"
    data = {"text": "text", "generations": "the base's answers"}[phase.corpus]
    return name, data, f"{phase.steps:,}", f"{tokens:,}", rate, f"{terms}, {weights} by position"


def hub_name(head: DraftHead) -> str | None:
    """The base's name on the Hub; None for a base that is not from there."""
    name = published_name(head.base)
    return None if head.base.config.random or Path(name).exists() or name.count("/") != 1 else name


def base_link(head: DraftHead) -> str:
    """The base by name, with a link where the Hub has it; of a local one the folder's name alone."""
    name = hub_name(head)
    if name is not None:
        return f"[{name}](https://huggingface.co/{name})"
    return (
        f"`{Path(published_name(head.base)).name}` ({'random weights' if head.base.config.random else 'a local base'})"
    )
