"""Compare settings of training: one head, one stored corpus, equal steps, several seeds, judged by acceptance.

    python benchmarks/training_quality.py benchmarks/studies/eagle3.yaml                    all rows, one seed
    python benchmarks/training_quality.py STUDY --rows recipe,muon --seeds 0,1,2 --steps 300
    python benchmarks/training_quality.py benchmarks/studies/optimiser.yaml --recipe hydra_smollm2
    python benchmarks/training_quality.py STUDY --split test --json docs/results/eagle3.json

A study is a YAML file: ``recipe``, ``settings`` of all rows, ``rows`` (a name, and its settings), ``suites`` (a name,
and its number of prompts) and ``tokens`` (the length of an answer). Its first row is the baseline. Each row and seed is
one `drafthead train`, of whose phases the last has --steps steps. The runs share the corpus and the stored hidden
states of the base. A row ``{speculators: [FLAGS]}`` trains an EAGLE-3 head with speculators 0.9.0, on the same ids,
loss mask and draft vocabulary. It needs --speculators, the Python of an environment that has it (see
speculators_trainer.py).

A head is judged on the base's own greedy answers: the corpus's held-out ones, and those to one half of each suite. The
mean accepted length (tau) of a chain over all draft positions, and of the best tree of six nodes, is that of decoding,
by simulation. Rows are compared in pairs: the same answers, the same seeds. An interval resamples answers and seeds
together. To search, use --split dev (the default); report what was chosen with --split test.

The record is written after every run and every judgement. The same command continues after an interruption.
"""

import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import yaml
from common import at_least, entry_point, listed, new_record, numbers, parser, print_table

from drafthead.data.answers.draft_vocab import draft_vocabulary
from drafthead.data.answers.store import open_answers
from drafthead.data.intervals import Floats
from drafthead.errors import UserError
from drafthead.eval.config import SuiteConfig
from drafthead.eval.trees.finished_answers import base_answers, read_texts, write_texts
from drafthead.eval.trees.search import greedy_tree
from drafthead.eval.trees.simulate import text_ranks
from drafthead.files.local import read_json, write_json
from drafthead.models.base.base_config import EMBEDDED
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.loading import load_head, load_parts
from drafthead.models.simulation.acceptance import (
    AcceptProbs,
    accept_probs_of_ranks,
    accepted_length_probs,
    start_probs,
)
from drafthead.models.token_tree import TokenTree
from drafthead.train.config import RunConfig, composed
from drafthead.train.corpora.corpora import is_held_out

ROOT = Path(__file__).parent.parent
NODES, WIDTH = 6, 10
HELD_OUT = "held out"
COST = "cost.json"


def read_study(path: Path) -> dict[str, Any]:
    """Return a study; reject a file without recipe and rows."""
    try:
        study = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not a readable YAML file ({str(error).splitlines()[0]})") from None
    if not isinstance(study, dict) or not {"recipe", "rows"} <= study.keys():
        raise UserError(f"{path} is not a study; it needs recipe and rows (see the files beside it)")
    study["rows"] = {name: row if isinstance(row, dict) else flat(row) for name, row in study["rows"].items()}
    return {"settings": [], "suites": {"spec_bench_like": 48, "mt_bench": 24}, "tokens": 80, **study}


def flat(settings: Sequence[Any]) -> list[str]:
    """Return settings, of which some are lists themselves: YAML's aliases of other rows."""
    return [each for item in settings for each in ([item] if isinstance(item, str) else flat(item))]


# Training --------------------------------------------------------------------------------------------------------


def run_settings(study: Mapping[str, Any], row: str, seed: int, arguments: Namespace) -> list[str]:
    """Return the settings for `drafthead train` of one row; the last phase has the steps of the command line."""
    settings = [f"recipe={study['recipe']}", *study["settings"], *study["rows"][row], f"seed={seed}"]
    last = [*composed(settings).phases][-1]
    never = ["validate_every=1000000", "tracker=none", "stages=[corpora,train]", "log_every=10"]
    folder = run_folder(arguments.out, row, seed, arguments.steps)
    return [*settings, f"phases.{last}.steps={arguments.steps}", *never, f"out={folder}"]


