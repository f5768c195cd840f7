"""The model card of a head, filled from its run, and the other files that go to the Hub with the weights."""

import shutil
from pathlib import Path
from shlex import quote
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from drafthead.data.answers.store import AnswerStats
from drafthead.data.prompts.suites import suite_label
from drafthead.data.text.sources import SourceConfig
from drafthead.engines.environment import engine_python
from drafthead.errors import visible
from drafthead.eval.metrics.base_quality import quality_line
from drafthead.eval.metrics.summary import speedup_of
from drafthead.eval.report.report import machine_line
from drafthead.eval.report.tables import DEFINITIONS, code, escaped, lossy, markdown_table, quality_table, sentence
from drafthead.files.hub import REPOSITORY
from drafthead.files.local import write_atomic, write_json
from drafthead.models.base.base_config import EMBEDDED, BaseConfig
from drafthead.models.formats import all_formats
from drafthead.models.formats.format import GGUF_TYPES, dtype_name, published_name, unsupported_adapter, without_gpu
from drafthead.models.formats.proposer import drafts_in_vllm, proposer_lines
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.head_folder import read_head_config
from drafthead.models.heads.parts.loading import config_class
from drafthead.models.heads.parts.losses import TERMS
from drafthead.system.devices import accelerator_name
from drafthead.train.config import PhaseConfig, RunConfig
from drafthead.train.corpora.corpus_config import DataConfig

TEMPLATE = Path(__file__).with_name("card.md.jinja")
LOSS_FIGURE = "training_loss.png"
UNKNOWN = "unknown"
SEARCHED: dict[str, Any] = {"library_name": "drafthead", "pipeline_tag": "text-generation"}
TAGS = ["drafthead", "speculative-decoding", "custom_generate"]
ADVICE = "   vLLM, SGLang and llama.cpp load EAGLE-3 heads: recipe=eagle3_smollm2_served, recipe=eagle3_llama3"


def write_card(
    run: RunConfig,
    head: DraftHead,
    answers: AnswerStats,
    evaluation: dict[str, Any],
    quality: dict[str, Any] | None,
    folder: Path,
    processes: int,
    agreement: str | None = None,
) -> None:
    """Write the model card ``README.md``, ``eval.json`` and, if there is one, the loss curve into ``folder/head``.
    ``evaluation`` and ``quality`` (None: a frozen base) are the contents of ``eval.json`` and ``quality.json``.
    ``answers`` are the counts of what is trained on."""
    # Prompt and tree files are named without this machine's folders.
    tree = {**evaluation["tree"], "spec": evaluation["tree"]["spec"].rpartition("/")[2]}
    evaluation = {**evaluation, "suite": suite_label(evaluation["suite"]), "tree": tree}
    evaluation.pop("resumed", None)
    target = folder / "head"
    write_json(target / "eval.json", evaluation)
    curve = folder / "plots" / LOSS_FIGURE
    if curve.exists():
        shutil.copyfile(curve, target / LOSS_FIGURE)
    licences, export_rows = base_licences(run.base), formats(head)
    card = ModelCard.from_template(
        metadata(run, head, evaluation, licences),
        template_path=str(TEMPLATE),
        repository=REPOSITORY,
        name=escaped(run.name),
        kind=type(head).__name__,
        depth=head.depth,
        parameters=f"{sum(p.numel() for p in head.parameters()):,}",
        base=base_link(head),
        evaluation=evaluation,
        machine=machine_line(evaluation["overall"]),
        results=markdown_table(evaluation),
        definitions=DEFINITIONS,
        formats=export_rows,
        in_vllm=drafts_in_vllm(head),
        is_loaded=any(engines != "none" and fit == "yes" for _, engines, fit in export_rows),
        obstacles=obstacles(export_rows),
        quality=None if quality is None else f"{quality_table(quality).markdown()}\n{sentence(quality_line(quality))}",
        facts=facts(run, head, answers, agreement),
        phases=[phase_row(name, phase, processes, contents(run)) for name, phase in run.phases.items()],
        loss_figure=LOSS_FIGURE if curve.exists() else None,
        licences=licences,
        code=code,
        escaped=escaped,
    )
    write_atomic(target / "README.md", str(card))


def minimal_card(folder: Path) -> None:
    """Write a short ``README.md`` into the folder of a head whose run is unknown, such as an imported head."""
    config = read_head_config(folder)
    name = visible(str(config["base"].get("name")))
    on_hub = _is_hub_name(name)
    data = ModelCardData(base_model=name if on_hub else None, tags=TAGS, license=UNKNOWN, **SEARCHED)
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        repository=REPOSITORY,
        name="Draft head",
        kind=config_class(config["head_type"]).__name__.removesuffix("Config"),
        base=code(name if on_hub else Path(name).name),
    )
    write_atomic(folder / "README.md", str(card))


