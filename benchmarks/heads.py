"""Compare draft heads on SmolLM2 that were trained on the same answers for the same time.

    python benchmarks/heads.py --minutes 20
    python benchmarks/heads.py --heads medusa,my_head --minutes 5 --out outputs/two_heads
    python benchmarks/heads.py --minutes 0.05 --suite builtin --out outputs/tiny_heads debug=tiny     a quick test

1. Every head is trained with its recipe `<head>_smollm2` (or `head=<head> phases=cpu`) on the corpus of --data, with
   cached hidden states. A probe of a few steps per phase measures the step times. The recipe's steps are then scaled by
   one factor, so that training takes --minutes. Corpora, caches, validation and checkpoints are not counted.
2. `drafthead eval` answers the suite with all heads, prompt lookup and autoregressive decoding, interleaved. It prints
   the table. A head that changed its base is evaluated in a separate run.

The same command resumes after an interruption. The machine must be otherwise idle: the probes decide the steps.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import sleep

from common import entry_point, listed, parser, save_record

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json, read_json_lines, write_json
from drafthead.models.heads.parts.loading import head_types
from drafthead.train.config import composed

RECIPES = Path(__file__).parent.parent / "recipes"
COMMAND = [sys.executable, "-m", "drafthead.cli"]
PROBE_STEPS, PROBE_WARM = 8, 3
"""Steps per phase in a probe, and the number of first ones that are not counted."""
NEVER = 10**9


def known_heads() -> list[str]:
    """Return the names of all heads and variants: modules of ``models/heads`` and files of ``recipes/head``."""
    return sorted({*head_types(), *(path.stem for path in RECIPES.glob("head/*.yaml"))})


def settings_of(name: str, arguments: Namespace) -> list[str]:
    """Return the settings for `drafthead train`, except for the numbers of steps."""
    recipe = f"{name}_smollm2"
    has_recipe = (RECIPES / "recipe" / f"{recipe}.yaml").exists()
    settings = [f"recipe={recipe}"] if has_recipe else [f"head={name}", "phases=cpu"]
    tiny = any(override.startswith("debug=") for override in arguments.overrides)
    settings += [f"data.folder={arguments.out / 'corpora'}" if tiny else f"data={arguments.data}"]
    settings += [f"out={arguments.out / name}", "eval.limit=2", "eval.max_new_tokens=24", *arguments.overrides]
    return [*settings, *(f"phases.{phase}.store_hidden_states=true" for phase in composed(settings).phases)]


def probe(settings: Sequence[str], phases: Sequence[str]) -> dict[str, float]:
    """Return the median seconds per step of every phase from a short run, which is stopped after the last probe."""
    with TemporaryDirectory(prefix="drafthead-probe-") as folder:
        rare = ["log_every=1", f"validate_every={NEVER}", f"checkpoint.every_steps={NEVER}", f"out={folder}"]
        steps = [f"phases.{name}.steps={PROBE_STEPS}" for name in phases]
        times: dict[str, list[float]] = dict.fromkeys(phases, [])
        with subprocess.Popen([*COMMAND, "train", *settings, *steps, *rare]) as process:
            while min(map(len, times.values())) < PROBE_STEPS:
                ended = process.poll() is not None  # asked before the file is read, or the last lines could be missed
                rows = [row for row in read_json_lines(Path(folder) / "metrics.jsonl") if "step_ms" in row]
                times = {name: [row["step_ms"] / 1e3 for row in rows if row["phase"] == name] for name in phases}
                if ended and min(map(len, times.values())) < PROBE_STEPS:
                    raise UserError("the probe failed; its output above says why")
                sleep(0.2)
            process.terminate()
    return {name: median(seconds[PROBE_WARM:]) for name, seconds in times.items()}


def train_head(name: str, arguments: Namespace) -> None:
    """Train one head for --minutes; skip a finished one."""
    folder, settings = arguments.out / name, settings_of(name, arguments)
    phases = composed(settings).phases
    budget = {"minutes": arguments.minutes, "overrides": arguments.overrides}
    path = folder / "budget.json"
    if not path.exists():
        step_s = probe(settings, list(phases))
        factor = 60 * arguments.minutes / sum(phase.steps * step_s[n] for n, phase in phases.items())
        steps = {n: max(1, round(factor * phase.steps)) for n, phase in phases.items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {**budget, "step_s": step_s, "steps": steps})
    saved = read_json(path)
    if any(saved[key] != value for key, value in budget.items()):
        raise UserError(f"{folder} was begun with other settings; choose another --out, or remove that folder")
    if (folder / "eval.json").exists():
        return
    steps, total = saved["steps"], sum(saved["steps"].values())
    schedule = [f"phases.{n}.steps={count}" for n, count in steps.items()]
    # A short phase must not consist of warm-up steps only.
    schedule += [f"phases.{n}.optim.warmup_steps={min(p.optim.warmup_steps, steps[n] // 4)}" for n, p in phases.items()]
    schedule += [f"validate_every={max(1, total // 4)}", f"log_every={max(1, total // 40)}"]
    if subprocess.run([*COMMAND, "train", *settings, *schedule], check=False).returncode:
        raise UserError(f"training {name} failed; its output above says why")


def evaluate(names: Sequence[str], folder: Path, arguments: Namespace) -> None:
    """Answer the suite with the heads of one base in an interleaved run."""
    heads = [arguments.out / name / "head" for name in names]
    methods = [*(f"head:{head}" for head in heads[1:]), "prompt_lookup:3", "hf_prompt_lookup:3"]
    settings = [f"head={heads[0]}", f"baselines=[{','.join(methods)}]", f"out={folder}", f"suite={arguments.suite}"]
    settings += [f"limit={arguments.limit}", f"max_new_tokens={arguments.max_new_tokens}"]
    settings += [f"sampler.temperature={arguments.temperature:g}", "split=test"]
    if subprocess.run([*COMMAND, "eval", *settings], check=False).returncode:
        raise UserError(f"evaluating {', '.join(names)} failed; its output above says why")


def main(given: list[str] | None = None) -> int:
    """Train and evaluate; return 1 if a head could not be trained."""
    options = parser(__doc__)
    add = options.add_argument
    add("--minutes", type=float, default=20.0, metavar="N", help="training time per head (default 20)")
    add("--heads", default=",".join(known_heads()), metavar="LIST", help="comma-separated; default: all heads")
    add("--out", type=Path, default=Path("outputs/heads"), metavar="DIR", help="default outputs/heads")
    add("--data", default="smollm2_large", metavar="NAME", help="recipes/data/NAME.yaml (ignored with debug=...)")
    add("--suite", default="spec_bench_like", metavar="NAME", help="prompts, as in `drafthead eval`")
    add("--limit", type=int, default=36, metavar="N", help="number of prompts over all tasks")
    add("--max-new-tokens", type=int, default=96, metavar="N", help="answer length")
    add("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    add("overrides", nargs="*", metavar="key=value", help="settings of all runs, as for `drafthead train`")
    arguments = options.parse_intermixed_args(given)
    if not 0 < arguments.minutes < NEVER:
        raise UserError(f"--minutes must be more than 0, got {arguments.minutes:g}")
    groups: dict[str, list[str]] = {}
    failed = {}
    for name in listed("heads", arguments.heads, known_heads()):
        try:
            train_head(name, arguments)
        except UserError as error:
            failed[name] = str(error)
            continue
        alone = composed(settings_of(name, arguments)).trains_base
        groups.setdefault(name if alone else "shared", []).append(name)
    results = {}
    for group, names in groups.items():
        folder = arguments.out / f"eval-{group}-T{arguments.temperature:g}"
        evaluate(names, folder, arguments)
        results[group] = {"heads": names, **read_json(folder / "eval.json")["overall"]}
    for name, message in failed.items():
        print(f"left out: {name}: {message}", file=sys.stderr)
    save_record(arguments, "heads", {"groups": results, "failed": failed})
    return 1 if failed else 0


if __name__ == "__main__":
    entry_point(main)
