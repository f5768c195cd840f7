"""Measure how long one and two processes take to fill a store with the base's hidden states of text.

    python benchmarks/stored_states.py                                     the embedded SmolLM2, on two free cores
    python benchmarks/stored_states.py --tokens 2000 --rounds 1 debug=tiny     a quick test

Processes have one thread each, so that two processes use twice the cores of one. One process with all threads is
measured too. Only the filling is timed, not the loading of the base. The cases take turns, each on an empty store; the
median of the rounds counts. Stores of one and of two processes must have equal bytes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.distributed as dist
from common import at_least, entry_point, parser, print_table, save_record

from drafthead.data.answers.store import ProcessGroup
from drafthead.data.batch import HiddenStatesSpec
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.system.display import Display
from drafthead.train.config import composed
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.original_base import OriginalBase

CASES = {"one process": (1, 1), "two processes": (2, 1), "one process, all threads": (1, os.cpu_count() or 1)}
"""Number of processes, and of threads of each."""


def worker(folder: Path, overrides: list[str], tokens: int) -> float:
    """Fill the store below ``folder`` together with the other processes; return the seconds."""
    rank, size, group = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), ProcessGroup()
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=size)
        group = ProcessGroup(rank, size, dist.barrier)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = composed([*overrides, f"data.folder={folder}", f"data.text.max_tokens={tokens}"])
    corpora = Corpora(OriginalBase.of(BaseModel.load(run.base)), run.data, run.seed, Display(enabled=False), group)
    documents = corpora.text_rows(512).documents
    states = corpora.states("text", documents, HiddenStatesSpec())
    group.wait()
    started = perf_counter()
    states.prepare(range(len(documents)))
    return perf_counter() - started


def fill(overrides: list[str], tokens: int, processes: int, threads: int) -> tuple[float, bytes]:
    """Fill an empty store with ``processes`` of ``threads`` each; return the seconds and the store's bytes."""
    with TemporaryDirectory(prefix="drafthead-states-") as folder:
        command = [sys.executable, __file__, "--tokens", str(tokens), "--worker", folder, *overrides]
        counts = {"WORLD_SIZE": str(processes), "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        started = [
            subprocess.Popen(command, env={**os.environ, **counts, "RANK": str(rank)}, stdout=subprocess.PIPE)
            for rank in range(processes)
        ]
        seconds = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
        (store,) = Path(folder).glob("states/*/states.bin")
        return max(seconds), store.read_bytes()


def main(given: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__)
    add = options.add_argument
    add("--tokens", type=int, default=16_000, metavar="N", help="tokens of text (default 16,000)")
    add("--rounds", type=int, default=3, metavar="N", help="measurements of each case (default 3)")
    add("--worker", type=Path, metavar="FOLDER", help="be one of the processes that this script starts")
    add("overrides", nargs="*", metavar="key=value", help="settings, as for `drafthead train`")
    arguments = options.parse_intermixed_args(given)
    at_least(arguments, 1, "rounds")
    at_least(arguments, 64, "tokens")
    overrides = ["recipe=medusa_smollm2", *arguments.overrides]
    if arguments.worker:
        print(worker(arguments.worker, overrides, arguments.tokens))
        return
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    stores = {}
    for _ in range(arguments.rounds):
        for name, case in CASES.items():
            taken, stores[name] = fill(overrides, arguments.tokens, *case)
            seconds[name].append(taken)
    if stores["one process"] != stores["two processes"]:
        raise UserError("two processes stored other bytes than one")
    alone = median(seconds["one process"])
    rows = [
        {
            "case": name,
            "threads": processes * threads,
            "seconds": f"{median(seconds[name]):.2f}",
            "tokens/s": f"{arguments.tokens / median(seconds[name]):,.0f}",
            "of one process": f"{median(seconds[name]) / alone:.2f}",
        }
        for name, (processes, threads) in CASES.items()
    ]
    print_table("filling a store of hidden states", rows)
    save_record(arguments, "stored_states", {"seconds": seconds, "equal_bytes": True})


if __name__ == "__main__":
    entry_point(main)