def metadata(run: RunConfig, head: DraftHead, evaluation: dict[str, Any], licences: dict[str, Any]) -> ModelCardData:
    """Return the card's front matter, which the Hub searches and shows, with results per task and overall."""
    sources = [*run.data.text.sources, *run.data.transcripts]
    sources += run.data.answers.sources if run.data.uses_answers else []
    datasets = [s.name for s in sources if s.kind == "hf" and not Path(s.name).exists()]
    machine, warning, suite = machine_line(evaluation["overall"]), lossy(evaluation), evaluation["suite"]
    note = f" ({warning})" if warning else ""
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=suite,
            dataset_name=f"{suite}, {task}",
            dataset_config=task,
            metric_type=metric,
            metric_name=title + note,
            metric_value=round(value, 3),
            metric_args={"hardware": machine},
        )
        for task, group in [*evaluation["tasks"].items(), ("overall", evaluation["overall"])]
        for metric, title, value in (
            ("speedup", "speedup over the fastest autoregressive decoding", speedup_of(group)),
            ("mean_accepted_length", "mean accepted length, bonus token included", group["mean_accepted_length"]),
        )
        if value is not None
    ]
    name = published_name(head.base)
    return ModelCardData(
        base_model=name if _is_on_hub(head) else None,
        tags=[*TAGS, type(head).__module__.rpartition(".")[2]],
        datasets=list(dict.fromkeys(datasets)) or None,
        model_name=run.name,
        eval_results=results or None,
        **SEARCHED,
        **licences,
    )


