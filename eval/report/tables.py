"""An evaluation as tables: for a terminal, and in Markdown for a model card."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from drafthead.eval.metrics.summary import fastest_baseline, speedup_of

TASK_COLUMNS = ("task", "speedup", "95 %", "accepted", "tok/s", "plain tok/s", "identical")
METHOD_COLUMNS = ("method", "speedup", "95 %", "Spec-Bench", "accepted", "tok/s", "decode tok/s", "identical")
DEFINITIONS = (
    "Speedup: tokens per second of speculative decoding over the faster plain decoding, totals over totals, prefill "
    "included, both timed in the same process with the prompts interleaved; the interval is a bootstrap over prompts. "
    "Accepted: tokens committed per verification, the base's own token included (plain decoding: 1). Identical: "
    "answers equal to plain decoding's, token for token."
)
METHOD_DEFINITIONS = (
    "Spec-Bench: the speedup as that benchmark computes it, the mean over prompts of tokens per second over the "
    "baseline's, whose tokens are counted by tokenising its text again. Decode tok/s (small "
    "on a page, under tok/s): without reading the prompt."
)


def number(value: float | None, pattern: str = "{:.2f}") -> str:
    """``value``, or a dash where nothing was measured."""
    return "–" if value is None else pattern.format(value)


def interval(numbers: dict[str, Any]) -> str:
    """The speedup's 95 % interval."""
    low, high = numbers["speedup"]["interval_95"]
    return "–" if low is None or high is None else f"{low:.2f}–{high:.2f}"


def identical(numbers: dict[str, Any]) -> str:
    """How many answers are plain decoding's; a dash where they were not compared."""
    outputs = numbers.get("identical_outputs")
    return f"{outputs['same']} of {outputs['of']}" if outputs else "–"


def lossy(evaluation: dict[str, Any], method: str | None = None) -> str | None:
    """The warning that stands beside every speedup of a lossy rule; None for a lossless one.

    Args:
        evaluation: what ``summarise`` returned, with "rule" or, by method, "rules": name, lossless, total_variation.
        method: whose rule; None is the headline's.
    """
    rule = _rule(evaluation, method)
    if not rule or rule["lossless"]:
        return None
    distance = rule.get("total_variation")
    return "lossy" if distance is None else f"lossy, TV {distance:.3g}"


def rule_line(evaluation: dict[str, Any]) -> str | None:
    """Rule and sampler of the headline method in words; None where the evaluation does not say."""
    rule = _rule(evaluation, None)
    parts = []
    if rule:
        distance = rule.get("total_variation")
        away = "" if distance is None else f": total variation {distance:.2g} on synthetic laws, see drafthead certify"
        parts.append(f"Rule: {rule['name']}, " + ("lossless" if rule["lossless"] else f"lossy{away}"))
    if sampler := evaluation.get("sampler"):
        # What leaves the law as it is, is not worth a word.
        kept = {key: value for key, value in sampler.items() if key == "temperature" or value not in (None, 0, 1)}
        told = ", ".join(f"{key.replace('_', '-')} {value:g}" for key, value in kept.items())
        parts.append(f"sampler: {told}" if parts else f"Sampler: {told}")
    if tree := evaluation.get("tree", {}).get("spec"):
        parts.append(f"tree: {tree}, {evaluation['tree']['nodes']} nodes, {evaluation['draft_sampling']} siblings")
    return "; ".join(parts) or None


def _rule(evaluation: dict[str, Any], method: str | None) -> dict[str, Any] | None:
    headline = evaluation.get("headline")
    rules: dict[str, dict[str, Any]] = evaluation.get("rules", {})
    if method is None or method == headline:
        return rules.get(str(headline)) or evaluation.get("rule")
    return rules.get(method)


