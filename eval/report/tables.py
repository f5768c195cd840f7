"""Tables and text lines of an evaluation (the contents of ``eval.json``) for the terminal, Markdown, HTML and wandb."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.table import Table

from drafthead.errors import visible
from drafthead.eval.config import METHOD
from drafthead.eval.engines.load import lengths_by_requests
from drafthead.eval.engines.served import PLAIN
from drafthead.eval.metrics.engine_comparison import engine_lines, prompts_line
from drafthead.eval.metrics.summary import fastest_autoregressive, nodes_per_step, speedup_of
from drafthead.system.machine import BUSY_CORES, other_processes_line

DEFINITIONS = (
    "Speedup: tokens per second of speculative decoding divided by those of the fastest autoregressive decoding (AR), "
    "both as total tokens over total time, prefill included. Both were timed in the same process with the prompts "
    "interleaved; the interval is a bootstrap over prompts. Tau: the mean accepted length, i.e. committed tokens per "
    "verification, bonus token included (autoregressive decoding: 1). Identical: answers that equal those of "
    "autoregressive decoding, token for token."
)
STOCK_LEFT_OUT = "; stock transformers was not timed (stock_baseline=false)"
BASELINE_NAMES = {
    "autoregressive": "our loop",
    "transformers": "transformers over our modules",
    "transformers_stock": "stock transformers",
}
METHOD_DEFINITIONS = (
    "Mean of prompts: the speedup as Spec-Bench computes it, from means over prompts of tokens per second; the tokens "
    "of autoregressive decoding are counted by tokenising its text again. Decode tok/s (printed small below tok/s): "
    "without the prefill."
)


FORMATS = {  # format of a number by its column; floats in other columns get four digits
    **dict.fromkeys(("speedup", "mean of prompts"), "{:.2f}x"),
    **dict.fromkeys(("tok/s", "AR tok/s", "decode tok/s", "predicted tok/s", "measured", "draft ms"), "{:.1f}"),
    **dict.fromkeys(("tau", "mean accepted length", "predicted speedup", "half in s", "90 % in s"), "{:.2f}"),
    **dict.fromkeys(("perplexity before", "after", "acceptance"), "{:.3f}"),
    **dict.fromkeys(("ratio", "KL"), "{:.4f}"),
    "tokens": "{:,}",
    "same top-1": "{:.2f} %",
}


def cell_text(column: str, value: Any) -> str:
    """Return ``value`` as text in the format of its ``column``: a dash for None, and low–high for an interval."""
    if isinstance(value, (list, tuple)):
        return "–" if None in value else "–".join(f"{end:.2f}" for end in value)
    default = "{:.4g}" if isinstance(value, float) else "{}"
    return number(value, default if isinstance(value, str) else FORMATS.get(column, default))


@dataclass(frozen=True)
class ResultTable:
    """A table of cells, each one line of plain text, which may end with a remark in parentheses."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    has_total: bool  # True if the last row holds the results over all tasks

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, Any]], has_total: bool = False) -> Self:
        """Return a table from rows that map column names to values. The first row must have all columns."""
        cells = [tuple(visible(cell_text(name, row.get(name))) for name in rows[0]) for row in rows]
        return cls(title, tuple(map(visible, rows[0])), cells, has_total)

    def markdown(self) -> str:
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        return "".join("| " + " | ".join(map(escaped, line)) + " |\n" for line in lines)

    def console(self) -> Table:
        """Return the table for a terminal of 80 columns, without the column "decode tok/s"."""
        table = Table(title=self.title)
        shown = [n for n, name in enumerate(self.columns) if name != "decode tok/s"]
        for n in shown:
            heading = self.columns[n].replace(" tok", "\ntok").replace("mean of ", "mean of\n")
            if n:
                table.add_column(heading, justify="right", no_wrap=True)
            else:  # many columns leave little room for a method's name, which may be a path
                table.add_column(heading, overflow="fold", max_width=22 if len(self.columns) > 6 else None)
        for row in self.rows:
            is_total = self.has_total and row is self.rows[-1]
            if is_total:
                table.add_section()
            cells = [row[n].replace(" (", "\n(").replace(", TV", ",\nTV").replace(", busy", ",\nbusy") for n in shown]
            table.add_row(*cells, style="bold" if is_total else None)
        return table


