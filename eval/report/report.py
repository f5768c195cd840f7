"""Report of an evaluation: one HTML page that needs no other file, and its figures as PNGs."""

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from drafthead.eval.metrics.engine_comparison import engine_lines
from drafthead.eval.metrics.summary import fastest_autoregressive, speedup_of
from drafthead.eval.report import tables
from drafthead.eval.report.plots import draw_figures, save_png
from drafthead.files.local import write_atomic
from drafthead.system.machine import other_processes_line


def write_report(
    folder: Path,
    evaluation: dict[str, Any],
    training_log: Sequence[dict[str, Any]] = (),
    training_data: str | None = None,
) -> None:
    figures = []
    for stale in ("tree", "tree_sizes"):  # of an earlier evaluation with another tree
        (folder / "plots" / f"{stale}.png").unlink(missing_ok=True)
    for name, figure in draw_figures(evaluation, training_log):
        png = save_png(figure, folder / "plots" / f"{name}.png")
        figures.append((name, "data:image/png;base64," + b64encode(png).decode()))
    overall, (by_task, *by_method) = evaluation["overall"], tables.result_tables(evaluation)
    autoregressive, _ = fastest_autoregressive(overall)
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"interval": partial(tables.cell_text, "95 %"), "number": tables.number}
    environment.filters |= {"ms": lambda seconds: f"{1e3 * seconds:.1f} ms"}
    html = environment.get_template("report.html.jinja").render(
        title=folder.name,
        machine=machine_line(overall),
        rule=tables.sentence(tables.rule_line(evaluation)),
        training_data=training_data,
        overall=overall,
        speedup=speedup_of(overall),
        interval=tables.cell_text("95 %", overall["speedup"]["interval_95"]),
        identical=tables.identical(overall),
        warning=tables.warning(evaluation),
        autoregressive=tables.baseline_name(evaluation, autoregressive),
        speeds=speeds_line(evaluation),
        by_task=by_task,
        by_method=by_method,
        definitions=tables.DEFINITIONS,
        method_definitions=tables.METHOD_DEFINITIONS,
        exceptions=exceptions(evaluation),
        spans=[tables.sentence(line) for line in tables.span_lines(evaluation) + tables.degenerate_lines(evaluation)],
        contexts=tables.context_table(evaluation.get("by_context_of", {})),
        engines=engine_lines(evaluation),
        served=[engine for engine in evaluation.get("engines", {}).values() if engine.get("speedup") is not None],
        explained=evaluation["speedup_breakdown"][autoregressive],
        forecast=[tables.sentence(line) for line in tables.forecast_lines(evaluation)],
        calibrated="calibration" in evaluation,
        by_cost="steps" in evaluation["tree"],
        figures=figures,
        versions=overall["hardware"] | overall["versions"],
    )
    write_atomic(folder / "report.html", html)


def speeds_line(evaluation: dict[str, Any]) -> str:
    overall = evaluation["overall"]
    speeds = sorted(overall["autoregressive_tokens_per_second"].items(), key=lambda item: -(item[1] or 0.0))
    shown = [(tables.baseline_name(evaluation, name), tables.number(speed, "{:.1f}")) for name, speed in speeds]
    others = ", ".join(f"{name} {speed}" for name, speed in shown[1:])
    return f"{tables.number(overall['tokens_per_second'], '{:.1f}')} tokens/s over {shown[0][1]} ({shown[0][0]})" + (
        f"; other decoding without drafts: {others}" if others else ""
    )


def machine_line(overall: dict[str, Any]) -> str:
    machine = overall["hardware"]
    return (
        f"{machine['gpu'] or machine['cpu']}; CPU cores: {machine['cores']}, torch threads: "
        f"{machine['torch_threads']}; {other_processes_line(machine.get('other_processes_cores'))}"
    )


def exceptions(evaluation: dict[str, Any]) -> list[str]:
    """Return a line for every answer that differs from autoregressive decoding, and every failed prompt; ties last."""
    methods = evaluation["overall"]["methods"]
    is_sampled = evaluation["sampler"]["temperature"] > 0
    margin = "the random number within {:.1e} of both" if is_sampled else "logits {:.1e} apart"
    lines_of: dict[str, list[str]] = {"different": [], "near_ties": []}
    for method, numbers in methods.items():
        for kind, lines in lines_of.items():
            for entry in (numbers.get("identical_outputs") or {}).get(kind, []):
                name = f"{method}, " if len(methods) > 1 else ""
                tokens, cause = entry["tokens"], entry.get("diagnosis") if kind == "different" else None
                lines.append(
                    f"{'Different' if kind == 'different' else 'Near-tie'}: {name}prompt {entry['prompt']}"
                    + (f", turn {entry['turn'] + 1}," if "turn" in entry else "")
                    + f" at answer token {entry['position']}, "
                    + (f"tokens {tokens[0]} and {tokens[1]}" if tokens else "where one answer ends")
                    + ("" if entry["margin"] is None else f", {margin.format(entry['margin'])}")
                    + (f": {cause}" if tokens and cause else "")
                )
    return [
        *lines_of["different"],
        *(tables.sentence(line)[:-1] for line in tables.failures(evaluation)),
        *lines_of["near_ties"],
    ]