def task_rows(evaluation: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """``TASK_COLUMNS`` per task, then overall; the headline's method."""
    for name, group in [*evaluation["tasks"].items(), ("overall", evaluation["overall"])]:
        yield (
            name,
            number(speedup_of(group), "{:.2f}x"),
            interval(group),
            number(group["mean_accepted_tokens"]),
            number(group["tokens_per_second"], "{:.1f}"),
            number(fastest_baseline(group)[1], "{:.1f}"),
            identical(group),
        )


def method_rows(evaluation: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """``METHOD_COLUMNS`` per method over all prompts, then the plain baselines."""
    overall = evaluation["overall"]
    for name, numbers in overall.get("methods", {}).items():
        yield (
            name,
            number(speedup_of(overall, name), "{:.2f}x"),
            interval(numbers),
            number((numbers["spec_bench"] or {}).get("speedup"), "{:.2f}x"),
            number(numbers["mean_accepted_tokens"]),
            number(numbers["tokens_per_second"], "{:.1f}"),
            number(numbers["decode_tokens_per_second"], "{:.1f}"),
            identical(numbers),
        )
    _, fastest = fastest_baseline(overall)
    for name, speed in overall["baseline_tokens_per_second"].items():
        ratio = None if speed is None or not fastest else speed / fastest
        yield (f"{name}, plain", number(ratio, "{:.2f}x"), "–", "–", "1.00", number(speed, "{:.1f}"), "–", "–")


def speedup_rows(evaluation: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Per task the speedup of every method; nothing when there is only one."""
    methods = list(evaluation["overall"].get("methods", {}))
    if len(methods) > 1:
        yield ("task", *methods)
        for name, group in [*evaluation["tasks"].items(), ("overall", evaluation["overall"])]:
            yield (name, *(number(speedup_of(group, method), "{:.2f}x") for method in methods))


def with_warnings(evaluation: dict[str, Any], rows: Iterator[tuple[str, ...]], by_method: bool) -> list[list[str]]:
    """Cells with the warning of :func:`lossy` behind the speedup of each row."""
    found = []
    for name, ratio, *rest in rows:
        method = name if by_method else None
        warning = None if by_method and name.endswith(", plain") else lossy(evaluation, method)
        found.append([name, f"{ratio} ({warning})" if warning else ratio, *rest])
    return found


def markdown_table(evaluation: dict[str, Any]) -> str:
    """The results per task, and per method, as Markdown tables for a model card."""
    tables = [_markdown(TASK_COLUMNS, with_warnings(evaluation, task_rows(evaluation), by_method=False))]
    if evaluation["overall"].get("methods"):
        tables.append(_markdown(METHOD_COLUMNS, with_warnings(evaluation, method_rows(evaluation), by_method=True)))
    if speedups := list(speedup_rows(evaluation)):
        tables.append("Speedup by task and method:\n\n" + _markdown(speedups[0], speedups[1:]))
    if line := rule_line(evaluation):
        tables.append(f"{line}.\n")
    if lost := failures(evaluation):
        tables.append("\n".join(f"- {line}" for line in lost) + "\n")
    return "\n".join(tables)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(_no_bar(name) for name in columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(_no_bar(cell) for cell in cells) + " |" for cells in rows]
    return "\n".join(lines) + "\n"


def _no_bar(cell: str) -> str:
    return cell.replace("|", "\\|")


def console_table(evaluation: dict[str, Any]) -> RenderableType:
    """The results per task for a terminal of 80 columns, and per method where several ran."""
    tasks = with_warnings(evaluation, task_rows(evaluation), by_method=False)
    tables = [_console("speculative decoding against plain decoding", TASK_COLUMNS, tasks, last_is_total=True)]
    if len(evaluation["overall"].get("methods", {})) > 1:
        kept = [n for n, name in enumerate(METHOD_COLUMNS) if name != "decode tok/s"]  # no room for it
        methods = with_warnings(evaluation, method_rows(evaluation), by_method=True)
        rows = [[row[n] for n in kept] for row in methods]
        tables.append(
            _console("methods, over all prompts", [METHOD_COLUMNS[n] for n in kept], rows, last_is_total=False)
        )
    return tables[0] if len(tables) == 1 else Group(*tables)


def _console(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], last_is_total: bool) -> Table:
    table = Table(title=title)
    for n, column in enumerate(columns):
        # Two lines for the longest heading, so that eight tasks fit 80 columns.
        two_lines = column.replace(" tok", "\ntok").replace("Spec-B", "Spec-\nB")
        if not last_is_total:  # names of methods are long
            two_lines = two_lines.replace("accepted", "tokens\na step").replace("identical", "same")
        if n:
            table.add_column(two_lines, justify="right", no_wrap=True)
        else:  # the name of a method may be a path
            table.add_column(two_lines, overflow="fold", max_width=22)
    for n, cells in enumerate(rows):
        total = last_is_total and n == len(rows) - 1
        if total:
            table.add_section()
        shown = [cell.replace(" (lossy, ", "\n").rstrip(")").replace(", plain", "\nplain") for cell in cells]
        if not last_is_total:
            shown = [cell.replace(" of ", "/") for cell in shown]
        table.add_row(*shown, style="bold" if total else None)
    return table


def failures(evaluation: dict[str, Any]) -> list[str]:
    """A line for every prompt without an answer."""
    return [f"failed: prompt {f['prompt']} ({f['task']}): {f['message']}" for f in evaluation.get("failed", [])]


def console_lines(evaluation: dict[str, Any], training_log: list[dict[str, Any]] | None = None) -> list[str]:
    """What the tables have no room for: baselines, acceptance by draft position, accuracy of the heads, equality."""
    overall = evaluation["overall"]
    names = {"drafthead": "our loop", "transformers": "transformers generate"}
    plain = [
        f"{number(speed, '{:.1f}')} ({names.get(name, name)})"
        for name, speed in sorted(overall["baseline_tokens_per_second"].items())
    ]
    lines = [
        f"tokens/s: speculative {number(overall['tokens_per_second'], '{:.1f}')}, plain {' and '.join(plain)}",
        f"mean accepted tokens a step: {number(overall['mean_accepted_tokens'])}; accepted by draft position, given "
        f"the one before: {' '.join(number(value) for value in overall['acceptance_per_depth'])}",
    ]
    held_out = [row for row in training_log or [] if row.get("held_out_accept_1") is not None]
    if held_out:
        depth = sum(key.startswith("held_out_accept_") for key in held_out[-1])
        accuracy = [number(held_out[-1][f"held_out_accept_{k}"]) for k in range(1, depth + 1)]
        shown = accuracy[0] if depth > 1 and len(set(accuracy)) == 1 else " ".join(accuracy)
        lines.append(f"top-1 accuracy by draft position on held-out answers, behind right ones: {shown}")
    if outputs := overall.get("identical_outputs"):
        lines.append(f"outputs identical: {identical(overall)}, near-ties: {len(outputs['near_ties'])}")
    if line := rule_line(evaluation):
        lines.append(line[0].lower() + line[1:])
    lines += failures(evaluation)
    resumed, turns = evaluation.get("resumed", (0, 0))
    if resumed:
        lines.append(f"{resumed} of {turns} answers were timed by an earlier run (resume=false times all again)")
    return lines
