"""Where a run's numbers go: metrics.jsonl always, a console line a log step, wandb or TensorBoard when asked."""

import json
import math
import netrc
import os
import resource
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from drafthead.data.errors import UserError
from drafthead.data.files import read_json_lines, write_atomic

KINDS = ("none", "wandb", "tensorboard")
MODES = ("auto", "online", "offline", "disabled")
Row = Mapping[str, Any]


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line, appended. Numbers that are not finite become null.

    A row holds ``total_step``, the optimiser steps finished over all phases; resuming drops what lies past it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: Row) -> None:
        """Append a row; it survives a kill of this process from here on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(_finite(row), allow_nan=False) + "\n")

    def truncate(self, total_step: int) -> None:
        """Keep rows up to ``total_step``, so that a resumed run logs no step twice; a torn last line goes too.

        Raises:
            UserError: a line before the last one is not JSON.
        """
        if self.path.exists():
            kept = [row for row in self.rows() if row.get("total_step", 0) <= total_step]
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows; empty when nothing was logged.

        Raises:
            UserError: a line before the last one is not JSON.
        """
        return read_json_lines(self.path)


class ConsoleLine:
    """Renders a log row as one line in a fixed order: phase step/total, loss, accept_1.., lr, ... eta."""

    def __init__(self, phase: str, steps: int) -> None:
        """``steps`` is the length of the phase; the eta counts to its end."""
        self.phase, self.steps = phase, steps

    def render(self, row: Row) -> str:
        """The line of a row with step, loss (and PART_loss), accept_k, lr, grad_norm, tokens_per_second and step_ms.

        Memory is the row's ``memory_bytes`` when it has one, else ``peak_memory()``.
        """
        accepted = " ".join(f"{row[key]:.3f}" for key in _accept_keys(row))
        memory = row.get("memory_bytes", peak_memory())
        parts = (
            f"{self.phase} {row['step']:>{len(str(self.steps))}}/{self.steps}",
            f"loss {row['loss']:.4f}{_parts(row)}",
            f"accept {accepted}",
            f"lr {row['lr']:.2e}",
            f"grad {row['grad_norm']:.3f}",
            f"{row['tokens_per_second']:,.0f} tok/s",
            f"{row['step_ms']:.0f} ms",
            f"{memory / 2**30:.2f} GiB",
            f"eta {_duration((self.steps - row['step']) * row['step_ms'] / 1e3)}",
        )
        return "   " + "  ".join(parts)


def _parts(row: Row) -> str:
    """What a loss of several parts is made of: `` (base 0.1234, heads 2.3456)`` of base_loss and heads_loss."""
    parts = [f"{key.removesuffix('_loss')} {row[key]:.4f}" for key in row if key.endswith("_loss")]
    return f" ({', '.join(parts)})" if parts else ""


def peak_memory() -> int:
    """Bytes at the peak so far: allocated on the GPU when torch uses one, else resident in this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


@dataclass(kw_only=True)
class TrackerConfig:
    """An experiment tracker besides ``metrics.jsonl``."""

    kind: str = "none"
    """``none``, ``wandb`` or ``tensorboard`` (needs the tensorboard package)."""
    project: str = "drafthead"
    entity: str | None = None
    """wandb user or team; None is the account's default."""
    run_name: str | None = None
    """None takes the run's own name."""
    mode: str = "auto"
    """wandb's. ``auto`` obeys WANDB_MODE, else is online when a login is found and offline when none is."""

    def __post_init__(self) -> None:
        for key, allowed in (("kind", KINDS), ("mode", MODES)):
            if getattr(self, key) not in allowed:
                raise UserError(f"tracker.{key} must be one of {list(allowed)}, got {getattr(self, key)!r}")


