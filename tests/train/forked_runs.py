"""Runs training in forks of one process that has imported everything, and makes events happen in them.

Tests start it as ``python forked_runs.py``. It reads one job per line and answers with a line ``{"codes": [...],
"seconds": ...}``, with an exit code per process. A job has::

    command      arguments of ``drafthead``, or
    script       a Python script and its arguments
    log          file for all output, rank 1's in FILE.1 and so on
    processes    how many (default 1)
    environment  additional environment variables of the processes
    kill_after   seconds until all processes are killed
    patience     seconds to wait for the others once one has ended (default 300)
    at           events: {"rank": 0, "call": [name, n], "do": event}, just before the n-th call (from 1) of a function
                 in CALLS. An event is a signal such as "SIGKILL". Or "full": this and all later calls find the disk
                 full. Or "small files": no later file may exceed LARGEST_FILE. Or "raise": the call fails
"""

import errno
import json
import os
import resource
import runpy
import signal
import sys
import time
from typing import Any

import torch

from drafthead import cli
from drafthead.data.answers import store as answers
from drafthead.data.states.stored import StoredStates
from drafthead.eval.engines.served import free_port
from drafthead.models.decoding import corpus as batched_generation
from drafthead.train import adapt, run  # noqa: F401 # forks find it imported
from drafthead.train.tracking import tracker as tracking
from drafthead.train.trainer import checkpoint
from drafthead.train.trainer import trainer as loop

CALLS: dict[str, tuple[Any, str]] = {
    "fsync": (os, "fsync"),
    "save tensors": (checkpoint, "save_file"),
    "write state": (checkpoint, "write_checksummed_json"),
    "prune": (checkpoint, "_prune"),
    "answer": (batched_generation, "Answer"),
    "save features": (answers, "save_file"),
    "write shard": (answers.pq, "write_table"),
    "store states": (StoredStates, "write"),
    "step": (loop, "train_step"),
    "update": (adapt, "train_step"),
    "validate": (loop, "evaluate_loss"),
    "track": (tracking, "_numbers"),
}
"""Module and attribute of each function that a job can name."""

LARGEST_FILE = 3000


def arrange(event: dict[str, Any]) -> None:
    """Make ``event`` happen in this process."""
    (name, number), action = event["call"], event["do"]
    module, attribute = CALLS[name]
    original, calls = getattr(module, attribute), [0]

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if action == "full" and calls[0] >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if calls[0] == number:
            if action == "raise":
                raise ArithmeticError("this process has a fault")
            if action == "small files":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
                return original(*args, **kwargs)
            os.kill(os.getpid(), signal.Signals[action])
        return original(*args, **kwargs)

    setattr(module, attribute, watched)


def work(job: dict[str, Any], rank: int) -> None:
    """Do one process's share of the job, then exit."""
    log = os.open(job["log"] + (f".{rank}" if rank else ""), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for event in job.get("at", ()):
        if event.get("rank", 0) == rank:
            arrange(event)
    os.environ.update(job.get("environment", {}))
    code: object = 0
    try:
        if "script" in job:
            sys.argv = job["script"]
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            sys.argv = ["drafthead", *job["command"]]
            cli.main()
    except SystemExit as left:
        code = left.code
        if isinstance(code, str):
            print(code)
    except BaseException as fault:
        print(f"fault: {fault!r}")
        code = 70
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def begin(job: dict[str, Any]) -> list[int]:
    """Fork the job's processes and return their ids by rank."""
    count = job.get("processes", 1)
    if count > 1:
        os.environ.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
    else:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)
    children = []
    for rank in range(count):
        if count > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        child = os.fork()
        if not child:
            work(job, rank)
        children.append(child)
    return children


def ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def serve() -> None:
    """Answer jobs until the input ends."""
    for line in sys.stdin:
        job, started = json.loads(line), time.monotonic()
        children = begin(job)
        limit, patience = job.get("kill_after", 300.0), job.get("patience", 300.0)
        while not all(map(ended, children)) and time.monotonic() - started < limit:
            time.sleep(0.002)
            if any(map(ended, children)):
                limit = min(limit, time.monotonic() - started + patience)
                patience = 300.0
        for child in children:
            os.kill(child, signal.SIGKILL)  # nothing happens to one that has ended
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps({"codes": codes, "seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve()
