"""Script that starts an engine's HTTP server in an interpreter without drafthead; it imports nothing of drafthead.
``python runner.py vllm PORT ARGUMENT...`` or ``python runner.py llamacpp JSON``. When standard input closes because the
parent has ended, the process group is killed."""

import json
import os
import runpy
import signal
import sys
import threading
import time
from importlib.metadata import version
from typing import Any


def follow_parent() -> None:
    """Start a thread that kills this process group when standard input closes."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def vllm(port: str, arguments: list[str]) -> None:
    sys.argv = ["vllm", "--host", "127.0.0.1", "--port", port, *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def llamacpp(settings: dict[str, Any]) -> None:
    """Run llama.cpp's server from the package xllamacpp. "f32_cache" of ``settings`` keeps keys and values in float32.
    To draft, it also has "head" (a GGUF file) and "method", llama.cpp's name of the head's type."""
    import xllamacpp as engine

    kinds = engine.common_speculative_type
    method = settings.get("method", "")
    kind = getattr(kinds, f"COMMON_SPECULATIVE_TYPE_DRAFT_{method.upper()}", None)
    if settings.get("head") and kind is None:
        raise SystemExit(f"error: xllamacpp {version('xllamacpp')} has no {method}; 2026.10.11549 has")
    params = engine.CommonParams()
    params.model.path, params.port = settings["base"], settings["port"]
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
    while server:
        time.sleep(3600)


if __name__ == "__main__":
    follow_parent()
    if sys.argv[1] == "vllm":
        vllm(sys.argv[2], sys.argv[3:])
    else:
        llamacpp(json.loads(sys.argv[2]))
