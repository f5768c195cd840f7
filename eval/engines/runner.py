"""Script that starts an engine's HTTP server in an interpreter without drafthead; it imports nothing of drafthead.

``python runner.py vllm PORT ARGUMENT...`` or ``python runner.py llamacpp JSON``. It writes JSON lines to the file
descriptor in the environment variable REPORTS. ``{"version": ...}`` comes before a long start, then ``{"url": ...}`` if
the engine chose the port, or ``{"error": ...}``. When standard input closes because the parent has ended, it kills the
process group.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OLD_VLLM = (0, 10, 2)
"""The first version whose server answers with token ids."""


def say(**content: Any) -> None:
    """Report ``content`` to the parent process as one JSON line."""
    os.write(int(os.environ["REPORTS"]), (json.dumps(content) + "\n").encode())


def follow_parent() -> None:
    """Kill this process group when standard input closes."""

    def wait() -> None:
        """Read standard input until it closes, then kill the group."""
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def require(package: str) -> str:
    """Return the version of the engine's ``package`` or its CPU build, after reporting it to the parent.

    Without either, report that the package is absent and exit.
    """
    for name in (package, f"{package}-cpu"):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        say(version=installed)
        return installed
    say(error=f"absent: no {package} is installed for {sys.executable}")
    raise SystemExit(1)


def vllm(port: str, arguments: list[str]) -> None:
    """Run vLLM's OpenAI-compatible server."""
    installed = require("vllm")
    if tuple(int(number) for number in installed.split("+")[0].split(".")[:3] if number.isdigit()) < OLD_VLLM:
        say(error=f"old: vLLM {installed} answers no token ids; 0.10.2 was the first that did")
        raise SystemExit(1)
    sys.argv = ["vllm", "--host", "127.0.0.1", "--port", port, *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def llamacpp(settings: dict[str, Any]) -> None:
    """Run llama.cpp's server from the package xllamacpp."""
    installed = require("xllamacpp")
    import xllamacpp as engine

    kinds = engine.common_speculative_type
    method = settings.get("method", "")
    kind = getattr(kinds, f"COMMON_SPECULATIVE_TYPE_DRAFT_{method.upper()}", None)
    if settings.get("head") and kind is None:
        say(error=f"old: xllamacpp {installed} has no {method}; 2026.10.11549 has")
        raise SystemExit(1)
    params = engine.CommonParams()
    params.model.path = settings["base"]
    params.n_ctx, params.n_parallel = settings["context"], 1
    params.endpoint_metrics, params.warmup, params.verbosity = True, True, 0
    cache = engine.ggml_type.GGML_TYPE_F32 if settings["f32_cache"] else engine.ggml_type.GGML_TYPE_F16
    draft = params.speculative.draft
    for holder in (params, draft):
        holder.cache_type_k = holder.cache_type_v = cache
        holder.cpuparams.n_threads = holder.cpuparams_batch.n_threads = settings["threads"]
    if settings.get("head"):
        params.speculative.types = [kind]
        draft.mparams.path = settings["head"]
        draft.n_max, draft.n_min, draft.p_min = settings["drafts"], 0, 0.0
    server = engine.Server(params)
    say(url=server.listening_address)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    follow_parent()
    if sys.argv[1] == "vllm":
        vllm(sys.argv[2], sys.argv[3:])
    else:
        llamacpp(json.loads(sys.argv[2]))
