"""Pieces of the evaluation's HTML page."""
# An explained speedup in words: shared by the page and the terminal.

import html
from collections.abc import Sequence
from typing import Any

from drafthead.eval.metrics.summary import fastest_baseline, speedup_of
from drafthead.eval.report.figures import explained_of
from drafthead.eval.report.tables import identical, interval, lossy, method_rows, number, speedup_rows, task_rows


def formula(explained: dict[str, Any], baseline: str) -> str:
    """m x plain step / (draft + verify + loop), with the numbers, predicted and measured."""
    plain, method = explained["plain"], explained["method"]
    one = sum(plain[part] for part in ("draft_s", "verify_s", "loop_s"))
    text = (
        f"{method['tokens']:.2f} tokens a step × {_ms(one)} of a plain step ({baseline}) ÷ ({_ms(method['draft_s'])} "
        f"drafting + {_ms(method['verify_s'])} verifying {1 + method['drafts']:.1f} tokens + {_ms(method['loop_s'])} "
        f"loop) = {number(explained['predicted'], '{:.2f}x')} predicted; {number(explained['measured'], '{:.2f}x')} "
        f"measured, prefill included"
    )
    if explained["predicted_from_costs"] is not None:
        text += f"; {explained['predicted_from_costs']:.2f}x from step costs that were measured apart"
    return text + "."


def facts(explained: dict[str, Any]) -> dict[str, str]:
    """The closed form, and the best draft on this machine; what is not known is left out."""
    found = {}
    if form := explained["closed_form"]:
        found["closed form"] = (
            f"{form['alpha_is']} = {form['alpha']:.2f}, c = {form['draft_cost']:.3f} plain steps a draft: a chain of "
            f"{form['drafts']} commits {form['expected_tokens']:.2f} tokens and is {form['expected_speedup']:.2f}x "
            "as fast, if verifying more tokens cost nothing"
        )
        unless = "" if form["improves"] else "; no chain pays, as alpha is not above c"
        found["optimal lookahead"] = (
            f"{form['optimal_drafts']} drafts, {form['optimal_speedup']:.2f}x by that form{unless}"
        )
    for name in ("best_chain", "best_tree"):
        if (option := explained[name]) is not None:
            what = "drafts" if name == "best_chain" else "drafted nodes"
            found[f"{name.replace('_', ' ')} here"] = (
                f"{option['nodes'] - 1} {what}: {option['tokens']:.2f} tokens in {_ms(option['step_s'])}, "
                f"{option['speedup']:.2f}x expected"
            )
    return found


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


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
@media(max-width:600px){th,td{padding:7px 3px}table{font-size:.76rem}h1{font-size:1.35rem}
main{padding:16px 12px 32px}}
"""
MOST_LISTED = 8
"""Exceptions beyond these wait behind a click."""


def escape(text: object) -> str:
    """``text`` as HTML text."""
    return html.escape(str(text))


def whole_page(title: str, body: str) -> str:
    """A page that needs no other file."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


def machine_line(overall: dict[str, Any]) -> str:
    """What the numbers were measured on."""
    machine = overall["hardware"]
    return (
        f"{machine['gpu'] or machine['cpu']}; CPU cores: {machine['cores']}, torch threads: {machine['torch_threads']}"
    )


def headline(evaluation: dict[str, Any]) -> str:
    """Cards: the speedup, tokens per step, identical outputs."""
    overall = evaluation["overall"]
    name, plain = fastest_baseline(overall)
    bounds, warning = interval(overall), lossy(evaluation)
    speed = f"{number(overall['tokens_per_second'], '{:.1f}')} tokens/s; plain, {name}: {number(plain, '{:.1f}')}"
    cards = [
        (
            "warn" if warning else "",
            number(speedup_of(overall), "{:.2f}x"),
            "speedup" + (f", 95 % {bounds}" if bounds != "–" else ""),
            f"{warning}; {speed}" if warning else speed,
        ),
        ("", number(overall["mean_accepted_tokens"]), "tokens per step", "the base's own included; plain decoding: 1"),
    ]
    if outputs := overall.get("identical_outputs"):
        ties, different = len(outputs["near_ties"]), len(outputs["different"])
        differing = [
            f"{n} {how}" for n, how in ((different, "differing"), (ties, "differing at a near-tie of two logits")) if n
        ]
        note = ", ".join(differing) or "token for token with plain decoding"
        cards.append(("warn" if different else "", identical(overall), "outputs identical", note))
    return '<div class="cards">' + "".join(
        f'<div class="card {kind}"><b>{escape(big)}</b><span>{escape(what)}</span>'
        f'<span class="muted">{escape(note)}</span></div>'
        for kind, big, what, note in cards
    ) + "</div>"  # fmt: skip


