"""Every draft head on SmolLM2: the same answers to train on, the same training time, one table.

    python benchmarks/heads.py --minutes 20 --json heads.json --markdown heads.md
    python benchmarks/heads.py --heads medusa,kangaroo --minutes 5 --out outputs/heads_short
    python benchmarks/heads.py --only table
    python benchmarks/heads.py --minutes 0.05 --suite builtin --out outputs/tiny_heads debug=tiny     does it run?

A loop over `drafthead train` and `drafthead eval`; three parts, all of them unless --only names some:

  train  the recipe `<head>_smollm2` of every head (`head=<head> phases=cpu` if it has none) on one corpus (--data),
         with cached hidden states. A probe of a few steps measures what a step of each phase takes; the steps are set
         so that all phases together take --minutes, divided by --shares. Corpora, caches, held-out measurements and
         checkpoints are not part of the budget.
  eval   the suite, answered by all heads, prompt lookup and both baselines in one interleaved run. A head that changed
         its base has a run of its own, against autoregressive decoding of that base.
  table  from what both left in --out.

Killed at any point, the same command resumes. Nothing else should run meanwhile: the probes decide the steps.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

from common import composed, entry_point, listed, parser, save_record, trained_steps
from rich.console import Console
from safetensors.torch import load_file

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json, read_json_lines, write_atomic, write_json
from drafthead.eval.metrics.summary import METHOD, speedup_of
from drafthead.eval.report.tables import ResultTable
from drafthead.train.config import PhaseConfig

RECIPES = Path(__file__).parent.parent / "recipes"
HEADS = tuple(sorted(path.stem for path in RECIPES.glob("head/*.yaml")))
PARTS = ("train", "eval", "table")
KINDS = ("text", "answers", "joint")
"""Phases that share a part of the budget: on text, on answers, and those that train the base, too."""
PROBE_STEPS, PROBE_WARM = 8, 3
"""Steps of every phase in a probe, and how many of them do not count."""
LOG_S, SAVE_S, VALIDATIONS = 30.0, 180.0, 4
"""Seconds of training between two console lines and two checkpoints; measurements on held-out answers in a run."""
NEVER = 10**9
LOOKUPS = ("prompt_lookup:3", "hf_prompt_lookup:3", "head+prompt_lookup:8:2")
COLUMNS = {
    "M parameters": "trained_millions",
    "minutes": "training_minutes",
    "M tokens": "trained_millions_of_tokens",
    "top-1": "top1",
    "chain": "chain",
    "largest tree": "largest_tree",
    "tree": "tree_nodes",
    "tau": "mean_accepted_length",
    "speedup": "ratio_to_autoregressive",
    "95 %": "interval_95",
    "draft ms": "draft_ms",
    "identical": "identical",
}
DEFINITIONS = (
    "Minutes and tokens: of training. Top-1: share of held-out answers' tokens that the first draft hits. Chain and "
    "largest tree: mean accepted length on held-out answers, simulated. Tree: nodes of the tree chosen for this "
    "machine, which is the one measured. Tau: mean accepted length, with the bonus token. Speedup: over the fastest "
    "autoregressive decoder of the same interleaved run; the interval is a bootstrap over prompts."
)


def parse_arguments(given: list[str] | None) -> Namespace:
    """The command line; lists are split."""
    options = parser(__doc__)
    add = options.add_argument
    add("--minutes", type=float, default=20.0, metavar="N", help="training time of a head (default 20)")
    add("--heads", default=",".join(HEADS), metavar="LIST", help=f"comma list; default {','.join(HEADS)}")
    add("--only", default=",".join(PARTS), metavar="PARTS", help=f"comma list of {', '.join(PARTS)}")
    add("--out", type=Path, default=Path("outputs/heads"), metavar="DIR", help="default outputs/heads")
    add("--data", default="smollm2_large", metavar="NAME", help="recipes/data/NAME.yaml for all, but with debug=...")
    add("--shares", default="1:6:3", metavar="T:A:B", help="of the time: text, answers, base; default 1:6:3")
    add("--suite", default="spec_bench_like", metavar="NAME", help="prompts, as in `drafthead eval`")
    add("--limit", type=int, default=36, metavar="N", help="of them so many, over all tasks")
    add("--max-new-tokens", type=int, default=96, metavar="N", help="of an answer")
    add("--temperature", type=float, default=0.0, metavar="T", help="of the part eval; default 0, greedy")
    add("--markdown", type=Path, metavar="FILE", help="write the table here")
    add("overrides", nargs="*", metavar="key=value", help="settings of all recipes, as for `drafthead train`")
    arguments = options.parse_intermixed_args(given)
    arguments.heads = listed("heads", arguments.heads, HEADS)
    arguments.only = listed("only", arguments.only, PARTS)
    weights = arguments.shares.split(":")
    if len(weights) != len(KINDS) or not all(weight.isdigit() and int(weight) for weight in weights):
        raise UserError(f"--shares takes three whole numbers above 0 such as 1:6:3, got {arguments.shares}")
    arguments.shares = [int(weight) for weight in weights]
    if not 0 < arguments.minutes < NEVER:
        raise UserError(f"--minutes must be more than 0, got {arguments.minutes:g}")
    return arguments


COMMAND = [sys.executable, "-m", "drafthead.cli"]


def settings_of(name: str, arguments: Namespace) -> list[str]:
    """What `drafthead train` gets, but for the steps."""
    recipe = f"{name}_smollm2"
    found = [f"recipe={recipe}"] if (RECIPES / "recipe" / f"{recipe}.yaml").exists() else [f"head={name}", "phases=cpu"]
    found += [f"out={arguments.out / name}", "eval.limit=2", "eval.max_new_tokens=24"]
    tiny = any(override.startswith("debug=") for override in arguments.overrides)
    found += [f"data.folder={arguments.out / 'corpora'}" if tiny else f"data={arguments.data}", *arguments.overrides]
    return [*found, *(f"phases.{phase}.hidden_states=cached" for phase in composed(found).phases)]


def choose_steps(
    phases: Mapping[str, PhaseConfig], step_s: Mapping[str, float], seconds: float, shares: Sequence[int]
) -> dict[str, int]:
    """Steps per phase that take ``seconds`` in all.

    Phases of one kind divide its share as their steps in the recipe; a kind that no phase has takes no share.
    """
    kinds = {name: "joint" if phase.train_base else phase.corpus for name, phase in phases.items()}
    steps_of = {kind: sum(phases[name].steps for name in phases if kinds[name] == kind) for kind in KINDS}
    weights = {kind: share for kind, share in zip(KINDS, shares, strict=True) if steps_of[kind]}
    found = {}
    for name, phase in phases.items():
        part = weights[kinds[name]] / sum(weights.values()) * phase.steps / steps_of[kinds[name]]
        found[name] = max(1, round(part * seconds / step_s[name]))
    return found


def probe(settings: Sequence[str], phases: Sequence[str]) -> dict[str, float]:
    """Seconds of a step of every phase: medians over a short run, which is stopped when it has all of them."""
    with TemporaryDirectory(prefix="drafthead-probe-") as folder:
        rare = ["log_every=1", f"validate_every={NEVER}", f"checkpoint.every_steps={NEVER}", f"out={folder}"]
        steps = [f"phases.{name}.steps={PROBE_STEPS}" for name in phases]
        with subprocess.Popen([*COMMAND, "train", *settings, *steps, *rare]) as process:
            times: dict[str, list[float]] = {}
            while process.poll() is None and min(len(times.get(n, [])) for n in phases) < PROBE_STEPS:
                sleep(0.2)
                times = _step_times(Path(folder))
            process.terminate()
        times = _step_times(Path(folder))
    if any(len(times.get(name, [])) < PROBE_STEPS for name in phases):
        raise UserError("the probe failed; what it printed says why")
    return {name: median(times[name][PROBE_WARM:]) for name in phases}


def _step_times(run: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in read_json_lines(run / "metrics.jsonl"):
        if "step_ms" in row:
            found.setdefault(row["phase"], []).append(row["step_ms"] / 1e3)
    return found


def train_head(name: str, arguments: Namespace) -> None:
    """Train one head for ``--minutes``; a finished one is left as it is."""
    folder, settings = arguments.out / name, settings_of(name, arguments)
    wanted = {"minutes": arguments.minutes, "shares": arguments.shares, "overrides": arguments.overrides}
    phases = composed(settings).phases
    if (folder / "budget.json").exists():
        budget = read_json(folder / "budget.json")
        if {key: budget[key] for key in wanted} != wanted:
            raise UserError(f"{folder} was begun with other settings; choose another --out, or remove that folder")
    else:
        step_s = probe(settings, list(phases))
        steps = choose_steps(phases, step_s, 60 * arguments.minutes, arguments.shares)
        budget = {**wanted, "step_s": step_s, "steps": steps}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "budget.json", budget)
    if (folder / "eval.json").exists():
        return
    steps = budget["steps"]
    typical = sum(steps[n] * budget["step_s"][n] for n in steps) / sum(steps.values())
    schedule = [f"phases.{n}.steps={count}" for n, count in steps.items()]
    # A warm-up over most of a phase would be another recipe.
    schedule += [f"phases.{n}.optim.warmup_steps={min(p.optim.warmup_steps, steps[n] // 4)}" for n, p in phases.items()]
    every = {"log_every": LOG_S / typical, "checkpoint.every_steps": SAVE_S / typical}
    every["validate_every"] = sum(steps.values()) / VALIDATIONS
    schedule += [f"{key}={max(1, round(value))}" for key, value in every.items()]
    if subprocess.run([*COMMAND, "train", *settings, *schedule], check=False).returncode:
        raise UserError(f"training {name} failed; what it printed says why")


def groups_of(arguments: Namespace) -> dict[str, list[str]]:
    """Heads by the run that measures them: those of the original base together, each trained base alone.

    The head with the highest expected speedup comes first: prompt lookup is combined with it.
    """
    results = {name: read_json(arguments.out / name / "eval.json")["calibration"] for name in arguments.heads}
    groups: dict[str, list[str]] = {}
    for name in sorted(results, key=lambda name: results[name]["expected_speedup"], reverse=True):
        alone = composed(settings_of(name, arguments)).trains_base
        groups.setdefault(name if alone else "shared", []).append(name)
    return groups


def measure(names: Sequence[str], folder: Path, arguments: Namespace) -> None:
    """All of one base in an interleaved `drafthead eval`, which resumes by itself."""
    first, *others = (arguments.out / name / "head" for name in names)
    baselines = [f"head:{path}" for path in others] + list(LOOKUPS if folder.name.startswith("eval-shared") else ())
    settings = [f"head={first}", f"baselines=[{','.join(baselines)}]", f"suite={arguments.suite}"]
    settings += [f"limit={arguments.limit}", f"max_new_tokens={arguments.max_new_tokens}", f"out={folder}"]
    settings += ["split=test", f"sampler.temperature={arguments.temperature:g}"]
    if subprocess.run([*COMMAND, "eval", *settings], check=False).returncode:
        raise UserError(f"measuring {', '.join(names)} failed; what it printed says why")


def training_results(folder: Path) -> dict[str, Any]:
    """What a run folder says of training and of held-out answers."""
    rows, seconds, tokens = read_json_lines(folder / "metrics.jsonl"), 0.0, 0.0
    for row, steps in trained_steps(rows):
        spent = row["step_ms"] / 1e3 * steps
        seconds, tokens = seconds + spent, tokens + row["tokens_per_second"] * spent
    held_out = next(row for row in reversed(rows) if "held_out_mean_accepted_length" in row)
    evaluation = read_json(folder / "eval.json")
    weights = (weight for path in (folder / "head").rglob("*.safetensors") for weight in load_file(path).values())
    parameters = sum(weight.numel() for weight in weights if weight.is_floating_point())
    return {
        "steps": read_json(folder / "budget.json")["steps"],
        "trained_millions": parameters / 1e6,
        "training_minutes": seconds / 60,
        "trained_millions_of_tokens": tokens / 1e6,
        "top1": held_out["held_out_accept_1"],
        "chain": held_out["held_out_mean_accepted_length"],
        "largest_tree": evaluation["calibration"]["expected_tokens_largest"],
        "tree_nodes": evaluation["tree"]["nodes"],
    }


def suite_results(folder: Path, names: Sequence[str], out: Path) -> dict[str, dict[str, Any]]:
    """What an evaluation says of its heads and baselines, by name."""
    overall = read_json(folder / "eval.json")["overall"]
    called = {METHOD: names[0], **{f"head:{out / name / 'head'}": name for name in names}}
    newest = max(folder.glob("eval-log-*.jsonl"), key=lambda path: path.stat().st_mtime)
    draft_s: dict[str, list[float]] = {}
    for row in read_json_lines(newest):
        for step in row.get("result", {}).get("steps", []):
            draft_s.setdefault(row["decoder"], []).append(step["draft_s"] or 0.0)
    found = {}
    for method, numbers in overall["methods"].items():
        name, same = called.get(method, method.replace("head+", f"{names[0]} + ")), numbers.get("identical_outputs")
        times = draft_s.get(method)
        found[name] = {
            "mean_accepted_length": numbers["mean_accepted_length"],
            "ratio_to_autoregressive": speedup_of(overall, method),
            "interval_95": numbers["speedup"]["interval_95"],
            "tokens_per_second": numbers["tokens_per_second"],
            "draft_ms": 1e3 * sum(times) / len(times) if times else None,
            "identical": f"{same['same']} of {same['of']}" if same else None,
        }
    return found


def main(given: list[str] | None = None) -> int:
    """Entry point; 1 when a head could not be trained."""
    arguments, failed = parse_arguments(given), []
    for name in arguments.heads if "train" in arguments.only else ():
        try:
            train_head(name, arguments)
        except UserError as error:  # the others go on
            failed.append(name)
            print(f"left out: {name}: {error}", file=sys.stderr)
    arguments.heads = [name for name in arguments.heads if (arguments.out / name / "eval.json").exists()]
    if not arguments.heads:
        raise UserError(f"{arguments.out} has no trained head; run the part train first")
    groups = groups_of(arguments)
    results: dict[str, Any] = {"heads": {}, "baselines": {}}
    for group, names in groups.items():
        sampled = f"-T{arguments.temperature:g}" if arguments.temperature else ""
        folder = arguments.out / f"eval-{group}{sampled}"
        if "eval" in arguments.only:
            measure(names, folder, arguments)
        if not (folder / "eval.json").exists():
            raise UserError(f"{', '.join(names)} not measured yet in {folder}; run the part eval first")
        measured = suite_results(folder, names, arguments.out)
        results["heads"] |= {name: training_results(arguments.out / name) | measured.pop(name) for name in names}
        results["baselines"] |= measured
    if "table" in arguments.only:
        show(results, arguments)
    return 1 if failed else 0


def cell(value: Any) -> str:
    """A value of the table; an interval without its ends is none."""
    if isinstance(value, list | tuple):
        value = None if None in value else "–".join(f"{end:.2f}" for end in value)
    return f"{value:.3g}" if isinstance(value, float) else "–" if value is None else str(value)


def show(results: dict[str, Any], arguments: Namespace) -> None:
    """The table on the console and in Markdown, and the record."""
    found = {**results["heads"], **results["baselines"]}
    rows = [(name, *(cell(numbers.get(key)) for key in COLUMNS.values())) for name, numbers in found.items()]
    table = ResultTable("", ("head", *COLUMNS), rows, has_total=False)
    console = Console()
    console.width = max(console.width, 160)  # a pipe says that it has 80 columns
    console.print(table.console(), DEFINITIONS)
    if arguments.markdown:
        write_atomic(arguments.markdown, f"{table.markdown()}\n{DEFINITIONS}\n")
    save_record(arguments, "heads", results)


if __name__ == "__main__":
    entry_point(main)