def base_licences(base: BaseConfig) -> dict[str, Any]:
    """Return "license", "license_name", "license_link" as the base's model card states them; else "unknown"."""
    if base.name == EMBEDDED:
        return {"license": "apache-2.0"}
    card = Path(base.name) / "README.md"
    if base.random or (Path(base.name).is_dir() and not card.exists()):
        return {"license": UNKNOWN}
    try:
        data = ModelCard.load(card if card.exists() else base.name, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no network, no such file, not a card: none of them should fail a finished run
        return {"license": UNKNOWN}
    keys = ("license", "license_name", "license_link")
    return {"license": UNKNOWN, **{key: str(data[key]) for key in keys if data.get(key)}}


def base_link(head: DraftHead) -> str:
    name = published_name(head.base)
    if _is_on_hub(head):
        return f"[{name}](https://huggingface.co/{name})"
    return f"{code(Path(name).name)} ({'random weights' if head.base.config.random else 'a local base'})"


def formats(head: DraftHead) -> list[tuple[str, str, str]]:
    """Return (format, engines that load it now, "yes" or "no: " and reasons) per export format, in Markdown."""
    rows = []
    for head_format in all_formats().values():
        if isinstance(head.config, head_format.head_config):
            engines = [
                f"{engine.name} ({engine.support})" for engine in head_format.engines_for(head) if engine.current
            ]
            fitted = head_format.fitted(head)
            reasons = "; ".join(
                reason for reason, _ in [*head_format.unsupported(fitted), *unsupported_adapter(head.base.identity())]
            )
            cell = escaped("; ".join(engines)) or "none"
            rows.append((f"`{head_format.name}`", cell, f"no: {reasons}" if reasons else "yes"))
    return rows


def serving_lines(head: DraftHead, folder: Path) -> list[str]:
    """Return the commands that export and serve ``head`` in each engine, or the reasons why none can."""
    drafts, is_adapted = min(head.depth, head.config.trained_positions), head.base.config.adapter is not None
    dtype, commands = dtype_name(head.base), dict[str, list[str]]()
    reasons: dict[str, str] = {}
    for target in all_formats().values():
        if not isinstance(head.config, target.head_config):
            continue
        fitted = target.fitted(head)
        if refused := "; ".join(f"{what} ({instead})" for what, instead in target.unsupported(fitted)):
            reasons |= {refused: target.name} if any(engine.current for engine in target.engines) else {}
            continue
        options = " vocabulary=full" * (fitted is not head) + " merged_base=true" * is_adapted
        options += f" base_gguf={GGUF_TYPES[dtype]}" * bool(target.base_file)
        out = folder.parent / target.name
        base, base_file = str(out / "base") if is_adapted else published_name(head.base), f"{out}/{target.base_file}"
        for engine in target.engines_for(fitted):
            if serve := engine.command(base, str(out), drafts, dtype, base_file):
                export = f"drafthead export {quote(f'head={folder}')} to={target.name}{options} {quote(f'out={out}')}"
                commands[engine.name] = [f"serve it in {engine.name}:", f"   {export}", f"   {serve}"]
                if (on_cpu := without_gpu(serve, head.base, engine_python())) and accelerator_name() is None:
                    commands[engine.name][2:] = [f"   {on_cpu}", f"   (with a GPU: {serve})"]
    if lines := proposer_lines(head, str(folder)):
        commands["drafthead in vLLM"] = ["serve it in vLLM without an export, by drafthead's own code:", *lines]
    if commands:
        return [line for lines in commands.values() for line in lines]
    listed = [f"   to={name}: {why}" for why, name in reasons.items()]
    listed = listed or [f"   no current release of an engine loads heads of the type {head.config.head_type}"]
    return ["no engine serves this head:", *listed, ADVICE]


def obstacles(rows: list[tuple[str, str, str]]) -> str:
    """Return a sentence with the reasons why no engine loads a head, from the ``rows`` of ``formats``."""
    reasons = [f"to={name.strip('`')}: {fit.removeprefix('no: ')}" for name, engines, fit in rows if engines != "none"]
    return f"Reasons, by export format: {'. '.join(reasons)}. " if reasons else ""


def contents(run: RunConfig) -> str:  # training data other than text
    data = run.data
    given = [given_kind(data)] if data.has_given_answers else []
    return " and ".join([*given, *["the base's answers"] * data.uses_answers])


def given_kind(data: DataConfig) -> str:
    return "transcripts" if data.transcripts else "offline texts"


def facts(run: RunConfig, head: DraftHead, answers: AnswerStats, agreement: str | None = None) -> list[tuple[str, str]]:
    """Return the card's rows (name, description) about the base, the training data and the seed, in Markdown."""
    sampler, data = run.data.answers.sampler, run.data
    revision = run.base.revision or getattr(head.base.model_config, "_commit_hash", None) or "not fixed"
    adapter = " and the adapter in `adapter/`" if head.base.config.adapter is not None else ""
    is_full = len(head.d2t) == head.vocab_size
    drafted = f"{len(head.d2t):,} of {head.vocab_size:,} ids{', and those of the context' * head.config.drafts_context}"
    rows = [
        ("base", f"{base_link(head)}{adapter}, revision {revision}, read in {str(head.base.dtype).split('.')[-1]}"),
        ("fingerprint of the base", f"`{head.base_identity['fingerprint']}`; drafthead refuses another base"),
        ("draft vocabulary", "the base's own" if is_full else drafted),
    ]
    if any(phase.corpus == "text" for phase in run.phases.values()):
        limit = "read while training" if data.text.stream else f"at most {data.text.max_tokens:,} tokens"
        rows.append(("text", f"{_sources(data.text.sources)}; {limit}"))
    if data.has_given_answers:
        source = _sources(data.transcripts) if data.transcripts else code(Path(data.offline.folder or "").name)
        rows.append((given_kind(data), f"{source}; {agreement}"))
        total = f"{answers.rows:,} assistant turns, {answers.tokens:,} tokens"
        rows.append(("trained on", f"{contents(run)}: {total}, held-out turns not included"))
    if data.uses_answers:
        prompts = [_sources(data.answers.sources)] if data.answers.prompts else []
        if count := data.answers.self_prompted:
            prompts.append(f"up to {count:,} written by the base itself")
        sampling = "greedy" if sampler.temperature == 0 else f"temperature {sampler.temperature:g}"
        sampling += f", top-k {sampler.top_k}" if sampler.top_k else ""
        sampling += f", top-p {sampler.top_p:g}" if sampler.top_p < 1 else ""
        own = "the base's own"
        if not data.transcripts:
            own = f"{answers.rows:,} of {own} to train on, {answers.tokens:,} tokens"
        rows.append(("prompts", "; ".join(prompts)))
        rows.append(("answers", f"{own}: {sampling}, at most {sampler.max_new_tokens} each"))
    return [*rows, ("seed", str(run.seed))]


def _sources(sources: list[SourceConfig]) -> str:
    """Name data sources for a public card; a local file without its folder."""
    names = []
    for s in sources:
        name, details = Path(s.name).name, [s.subset or "", s.split, f"revision {s.revision}" if s.revision else ""]
        if s.kind != "hf":
            name = f"{s.kind} {code(name)}"
        elif Path(s.name).exists():
            name = f"local data set {code(name)}"
        else:
            name = f"[{s.name}](https://huggingface.co/datasets/{s.name}) ({', '.join(filter(None, details))})"
        names.append(name + ("" if s.weight is None else f" (weight {s.weight:g})"))
    return ", ".join(names) or "none"


def phase_row(name: str, phase: PhaseConfig, processes: int, answers: str = "the base's answers") -> tuple[str, ...]:
    """Return the cells of a phase in the card's table: name, data, steps, tokens per step, learning rate, loss."""
    optim, loss = phase.optim, phase.loss
    tokens = phase.seq_len * phase.rows(processes)
    rate = f"{optim.lr:g}, {optim.schedule}, {optim.warmup_steps} steps of {optim.warmup} warm-up"
    terms = " + ".join(f"{getattr(loss, term):g} {term}" for term in TERMS if getattr(loss, term))
    weights = f"decay {loss.decay:g}" if loss.depth_weights is None else f"weights {loss.depth_weights}"
    data = "text" if phase.corpus == "text" else answers
    return escaped(name), data, f"{phase.steps:,}", f"{tokens:,}", rate, f"{terms}, {weights} by position"


def _is_on_hub(head: DraftHead) -> bool:
    return not head.base.config.random and _is_hub_name(published_name(head.base))


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not Path(name).exists()
