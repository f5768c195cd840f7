"""Training every head for the same time: a probe, the steps that follow from it, and `drafthead train`."""

import argparse
import fcntl
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import Any, TextIO

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json, read_json_lines, write_json
from drafthead.train.config import PhaseConfig, RunConfig, preflight

KINDS = ("text", "generations", "joint")
"""Phases that share a part of the budget: on text, on answers, and those that train the base along."""
PROBE_STEPS, PROBE_WARM = 8, 3
"""Steps of every phase in a probe, and how many of them do not count."""
LOG_S, SAVE_S, VALIDATIONS = 30.0, 180.0, 4
"""Seconds of training between two console lines and two checkpoints; measurements on held-out answers in a run."""
NEVER = 10**9
"""Steps."""
BUDGET = "budget.json"
"""In a head's folder: the steps that were chosen for it, and what for."""


@dataclass(frozen=True)
class Entry:
    """One head of the benchmark."""

    name: str
    folder: Path
    """Its run folder."""
    run: RunConfig
    """Its recipe with this benchmark's settings, but for the steps."""
    overrides: list[str]
    """What makes ``run``, as for `drafthead train`."""

    @property
    def finished(self) -> bool:
        """Whether it is trained, with its tree chosen."""
        return (self.folder / "eval.json").exists()


def kind_of(phase: PhaseConfig) -> str:
    """Key of ``KINDS``."""
    return "joint" if phase.train_base else phase.corpus


def choose_steps(
    phases: Mapping[str, PhaseConfig], step_s: Mapping[str, float], seconds: float, shares: Sequence[int]
) -> dict[str, int]:
    """Steps per phase that take ``seconds`` in all.

    Args:
        phases: of the recipe; those of one kind divide its part as their steps in the recipe.
        step_s: seconds of a step, per phase.
        seconds: of training.
        shares: weights of ``KINDS``; a kind that no phase has takes no part.
    """
    steps_of_kind = {kind: sum(p.steps for p in phases.values() if kind_of(p) == kind) for kind in KINDS}
    weights = {kind: share for kind, share in zip(KINDS, shares, strict=True) if steps_of_kind[kind]}
    found = {}
    for name, phase in phases.items():
        kind = kind_of(phase)
        part = weights[kind] / sum(weights.values()) * phase.steps / steps_of_kind[kind]
        found[name] = max(1, round(part * seconds / step_s[name]))
    return found


