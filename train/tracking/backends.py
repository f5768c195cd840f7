"""What the experiment trackers are told, and how: wandb by itself, TensorBoard and others through accelerate."""

import netrc
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_sealed_json, write_sealed_json
from drafthead.eval.report.tables import METHOD_COLUMNS, TASK_COLUMNS, method_rows, task_rows

Say = Callable[[str], None]
START_PATIENCE = 60
"""Seconds that the start of a run waits for wandb's server."""
PATIENCE = 600
"""Seconds that the end of a run waits for wandb to upload what is left."""
REPLACED = "replaced"
"""Folder below ``wandb`` for the parts of a run that a later part holds as well; ``wandb sync`` does not look there."""


class TrackerBackend(Protocol):
    """One tracker that is open."""

    def lacks(self, step: int) -> bool:
        """Whether a row of ``step`` that an earlier process logged has to be sent again."""

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Send a row under ``step``, the optimiser steps finished over all phases."""

    def finish(self, numbers: dict[str, float], evaluation: Mapping[str, Any] | None, folder: Path) -> None:
        """Send what the run came to, and close.

        Args:
            numbers: of the evaluation, nested keys joined by /.
            evaluation: the contents of ``eval.json``; None when there was none.
            folder: the run folder.
        """


class WandbBackend:
    """A wandb run: settings as they are nested, curves per phase, tables, the report and the files behind them.

    A run that goes on sends all its rows again, as far as the server lacks them: what a killed process leaves offline
    has lost its end (all of it, where that was short), reaches beyond the checkpoint, and ``wandb sync`` stops at it.
    So the newest part is the whole run, and the earlier ones are set aside.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        settings: Mapping[str, Any],
        say: Say,
        *,
        project: str,
        entity: str | None,
        mode: str,
    ) -> None:
        import wandb  # takes seconds to import

        self.wandb, self.say, self.folder = wandb, say, folder
        self._options: dict[str, Any] = {"project": project, "entity": entity, "name": name, "config": dict(settings)}
        folder.mkdir(parents=True, exist_ok=True)
        # Where artefacts wait for an upload: below the home folder by default, which is not there when a run's folder
        # is synced from another machine.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder.resolve() / "wandb"))
        chosen = wandb_mode(mode, os.environ)
        why = " (no login found)" if mode == "auto" and "WANDB_MODE" not in os.environ else ""
        try:
            self.run = self._start(chosen)
        except Exception as error:  # no network, a wrong key, a server that is down
            if chosen != "online":
                raise
            wandb.teardown()  # which still holds the run's id
            self.run = self._start("offline")
            chosen, why = "offline", f" ({str(error).splitlines()[0]})"
        if chosen == "offline":
            say(f"wandb: offline{why}; to upload later: wandb login && wandb sync {self._part()}")
        elif chosen == "online":
            say(f"wandb: {self.run.url}")
        for phase in settings.get("phases", {}):
            self.run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def _start(self, mode: str) -> Any:
        number = _run_id(self.folder, offline=mode == "offline")
        _set_aside(self.folder, number)
        return self.wandb.init(
            **self._options,
            dir=str(self.folder),
            id=number,
            resume="allow",
            mode=mode,  # type: ignore[arg-type]  # WANDB_MODE may hold anything; wandb says what it allows
            settings=self.wandb.Settings(
                silent=True,
                console="off",
                init_timeout=START_PATIENCE,
                finish_timeout=PATIENCE,
                finish_timeout_raises=True,
            ),
        )

    def _part(self) -> Path:
        """The folder of what this process writes, which ``wandb sync`` takes."""
        return self.folder / "wandb" / Path(self.run.settings.sync_dir).name

    def lacks(self, step: int) -> bool:
        return bool(step >= self.run.starting_step)  # 0 but where a run goes on online

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.run.log(numbers, step=step)

    def finish(self, numbers: dict[str, float], evaluation: Mapping[str, Any] | None, folder: Path) -> None:
        self.run.summary.update(numbers)
        if evaluation is not None:
            self.run.log(self._tables(dict(evaluation)) | self._report(folder))
            found = self.wandb.Artifact(f"evaluation-{self.run.id}", type="evaluation")
            for path in _results(folder):
                found.add_file(str(path), name=str(path.relative_to(folder)))
            self.run.log_artifact(found)
        try:
            self.run.finish()
        except TimeoutError:
            self.say(
                f"warning: wandb did not take everything within {PATIENCE} s; to send the rest later: wandb sync "
                f"--include-online {self._part()}"
            )

    def _tables(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        kinds = (("tasks", TASK_COLUMNS, task_rows), ("methods", METHOD_COLUMNS, method_rows))
        return {
            f"evaluation/{name}": self.wandb.Table(columns=list(columns), data=[list(row) for row in rows(evaluation)])
            for name, columns, rows in kinds
        }

    def _report(self, folder: Path) -> dict[str, Any]:
        page = folder / "report.html"
        return {"report": self.wandb.Html(page.read_text(), inject=False)} if page.exists() else {}


class AccelerateBackend:
    """Any tracker that accelerate knows: settings, and every number as a curve."""

    def __init__(
        self, folder: Path, name: str, settings: Mapping[str, Any], say: Say, *, kind: str, project: str
    ) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        made = LOGGER_TYPE_TO_CLASS[kind]
        # What accelerate calls run_name is a folder below the logging folder for some, the project for the others.
        place = (kind, folder) if made.requires_logging_directory else (project,)
        self.step = 0
        try:
            self.tracker = made(*place)
            self.tracker.start()
        except ImportError as error:
            raise UserError(f"the {kind} package is missing ({error}): pip install {kind}") from None
        self.tracker.store_init_configuration({"name": name, **_flat(settings)})
        if kind == "tensorboard":
            say(f"tensorboard: tensorboard --logdir {folder / kind}")

    def lacks(self, step: int) -> bool:
        return False  # it was told, and keeps what it is told

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.step = step
        self.tracker.log(numbers, step=step)

    def finish(self, numbers: dict[str, float], evaluation: Mapping[str, Any] | None, folder: Path) -> None:
        if numbers:
            self.tracker.log({f"evaluation/{key}": value for key, value in numbers.items()}, step=self.step)
        self.tracker.finish()


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


def _run_id(folder: Path, offline: bool) -> str:
    """The folder's wandb run: the one it had when it goes on, a new one when it starts.

    What goes on offline holds all rows, and the server would add them to those that it has: then it is a new run, too.

    Raises:
        UserError: the one it had cannot be read.
    """
    file = folder / "wandb-run-id"
    if (folder / "metrics.jsonl").exists() and file.exists():
        number = str(read_sealed_json(file))
        if not (offline and any(_was_sent(part) for part in _parts(folder, number, "", REPLACED))):
            return number
    write_sealed_json(file, uuid.uuid4().hex[:12])
    return str(read_sealed_json(file))


def _parts(folder: Path, number: str, *places: str) -> list[Path]:
    """The folders that wandb made for a run, one a process."""
    return [path for place in places for path in sorted((folder / "wandb" / place).glob(f"*run-*-{number}"))]


def _was_sent(part: Path) -> bool:
    """Whether the server has rows of it: it was written online, or synced."""
    return "offline-" not in part.name or any(part.glob("*.wandb.synced"))


def _set_aside(folder: Path, number: str) -> None:
    """Move what earlier processes of the run wrote out of the sight of ``wandb sync``."""
    for part in _parts(folder, number, ""):
        place = folder / "wandb" / REPLACED
        place.mkdir(exist_ok=True)
        part.rename(place / f"{len(list(place.iterdir()))}-{part.name}")


def _results(folder: Path) -> list[Path]:
    """The files of a finished run that say what it came to."""
    names = ("eval.json", "report.html", "recipe.yaml", "provenance.json", "metrics.jsonl")
    return [path for name in names if (path := folder / name).exists()] + sorted((folder / "plots").glob("*.png"))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested settings as dotted keys and plain values, which is all that most trackers take."""
    found: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return found
