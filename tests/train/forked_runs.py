"""Runs training again and again in forks of one process that has imported everything, and kills them.

Started by tests as ``python forked_runs.py``. It reads one job a line, ``{"overrides": [...], "log": path}`` with one of
these at most, and answers each with a line ``{"code": ..., "seconds": ...}``:

    "kill_after": seconds     kill -9 from outside
    "kill_at": [name, n]      kill -9 just before the n-th call (from 1) of a function that writes
    "full_at": [name, n]      that call, and all later ones, find the disk full

``python forked_runs.py once '{"overrides": ...}'`` does one job in this process. A run ends with its phases: the head
is saved as trained, nothing is evaluated.
"""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from drafthead.data import files, generations
from drafthead.data.config import say
from drafthead.data.errors import UserError
from drafthead.train import checkpoint, corpora, pipeline, signals
from drafthead.train.config import parse_run

WRITERS = {
    "fsync": (os, "fsync"),
    "save_tensors": (checkpoint, "save_file"),
    "write_state": (checkpoint, "write_sealed_json"),
    "prune": (checkpoint, "_prune"),
    "shard": (generations, "save_file"),
    "publish": (files, "publish"),
    "publish_shard": (generations, "publish"),
}
"""Functions by the name that a job gives them: where they are looked up when they are called."""


def on_call(name: str, number: int, act: Callable[[], None], again: bool = False) -> None:
    """Have ``act`` happen just before the ``number``-th call of a writer; with ``again``, before all later ones, too."""
    module, attribute = WRITERS[name]
    original, calls = getattr(module, attribute), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number or (again and calls[0] > number):
            act()
        return original(*args, **kwargs)

    setattr(module, attribute, counted)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def find_disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def finish_at_once(run: Any, head: Any, used: Any, folder: Path, *rest: Any) -> None:
    head.save_pretrained(folder / "head")


def do(job: dict[str, Any]) -> None:
    """Run the job in this process; ends it."""
    if job.get("log"):
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    if "kill_at" in job:
        on_call(*job["kill_at"], die)
    if "full_at" in job:
        on_call(*job["full_at"], find_disk_full, again=True)
    corpora.SHARD_ROWS = 4
    pipeline._finish = finish_at_once
    code = 0
    try:
        with signals.handled(say):
            with initialize_config_module("drafthead.recipes", version_base="1.3"):
                cfg = compose("train", overrides=job["overrides"])
            pipeline.run_pipeline(parse_run(cfg), OmegaConf.to_yaml(cfg, resolve=True))
    except UserError as error:
        print(f"error: {error}")
        code = 1
    except SystemExit as left:
        code = int(left.code or 0)
    sys.stdout.flush()
    os._exit(code)


def serve() -> None:
    """Answer jobs until the input ends."""
    for line in sys.stdin:
        job = json.loads(line)
        started = time.monotonic()
        child = os.fork()
        if not child:
            do(job)
        if "kill_after" in job:
            while (
                time.monotonic() - started < job["kill_after"]
                and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            ):
                time.sleep(0.002)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(
            json.dumps({"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - started}), flush=True
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["once"]:
        do(json.loads(sys.argv[2]))
    serve()
