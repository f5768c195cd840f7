"""An evaluation for people: one self-contained page, and its figures as files."""

from pathlib import Path
from typing import Any

from drafthead.data.utils.files import write_atomic
from drafthead.eval.report import html_page as page
from drafthead.eval.report.figures import FIGURES, draw_figures
from drafthead.eval.report.html_page import escape
from drafthead.eval.report.plots import save_png, svg_uri
from drafthead.eval.report.tables import DEFINITIONS, METHOD_DEFINITIONS, rule_line
from drafthead.models.token_tree import TokenTree


def write_report(
    folder: Path,
    evaluation: dict[str, Any],
    *,
    latency: list[tuple[int, float]] | None,
    tree: TokenTree | None,
    training_log: list[dict[str, Any]] | None,
    title: str,
) -> Path:
    """Write ``folder/report.html``, which needs no other file, and its plots as ``folder/plots/*.png``.

    Args:
        folder: the run folder.
        evaluation: what ``summary.summarise`` returned, with "rule", "rules" and "sampler" where known, or
            ``eval.json`` read back.
        latency: (n, seconds) of verifying n tokens in one forward; None leaves the cost plot out.
        tree: the tree that was decoded with.
        training_log: rows of ``metrics.jsonl`` with "phase", "step", "loss_1", "accept_1", ...
        title: heading of the page.

    Returns:
        Path of the page.
    """
    figures = _figures(folder, evaluation, latency, tree, training_log)
    path = folder / "report.html"
    write_atomic(path, page.whole_page(title, _body(title, evaluation, figures)))
    return path


def _figures(
    folder: Path,
    evaluation: dict[str, Any],
    latency: list[tuple[int, float]] | None,
    tree: TokenTree | None,
    training_log: list[dict[str, Any]] | None,
) -> str:
    figures = []
    for name, figure in draw_figures(evaluation, latency, tree, training_log):
        heading, caption = FIGURES[name]
        save_png(figure, folder / "plots" / f"{name}.png")
        image = f'<img src="{svg_uri(figure)}" alt="{escape(heading)}. {escape(caption)}">'
        figures.append(f"<figure><h3>{escape(heading)}</h3>{image}<figcaption>{escape(caption)}</figcaption></figure>")
    return "".join(figures)


def _body(title: str, evaluation: dict[str, Any], figures: str) -> str:
    overall = evaluation["overall"]
    rule = rule_line(evaluation)
    methods = page.method_table(evaluation) if overall.get("methods") else ""
    explanation = page.explanation(evaluation)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(page.machine_line(overall))}</p>',
        f"<p>{escape(rule)}.</p>" if rule else "",
        page.headline(evaluation),
        "<h2>By task</h2>",
        page.task_table(evaluation),
        f'<p class="muted">{escape(DEFINITIONS)}</p>',
        f'<h2>By method</h2>{methods}<p class="muted">{escape(METHOD_DEFINITIONS)}</p>' if methods else "",
        page.speedup_table(evaluation),
        page.exceptions(evaluation),
        f"<h2>The speedup explained</h2>{explanation}" if explanation else "",
        f'<h2>How it comes about</h2><div class="plots">{figures}</div>',
        "<h2>Measured on</h2>",
        page.fact_table(overall["hardware"] | overall["versions"]),
    ]
    return "\n".join(part for part in parts if part)
