"""One fair table of draft heads: the same answers, the same training time on one core, several seeds, one machine.

    python benchmarks/heads.py                                          everything
    python benchmarks/heads.py --stage time                             only the timing of trained heads (8 minutes)
    python benchmarks/heads.py --stage table                            only print, draw, and write the pages
    python benchmarks/heads.py --heads medusa,my_head --minutes 5 --seeds 0 --out outputs/two --json two.json
    python benchmarks/heads.py --minutes 0.02 --seeds 0 --suite builtin --out outputs/tiny --json tiny.json debug=tiny

Heads are those of ``recipes/head`` and ``models/heads``. Each head has the settings of its recipe ``<head>_smollm2``.
Without a recipe it has ``head=<head> phases=cpu``. Stages, in order:

1. measure: time a training step of every phase, once per head, on one thread, in CPU seconds. A budget of minutes then
   becomes a number of steps, and the recipe's phases keep their proportions. Fixed steps give every seed the same
   training, let the learning rate end where the recipe ends it, and can be repeated on another machine. Other
   processes slow CPU time too. Therefore every step is measured in units of a small reference step, which runs right
   before and after it. A unit is worth the same for all heads: the median of all reference steps. Corpora, hidden
   states of the base, validation and checkpoints are not counted.
2. train: run `drafthead train` on one thread for every budget, seed and head. Then choose each head's tree of --nodes
   nodes on the dev half of the suite, and measure the mean accepted length tau on the test half. Tau is measured with
   the head alone, and with the head and prompt lookup in one tree. It is simulated on the base's own greedy answers,
   which gives the number of decoding them. A head that changed its base drafts for the answers of that base.
3. time: answer prompts of the test half with the heads of one budget, prompt lookup and stock `generate`, interleaved.
   The budget is the one that most heads have finished. Only this stage needs an idle machine.
4. table: print medians and ranges over the seeds, and draw a figure. --write also writes the tables of the pages.

The record (--json) is written after every result. The same command continues after an interruption.
"""

import gc
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np
import torch
from common import at_least, entry_point, filled, listed, new_record, now, numbers, parser, print_table
from figures import svg
from heads_table import caption, figure, markdown, rows

from drafthead.data.answers.store import Answer
from drafthead.errors import UserError
from drafthead.eval.config import METHOD, EvalConfig, SuiteConfig
from drafthead.eval.evaluate import evaluate
from drafthead.eval.metrics.summary import speedup_of
from drafthead.eval.trees.finished_answers import base_answers
from drafthead.eval.trees.search import greedy_tree
from drafthead.eval.trees.simulate import simulate_texts, text_ranks
from drafthead.files.local import read_json, write_atomic, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import Drafter
from drafthead.models.decoding.loop import static_draft_config
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.heads.parts.head_folder import write_trees
from drafthead.models.heads.parts.loading import head_types, load_base_and_head, load_head
from drafthead.models.simulation.acceptance import SimulatedAcceptance, accept_probs_of_ranks
from drafthead.models.simulation.ranks import WIDTH
from drafthead.system.display import Display
from drafthead.train.config import RunConfig, composed
from drafthead.train.distributed.launcher import launched
from drafthead.train.pipeline import RunContext
from drafthead.train.trainer.step import StepResult
from drafthead.train.trainer.trainer import Trainer

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "results" / "heads.json"
PAGES = (RECORD.with_suffix(".md"),)
MARKS = "<!-- made by python benchmarks/heads.py --stage table --write -->\n", "<!-- end -->"
STAGES = ("measure", "train", "time", "table")
LOOKUP = "prompt_lookup:8:2"
PROBE_STEPS, SLOW_PROBE_STEPS, PROBE_WARM = 8, 3, 2
"""Steps of a phase that are measured; fewer in a phase that trains the base; and how many of them are not counted."""
NEVER = 10**9
TIMED_TOKENS = 48
"""Length of timed answers."""


def known_heads() -> list[str]:
    """Return the names of all heads and variants: modules of ``models/heads`` and files of ``recipes/head``."""
    return sorted({*head_types(), *(path.stem for path in (ROOT / "recipes").glob("head/*.yaml"))})


