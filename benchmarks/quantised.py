"""Acceptance on quantised targets: of a head trained on the float32 base, and of one trained on the target itself.

    python benchmarks/quantised.py --json docs/results/quantised.json
    python benchmarks/quantised.py --targets bfloat16,q4_0 --steps 112

A target is SmolLM2 in bfloat16, or a GGUF file of it with weights of 8 or 4 bits, whose dequantised weights run here in
float32. In a 4-bit file, embedding and output head have 8 bits. Each target answers the same prompts and trains an
EAGLE-3 head on its own answers and states. Both heads are judged on the target's own greedy answers to other prompts,
by simulation, as in training_quality.py. Both use the embedding and the output head of the target, as engines do.

The record is written after every target. The same command continues after an interruption.
"""

import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import at_least, entry_point, listed, new_record, parser, print_table
from training_quality import HELD_OUT, ROOT, Judge, ratio, run_folder, tau, train

from drafthead.files.local import read_json, write_json
from drafthead.models.base.base_config import EMBEDDED, BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats.gguf.gguf_files import write_base

FLOAT32, RECIPE, SUITE = "float32", "eagle3_smollm2_vllm", "spec_bench_like"
TARGETS = (FLOAT32, "bfloat16", "q8_0", "q4_0")  # the first one trains the head that all targets try
NEW_TOKENS = 64  # per answer
OF_TARGET, OF_FLOAT32 = "trained on the target", "trained on float32"


def base_settings(target: str, out: Path) -> list[str]:
    """Return the settings of ``target`` as a run's base; write its GGUF file if it is new."""
    if target in (FLOAT32, "bfloat16"):
        return [f"base.dtype={target}"]
    folder, name = (out / target).resolve(), f"{target}.gguf"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_base(BaseModel.load(BaseConfig(name=EMBEDDED, dtype="float32")), folder / "new", target)
        (folder / "new").rename(folder / name)
    tokenizer = BaseConfig(name=EMBEDDED).folder()
    return [f"base.name={folder}", f"base.gguf_file={name}", f"base.tokenizer={tokenizer}", f"base.dtype={FLOAT32}"]


def study_of(target: str, arguments: Namespace) -> dict[str, Any]:
    """Return the study of one row, in the sense of training_quality.py, that trains on ``target``."""
    settings = ["~phases.pretrain", f"data.folder={arguments.out / 'corpora' / target}", "data.answers.fresh=true"]
    settings += [f"data.answers.prompts={arguments.prompts}", "data.answers.self_prompted=0"]
    settings += [f"data.answers.sampler.max_new_tokens={NEW_TOKENS}", *base_settings(target, arguments.out)]
    suites = {SUITE: arguments.judged}
    return {"recipe": RECIPE, "settings": settings, "rows": {target: []}, "suites": suites, "tokens": NEW_TOKENS}


def for_target(head: Path, base: BaseModel, out: Path) -> Path:
    """Return a copy of ``head`` that states ``base`` as its own, because drafthead refuses heads of another base."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(head, out)
    write_json(out / "config.json", read_json(out / "config.json") | {"base": base.identity()})
    return out


def measure(target: str, arguments: Namespace) -> dict[str, Any]:
    """Train a head on ``target``, and judge it and the head of float32 on the target's own answers."""
    study = study_of(target, arguments)
    folder = run_folder(arguments.out, target, arguments.seed, arguments.steps)
    cost = train(study, target, arguments.seed, arguments)
    judge = Judge(study, Namespace(split="all", out=arguments.out / target))
    judged = {OF_TARGET: judge.judge(folder / "head")}
    if target != FLOAT32:
        head = run_folder(arguments.out, FLOAT32, arguments.seed, arguments.steps) / "head"
        judged[OF_FLOAT32] = judge.judge(for_target(head, judge.base, folder / "head_of_float32"))
    return {"cost": cost, "judged": judged}


def lines(record: dict[str, Any], kind: str) -> list[dict[str, object]]:
    """Return a line per target and set of answers, for trees of ``kind``: chain or tree."""
    rows = []
    for run in record["runs"]:
        own = run["judged"][OF_TARGET]
        for texts in own:
            line: dict[str, object] = {"target": run["target"], "answers": "held out" if texts == HELD_OUT else texts}
            line[f"tau, {OF_TARGET}"] = f"{tau(own[texts][kind]):.3f}"
            other = run["judged"].get(OF_FLOAT32)
            line[f"tau, {OF_FLOAT32}"] = f"{tau(other[texts][kind]):.3f}" if other else ""
            line["target / float32 (95 %)"] = ""
            if other:
                steps, steps_float32 = (np.array([judged[texts][kind]]) for judged in (own, other))
                line["target / float32 (95 %)"] = "{:.3f} ({:.3f}-{:.3f})".format(*ratio(steps, steps_float32))
            rows.append(line)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the targets that the record lacks, then print the tables."""
    options = parser(__doc__)
    options.add_argument("--targets", default=",".join(TARGETS), help="targets, separated by commas")
    options.add_argument("--steps", type=int, default=40, help="training steps")
    options.add_argument("--prompts", type=int, default=240, help="prompts of the training corpus")
    options.add_argument("--judged", type=int, default=48, help=f"prompts of {SUITE} to judge on")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=1, help="threads of a training")
    options.add_argument("--out", type=Path, default=ROOT / "outputs" / "quantised", help="folder of corpora and heads")
    arguments = options.parse_args(argv)
    at_least(arguments, 1, "steps", "threads", "judged")
    at_least(arguments, 40, "prompts")
    path = arguments.json or arguments.out / "record.json"
    record = read_json(path) if path.exists() else new_record("quantised") | {"runs": []}
    for target in dict.fromkeys([FLOAT32, *listed("targets", arguments.targets, TARGETS)]):
        key = {"target": target, **{name: getattr(arguments, name) for name in ("seed", "steps", "prompts")}}
        if not any(key.items() <= run.items() for run in record["runs"]):
            record["runs"].append(key | measure(target, arguments))
            write_json(path, record)
    for kind in ("chain", "tree"):
        print_table(f"{kind}, {arguments.steps} steps", lines(record, kind))


if __name__ == "__main__":
    entry_point(main)