def task_table(evaluation: dict[str, Any]) -> ResultTable:
    rows = [
        {
            "task": name,
            "speedup": _with_remark(speedup_of(group), warning(evaluation) if name == "overall" else lossy(evaluation)),
            "95 %": group["speedup"]["interval_95"],
            "tau": group["mean_accepted_length"],
            "tok/s": group["tokens_per_second"],
            "AR tok/s": fastest_autoregressive(group)[1],
            "identical": identical(group),
        }
        for name, group in _groups(evaluation)
    ]
    return ResultTable.of("Speculative against autoregressive decoding", rows, has_total=True)


def baseline_name(evaluation: dict[str, Any], name: str) -> str:
    """Return what decodes without drafts; an engine if it answered with drafts, too (``evaluate_unloaded``)."""
    engine = evaluation.get("answered_by")
    return BASELINE_NAMES[name] if engine is None else f"{engine['engine']} {engine['version']} without the head"


def method_table(evaluation: dict[str, Any]) -> ResultTable:
    overall = evaluation["overall"]
    chains = {engine.get("chain") for engine in evaluation.get("engines", {}).values()} - {METHOD}
    rows = [
        {
            "method": name + " (head as exported)" * (name in chains),
            "speedup": _with_remark(speedup_of(overall, name), lossy(evaluation, name)),
            "95 %": numbers["speedup"]["interval_95"],
            "mean of prompts": numbers["spec_bench"]["speedup"],
            "tau": numbers["mean_accepted_length"],
            "tok/s": numbers["tokens_per_second"],
            "decode tok/s": numbers["decode_tokens_per_second"],
            "identical": identical(numbers),
        }
        for name, numbers in overall["methods"].items()
    ]
    _, fastest = fastest_autoregressive(overall)
    for name, speed in overall["autoregressive_tokens_per_second"].items():
        measured = {"tau": 1.0, "tok/s": speed, "speedup": speed / fastest if speed and fastest else None}
        rows.append(
            dict.fromkeys(rows[0]) | {"method": f"autoregressive ({baseline_name(evaluation, name)})"} | measured
        )
    return ResultTable.of("Methods, over all prompts", rows)


def speedup_table(evaluation: dict[str, Any]) -> ResultTable:
    rows = [
        {"task": name} | {m: cell_text("speedup", speedup_of(group, m)) for m in evaluation["overall"]["methods"]}
        for name, group in _groups(evaluation)
    ]
    return ResultTable.of("Speedup by task and method", rows, has_total=True)


def load_table(evaluation: dict[str, Any]) -> ResultTable:
    rows = [
        {
            "at once": str(row["requests"]),
            "method": row["method"],
            "speedup": row["ratio"],
            "by round": [min(row["rounds"], default=None), max(row["rounds"], default=None)],
            "tok/s": row["tokens_per_second"],
            "half in s": row["median_s"],
            "90 % in s": row["slowest_tenth_s"],
            "tau": row["tau"],
            # vLLM draws other random numbers for drafts, so sampled answers differ.
            "identical": "sampled" if row.get("temperature") else f"{row['same']} of {row['of']}",
        }
        for row in evaluation["load"]
    ]
    return ResultTable.of("vLLM under load", rows)


def load_lines(evaluation: dict[str, Any]) -> list[str]:
    """Return a line about the draft lengths that pay in vLLM; [] if its load was not measured."""
    lengths = lengths_by_requests(evaluation.get("load", []))
    shown = ", ".join(f"[{first}, {last}, {drafts}]" for first, last, drafts in lengths)
    what = "drafts that pay in vLLM, by requests at once"
    return [f'{what}: "num_speculative_tokens_per_batch_size": [{shown}]'] if lengths else []


