"""An evaluation for people: a console table, a model card's table, and one self-contained page."""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from drafthead.data.contracts import TokenTree
from drafthead.data.files import write_atomic
from drafthead.eval.figures import FIGURES, draw_figures
from drafthead.eval.plots import save_png, svg_uri
from drafthead.eval.speed import fastest_baseline, speedup_of

COLUMNS = ("task", "speedup", "95 %", "accepted", "tok/s", "plain tok/s", "identical")
DEFINITIONS = (
    "Speedup: tokens per second of speculative decoding over the faster plain decoding, both timed in the same process "
    "with the prompts interleaved; the interval is a bootstrap over prompts. Accepted: tokens committed per "
    "verification, the base's own token included (plain decoding: 1). Identical: answers equal to plain decoding's, "
    "token for token."
)
CSS = """
:root{color-scheme:light;--ink:#1b2430;--muted:#5b6775;--line:#e3e7ec;--accent:#0b6e99;--warm:#b3400f}
*{box-sizing:border-box}
body{margin:0;background:#f5f7f9;color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:36px 0 12px}
p{margin:0 0 12px;max-width:60em}.muted,figcaption{color:var(--muted);font-size:.875rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:12px;margin:20px 0}
.card,.table,figure{background:#fff;border:1px solid var(--line);border-radius:10px}
.card{padding:14px 16px}.card b{display:block;font-size:2rem;line-height:1.2;color:var(--accent)}
.card.warn b{color:var(--warm)}.card span{display:block}
.table{overflow-x:auto;margin-bottom:12px}
table{border-collapse:collapse;width:100%;font-size:.9375rem;font-variant-numeric:tabular-nums}
th,td{padding:8px 12px;text-align:right;border-top:1px solid var(--line)}
thead th{border-top:0;color:var(--muted);font-weight:600;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tbody th{font-weight:400}
tr.total th,tr.total td{font-weight:600;border-top:2px solid var(--muted)}
td small{display:block;color:var(--muted);font-weight:400;white-space:nowrap}
table.facts td{text-align:left;overflow-wrap:anywhere}table.facts th{width:9em;color:var(--muted)}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:16px;align-items:start}
figure{margin:0;padding:12px}figure img{display:block;width:100%;height:auto;max-width:560px;margin:0 auto}
figcaption{margin-top:8px}h3{font-size:1rem;margin:0 0 6px}
@media(max-width:600px){th,td{padding:7px 4px}table{font-size:.78rem}h1{font-size:1.35rem}
main{padding:16px 12px 32px}}
"""


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
        evaluation: what ``speed.summarise`` returned, or ``eval.json`` read back.
        latency: (n, seconds) of verifying n tokens in one forward; None leaves the cost plot out.
        tree: the tree that was decoded with.
        training_log: rows of ``metrics.jsonl`` with "phase", "step", "loss_1", "accept_1", ...
        title: heading of the page.

    Returns:
        Path of the page.
    """
    figures = []
    for name, figure in draw_figures(evaluation, latency, tree, training_log):
        heading, caption = FIGURES[name]
        save_png(figure, folder / "plots" / f"{name}.png")
        image = f'<img src="{svg_uri(figure)}" alt="{_e(heading)}. {_e(caption)}">'
        figures.append(f"<figure><h3>{_e(heading)}</h3>{image}<figcaption>{_e(caption)}</figcaption></figure>")
    overall = evaluation["overall"]
    body = "\n".join(
        [
            f"<h1>{_e(title)}</h1>",
            f'<p class="muted">{_e(_machine_line(overall))}</p>',
            _headline(overall),
            "<h2>By task</h2>",
            _task_table(evaluation),
            f'<p class="muted">{_e(DEFINITIONS)}</p>',
            _exceptions(evaluation),
            f'<h2>How it comes about</h2><div class="plots">{"".join(figures)}</div>',
            "<h2>Measured on</h2>",
            _facts(overall["hardware"] | overall["versions"]),
        ]
    )
    path = folder / "report.html"
    write_atomic(path, _page(title, body))
    return path


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_e(title)}</title><style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


def markdown_table(evaluation: dict[str, Any]) -> str:
    """The results per task as a Markdown table, for a model card."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |" for cells in _rows(evaluation)]
    return "\n".join(lines) + "\n"


def console_table(evaluation: dict[str, Any]) -> Table:
    """The results per task for a terminal."""
    table = Table(title="speculative decoding against plain decoding")
    for column in COLUMNS:
        # Two lines for the longest heading, so that eight tasks fit 80 columns.
        table.add_column(column.replace(" tok", "\ntok"), justify="left" if column == "task" else "right", no_wrap=True)
    rows = list(_rows(evaluation))
    for cells in rows[:-1]:
        table.add_row(*cells)
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    return table