class Tracker:
    """Feeds the tracker of a recipe. It never fails a run: the first error is one warning line, then it is silent.

    Make it on the main process only, before the first row of ``metrics.jsonl``: a folder that has rows continues
    its wandb run, another starts a new one.
    """

    def __init__(
        self, config: TrackerConfig, folder: Path, name: str, resolved: str, say: Callable[[str], None]
    ) -> None:
        """Open the tracker.

        Args:
            config: which one.
            folder: the run folder; offline data and event files go below it.
            name: of the run, unless ``config.run_name`` is set.
            resolved: the resolved recipe as YAML, kept with the run.
            say: receives lines for the user: where to look, how to sync, what went wrong.
        """
        self._config, self._say = config, say
        self._sink: _Sink | None = None
        if config.kind == "wandb":
            self._guard(lambda: self._open(_WandbSink(config, folder, config.run_name or name, resolved, say)))
        elif config.kind == "tensorboard":
            self._guard(lambda: self._open(_TensorboardSink(folder, resolved, say)))

    def log(self, row: Row, step: int) -> None:
        """Send a row's finite numbers under ``step``, the optimiser steps finished over all phases."""
        self._guard(lambda: self._sink.log(dict(_numbers(row)), step) if self._sink else None)

    def finish(self, summary: Row | None = None) -> None:
        """Add the finite numbers of ``summary`` (nested keys joined by /) and close; later calls do nothing."""
        self._guard(lambda: self._sink.finish(dict(_numbers(summary or {}))) if self._sink else None)
        self._sink = None

    def _open(self, sink: "_Sink") -> None:
        self._sink = sink

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a service that is down, full or changed must not cost a training run
            self._sink = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._say(f"warning: {self._config.kind} failed ({reason}); training goes on, metrics.jsonl has every row")


class _Sink(Protocol):
    def log(self, numbers: dict[str, float], step: int) -> None: ...

    def finish(self, summary: dict[str, float]) -> None: ...


class _WandbSink:
    def __init__(
        self, config: TrackerConfig, folder: Path, name: str, resolved: str, say: Callable[[str], None]
    ) -> None:
        import wandb  # takes seconds to import

        mode = wandb_mode(config.mode, os.environ)
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=name,
            dir=str(folder),
            id=_run_id(folder),
            resume="allow",
            mode=mode,  # type: ignore[arg-type]  # WANDB_MODE may hold anything; wandb says what it allows
            config={"recipe": resolved},
            settings=wandb.Settings(silent=True, console="off"),
        )
        if mode == "offline":
            why = " (no login found)" if config.mode == "auto" and "WANDB_MODE" not in os.environ else ""
            sync = Path(self.run.settings.sync_dir)
            say(f"wandb: offline{why}; to upload later: wandb login && wandb sync {sync}")
        elif mode == "online":
            say(f"wandb: {self.run.url}")

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.run.log(numbers, step=step)

    def finish(self, summary: dict[str, float]) -> None:
        self.run.summary.update(summary)
        self.run.finish()


class _TensorboardSink:
    def __init__(self, folder: Path, resolved: str, say: Callable[[str], None]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # needs a package that is not among our dependencies
        except ImportError:
            raise UserError("the tensorboard package is missing: pip install tensorboard") from None
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("recipe", f"```yaml\n{resolved}\n```")
        say(f"tensorboard: tensorboard --logdir {folder / 'tensorboard'}")

    def log(self, numbers: dict[str, float], step: int) -> None:
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, step)

    def finish(self, summary: dict[str, float]) -> None:
        self.log({f"summary/{key}": value for key, value in summary.items()}, 0)
        self.writer.close()


def wandb_mode(mode: str, environment: Mapping[str, str]) -> str:
    """What ``TrackerConfig.mode`` means here: never online without a login, because wandb would ask for one.

    A login is WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, or an entry for the server in the netrc file.
    """
    if mode != "auto":
        return mode
    if "WANDB_MODE" in environment:
        return environment["WANDB_MODE"]
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    path = Path(environment["NETRC"]) if "NETRC" in environment else Path.home() / ".netrc"
    try:
        known = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return "offline"
    return "online" if host in known else "offline"


def _run_id(folder: Path) -> str:
    """The folder's wandb run: the one it had when it goes on, a new one when it starts."""
    file = folder / "wandb-run-id"
    if not ((folder / "metrics.jsonl").exists() and file.exists()):
        write_atomic(file, uuid.uuid4().hex[:12])
    return file.read_text()


def _accept_keys(row: Row) -> list[str]:
    depths = sorted(int(key[7:]) for key in row if key.startswith("accept_") and key[7:].isdigit())
    return [f"accept_{k}" for k in depths]


def _numbers(row: Row, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            yield f"{prefix}{key}", value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