def result_tables(evaluation: dict[str, Any]) -> list[ResultTable]:
    tables = (task_table, method_table, speedup_table)[: 2 + (len(evaluation["overall"]["methods"]) > 1)]
    return [table(evaluation) for table in tables] + ([load_table(evaluation)] if "load" in evaluation else [])


def context_table(methods: Mapping[str, Sequence[Mapping[str, Any]]]) -> ResultTable | None:
    """Return tau and steps by the number of tokens before the step; None without steps. ``methods`` are the bins of
    ``by_context`` per method; one method's bins fill a column each."""
    edges = sorted({(row["low"], row["high"]) for rows in methods.values() for row in rows})
    if not edges:
        return None
    one = len(methods) == 1
    table = []
    for low, high in edges:
        cells: dict[str, Any] = {"context (tokens)": f"{low:,.0f} to {high - 1:,.0f}"}
        for name, rows in methods.items():
            found = next((row for row in rows if row["low"] == low), None)
            tau, steps = (found["mean_accepted_length"], found["steps"]) if found else (None, 0)
            if one:
                cells |= {"tau": tau, "steps": f"{steps:,.0f}"}
            else:
                cells[name] = f"{number(tau)} ({steps:,.0f} steps)"
        table.append(cells)
    return ResultTable.of("Mean accepted length by context" + f", {next(iter(methods))}" * one, table)


def degenerate_lines(evaluation: dict[str, Any]) -> list[str]:
    """Return a warning if answers of a method repeat themselves, with a count per method; [] if none do."""
    counts = evaluation.get("degenerate", {})
    if not any(entry["answers"] for entry in counts.values()):
        return []
    parts = [f"{name} {entry['answers']} of {entry['of']}" for name, entry in counts.items()]
    headline = counts[evaluation["headline"]]
    without = f"; {evaluation['headline']} has tau {number(headline['mean_accepted_length_without'])} without them"
    return [
        f"warning: answers that repeat themselves, which flatters acceptance: {', '.join(parts)}"
        + without * bool(headline["answers"])
    ]


def quality_table(quality: dict[str, Any]) -> ResultTable:
    rows = [
        {
            "on": kind,
            "tokens": row["tokens"],
            "perplexity before": row["original_perplexity"],
            "after": row["tuned_perplexity"],
            "ratio": row["perplexity_ratio"],
            "same top-1": 100 * row["greedy_match_rate"],
            "KL": row["kl"],
        }
        for kind, row in quality["held_out"].items()
    ]
    return ResultTable.of("The tuned and the original base, on held-out tokens", rows)


def markdown_table(evaluation: dict[str, Any]) -> str:
    parts = [f"{table.title}:\n\n{table.markdown()}" for table in result_tables(evaluation)]
    if (contexts := context_table(evaluation.get("by_context_of", {}))) is not None:
        parts.append(f"{contexts.title}:\n\n{contexts.markdown()}")
    parts.append(f"{escaped(sentence(rule_line(evaluation)))}\n")
    parts += [f"{escaped(sentence(line))}\n" for line in degenerate_lines(evaluation)]
    for lines in (engine_lines(evaluation), failures(evaluation)):
        parts.append("".join(f"- {escaped(line.strip())}\n" for line in lines))
    return "\n".join(filter(None, parts))


def console_table(evaluation: dict[str, Any]) -> RenderableType:
    """Return for the terminal the table per task and, if several methods ran, the table per method; and the load's."""
    shown = [task_table(evaluation), *([method_table(evaluation)] if len(evaluation["overall"]["methods"]) > 1 else [])]
    shown += [load_table(evaluation)] if "load" in evaluation else []
    return Group(*(table.console() for table in shown))