@dataclass
class Record:
    """The JSON file of the results."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any]) -> "Record":
        """Continue the record in a file, or begin one."""
        if not path.exists():
            nothing: dict[str, Any] = {"precision": None, "reference_s": None, "heads": {}, "lookup": None, "runs": []}
            return cls(path, new_record("heads") | {"settings": settings} | nothing)
        content = read_json(path)
        if changed := [name for name, value in settings.items() if content["settings"].get(name) != value]:
            raise UserError(
                f"{path} was begun with other settings ({', '.join(changed)}); choose another --json and --out, or "
                "remove both"
            )
        return cls(path, content)

    def save(self) -> None:
        """Write the file."""
        write_json(self.path, self.content)

    def run(self, head: str, minutes: float, seed: int) -> dict[str, Any] | None:
        """Return the results of a trained head, or None."""
        runs = (r for r in self.content["runs"] if (r["head"], r["minutes"], r["seed"]) == (head, minutes, seed))
        return next(runs, None)


# Training --------------------------------------------------------------------------------------------------------


def settings_of(name: str, arguments: Namespace, seed: int = 0) -> list[str]:
    """Return the settings for `drafthead train`, except for the numbers of steps."""
    recipe = f"{name}_smollm2"
    has_recipe = (ROOT / "recipes" / "recipe" / f"{recipe}.yaml").exists()
    settings = [f"recipe={recipe}"] if has_recipe else [f"head={name}", "phases=cpu", f"name={name}"]
    tiny = any(override.startswith("debug=") for override in arguments.overrides)
    settings += [f"data.folder={arguments.out / f'corpora-{seed}'}"] if tiny else [f"data={arguments.data}"]
    return [*settings, f"seed={seed}", *arguments.overrides]


class Reference:
    """A small training step, whose CPU time tells how fast the machine is at a moment."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states = torch.randn(1024, 576, generator=generator, dtype=torch.bfloat16)
        self.weight = torch.randn(4096, 576, generator=generator, dtype=torch.bfloat16).requires_grad_()
        self.seconds: list[float] = []

    def step(self) -> float:
        """Run the step and return its CPU seconds."""
        started = process_time()
        for _ in range(3):
            logits = (self.states @ self.weight.T).float()
            torch.autograd.backward(logits.log_softmax(-1)[:, 0].sum())
        self.seconds.append(process_time() - started)
        return self.seconds[-1]


class TimedTrainer(Trainer):
    """A trainer that records the CPU time of its steps, in reference steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reference, self.units = Reference(), list[float]()

    def _step(self, *arguments: Any) -> StepResult:
        before = self.reference.step()
        started = process_time()
        result = super()._step(*arguments)
        seconds = process_time() - started
        self.units.append(2 * seconds / (before + self.reference.step()))
        return result


def measure(settings: Sequence[str]) -> dict[str, Any]:
    """Return the cost of a training step by phase in reference steps, the reference's seconds, and the precision."""
    phases = composed(settings).phases
    counts = {name: SLOW_PROBE_STEPS if phase.train_base else PROBE_STEPS for name, phase in phases.items()}
    with TemporaryDirectory(prefix="drafthead-probe-") as folder:
        steps = [f"phases.{name}.steps={count}" for name, count in counts.items()]
        rare = [f"validate_every={NEVER}", f"checkpoint.every_steps={NEVER}", f"out={folder}", "tracker=none"]
        run = composed([*settings, *steps, *rare])
        with launched(run) as launch:
            context = RunContext(run, launch)
            context.corpora.answers()
            trainer = TimedTrainer(run, context.new_head(), context.corpora, Path(folder), launch, None)
            trainer.train()
            precision = str(launch.sharding.precision(trainer.head.base)).removeprefix("torch.")
            launch.sharding.close()
    medians, first = {}, 0
    for name, count in counts.items():
        units = trainer.units[first : first + count]
        medians[name], first = median(units[min(PROBE_WARM, count - 1) :]), first + count
    seconds = {"reference_s": median(trainer.reference.seconds), "reference_best_s": min(trainer.reference.seconds)}
    return {"units": medians, **seconds, "precision": precision, "trains_base": run.trains_base}