def run_folder(out: Path, row: str, seed: int, steps: int) -> Path:
    return out / f"{row.replace(' ', '_')}-{steps}-seed{seed}"


def run_measured(command: Sequence[str], threads: int) -> dict[str, float]:
    """Run a training, and return its seconds, CPU seconds and peak memory."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, env=environment)
    while not (waited := os.wait4(process.pid, os.WNOHANG))[0]:
        # Not the usage's maximum, which includes this process's memory at the fork.
        peak = max(peak, *map(int, re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())), 0)
        time.sleep(0.2)
    _, status, usage = waited
    if status:
        raise UserError("the training failed; its output above says why")
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"wall_s": time.perf_counter() - started, "cpu_s": cpu_s, "peak_gib": peak / 2**20}


def train(study: Mapping[str, Any], row: str, seed: int, arguments: Namespace) -> dict[str, float]:
    """Train the head of one row; return the costs. An interrupted run of drafthead continues."""
    of_row = study["rows"][row]
    if not isinstance(of_row, dict):
        command = [sys.executable, "-m", "drafthead", "train", *run_settings(study, row, seed, arguments)]
        return run_measured(command, arguments.threads)
    if arguments.speculators is None:
        raise UserError(f"the row {row} trains with speculators; give --speculators PYTHON, or --rows without it")
    script, folder = str(Path(__file__).with_name("speculators_trainer.py")), arguments.out / "speculators"
    run = composed([f"recipe={study['recipe']}", *study["settings"]])
    base = str(run.base.folder(print))
    if not (folder / "data" / "hidden_states").exists():
        write_corpus(run, base, folder, arguments.speculators, script)
    rows = {path.stem: len(path.read_text().splitlines()) for path in folder.glob("*.jsonl")}
    share = rows["train"] / sum(rows.values())
    out = run_folder(arguments.out, row, seed, arguments.steps)
    flags = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": base,
        "data-path": folder / "data",
        **{f"{name}-path": folder / f"{name}.npy" for name in ("d2t", "t2d")},
        "draft-vocab-size": len(np.load(folder / "d2t.npy")),
        "total-seq-len": 2048,
        "train-data-ratio": f"{share:.7f}",
        "ttt-steps": 3,
        "on-missing": "raise",
        "num-workers": 0,
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        "max-steps": arguments.steps,
        "epochs": 1000,
        "hidden-states-dtype": "bfloat16",
        "seed": seed,
        "save-path": out / "trained",
    }
    command = [arguments.speculators, script, "train", *(f"--{name}={value}" for name, value in flags.items())]
    if not (out / COST).exists():
        write_json(out / COST, run_measured([*command, *of_row["speculators"]], arguments.threads))
    newest = max((path for path in (out / "trained").iterdir() if path.name.isdigit()), key=lambda p: int(p.name))
    # Its layers slide over 2,048 tokens; all texts here are shorter.
    settings = ["config.use_sliding_window=false", "config.layer_types=[full_attention]"]
    folders = [f"from={newest}", f"base={EMBEDDED}", f"out={out / 'head'}"]
    if not (out / "head").exists():
        subprocess.run([sys.executable, "-m", "drafthead", "import", *folders, *settings], check=True)
    return dict(read_json(out / COST))


def write_corpus(run: RunConfig, base: str, folder: Path, python: str, script: str) -> None:
    """Write the run's answers, its draft vocabulary and the base's hidden states as speculators reads them."""
    store = open_answers(Path(run.data.folder))
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[bool, list[str]] = {False: [], True: []}
    for answer in store.read(with_hidden_states=False):
        mask = [0] * answer.boundary + [1] * (len(answer.input_ids) - answer.boundary)
        row = json.dumps({"input_ids": answer.input_ids.tolist(), "loss_mask": mask})
        lines[is_held_out(answer.prompt_number)].append(row)
    parts = load_parts(run.base.name)
    ids = draft_vocabulary(
        store.token_counts(parts.vocab_size), run.head_config().draft_vocab_size or parts.vocab_size, parts.eos_ids
    )
    marks = np.zeros(parts.vocab_size, dtype=np.bool_)
    marks[ids] = True
    np.save(folder / "d2t.npy", ids - np.arange(len(ids)))  # offsets
    np.save(folder / "t2d.npy", marks)
    for held_out, name in ((False, "train"), (True, "held_out")):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(line + "\n" for line in lines[held_out]))
        sizes = ["--seq-length", "512", "--num-preprocessing-workers", "1"]
        command = [python, "-m", "speculators", "prepare-data", "--model", base, "--data", str(path)]
        subprocess.run([*command, "--output", str(folder / name), *sizes], check=True)
    data = [str(folder / name) for name in ("train", "held_out", "data")]
    subprocess.run([python, script, "states", base, *data], check=True)


# Acceptance ------------------------------------------------------------------------------------------------------


class Judge:
    """A base with its own answers, on which heads are compared."""

    def __init__(self, study: Mapping[str, Any], arguments: Namespace) -> None:
        run = composed([f"recipe={study['recipe']}", *study["settings"]])
        self.base, self.split = BaseModel.load(run.base), arguments.split
        corpus = open_answers(Path(run.data.folder) / "answers").read(with_hidden_states=False)
        # The halves of the held-out answers, as of a suite: even and odd ones.
        held_out = [answer for answer in corpus if is_held_out(answer.prompt_number)]
        self.texts = {HELD_OUT: held_out[arguments.split == "test" :: 2] if arguments.split != "all" else held_out}
        for suite, limit in study["suites"].items():
            path = arguments.out / "answers" / f"{suite}-{arguments.split}-{limit}-{study['tokens']}.jsonl"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                config = SuiteConfig(suite=suite, limit=limit, max_new_tokens=study["tokens"])
                write_texts(path, base_answers(self.base, config, split=arguments.split))
            self.texts[suite] = read_texts(path)

    def judge(self, folder: Path) -> dict[str, Any]:
        """Return the acceptance of a saved head on every set of answers."""
        head = load_head(folder, self.base)
        tables = {
            name: [accept_probs_of_ranks(r, WIDTH) for r in text_ranks(head, t)] for name, t in self.texts.items()
        }
        tree = greedy_tree([table for sets in tables.values() for table in sets], NODES - 1).tree(NODES - 1)
        trees = {"chain": TokenTree.chain(head.depth), "tree": tree}
        return {
            name: {
                "first": float(np.nanmean(np.concatenate([table[:, 0, 0] for table in sets]))),
                **{kind: steps_of(sets, tree) for kind, tree in trees.items()},
            }
            for name, sets in tables.items()
        }


def steps_of(tables: Sequence[AcceptProbs], tree: TokenTree) -> list[list[float]]:
    """Return per answer its positions and the expected number of steps."""
    starts = start_probs([accepted_length_probs(table, tree) for table in tables])
    return [[len(table), float(start.sum())] for table, start in zip(tables, starts, strict=True)]


# Comparison ------------------------------------------------------------------------------------------------------


def tau(answers: Sequence[Sequence[float]]) -> float:
    tokens, steps = np.sum(answers, 0)
    return float(tokens / steps)


def ratio(row: Floats, baseline: Floats, resamples: int = 4000) -> tuple[float, float, float]:
    """Return tau of ``row`` over that of ``baseline`` with its 95 % interval, both [seeds, answers, 2]. The same seeds
    and answers are drawn for both."""
    seeds, answers = row.shape[:2]
    generator = np.random.default_rng(0)
    s, a = generator.integers(seeds, size=(resamples, seeds)), generator.integers(answers, size=(resamples, answers))

    def taus(values: Floats) -> Floats:
        drawn = values[s[:, :, None], a[:, None, :]].sum((1, 2))
        result: Floats = drawn[:, 0] / drawn[:, 1]
        return result

    low, high = np.quantile(taus(row) / taus(baseline), (0.025, 0.975))
    totals = row.sum((0, 1)), baseline.sum((0, 1))
    return float(totals[0][0] / totals[0][1] / (totals[1][0] / totals[1][1])), float(low), float(high)


def table(record: Mapping[str, Any], kind: str, split: str) -> list[dict[str, object]]:
    """Return a line per row: tau, the ratio to the first row over their common seeds, and costs."""
    runs: dict[str, dict[int, Any]] = {}
    for run in record["runs"]:
        if split in run["judged"]:
            runs.setdefault(run["row"], {})[run["seed"]] = run
    lines = []
    first = next(iter(runs.values()), {})
    for name, by_seed in runs.items():
        line: dict[str, object] = {"settings": name, "seeds": len(by_seed)}
        common = sorted(by_seed.keys() & first.keys())
        for what in first[min(first)]["judged"][split]:
            values = [tau(run["judged"][split][what][kind]) for run in by_seed.values()]
            spread = f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""
            line[f"{what}, tau"] = f"{mean(values):.3f}{spread}"
            if by_seed is not first and common:
                own, other = (np.array([of[s]["judged"][split][what][kind] for s in common]) for of in (by_seed, first))
                line[f"{what}, ratio"] = "{:.3f} ({:.3f}-{:.3f})".format(*ratio(own, other))
            else:
                line[f"{what}, ratio"] = ""
        for column, key, digits in (("CPU s", "cpu_s", 0), ("GiB", "peak_gib", 1)):
            values = [run["cost"][key] for run in by_seed.values() if key in run["cost"]]
            line[column] = f"{median(values):.{digits}f}" if values else ""
        lines.append(line)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Train and judge what the record lacks, then print the tables."""
    options = parser(__doc__)
    options.add_argument("study", type=Path, help="YAML file of the rows")
    options.add_argument("--recipe", help="recipe to train instead of the study's")
    options.add_argument("--rows", help="rows to train, separated by commas; default: all")
    options.add_argument("--seeds", default="0", help="seeds, separated by commas")
    options.add_argument("--steps", type=int, default=112, help="steps of the last phase")
    options.add_argument(
        "--split", default="dev", choices=["dev", "test", "all"], help="half of the answers to judge on"
    )
    options.add_argument("--threads", type=int, default=1, help="threads of a training")
    options.add_argument("--out", type=Path, help="folder of the heads; default: outputs/studies/STUDY")
    options.add_argument("--speculators", metavar="PYTHON", help="Python of an environment with speculators 0.9.0")
    options.add_argument("--print", action="store_true", help="only print the record's tables")
    arguments = options.parse_args(argv)
    at_least(arguments, 1, "steps", "threads")
    study = read_study(arguments.study)
    study["recipe"] = arguments.recipe or study["recipe"]
    name = "-".join([arguments.study.stem, *([arguments.recipe] if arguments.recipe else [])])
    arguments.out = arguments.out or ROOT / "outputs" / "studies" / name
    path = arguments.json or arguments.out / "record.json"
    names = listed("rows", arguments.rows or ",".join(study["rows"]), [*study["rows"]])
    record = read_json(path) if path.exists() else new_record("training_quality") | {"study": study, "runs": []}
    judge = None
    for seed in () if arguments.print else numbers("seeds", arguments.seeds, least=0):
        for name in names:
            folder = run_folder(arguments.out, name, seed, arguments.steps)
            key = {"row": name, "seed": seed, "steps": arguments.steps, "settings": study["rows"][name]}
            run = next((run for run in record["runs"] if key.items() <= run.items()), None)
            if run is None:
                run = key | {"cost": train(study, name, seed, arguments), "judged": {}}
                record["runs"].append(run)
                write_json(path, record)
            if arguments.split not in run["judged"]:
                judge = judge or Judge(study, arguments)
                run["judged"][arguments.split] = judged = judge.judge(folder / "head")
                write_json(path, record)
                taus = ", ".join(f"{what} {tau(values['chain']):.3f}" for what, values in judged.items())
                print(f"{folder.name}: tau of a chain: {taus}", flush=True)
    for kind in ("chain", "tree"):
        print_table(f"{kind}, {arguments.split} half, {arguments.steps} steps", table(record, kind, arguments.split))


if __name__ == "__main__":
    entry_point(main)
