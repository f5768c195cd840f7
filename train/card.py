"""The model card of a trained head, filled from its run, and the files that go to the Hub beside the weights."""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from drafthead.data.files import write_atomic, write_json
from drafthead.data.generations import GenerationStats
from drafthead.eval.page import machine_line
from drafthead.eval.quality import quality_markdown
from drafthead.eval.suites import suite_label
from drafthead.eval.summary import speedup_of
from drafthead.eval.tables import DEFINITIONS, lossy, markdown_table
from drafthead.models.base_config import EMBEDDED, BaseConfig
from drafthead.models.draft_head import DraftHead
from drafthead.models.head_files import read_head_config
from drafthead.models.hub import REPOSITORY
from drafthead.train.card_facts import base_link, facts, formats, hub_name, phase_row
from drafthead.train.config import RunConfig

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
    base, kind = config["base"], str(config["head"]).rpartition(".")[2].removesuffix("Config")
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
