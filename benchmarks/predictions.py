"""Compare predicted with measured acceptance and speedup, for several heads and suites.

    python benchmarks/predictions.py --heads outputs/medusa_smollm2/head,outputs/hydra_smollm2/head --json FILE

Every pair is a run of `drafthead eval` on the test half of the suite. It predicts from answers to the dev half. The
record (--json) is written after every run, and the same command continues after an interruption.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from common import at_least, entry_point, new_record, parser, print_table

from drafthead.errors import UserError
from drafthead.eval.config import METHOD
from drafthead.eval.metrics.summary import speedup_of
from drafthead.files.local import read_json, write_json


def row_of(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return predicted and measured numbers of an eval.json, and the other processes' use of cores during its run."""
    overall = evaluation["overall"]
    numbers = overall["methods"][METHOD]
    return {
        "predicted": evaluation["predicted"],
        "measured": {"mean_accepted_length": numbers["mean_accepted_length"], "speedup": speedup_of(overall, METHOD)},
        "interval_95": numbers["speedup"]["interval_95"],
        "identical_outputs": {key: numbers["identical_outputs"][key] for key in ("same", "of")},
        "other_processes_cores": overall["hardware"]["other_processes_cores"],
    }


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row: predicted, measured and the error of tau and speedup."""
    cells = {"suite": row["suite"], "head": row["head"]}
    for key, name, unit in (("mean_accepted_length", "tau", ""), ("speedup", "speedup", "x")):
        predicted, measured = row["predicted"][key], row["measured"][key]
        cells[f"{name} predicted"], cells[f"{name} measured"] = f"{predicted:.2f}{unit}", f"{measured:.2f}{unit}"
        cells[f"{name} error"] = f"{predicted / measured - 1:+.0%}"
    return cells


def main(given: list[str] | None = None) -> None:
    """Run every evaluation that the record lacks."""
    options = parser(__doc__)
    options.set_defaults(json=Path("predictions.json"))
    add = options.add_argument
    add("--heads", required=True, metavar="LIST", help="comma-separated folders of heads")
    add("--suites", default="spec_bench_like,mt_bench,code", metavar="LIST", help="suites, as in `drafthead eval`")
    add("--drafter", default="head+prompt_lookup:8:2", metavar="DRAFTER", help="as in `drafthead eval`")
    add("--limit", type=int, default=24, metavar="N", help="prompts of each suite; default 24")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="length of answers; default 48")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "limit", "max_new_tokens")
    settings = {"drafter": arguments.drafter, "limit": arguments.limit, "max_new_tokens": arguments.max_new_tokens}
    record = read_json(arguments.json) if arguments.json.exists() else new_record("predictions") | settings
    if changed := [key for key, value in settings.items() if record[key] != value]:
        raise UserError(f"{arguments.json} was begun with another {', '.join(changed)}; choose another --json")
    rows = record.setdefault("rows", [])
    for suite in arguments.suites.split(","):
        for folder in map(Path, arguments.heads.split(",")):
            key = {"suite": suite, "head": folder.parent.name if folder.name == "head" else folder.name}
            if any(key.items() <= row.items() for row in rows):
                continue
            out = folder.parent / f"predicted-{suite}"
            command = [f"head={folder}", f"suite={suite}", "split=test", "stock_baseline=false", f"out={out}"]
            command += [f"{name}={value}" for name, value in settings.items()]
            if subprocess.run([sys.executable, "-m", "drafthead", "eval", *command], check=False).returncode:
                raise UserError(f"evaluating {folder} on {suite} failed; its output above says why")
            rows.append(key | row_of(read_json(out / "eval.json")))
            write_json(arguments.json, record)
    print_table("predicted and measured", [shown(row) for row in rows])


if __name__ == "__main__":
    entry_point(main)