def console_lines(evaluation: dict[str, Any], training_log: list[dict[str, Any]] | None = None) -> list[str]:
    overall = evaluation["overall"]
    speeds = [
        f"{number(speed, '{:.1f}')} ({baseline_name(evaluation, name)})"
        for name, speed in sorted(overall["autoregressive_tokens_per_second"].items())
    ]
    is_complete = "answered_by" in evaluation or "transformers_stock" in overall["autoregressive_tokens_per_second"]
    lines = [
        f"tokens/s: speculative {number(overall['tokens_per_second'], '{:.1f}')}, autoregressive {', '.join(speeds)}"
        + ("" if is_complete else STOCK_LEFT_OUT),
        f"mean accepted length (tau, with the bonus token) {prompts_line(evaluation)}: "
        f"{number(overall['mean_accepted_length'])}; accepted by draft position, given the one before: "
        f"{' '.join(number(value) for value in overall['acceptance_per_depth'])}",
    ]
    lines += [*span_lines(evaluation), *degenerate_lines(evaluation), *forecast_lines(evaluation)]
    held_out = [row for row in training_log or [] if row.get("held_out_accept_1") is not None]
    if held_out:
        depth = sum(key.startswith("held_out_accept_") for key in held_out[-1])
        accuracy = [number(held_out[-1][f"held_out_accept_{k}"]) for k in range(1, depth + 1)]
        shown = accuracy[0] if depth > 1 and len(set(accuracy)) == 1 else " ".join(accuracy)
        lines.append(f"top-1 accuracy by draft position on held-out answers, given the right tokens before: {shown}")
    if outputs := overall.get("identical_outputs"):
        lines.append(f"outputs identical: {identical(overall)}, near-ties: {len(outputs['near_ties'])}")
    lines += [rule_line(evaluation), *engine_lines(evaluation), *load_lines(evaluation), *failures(evaluation)]
    speedups = [speedup_of(overall, name) for name in overall["methods"] if not name.endswith(PLAIN)]
    if known := [speedup for speedup in speedups if speedup is not None]:
        lines += ["nothing is faster than decoding without drafts: see docs/guides/not_faster.md"] * (max(known) <= 1)
    if ignored := evaluation.get("not_applied"):
        lines.append(f"not applied, of the base's generation_config.json: {', '.join(ignored)}")
    lines.append(other_processes_line(overall["hardware"].get("other_processes_cores")))
    resumed, turns = evaluation.get("resumed", (0, 0))
    if resumed:
        lines.append(f"{resumed} of {turns} answers were timed by an earlier run (resume=false times all again)")
    return lines


def span_lines(evaluation: dict[str, Any]) -> list[str]:
    """Return a line about acceptance in thinking, answers and tool calls; [] if the answers have only one of them."""
    spans = evaluation.get("by_span", [])
    parts = [f"{s['span']} {number(s['mean_accepted_length'])} ({s['tokens']:,} tokens)" for s in spans]
    return [f"mean accepted length by part of the answers: {', '.join(parts)}"] if len(parts) > 1 else []


def forecast_lines(evaluation: dict[str, Any]) -> list[str]:
    """Return a line with tau and speedup as forecast from the suite's dev half; [] without a forecast."""
    forecast = evaluation.get("predicted")
    if not forecast:
        return []
    around, tau = forecast.get("interval_95"), evaluation["overall"]["mean_accepted_length"]
    source = f"{forecast['answers']} answers to the suite's dev half" if "answers" in forecast else "the dev half"
    missed = around is not None and tau is not None and not around[0] <= tau <= around[1]
    return [
        f"forecast from {source}: tau {number(forecast['mean_accepted_length'])}"
        + (f" (95 %: {around[0]:.2f} to {around[1]:.2f})" if around else "")
        + f", speedup {number(forecast['speedup'], '{:.2f}x')}"
        + f"; the measured {number(tau)} is outside this interval" * missed
    ]


