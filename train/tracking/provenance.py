"""The origin of a run: its resolved recipe, the command, the code's git state, versions and hardware."""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import drafthead
from drafthead.files.local import write_atomic, write_json
from drafthead.system.machine import hardware, versions

# Variables that change the results of a run; others may hold secrets.
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
MAX_DIFF_BYTES = 2_000_000  # a larger diff is cut, because it comes from data, not from code


def write_provenance(folder: Path, resolved_config_yaml: str) -> list[str]:
    """Write ``recipe.yaml``, ``provenance.json`` and ``git.diff``; return a warning for each that cannot be written."""
    root = Path(drafthead.__file__).resolve().parent.parent
    # A copy of the code inside another repository is not that repository's commit.
    checkout = root if (root / ".git").exists() else None
    record = {
        "command": [sys.executable, *sys.argv],
        "folder": str(Path.cwd()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {key: os.environ[key] for key in VARIABLES if key in os.environ},
        "git": _or_error(lambda: _git_state(checkout)) if checkout else None,
        "versions": _or_error(lambda: {package.name: package.version for package in distributions()} | versions()),
        "hardware": _or_error(hardware),
    }
    files: dict[str, Callable[[Path], None]] = {
        "recipe.yaml": lambda path: write_atomic(path, resolved_config_yaml),
        "provenance.json": lambda path: write_json(path, record),
        "git.diff": lambda path: _write_diff(path, checkout),
    }
    warnings = []
    for name, write in files.items():
        try:
            write(folder / name)
        except (OSError, subprocess.SubprocessError) as error:
            warnings.append(f"{folder / name} could not be written ({error}); the run continues without it")
    return warnings


def _or_error(get_value: Callable[[], Any]) -> Any:
    try:
        return get_value()
    except Exception as error:  # recording a run must not stop it
        return {"error": f"{type(error).__name__}: {error}"}


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.decode(errors="replace")


def _git_state(checkout: Path) -> dict[str, Any]:
    lines = _git(checkout, "status", "--porcelain").splitlines()
    return {
        "commit": _git(checkout, "rev-parse", "HEAD").strip(),
        "changed": [line[3:] for line in lines if not line.startswith("??")],
        "untracked": [line[3:] for line in lines if line.startswith("??")],
    }


def _write_diff(path: Path, checkout: Path | None) -> None:
    path.unlink(missing_ok=True)  # of an earlier start of this run
    diff = _git(checkout, "diff", "HEAD") if checkout else ""
    if len(diff) > MAX_DIFF_BYTES:
        diff = diff[:MAX_DIFF_BYTES] + f"\n... cut: the diff has {len(diff):,} characters\n"
    if diff:
        write_atomic(path, diff)