def task_table(evaluation: dict[str, Any]) -> str:
    """The headline's method by task."""
    warning = lossy(evaluation)
    rows = [
        [task, _speedup(ratio, bounds, warning), *map(escape, (accepted, speed, plain, same.replace(" of ", "/")))]
        for task, ratio, bounds, accepted, speed, plain, same in task_rows(evaluation)
    ]
    return _table(("task", "speedup", "accepted", "tok/s", "plain", "same"), rows, total=True)


def method_table(evaluation: dict[str, Any]) -> str:
    """Every method and baseline over all prompts."""
    rows = []
    for name, ratio, bounds, compatible, accepted, speed, decoding, same in method_rows(evaluation):
        shown = _speedup(ratio, "" if bounds == "–" else bounds, lossy(evaluation, name))
        speeds = escape(speed) + (f"<small>{escape(decoding)}</small>" if decoding != "–" else "")
        rows.append([name, shown, escape(compatible), escape(accepted), speeds, escape(same.replace(" of ", "/"))])
    return _table(("method", "speedup", "Spec-Bench", "accepted", "tok/s", "same"), rows)


def speedup_table(evaluation: dict[str, Any]) -> str:
    """Speedup by task and method; empty with one method."""
    heads, *rows = [*speedup_rows(evaluation)] or [()]
    return _table(heads, [[row[0], *map(escape, row[1:])] for row in rows], total=True) if heads else ""


def _speedup(ratio: str, bounds: str, warning: str | None) -> str:
    short = warning and warning.removeprefix("lossy, ")  # the page's second line says that the rule is lossy
    notes = "".join(f"<small>{escape(note)}</small>" for note in (bounds, short) if note)
    return f"{escape(ratio)}{notes}"


def _breakable(name: str) -> str:
    """A name that may be cut behind its underscores, so that a phone shows the whole row."""
    return escape(name).replace("_", "_<wbr>")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], total: bool = False) -> str:
    """A table; a row's first cell is text, the others are HTML."""
    lines = []
    for n, (name, *cells) in enumerate(rows):
        kind = ' class="total"' if total and n == len(rows) - 1 else ""
        row = f'<th scope="row">{_breakable(name)}</th>' + "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr{kind}>{row}</tr>")
    head = "".join(f'<th scope="col">{_breakable(name)}</th>' for name in heads)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def explanation(evaluation: dict[str, Any]) -> str:
    """The speedup's terms, predicted and measured, and the best draft on this machine."""
    name, found = explained_of(evaluation)
    if found is None:
        return ""
    return f"<p>{escape(formula(found, name))}</p>{fact_table(facts(found))}"


def exceptions(evaluation: dict[str, Any]) -> str:
    """Every answer that is not plain decoding's, and every prompt without one."""
    overall = evaluation["overall"]
    methods = overall.get("methods") or {"": overall}
    lines = [
        f"{kind}: {f'{method}, ' if len(methods) > 1 else ''}{_where(d)} at answer token {d['position']}, "
        + (f"tokens {d['tokens'][0]} and {d['tokens'][1]}" if d["tokens"] else "where one answer ends")
        + (f", logits {d['margin']:.1e} apart" if d["margin"] is not None else "")
        + (f": {d['diagnosis']}" if kind == "Different" and d["tokens"] and d.get("diagnosis") else "")
        for method, numbers in methods.items()
        for kind, group in (("Different", "different"), ("Near-tie", "near_ties"))
        for d in (numbers.get("identical_outputs") or {}).get(group, [])
    ]
    lines += [f"Failed: {_where(f)} ({f['task']}): {f['message']}" for f in evaluation.get("failed", [])]
    lines.sort(key=lambda line: line.startswith("Near-tie"))  # faults first
    shown, hidden = ("".join(f"<li>{escape(line)}</li>" for line in part) for part in _parted(lines))
    more = f"<details><summary>{len(lines) - MOST_LISTED} more</summary><ul>{hidden}</ul></details>" if hidden else ""
    return f"<ul>{shown}</ul>{more}" if shown else ""


def _where(entry: dict[str, Any]) -> str:
    return f"prompt {entry['prompt']}" + (f", turn {entry['turn'] + 1}," if "turn" in entry else "")


def _parted(lines: list[str]) -> tuple[list[str], list[str]]:
    return lines[:MOST_LISTED], lines[MOST_LISTED:]


def fact_table(found: dict[str, Any]) -> str:
    """Names and values, one a row."""
    rows = "".join(
        f'<tr><th scope="row">{escape(key.replace("_", " "))}</th>'
        f"<td>{escape('none' if value is None else value)}</td></tr>"
        for key, value in found.items()
    )
    return f'<div class="table"><table class="facts"><tbody>{rows}</tbody></table></div>' if rows else ""