def console_lines(evaluation: dict[str, Any], training_log: list[dict[str, Any]] | None = None) -> list[str]:
    """What the table has no room for: both baselines, acceptance by draft position, accuracy of the heads, equality."""
    overall = evaluation["overall"]
    plain, outputs = overall["baseline_tokens_per_second"], overall["identical_outputs"]
    lines = [
        f"tokens/s: speculative {_format(overall['tokens_per_second'], '{:.1f}')}, plain "
        f"{_format(plain['drafthead'], '{:.1f}')} (our loop) and {_format(plain['transformers'], '{:.1f}')} "
        "(transformers generate)",
        f"mean accepted tokens a step: {_format(overall['mean_accepted_tokens'])}; accepted by draft position, given "
        f"the one before: {' '.join(_format(value) for value in overall['acceptance_per_depth'])}",
    ]
    held_out = [row for row in training_log or [] if row.get("held_out_accept_1") is not None]
    if held_out:
        depth = sum(key.startswith("held_out_accept_") for key in held_out[-1])
        accuracy = " ".join(_format(held_out[-1][f"held_out_accept_{k}"]) for k in range(1, depth + 1))
        lines.append(f"top-1 accuracy of each head on held-out answers: {accuracy}")
    lines.append(f"outputs identical: {outputs['same']} of {outputs['of']}, near-ties: {len(outputs['near_ties'])}")
    return lines


def _rows(evaluation: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, group in [*evaluation["tasks"].items(), ("overall", evaluation["overall"])]:
        outputs = group["identical_outputs"]
        yield (
            name,
            _format(speedup_of(group), "{:.2f}x"),
            _interval(group),
            _format(group["mean_accepted_tokens"]),
            _format(group["tokens_per_second"], "{:.1f}"),
            _format(fastest_baseline(group)[1], "{:.1f}"),
            f"{outputs['same']} of {outputs['of']}",
        )


def _interval(group: dict[str, Any]) -> str:
    low, high = group["speedup"]["interval_95"]
    return "–" if low is None or high is None else f"{low:.2f}–{high:.2f}"


def _format(value: float | None, pattern: str = "{:.2f}") -> str:
    return "–" if value is None else pattern.format(value)


def _e(text: object) -> str:
    return html.escape(str(text))


def _machine_line(overall: dict[str, Any]) -> str:
    machine = overall["hardware"]
    return (
        f"{machine['gpu'] or machine['cpu']}; CPU cores: {machine['cores']}, torch threads: {machine['torch_threads']}"
    )


def _headline(overall: dict[str, Any]) -> str:
    name, plain = fastest_baseline(overall)
    outputs = overall["identical_outputs"]
    ties, different = len(outputs["near_ties"]), len(outputs["different"])
    differing = [
        f"{n} {how}" for n, how in ((different, "differing"), (ties, "differing at a near-tie of two logits")) if n
    ]
    interval = _interval(overall)
    speed = f"{_format(overall['tokens_per_second'], '{:.1f}')} tokens/s; plain, {name}: {_format(plain, '{:.1f}')}"
    cards = [
        (
            "",
            _format(speedup_of(overall), "{:.2f}x"),
            "speedup" + (f", 95 % {interval}" if interval != "–" else ""),
            speed,
        ),
        ("", _format(overall["mean_accepted_tokens"]), "tokens per step", "the base's own included; plain decoding: 1"),
        (
            "warn" if different else "",
            f"{outputs['same']} of {outputs['of']}",
            "outputs identical",
            ", ".join(differing) or "token for token with plain decoding",
        ),
    ]
    return '<div class="cards">' + "".join(
        f'<div class="card {kind}"><b>{_e(number)}</b><span>{_e(what)}</span>'
        f'<span class="muted">{_e(note)}</span></div>'
        for kind, number, what, note in cards
    ) + "</div>"  # fmt: skip


def _task_table(evaluation: dict[str, Any]) -> str:
    heads = ("task", "speedup", "accepted", "tok/s", "plain", "same")
    lines = []
    for task, ratio, interval, accepted, speed, plain, same in _rows(evaluation):
        cells = (
            f"{_e(ratio)}<small>{_e(interval)}</small>",
            *map(_e, (accepted, speed, plain, same.replace(" of ", "/"))),
        )
        row = f'<th scope="row">{_e(task)}</th>' + "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr>{row}</tr>")
    lines[-1] = lines[-1].replace("<tr>", '<tr class="total">')
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _exceptions(evaluation: dict[str, Any]) -> str:
    """Every answer that is not plain decoding's, and every prompt without one."""
    outputs = evaluation["overall"]["identical_outputs"]
    lines = [
        f"{kind}: prompt {d['prompt']} at answer token {d['position']}, "
        + (f"tokens {d['tokens'][0]} and {d['tokens'][1]}" if d["tokens"] else "where one answer ends")
        + (f", logits {d['margin']:.1e} apart" if d["margin"] is not None else "")
        for kind, found in (("Different", outputs["different"]), ("Near-tie", outputs["near_ties"]))
        for d in found
    ]
    lines += [f"Failed: prompt {f['prompt']} ({f['task']}): {f['message']}" for f in evaluation.get("failed", [])]
    return f"<ul>{''.join(f'<li>{_e(line)}</li>' for line in lines)}</ul>" if lines else ""


def _facts(facts: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_e(key.replace("_", " "))}</th><td>{_e("none" if value is None else value)}</td></tr>'
        for key, value in facts.items()
    )
    return f'<div class="table"><table class="facts"><tbody>{rows}</tbody></table></div>'