def probed_step_s(rows: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> dict[str, float]:
    """Seconds of a step: medians over a probe's log without its first steps, for every phase that has all of them."""
    found = {}
    for name in phases:
        times = [row["step_ms"] / 1e3 for row in rows if row["phase"] == name and "step_ms" in row]
        if len(times) >= PROBE_STEPS:
            found[name] = median(times[PROBE_WARM:])
    return found


def budget_of(entry: Entry, arguments: argparse.Namespace, display: Display) -> dict[str, Any]:
    """``budget.json`` of a head, after a probe where there is none: "settings", "step_s" and "steps" by phase.

    Raises:
        UserError: it was made for other settings, or the probe failed.
    """
    settings = {"minutes": arguments.minutes, "shares": list(arguments.shares), "overrides": entry.overrides}
    path = entry.folder / BUDGET
    if path.exists():
        found: dict[str, Any] = read_json(path)
        for key, value in settings.items():
            if found["settings"].get(key) != value:
                raise UserError(
                    f"{entry.folder} was begun with {key} {found['settings'].get(key)}, now it is {value}; choose "
                    "another --out, or remove that folder"
                )
        return found
    step_s = _probe(entry, display)
    steps = choose_steps(entry.run.phases, step_s, 60 * arguments.minutes, arguments.shares)
    found = {"settings": settings, "step_s": step_s, "steps": steps}
    write_json(path, found)
    return found


def _probe(entry: Entry, display: Display) -> dict[str, float]:
    folder, phases = entry.folder / "probe", list(entry.run.phases)
    shutil.rmtree(folder, ignore_errors=True)  # of a probe that was killed
    steps = [f"phases.{name}.steps={PROBE_STEPS}" for name in phases]
    rare = ["log_every=1", f"validate_every={NEVER}", f"checkpoint.every_steps={NEVER}"]

    def measured() -> dict[str, float]:
        return probed_step_s(read_json_lines(folder / "metrics.jsonl"), phases)

    log = entry.folder / "probe.log"
    command = ["train", *entry.overrides, *steps, *rare, f"out={folder}"]
    drafthead(command, log, display, until=lambda: len(measured()) == len(phases))
    found = measured()
    if len(found) < len(phases):
        raise UserError(f"the probe of {entry.name} failed: {last_line(log)} ({log} has all it said)")
    shutil.rmtree(folder)
    return found


def train_all(entries: Sequence[Entry], arguments: argparse.Namespace, display: Display) -> dict[str, str]:
    """Train what is not finished; returns the heads that failed, and why.

    Raises:
        UserError: a head was begun with other settings, an input is missing, or the corpora cannot be made.
    """
    left = [entry for entry in entries if not entry.finished]
    for entry in entries:
        if (entry.folder / BUDGET).exists():
            budget_of(entry, arguments, display)
    for entry in left:
        preflight(entry.run)
    if not left:
        return {}
    log = arguments.out / "data.log"
    with display.stage("corpora"):
        if drafthead(["data", *left[0].overrides], log, display):
            raise UserError(f"the corpora could not be made: {last_line(log)} ({log} has all that was said)")
    failed: dict[str, str] = {}
    spent = []
    for number, entry in enumerate(left, start=1):
        started = monotonic()
        with display.stage(f"{entry.name}: {arguments.minutes:g} min of training, head {number} of {len(left)}"):
            try:
                _train_one(entry, budget_of(entry, arguments, display), display)
            except UserError as error:  # the others go on
                failed[entry.name] = str(error)
                display.line(f"   failed: {error}")
        spent.append(monotonic() - started)
        if number < len(left):
            eta = (len(left) - number) * fmean(spent) / 60
            display.line(f"{number} of {len(left)} heads, about {eta:.0f} min left to train the others")
    return failed


def _train_one(entry: Entry, budget: Mapping[str, Any], display: Display) -> None:
    log = entry.folder / "train.log"
    shown = ", ".join(f"{n} {steps} x {budget['step_s'][n]:.3f} s" for n, steps in budget["steps"].items())
    display.line(f"   steps: {shown}")
    code = drafthead(["train", *entry.overrides, *schedule(entry.run, budget)], log, display)
    if not entry.finished:
        raise UserError(f"training ended with {code}: {last_line(log)} ({log} has all it said)")


def schedule(run: RunConfig, budget: Mapping[str, Any]) -> list[str]:
    """The settings that follow from a budget: steps, and how often is logged, measured and saved."""
    steps: Mapping[str, int] = budget["steps"]
    typical = sum(steps[n] * budget["step_s"][n] for n in steps) / sum(steps.values())
    found = [f"phases.{name}.steps={count}" for name, count in steps.items()]
    for name, count in steps.items():
        # A warm-up over most of a phase would be another recipe.
        found.append(f"phases.{name}.optim.warmup_steps={min(run.phases[name].optim.warmup_steps, count // 4)}")
    every = {
        "log_every": LOG_S / typical,
        "checkpoint.every_steps": SAVE_S / typical,
        "validate_every": sum(steps.values()) / VALIDATIONS,
    }
    return [*found, *(f"{key}={max(1, round(value))}" for key, value in every.items())]


def drafthead(command: Sequence[str], log: Path, display: Display, until: Callable[[], bool] | None = None) -> int:
    """Run `drafthead COMMAND ...`; what it says is shown and appended to ``log``. Ends it once ``until`` holds.

    Returns:
        Its exit code.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file, (log.parent / ".lock").open("w") as lock:
        # Through a pipe: when this process is killed, the other one ends with its next line instead of training on.
        # Until then the next call waits: the lock is inherited.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, "-m", "drafthead.cli", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[lock.fileno()],
        ) as process:
            _follow(process, file, display, until)
    return process.returncode


def _follow(process: subprocess.Popen[str], file: TextIO, display: Display, until: Callable[[], bool] | None) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            file.write(line)
            file.flush()
            display.line("   " + line.rstrip())
            if until is not None and until():
                process.terminate()
                break
    except BaseException:
        process.terminate()
        raise


def last_line(log: Path) -> str:
    """What a command said last."""
    lines = deque((line.strip() for line in log.read_text().splitlines() if line.strip()), 1)
    return lines[0] if lines else "nothing was said"
