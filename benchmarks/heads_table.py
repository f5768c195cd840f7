"""Measuring trained heads side by side, and the table of what training and measuring left on disk."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from heads_training import BUDGET, Entry
from rich.table import Table
from safetensors import safe_open

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json, read_json_lines, write_json
from drafthead.eval.config import EvalConfig
from drafthead.eval.evaluate import evaluate
from drafthead.eval.metrics.summary import METHOD, fastest_baseline, speedup_of
from drafthead.eval.report.tables import identical, interval, number
from drafthead.models.base.config import ADAPTER
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.heads.common.loading import load_base_and_head

LOOKUPS = ("prompt_lookup:3", "hf_prompt_lookup:3")
"""Peers of the heads that share a base."""
WITH_LEAD = "head+prompt_lookup:4"
"""One more: the head that expects the highest speedup, in one tree with a look-up."""
PLAIN = {"transformers": "transformers generate", "drafthead": "our loop"}
SHARED = "shared"
"""The run of all heads whose base is the untouched one."""
MEMBERS = "members.json"
"""In a run's folder: its heads, what they are called in ``eval.json``, and what they are made of."""

TRAINING = ("head", "M parameters", "positions", "minutes", "M tokens", "top-1", "chain", "64 nodes", "tree")
MEASURED = ("accepted", "speedup", "95 %", "draft ms", "identical")
BREAKS = {"M parameters": "M para-\nmeters", "M tokens": "M to-\nkens", "64 nodes": "64\nnodes"} | {
    "positions": "posi-\ntions",
    "minutes": "mi-\nnutes",
}
DEFINITIONS = (
    "Parameters: trained ones, millions. Positions: tokens drafted at most on a path. Minutes and tokens: of training. "
    "Top-1: share of the held-out answers' tokens that the first draft hits. Chain and 64 nodes: tokens a step on "
    "held-out answers by replay, with a chain over all positions and with the best tree of at most 64 nodes (searched "
    "on the same answers). Tree: nodes, root included, of the tree chosen for this machine, which is the one measured. "
    "Accepted: tokens a verification, the base's own included. Speedup: over the faster plain decoding in the same "
    "interleaved run; the interval is a bootstrap over prompts. Draft: per step. Identical: answers equal to plain "
    "decoding's."
)
TUNED = (
    "{name}: base tuned along, so measured in a run of its own against plain decoding of that base; the quality gate "
    "{gate}. Its held-out answers are the untouched base's."
)

Results = dict[str, Any]


# Measuring -----------------------------------------------------------------------------------------------------


