"""The command lines of vLLM's server. This module imports no heavy library."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from drafthead.engines.environment import VLLM_SIZE, environment
from drafthead.errors import UserError

IN_VLLM = Path(__file__).with_name("in_vllm")  # modules that vLLM imports
STOCK_CONNECTOR, CPU_CONNECTOR = "ExampleHiddenStatesConnector", "CpuHiddenStatesConnector"


def vllm_python(python: str | None) -> str:
    """Return the interpreter ``python`` (None: of drafthead's environment); reject one that does not exist."""
    python = python or str(environment() / "bin" / "python")
    if not Path(python).exists():
        raise UserError(f"there is no {python}; install vLLM with `drafthead engines install=vllm` ({VLLM_SIZE})")
    return python


def vllm_variables(model: str, threads: int) -> dict[str, str]:
    """Return the environment variables of a server of ``model`` on ``threads`` cores."""
    every = range(threads)
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else every
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_LOGGING_LEVEL": "WARNING"}
    if Path(model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


def states_arguments(layers: Sequence[int], folder: Path, on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and environment variables with which vLLM writes the hidden states of ``layers`` to files in
    ``folder``. Layer 0 is the embedding, i the output of layer i. On a CPU, a connector of drafthead writes them."""
    hidden = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": hidden}
    connector: dict[str, object] = {"kv_connector": CPU_CONNECTOR if on_cpu else STOCK_CONNECTOR}
    if on_cpu:
        connector["kv_connector_module_path"] = "drafthead_states"
    connector |= {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    arguments = ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(connector)]
    # A prompt whose start is cached has no states there.
    arguments += ["--no-enable-prefix-caching"]
    return arguments, {"PYTHONPATH": str(IN_VLLM), "VLLM_USE_V2_MODEL_RUNNER": "0"} if on_cpu else {}


def proposer_arguments(head: str, drafts: int, **settings: object) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and environment variables with which vLLM drafts chains of up to ``drafts`` tokens with the
    head in the folder ``head``, by drafthead's own code. ``settings``: further ones of its ``ProposerConfig``."""
    extra = {"head": head, **settings}
    method: dict[str, object] = {"method": "custom_class", "model": "drafthead_proposer.Proposer"}
    method |= {"num_speculative_tokens": drafts, "draft_load_config": {"model_loader_extra_config": extra}}
    variables = {"PYTHONPATH": str(IN_VLLM), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    return ["--speculative-config", json.dumps(method)], variables
