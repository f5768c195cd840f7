"""A corpus of answers with hidden states from a real vLLM, while client or server are killed at random.

    python benchmarks/served_kills.py --json docs/results/served_kills.json

``drafthead data`` starts vLLM and lets it answer. Some seconds after the first answers, either the command or a process
of vLLM gets SIGKILL, and the command is repeated, until there were --kills kills. Then it runs to its end. Every prompt
must be answered once, and the stored states of all answers must be those of the base here.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from common import at_least, entry_point, parser, print_table, save_record

from drafthead.data.answers.store import AnswerStore
from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.states.stored import StoredStates
from drafthead.errors import UserError
from drafthead.eval.engines.served import free_port
from drafthead.files.local import read_manifest
from drafthead.models.base.base_config import EMBEDDED
from drafthead.models.heads.parts.loading import load_base

SCRIPT = "import drafthead.data.answers.server as s; s.SHARD_ROWS = 8; from drafthead.commands.data import main; main()"
TOKENS = 24  # per answer
LONGEST_S = 900.0


def command(folder: Path, prompts: int) -> list[str]:
    settings = ["recipe=eagle3_smollm2_vllm", "~phases.pretrain", f"out={folder / 'run'}"]
    settings += [f"data.folder={folder / 'corpora'}", "data.states.serve=true"]
    settings += [f"data.states.url=http://127.0.0.1:{free_port()}"]
    answers = ["sources=[{kind: embedded, name: questions}]", f"prompts={prompts}", "self_prompted=0"]
    answers += ["precomputed=null", f"sampler.max_new_tokens={TOKENS}", "server.concurrency=4"]
    return [sys.executable, "-c", SCRIPT, *settings, *(f"data.answers.{setting}" for setting in answers)]


def descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started, and theirs."""
    found = list[int]()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def written(folder: Path) -> int:
    return len([*(folder / "corpora" / "answers").glob("shard-*.parquet")])


def killed(folder: Path, prompts: int, draw: random.Random) -> str:
    """Run the command until it has written a file, wait, kill it or its server; return which one."""
    process, before = subprocess.Popen(command(folder, prompts), stdout=subprocess.DEVNULL), written(folder)
    deadline = time.monotonic() + LONGEST_S
    while written(folder) == before:
        if process.poll() is not None or time.monotonic() > deadline:
            return "nothing: the command had ended"
        time.sleep(0.2)
    time.sleep(draw.uniform(0.0, 4.0))
    try:
        of_server = descendants(process.pid)
        victim = draw.choice([("the command", process.pid), *(("vLLM", pid) for pid in of_server[-1:])])
        os.kill(victim[1], signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        return "nothing: the command had ended"
    process.wait(LONGEST_S)
    return victim[0]


def largest_error(folder: Path) -> tuple[int, float]:
    """Return the number of answers, and the largest error of their states relative to the base's largest value."""
    base, corpus = load_base(EMBEDDED), list(AnswerStore(folder / "corpora" / "answers").read())
    numbers = [answer.prompt_number for answer in corpus]
    if len({*numbers}) != len(numbers):
        raise UserError("a prompt was answered twice")
    (path,) = (folder / "corpora" / "states").glob("answers-*")
    manifest = read_manifest(path)
    sizes, lengths = manifest.pop("store"), np.array([len(answer.input_ids) for answer in corpus])
    stored = StoredStates(path, lengths, sizes["width"], sizes["dtype"], manifest)
    spec, worst = HiddenStatesSpec(layers=tuple(manifest["layers"])), 0.0
    for answer, states in zip(corpus, stored.read(range(len(corpus))), strict=True):
        own = base.hidden_states(TrainBatch.of([answer.ids]), spec)
        assert own.layers is not None
        expected = torch.cat([own.final, own.layers], -1)[0][:-1]  # an answer's last token has no states
        worst = max(worst, float((states.float()[:-1] - expected).abs().max() / expected.abs().max()))
    return len(corpus), worst


def main(argv: Sequence[str] | None = None) -> None:
    """Kill, repeat, and compare."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=200)
    options.add_argument("--kills", type=int, default=10)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args(argv)
    at_least(arguments, 1, "prompts", "kills")
    draw = random.Random(arguments.seed)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        victims = list[str]()
        while len(victims) < arguments.kills:
            victims.append(killed(folder, arguments.prompts, draw))
            print(f"killed: {victims[-1]}, with {written(folder)} files of answers", flush=True)
        subprocess.run(command(folder, arguments.prompts), check=True)
        answers, error = largest_error(folder)
    result = {"killed": victims, "answers": answers, "largest error of a state": error}
    print_table("answers and states after kills", [result | {"killed": str(len(victims))}])
    save_record(arguments, "served_kills", result)


if __name__ == "__main__":
    entry_point(main)
