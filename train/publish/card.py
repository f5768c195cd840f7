"""The model card of a trained head, filled from its run, and the files that go to the Hub beside the weights."""
# What a model card says of a head's training, its base and the engines that load it, as rows of Markdown tables.

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from drafthead.data.answers.store import GenerationStats
from drafthead.data.text.sources import SourceConfig
from drafthead.data.utils.files import write_atomic, write_json
from drafthead.data.utils.hub import REPOSITORY
from drafthead.eval.metrics.base_quality import quality_markdown
from drafthead.eval.metrics.summary import speedup_of
from drafthead.eval.prompts.suites import suite_label
from drafthead.eval.report.report import machine_line
from drafthead.eval.report.tables import DEFINITIONS, lossy, markdown_table
from drafthead.models.base.config import EMBEDDED, BaseConfig
from drafthead.models.formats import FORMATS
from drafthead.models.formats.contract import published_name, unsupported_adapter
from drafthead.models.heads.common.contract import DraftHead, config_class
from drafthead.models.heads.common.files import read_head_config
from drafthead.models.heads.common.losses import TERMS
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
            unsupported = [*found.unsupported(head), *unsupported_adapter(head)]
            fits = f"no: {'; '.join(obstacle.found for obstacle in unsupported)}" if unsupported else "yes"
            rows.append((f"`{found.name}`", "; ".join(current).replace("|", "\\|") or "none", fits))
            loaded = loaded or (bool(current) and not unsupported)
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
    written = run.data.generations.self_prompted
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
    tokens = phase.seq_len * phase.micro_batch_size * phase.accumulate * processes
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


LOSSES = "training_loss.png"
UNKNOWN = "unknown"
LOADING = f"""\
## How to load it

```python
import drafthead

head = drafthead.load_head("{REPOSITORY}")  # and the base it is for
print(drafthead.generate(head.base, head, "Why is the sky blue?").text)
```
"""
PLAIN = (
    """\
---
{{ card_data }}
---
# Draft head

A draft head ({{ kind }}) for speculative decoding with `{{ base }}`.

"""
    + LOADING
    + """
How it was trained and what it measures is not known here: `drafthead eval head=... suite=mt_bench` measures it.

## Licence

Unknown: find out what the licences of the base and of the data say before you use or share it.
"""
)
TEMPLATE = (
    """\
---
{{ card_data }}
---
# {{ name }}

A draft head ({{ kind }}, {{ depth }} draft positions, {{ parameters }} parameters) for speculative
decoding with {{ base }}. It guesses the next tokens, the base checks them in one pass, and {{ promise }}.

"""
    + LOADING
    + """
{{ table }}
{% if loaded -%}
Engines load it once it is exported: `drafthead export head=... to=FORMAT out=...`.
{%- else -%}
No current release of an inference engine loads this head; drafthead decodes with it.
{%- endif %}
{% if formats %}
| `to=` | loaded by current releases of | holds this head |
|---|---|---|
{% for row in formats -%}
| {{ row | join(" | ") }} |
{% endfor -%}
{% endif -%}
{% if tuned %}
{{ tuned }}
{% endif %}
## How it was trained

| | |
|---|---|
{% for row in facts -%}
| {{ row | join(" | ") }} |
{% endfor %}
| phase | data | steps | tokens a step | learning rate | loss |
|---|---|---:|---:|---|---|
{% for row in phases -%}
| {{ row | join(" | ") }} |
{% endfor %}
{% if losses -%}
![Loss of each draft position over the steps of all phases]({{ losses }})
{% endif %}
## Licence

{{ licence }}
"""
)


def write_card(
    run: RunConfig,
    head: DraftHead,
    answers: GenerationStats,
    evaluation: dict[str, Any],
    quality: dict[str, Any] | None,
    folder: Path,
    processes: int,
) -> None:
    """Write ``README.md``, ``eval.json`` and the curve of the losses into ``folder/head``.

    Args:
        run: the recipe.
        head: with its base.
        answers: size of the corpus of the base's own answers.
        evaluation: what ``evaluate`` returned.
        quality: of a base that was tuned along; None otherwise.
        folder: the run folder.
        processes: that the run began with.
    """
    target, evaluation = folder / "head", _published(evaluation)
    write_json(target / "eval.json", evaluation)
    curve = folder / "plots" / LOSSES
    if curve.exists():
        shutil.copyfile(curve, target / LOSSES)
    licences, (known, loaded) = base_licences(run.base), formats(head)
    shown: dict[str, Any] = {
        "name": run.name,
        "kind": type(head).__name__,
        "depth": head.depth,
        "parameters": f"{sum(p.numel() for p in head.parameters()):,}",
        "base": base_link(head),
        "promise": _promise(evaluation),
        "table": _results(evaluation),
        "formats": known,
        "loaded": loaded,
        "tuned": "" if quality is None else quality_markdown(quality),
        "facts": facts(run, head, answers),
        "phases": [phase_row(name, phase, processes) for name, phase in run.phases.items()],
        "losses": LOSSES if curve.exists() else "",
        "licence": _licence(licences),
    }
    card = ModelCard.from_template(metadata(run, head, evaluation, licences), template_str=TEMPLATE, **shown)
    write_atomic(target / "README.md", str(card))