def steps_of(run: RunConfig, step_s: Mapping[str, float], minutes: float) -> dict[str, int]:
    """Return the steps of every phase that take ``minutes`` together, in the proportions of the recipe."""
    factor = 60 * minutes / sum(phase.steps * step_s[name] for name, phase in run.phases.items())
    return {name: max(1, round(factor * phase.steps)) for name, phase in run.phases.items()}


def train(settings: Sequence[str], steps: Mapping[str, int], precision: str, folder: Path) -> None:
    """Train a head on one thread; an interrupted run continues at its last checkpoint."""
    phases, total = composed(settings).phases, sum(steps.values())
    schedule = [f"phases.{name}.steps={count}" for name, count in steps.items()]
    # A short phase must not consist of warm-up steps only.
    warm = {name: min(phase.optim.warmup_steps, steps[name] // 4) for name, phase in phases.items()}
    schedule += [f"phases.{name}.optim.warmup_steps={count}" for name, count in warm.items()]
    schedule += [f"{name}_every={max(1, total // parts)}" for name, parts in (("validate", 4), ("log", 20))]
    fixed = [f"shard.precision={precision}", f"out={folder}", "stages=[corpora,train]", "tracker=none"]
    command = [sys.executable, "-m", "drafthead", "train", *settings, *schedule, *fixed]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if subprocess.run(command, check=False, env=environment).returncode:
        raise UserError(f"training {folder.name} failed; its output above says why")


# Acceptance ------------------------------------------------------------------------------------------------------


class Judge:
    """A base with its own answers, on which heads are compared."""

    def __init__(self, base: BaseModel, arguments: Namespace) -> None:
        self.base, self.arguments = base, arguments

    def _answers(self, split: str) -> list[Answer]:
        limits = {key: getattr(self.arguments, key) for key in ("suite", "limit", "max_new_tokens")}
        return base_answers(self.base, SuiteConfig(**limits), split=split, keep_hidden_states=True)

    @cached_property
    def dev(self) -> list[Answer]:
        """Answers on which trees are chosen."""
        return self._answers("dev")

    @cached_property
    def test(self) -> list[Answer]:
        """Answers on which tau is measured."""
        return self._answers("test")

    def tau(self, spec: str, head: Drafter | None = None) -> dict[str, Any]:
        """Return the mean accepted length of a drafter."""
        config = None if head is None else static_draft_config(head)
        drafter, draft_config = build_drafter(parse_drafter(spec), self.base, head, config)
        # One by one, as in decoding: a combined drafter divides its nodes among the rows of a batch.
        sampler = Sampler(temperature=0.0)
        simulated: SimulatedAcceptance = simulate_texts(
            self.base, drafter, self.test, draft_config, sampler, in_order="+" in spec
        )
        return {"tau": simulated.mean_accepted_length, "interval_95": simulated.interval}

    def acceptance(self, folder: Path) -> dict[str, Any]:
        """Choose the tree of a saved head, and return its acceptance."""
        head = load_head(folder, self.base)
        ranks = text_ranks(head, self.dev)
        drafts = self.arguments.nodes - 1
        head.tree = greedy_tree([accept_probs_of_ranks(r, WIDTH) for r in ranks], drafts).tree(drafts)
        write_trees(folder, head)
        positions = np.concatenate(text_ranks(head, self.test))
        hits = [float((column[column >= 0] == 0).mean()) for column in positions.T]
        return {"alone": self.tau("head", head), "with_lookup": self.tau(f"head+{LOOKUP}", head), "acceptance": hits}


def measure_all(record: Record, heads: Sequence[str], arguments: Namespace) -> dict[str, str]:
    """Measure the training step of every head that the record lacks; return the errors by head."""
    content, failed = record.content, {}
    for name in heads:
        if name in content["heads"]:
            continue
        try:
            content["heads"][name] = measure(settings_of(name, arguments))
        except UserError as error:
            failed[name] = str(error)
            continue
        gc.collect()  # frees the base: the next head loads its own
        record.save()
    measured = content["heads"].values()
    if measured and content["reference_s"] is None:
        content["reference_s"] = median(head["reference_s"] for head in measured)
        content["precision"] = next(head["precision"] for head in measured)
    for name, head in content["heads"].items():
        head["step_s"] = {phase: units * content["reference_s"] for phase, units in head["units"].items()}
        print(
            f"{name}: " + ", ".join(f"{phase} {1e3 * s:.0f} ms a step" for phase, s in head["step_s"].items()),
            flush=True,
        )
    record.save()
    return failed


def train_all(record: Record, heads: Sequence[str], arguments: Namespace) -> dict[str, str]:
    """Train and judge every head that the record lacks; return the errors by head.

    All heads of a budget and seed come before the next seed, and all seeds before the next budget.
    """
    content, failed, shared = record.content, {}, None
    todo = [(m, seed, name) for m in arguments.minutes for seed in arguments.seeds for name in heads]
    for minutes, seed, name in todo:
        if name in failed or name not in content["heads"] or record.run(name, minutes, seed):
            continue
        settings, folder = settings_of(name, arguments, seed), run_folder(arguments.out, name, minutes, seed)
        run = composed(settings)
        steps = steps_of(run, content["heads"][name]["step_s"], minutes)
        try:
            train(settings, steps, content["precision"], folder)
        except UserError as error:
            failed[name] = str(error)
            continue
        if run.trains_base:
            judge = Judge(load_base_and_head(folder / "head")[0], arguments)
        else:
            judge = shared = shared or Judge(BaseModel.load(run.base), arguments)
            content["lookup"] = content["lookup"] or judge.tau(LOOKUP)
        result = judge.acceptance(folder / "head")
        shutil.rmtree(folder / "checkpoints")  # hundreds of megabytes
        content["runs"].append({"head": name, "minutes": minutes, "seed": seed, "steps": steps, **result})
        record.save()
        taus = f"tau {result['alone']['tau']:.3f} alone, {result['with_lookup']['tau']:.3f} with prompt lookup"
        print(f"{folder.name}: {taus}", flush=True)
    return failed


def run_folder(out: Path, name: str, minutes: float, seed: int) -> Path:
    """Return the folder of a run."""
    return out / f"{name}-{minutes:g}min-seed{seed}"


# Speed -----------------------------------------------------------------------------------------------------------


def time_heads(record: Record, heads: Sequence[str], arguments: Namespace) -> None:
    """Time the first seed's heads of the budget that most heads have finished; of two, of the longer one."""
    seed = arguments.seeds[0]
    finished = {m: [name for name in heads if record.run(name, m, seed)] for m in arguments.minutes}
    minutes = max(finished, key=lambda m: (len(finished[m]), m))
    groups: dict[str, list[str]] = {}
    if not finished[minutes]:
        raise UserError(f"{arguments.json} has no trained head yet; run the stages measure and train first")
    for name in finished[minutes]:
        groups.setdefault(name if record.content["heads"][name]["trains_base"] else "shared", []).append(name)
    speed: dict[str, Any] = {"minutes": minutes, "seed": seed, "prompts": arguments.time_limit}
    speed |= {"max_new_tokens": TIMED_TOKENS, "heads": {}, "groups": {}}
    for group, names in groups.items():
        folders = {name: run_folder(arguments.out, name, minutes, seed) / "head" for name in names}
        base, _ = load_base_and_head(folders[names[0]])
        lookup, _ = build_drafter(parse_drafter(LOOKUP), base)
        specs = {name: (f"head:{folder}", f"head:{folder}+{LOOKUP}") for name, folder in folders.items()}
        config = EvalConfig(
            suite=arguments.suite,
            split="test",
            limit=arguments.time_limit,
            max_new_tokens=TIMED_TOKENS,
            baselines=[spec for pair in specs.values() for spec in pair],
        )
        folder = arguments.out / f"time-{group}-{minutes:g}min"
        folder.mkdir(parents=True, exist_ok=True)
        overall = evaluate(base, lookup, config, folder, Display())["overall"]
        for name, (alone, combined) in specs.items():
            speed["heads"][name] = {"alone": speeds(overall, alone), "with_lookup": speeds(overall, combined)}
        copied = {key: overall[key] for key in ("autoregressive_tokens_per_second", "hardware")}
        speed["groups"][group] = {"lookup": speeds(overall, METHOD), **copied}
    record.content["speed"] = {"date": now(), **speed}
    record.save()


def speeds(overall: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the speedup of a method over the fastest autoregressive decoder, and how many answers were identical."""
    numbers = overall["methods"][method]
    copied = {key: numbers[key] for key in ("tokens_per_second", "identical_outputs")}
    interval = numbers["speedup"]["interval_95"]
    return {"speedup": speedup_of(overall, method), "interval_95": interval, **copied}


def main(given: list[str] | None = None) -> int:
    """Run the stages; return 1 if a head could not be measured."""
    options = parser(__doc__)
    options.set_defaults(json=RECORD)
    add = options.add_argument
    add("--stage", default="all", metavar="NAME", help=f"one of {', '.join(STAGES)}; default: all")
    add("--minutes", default="4,15", metavar="LIST", help="budgets of CPU minutes per head (default 4,15)")
    add("--seeds", default="0,1,2", metavar="LIST", help="seeds of every budget (default 0,1,2)")
    add("--heads", default=",".join(known_heads()), metavar="LIST", help="comma-separated; default: all heads")
    add("--out", type=Path, default=Path("outputs/heads"), metavar="DIR", help="default outputs/heads")
    add("--data", default="smollm2", metavar="NAME", help="recipes/data/NAME.yaml (ignored with debug=...)")
    add("--suite", default="spec_bench_like", metavar="NAME", help="prompts, as in `drafthead eval`")
    add("--limit", type=int, default=24, metavar="N", help="prompts of each half for tau (default 24)")
    add("--time-limit", type=int, default=6, metavar="N", help="prompts to time (default 6)")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="answer length (default 64)")
    add("--nodes", type=int, default=6, metavar="N", help="nodes of a head's tree, root included (default 6)")
    add("--write", action="store_true", help="write the table into docs/results/heads.md")
    add("overrides", nargs="*", metavar="key=value", help="settings of all runs, as for `drafthead train`")
    arguments = options.parse_intermixed_args(given)
    at_least(arguments, 2, "nodes", "max_new_tokens")
    at_least(arguments, 1, "limit", "time_limit")
    stages = list(STAGES) if arguments.stage == "all" else listed("stage", arguments.stage, STAGES)
    heads = listed("heads", arguments.heads, known_heads())
    arguments.minutes = numbers("minutes", arguments.minutes, float, least=0.01)
    arguments.seeds = numbers("seeds", arguments.seeds, least=0)
    names = ("data", "suite", "limit", "max_new_tokens", "nodes", "overrides")
    record = Record.open(arguments.json, {name: getattr(arguments, name) for name in names})
    failed: dict[str, str] = {}
    if "measure" in stages or "train" in stages:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        if "measure" in stages:
            failed |= measure_all(record, heads, arguments)
        if "train" in stages:
            failed |= train_all(record, heads, arguments)
        torch.set_num_threads(threads)
    if "time" in stages:
        time_heads(record, heads, arguments)
    if "table" in stages:
        if not record.content["runs"]:
            raise UserError(f"{arguments.json} has no trained head yet; run the stages measure and train first")
        print_table(caption(record.content), rows(record.content))
        write_atomic(arguments.json.with_suffix(".svg"), svg(figure(record.content), "heads"))
        for page in PAGES if arguments.write else ():
            write_atomic(page, filled(page, MARKS, f"{markdown(record.content)}\n"))
    for name, message in failed.items():
        print(f"left out: {name}: {message}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    entry_point(main)
