"""Serve a recipe's base in vLLM, which computes hidden states for `drafthead train`.

usage: drafthead serve recipe=NAME [key=value ...]

drafthead serve recipe=eagle3_smollm2_vllm
drafthead train recipe=eagle3_smollm2_vllm data.states.url=http://127.0.0.1:8000

The settings are those of `drafthead train`. The server writes the layers that the recipe's head reads. It is started
from the environment of `drafthead engines install=vllm`, at the port of data.states.url or at 8000, and is stopped with
this command. Its command line is printed, for a machine of your own. That machine needs the same data.folder.
"""

import shlex
import time
from urllib.parse import urlsplit

import httpx2
import torch
from omegaconf import DictConfig

from drafthead.engines.process import EngineError, EngineProcess
from drafthead.engines.vllm import states_arguments, vllm_python, vllm_variables
from drafthead.errors import UserError
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats.format import cpu_memory, dtype_name
from drafthead.settings.compose import run_recipe
from drafthead.system.display import Display
from drafthead.train.config import RunConfig, parse_run
from drafthead.train.corpora.served_states import served_layers

PORT, START_S = 8000, 1800.0


def _main(cfg: DictConfig) -> None:
    run, display = parse_run(cfg), Display()
    parts = BaseParts.of_checkpoint(run.base, progress=display.line)
    config = run.head_config()
    spec = config.build(parts, torch.arange(config.drafted_ids(parts.vocab_size)), start=False).spec
    layers = served_layers(spec.layers, parts.num_layers)
    folder = run.data.served_folder.resolve()
    on_cpu = not torch.accelerator.is_available()
    port = urlsplit(run.data.states.url or "").port or PORT
    model = parts.config.folder()
    arguments = ["--model", str(model), "--dtype", dtype_name(parts), "--seed", "0"]
    arguments += ["--served-model-name", parts.name, *(["--enforce-eager", *cpu_memory(parts)] if on_cpu else [])]
    of_states, variables = states_arguments(layers, folder, on_cpu)
    arguments += of_states
    display.line(f"hidden states of the layers {', '.join(map(str, layers))}, written to {folder}. The command:")
    words = [f"{key}={value}" for key, value in variables.items()]
    words += ["python", "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), *arguments]
    display.line(f"   {shlex.join(words)}")
    python = vllm_python(None)
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.safetensors*"):
        file.unlink()  # of requests that nobody waits for any more
    variables |= vllm_variables(str(model), torch.get_num_threads())
    process = EngineProcess("vLLM", python, ["vllm", str(port), *arguments], variables)
    try:
        process.wait_until(lambda: _is_ready(port), START_S)
        url = f"http://127.0.0.1:{port}"
        display.line(f"ready at {url}: set data.states.url={url}")
        display.line("   Ctrl-C stops it")
        while True:
            process.check()
            time.sleep(1)
    except EngineError as error:
        raise UserError(str(error)) from None
    finally:
        process.close()


def _is_ready(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/health", timeout=2).is_success
    except httpx2.HTTPError:
        return False


def main() -> None:
    run_recipe(_main, RunConfig, __doc__)


if __name__ == "__main__":
    main()