def groups_of(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The runs that ``entries`` need, by name: one for all on the untouched base, one for each tuned base."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.name if entry.run.trains_base else SHARED, []).append(entry)
    return groups


def lead_first(members: Sequence[Entry]) -> list[Entry]:
    """The head with the highest expected speedup before the others: the one that is merged with a look-up."""

    def expected(entry: Entry) -> float:
        speedup: float = read_json(entry.folder / "calibration.json")["calibration"]["expected_speedup"]
        return speedup

    lead = max(members, key=expected)
    return [lead, *(entry for entry in members if entry is not lead)]


def measure_heads(entries: Sequence[Entry], config: EvalConfig, out: Path, display: Display) -> None:
    """Answer the suite with all heads, interleaved; ``out/eval-GROUP`` holds ``eval.json`` and ``members.json``.

    What an earlier call measured of the same heads is kept.
    """
    for group, members in groups_of(entries).items():
        folder = out / f"eval-{group}"
        with display.stage(f"{', '.join(entry.name for entry in members)} on {config.suite}"):
            _measure_group(members, config, folder, display)


def _measure_group(members: Sequence[Entry], config: EvalConfig, folder: Path, display: Display) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    members = lead_first(members)
    first, *others = (entry.folder / "head" for entry in members)
    digests = {entry.name: _digest(entry.folder / "head") for entry in members}
    known = read_json(folder / MEMBERS) if (folder / MEMBERS).exists() else {}
    if any(known.get(name, {}).get("digest", digest) != digest for name, digest in digests.items()):
        for path in folder.glob("eval-log-*.jsonl"):  # so that the newest one is of these heads
            path.unlink()
    methods = [METHOD, *(f"head:{path}" for path in others)]
    named = {name: {"method": method, "digest": digests[name]} for name, method in zip(digests, methods, strict=True)}
    write_json(folder / MEMBERS, known | named)
    base, head = load_base_and_head(first)
    sizes = [_size(head, first), *(_size(DraftHead.from_pretrained(path, base), path) for path in others)]
    lookups = [] if members[0].run.trains_base else [*LOOKUPS, WITH_LEAD]
    config = EvalConfig(**vars(config) | {"against": [*methods[1:], *lookups]})
    evaluate(base, head, config, folder, display.progress, draft_config=config.draft_config(head))
    newest = max(folder.glob("eval-log-*.jsonl"), key=lambda path: path.stat().st_mtime)
    draft_ms = _draft_ms(read_json_lines(newest))
    found = {
        name: member | size | {"draft_ms": draft_ms.get(member["method"])}
        for (name, member), size in zip(named.items(), sizes, strict=True)
    }
    write_json(folder / MEMBERS, found)


def _digest(head: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*head.rglob("*.safetensors"), *head.glob("tree.json")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _size(head: DraftHead, folder: Path) -> dict[str, int]:
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    for path in (folder / ADAPTER).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            trained += sum(file.get_tensor(name).numel() for name in file.keys())
    return {"trained_parameters": trained, "draft_positions": head.depth}


def _draft_ms(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of drafting a step, by method; of several answers to one prompt the last counts."""
    last = {(row["key"], row["decoder"]): row["result"]["steps"] for row in rows if "result" in row}
    steps: dict[str, list[float]] = {}
    for (_, method), answer in last.items():
        steps.setdefault(method, []).extend(step["draft_s"] or 0.0 for step in answer)
    return {method: 1e3 * sum(times) / len(times) for method, times in steps.items() if times}


# Results -------------------------------------------------------------------------------------------------------


def find_results(entries: Sequence[Entry], out: Path) -> Results:
    """What training and measuring left on disk, for the tables and for compare.py.

    Returns:
        "heads": per head what :func:`training_results` has, its parameters, and "suite"; "plain" and "peers": per
        group of heads (those of one base) the plain decodings and the lookups.

    Raises:
        UserError: a head was not measured yet.
    """
    results: Results = {"heads": {}, "plain": {}, "peers": {}}
    for group, members in groups_of(entries).items():
        folder = out / f"eval-{group}"
        known = read_json(folder / MEMBERS) if (folder / MEMBERS).exists() else {}
        missing = [entry.name for entry in members if "draft_ms" not in known.get(entry.name, {})]
        if missing:
            raise UserError(f"{', '.join(missing)} not measured yet in {folder}; run the part eval first")
        overall = read_json(folder / "eval.json")["overall"]
        for entry in members:
            member = known[entry.name]
            sizes = {key: member[key] for key in ("trained_parameters", "draft_positions")}
            suite = _suite_results(overall, member["method"]) | {"draft_ms": member["draft_ms"]}
            results["heads"][entry.name] = sizes | training_results(entry.folder) | {"suite": suite}
        _, fastest = fastest_baseline(overall)
        results["plain"][group] = {
            name: {"tokens_per_second": speed, "ratio_to_fastest_plain": speed / fastest if speed and fastest else None}
            for name, speed in overall["baseline_tokens_per_second"].items()
        }
        lead = next(name for name, member in known.items() if member["method"] == METHOD)
        results["peers"][group] = {
            name.replace("head+", f"{lead} + "): _suite_results(overall, name)
            for name in (*LOOKUPS, WITH_LEAD)
            if name in overall["methods"]
        }
    order = [entry.name for entry in entries]
    results["heads"] = {name: results["heads"][name] for name in order}
    return results


def training_results(folder: Path) -> Results:
    """What a run folder says: minutes and tokens of its training steps, held-out accuracy, tree, budget, gate.

    Raises:
        UserError: a file of the run is missing or broken.
    """
    rows = read_json_lines(folder / "metrics.jsonl")
    seconds, tokens, done = 0.0, 0.0, 0
    for row in rows:
        if "step_ms" in row:  # a mean over the steps since the row before
            spent = row["step_ms"] / 1e3 * (row["total_step"] - done)
            seconds, tokens, done = seconds + spent, tokens + row["tokens_per_second"] * spent, row["total_step"]
    held_out = next((row for row in reversed(rows) if "held_out_tokens_a_step" in row), None)
    if held_out is None:
        raise UserError(f"{folder}/metrics.jsonl has no measurement on held-out answers; train the head again")
    calibration = read_json(folder / "calibration.json")["calibration"]
    found: Results = {
        "training_minutes": seconds / 60,
        "trained_tokens": round(tokens),
        "held_out": {
            "top1": held_out["held_out_accept_1"],
            "chain": {"mean_accepted_tokens": held_out["held_out_tokens_a_step"]},
            "largest_tree": {"mean_accepted_tokens": calibration["expected_tokens_largest"]},
        },
        "tree_nodes": calibration["nodes"],
    }
    if (folder / BUDGET).exists():
        budget = read_json(folder / BUDGET)
        found["budget"] = {"minutes": budget["settings"]["minutes"], "steps": budget["steps"]}
    if (folder / "quality.json").exists():
        found["gate_passed"] = read_json(folder / "quality.json")["passed"]
    return found


def _suite_results(overall: Mapping[str, Any], method: str) -> Results:
    numbers = overall["methods"][method]
    outputs = numbers.get("identical_outputs")
    return {
        "mean_accepted_tokens": numbers["mean_accepted_tokens"],
        "ratio_to_fastest_plain": speedup_of(dict(overall), method),
        "interval_95": numbers["speedup"]["interval_95"],
        "tokens_per_second": numbers["tokens_per_second"],
        "same": outputs["same"] if outputs else None,
        "answers": outputs["of"] if outputs else None,
    }


# Tables --------------------------------------------------------------------------------------------------------


def training_cells(name: str, head: Results) -> tuple[str, ...]:
    """``TRAINING`` of a head."""
    held_out = head["held_out"]
    return (
        name,
        f"{head['trained_parameters'] / 1e6:.2f}",
        str(head["draft_positions"]),
        f"{head['training_minutes']:.1f}",
        f"{head['trained_tokens'] / 1e6:.2f}",
        number(held_out["top1"], "{:.3f}"),
        number(held_out["chain"]["mean_accepted_tokens"]),
        number(held_out["largest_tree"]["mean_accepted_tokens"]),
        str(head["tree_nodes"]),
    )


def measured_cells(suite: Results) -> tuple[str, ...]:
    """``MEASURED`` of a head or a peer."""
    same = None if suite["same"] is None else {"same": suite["same"], "of": suite["answers"]}
    return (
        number(suite["mean_accepted_tokens"]),
        number(suite["ratio_to_fastest_plain"], "{:.2f}x"),
        interval({"speedup": suite}),
        number(suite.get("draft_ms"), "{:.1f}"),
        identical({"identical_outputs": same}),
    )


def other_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Name and ``MEASURED`` of the peers and of plain decoding, per base."""
    for group, plain in results["plain"].items():
        of = "" if group == SHARED else f", base of {group}"
        for name, suite in results["peers"][group].items():
            yield (name + of, *measured_cells(suite))
        for name, speed in plain.items():
            yield (
                f"plain, {PLAIN.get(name, name)}{of}",
                "1.00",
                number(speed["ratio_to_fastest_plain"], "{:.2f}x"),
                "–",
                "–",
                "–",
            )


def tuned_lines(results: Results) -> list[str]:
    """A line for each head whose base was tuned along."""
    found = []
    for name, head in results["heads"].items():
        if "gate_passed" in head:
            found.append(TUNED.format(name=name, gate="passed" if head["gate_passed"] else "failed"))
    return found


def console_tables(results: Results) -> list[Table]:
    """Training and held-out answers, then the suite: each for a terminal of 80 columns."""
    training, measured = Table(title="training, and held-out answers by replay"), Table(title="the suite")
    for table, columns in ((training, TRAINING), (measured, ("method", *MEASURED))):
        for place, column in enumerate(columns):
            # Two lines for long headings, so that the names of the heads fit, too.
            two_lines = BREAKS.get(column, column)
            table.add_column(two_lines, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for name, head in results["heads"].items():
        training.add_row(*training_cells(name, head))
        measured.add_row(name, *measured_cells(head["suite"]))
    measured.add_section()
    for cells in other_rows(results):
        measured.add_row(*cells)
    return [training, measured]


def markdown(results: Results) -> str:
    """One table of everything, and what its columns mean."""
    columns = (*TRAINING, *MEASURED)
    lines = [_line(columns), "|---" + "|---:" * (len(columns) - 1) + "|"]
    for name, head in results["heads"].items():
        lines.append(_line((*training_cells(name, head), *measured_cells(head["suite"]))))
    for name, *cells in other_rows(results):
        lines.append(_line((name, *["–"] * (len(TRAINING) - 1), *cells)))
    return "\n".join([*lines, "", *(f"{line}\n" for line in (DEFINITIONS, *tuned_lines(results)))])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