_MARKUP = re.compile(r"[\\`*\[\]<|~$&]|(?<![^\W_])_|_(?![^\W_])")


def escaped(text: str) -> str:
    """Return Markdown that shows ``text`` as it is, in one line, also in the cell of a table."""
    return _MARKUP.sub(r"\\\g<0>", visible(text))


def code(text: str) -> str:
    """Return ``text`` as inline code of Markdown, or escaped if code could not hold it."""
    return escaped(text) if {"`", "|"} & {*text} else f"`{visible(text)}`"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def number(value: float | None, pattern: str = "{:.2f}") -> str:
    """Return ``value`` as text by ``pattern``, or a dash for None (not measured)."""
    return "–" if value is None else pattern.format(value)


def identical(numbers: dict[str, Any]) -> str:
    """Return how many answers equal those of autoregressive decoding ("79 of 80"); a dash if not compared."""
    outputs = numbers.get("identical_outputs")
    return f"{outputs['same']} of {outputs['of']}" if outputs else "–"


def lossy(evaluation: dict[str, Any], method: str | None = None) -> str | None:
    """Return a warning if the rule of ``method`` (None: the headline method) is lossy, else None."""
    rule = evaluation["rule"]
    if rule["lossless"] or method not in (None, evaluation["headline"]):
        return None
    return f"lossy, TV {rule['total_variation']:.3g}"


def warning(evaluation: dict[str, Any]) -> str | None:
    """Return the warning next to the headline speedup: a lossy rule, or a machine busy with other work; else None."""
    cores = evaluation["overall"]["hardware"].get("other_processes_cores")
    busy = "busy machine" if cores is not None and cores > BUSY_CORES else None
    return ", ".join(filter(None, (lossy(evaluation), busy))) or None


def rule_line(evaluation: dict[str, Any]) -> str:
    rule = evaluation["rule"]
    effect = "lossless"
    if not rule["lossless"]:
        effect = f"lossy: total variation {rule['total_variation']:.2g} on synthetic distributions (drafthead certify)"
    # Settings that change nothing are not named.
    used = {k: v for k, v in evaluation["sampler"].items() if k == "temperature" or v not in (None, 0, 1)}
    sampler = ", ".join(f"{key.replace('_', '-')} {value:g}" for key, value in used.items())
    sampler += ", coupled" if evaluation["sampler"].get("coupled") else ""
    drafted = f"{_drafted(evaluation)}, draft sampling {evaluation['draft_sampling']}"
    return f"rule: {rule['name']}, {effect}; sampler: {sampler}; tree: {drafted}"


def _drafted(evaluation: dict[str, Any]) -> str:
    """Describe the drafts: the tree's setting and size, other drafters' sizes, and a step's mean number of nodes."""
    tree = evaluation["tree"]
    (first, *others), average = tree.get("drafters", [tree]), nodes_per_step(evaluation)
    limit = "up to " if "steps" in tree else ""
    more = [f"up to {part['nodes'] - 1} of {part['drafter']}" for part in others]
    kind = {"head": "static", "cost": "by cost"}.get(tree["spec"], tree["spec"])
    text = ", ".join([kind, " and ".join([f"{limit}{first['nodes']} nodes", *more])])
    varies = average is not None and f"{average:.1f}" != f"{tree['nodes']:.1f}"
    return text + (f" ({average:.1f} per step on average)" if varies else "")


def failures(evaluation: dict[str, Any]) -> list[str]:
    return [f"failed: prompt {f['prompt']} ({f['task']}): {f['message']}" for f in evaluation["failed"]]


def _groups(evaluation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [*evaluation["tasks"].items(), ("overall", evaluation["overall"])]


def _with_remark(speedup: float | None, remark: str | None) -> str:
    return cell_text("speedup", speedup) + (f" ({remark})" if remark else "")