def _published(evaluation: dict[str, Any]) -> dict[str, Any]:
    """An evaluation with files of prompts and trees by their names alone, without this machine's folders."""
    found = {key: value for key, value in evaluation.items() if key != "resumed"}
    tree = {**evaluation["tree"], "spec": evaluation["tree"]["spec"].rpartition("/")[2]}
    return {**found, "suite": suite_label(evaluation["suite"]), "tree": tree}


def metadata(run: RunConfig, head: DraftHead, evaluation: dict[str, Any], licences: dict[str, Any]) -> ModelCardData:
    """The card's front matter: what the Hub searches and shows."""
    sources = [*run.data.text.sources, *run.data.generations.sources]
    datasets = [s.name for s in sources if s.kind == "hf" and not Path(s.name).exists()]
    return ModelCardData(
        base_model=hub_name(head),
        library_name="drafthead",
        pipeline_tag="text-generation",
        tags=["drafthead", "speculative-decoding", type(head).__module__.rpartition(".")[2]],
        datasets=list(dict.fromkeys(datasets)) or None,
        model_name=run.name,
        eval_results=_eval_results(evaluation) or None,
        **licences,
    )


def _eval_results(evaluation: dict[str, Any]) -> list[EvalResult]:
    """Speedup and tokens a step, per task and overall, with the machine."""
    machine, warning, suite = machine_line(evaluation["overall"]), lossy(evaluation), evaluation["suite"]
    note = f" ({warning})" if warning else ""
    found = []
    for task, group in [*evaluation["tasks"].items(), ("overall", evaluation["overall"])]:
        for kind, title, value in (
            ("speedup", f"speedup over the faster plain decoding{note}", speedup_of(group)),
            ("mean_accepted_tokens", f"tokens a step{note}", group["mean_accepted_tokens"]),
        ):
            if value is not None:
                found.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=suite,
                        dataset_name=f"{suite}, {task}",
                        dataset_config=task,
                        metric_type=kind,
                        metric_name=title,
                        metric_value=round(value, 3),
                        metric_args={"hardware": machine},
                    )
                )
    return found


def base_licences(base: BaseConfig) -> dict[str, Any]:
    """``license`` (and its name and link) of the base's own card; "unknown" where there is none to be read."""
    if base.name == EMBEDDED:
        return {"license": "apache-2.0"}
    card = Path(base.name) / "README.md"
    if base.random or (Path(base.name).is_dir() and not card.exists()):
        return {"license": UNKNOWN}
    try:
        found = ModelCard.load(card if card.exists() else base.name, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no network, no such file, a card that is none: nothing that a finished run should fail for
        return {"license": UNKNOWN}
    keys = ("license", "license_name", "license_link")
    return {"license": UNKNOWN, **{key: str(found[key]) for key in keys if found.get(key)}}


def _licence(licences: dict[str, Any]) -> str:
    if licences["license"] == UNKNOWN:
        return (
            "Unknown: the base's could not be read. The head was trained on the base's hidden states and answers, so "
            "find out what the base's licence and those of the data say before you use or share it."
        )
    named = licences.get("license_name", licences["license"])
    link = licences.get("license_link")
    return (
        f"`{named}`{f' ({link})' if link else ''}, as the base's card has it: the head was trained on the base's "
        "hidden states and answers. Those of the data count as well."
    )


def _promise(evaluation: dict[str, Any]) -> str:
    rule = evaluation.get("rule")
    if rule is None or rule["lossless"]:
        return "the text stays the base's own, greedy or sampled"
    return f"the text is close to the base's own (the figures below are of a lossy rule, {rule['name']})"


def _results(evaluation: dict[str, Any]) -> str:
    overall = evaluation["overall"]
    versions = ", ".join(f"{name} {version}" for name, version in overall["versions"].items())
    return (
        f"## What was measured\n\n{evaluation['suite']}, at most {evaluation['max_new_tokens']} new "
        f"tokens, batch size 1. {machine_line(overall)}; {versions}.\n\n{markdown_table(evaluation)}\n{DEFINITIONS}\n\n"
        "## Engines\n"
    )


def plain_card(folder: Path) -> None:
    """Write a short ``README.md`` into the folder of a head whose run is not known, such as an imported one."""
    config = read_head_config(folder)
    base, kind = config["base"], config_class(config["head_type"]).__name__.removesuffix("Config")
    name = str(base.get("name"))
    known = name.count("/") == 1 and not Path(name).exists()
    data = ModelCardData(
        base_model=name if known else None,
        library_name="drafthead",
        pipeline_tag="text-generation",
        tags=["drafthead", "speculative-decoding"],
        license=UNKNOWN,
    )
    card = ModelCard.from_template(data, template_str=PLAIN, kind=kind, base=Path(name).name if not known else name)
    write_atomic(folder / "README.md", str(card))
