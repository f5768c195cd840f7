"""The experiment tracker of a run: wandb or TensorBoard, through accelerate."""

import math
import netrc
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from accelerate import Accelerator

from drafthead.errors import UserError, one_line
from drafthead.eval.report.tables import method_table, task_table
from drafthead.files.local import read_checksummed_json, write_checksummed_json
from drafthead.settings.schema import flatten, settings

Row = Mapping[str, Any]
# Files of a finished run that wandb stores as an artifact.
RESULT_FILES = ("eval.json", "report.html", "recipe.yaml", "provenance.json", "metrics.jsonl", "plots/*.png")
# Seconds for wandb's server to start, and for uploads at the end.
WANDB_TIMEOUTS: dict[str, Any] = {"init_timeout": 60, "finish_timeout": 600, "finish_timeout_raises": True}


@settings(kw_only=True)
class TrackerConfig:
    """Settings of the experiment tracker."""

    kind: Literal["none", "wandb", "tensorboard"] = "none"
    """Experiment tracker to which metrics are sent, in addition to ``metrics.jsonl``. Its package must be installed."""
    project: str = "drafthead"
    """Project of the tracker."""
    entity: str | None = None
    """User or team on wandb. With null, the account's default."""
    run_name: str | None = None
    """Name of the run in the tracker. With null, the run's own name."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Mode of wandb. ``auto`` obeys WANDB_MODE; without it, wandb is online if a login is found and offline
    otherwise."""


class Tracker:
    """The experiment tracker of a run. Its errors never end the run: after the first, it warns and sends no more.
    Create it on the main process only, before the first row of ``metrics.jsonl`` is written: with rows, the folder's
    wandb run is resumed."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrackerConfig,
        folder: Path,
        name: str,
        settings: Row,
        log: Callable[[str], None],
    ) -> None:
        """Start tracking. ``accelerator`` has ``log_with=config.kind`` and the run folder as ``project_dir``."""
        self.accelerator, self.config, self.folder, self._log = accelerator, config, folder, log
        self._step = 0
        self._wandb_run: Any = None
        self._active = config.kind != "none"
        self._attempt(lambda: self._open(config.run_name or name, settings))

    def log(self, row: Row, step: int) -> None:
        """Send the finite numbers of a row of ``metrics.jsonl`` as ``PHASE/KEY``. ``step`` counts over all phases."""
        self._step = step
        self._attempt(lambda: self.accelerator.log(_numbers(row, f"{row['phase']}/"), step=step))

    def replay(self, rows: Iterable[Row]) -> None:
        """Send the rows of ``metrics.jsonl`` that a resumed wandb run lacks. If wandb is offline, all rows are sent, so
        that its newest folder holds the whole run. TensorBoard's files hold all."""
        if self._wandb_run is not None:
            for row in rows:
                if row["total_step"] >= self._wandb_run.starting_step:
                    self.log(row, row["total_step"])

    def finish(self, evaluation: Row | None = None, failed: bool = False) -> None:
        """Send the contents of ``eval.json`` (to wandb also tables and files), and close the tracker."""
        self._attempt(lambda: self._finish(evaluation, failed))
        self._active = False

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call ``action`` unless an earlier one has failed; turn an error into a warning."""
        if self._active:
            try:
                action()
            except Exception as error:  # a service that is down, full or changed must not end a training run
                self._active = False
                failure = f"{self.config.kind} failed ({one_line(error)})"
                self._log(f"warning: {failure}; training continues, metrics.jsonl has every row")

    def _finish(self, evaluation: Row | None, failed: bool) -> None:
        if evaluation is not None:
            self.accelerator.log(_numbers(evaluation, "evaluation/"), step=self._step)
        if evaluation is not None and self._wandb_run is not None:
            import wandb

            results: dict[str, Any] = {
                f"evaluation/by_{table.columns[0]}": wandb.Table(columns=list(table.columns), data=list(table.rows))
                for table in (task_table(dict(evaluation)), method_table(dict(evaluation)))
            }
            html = self.folder / "report.html"
            if html.exists():
                results["report"] = wandb.Html(html.read_text(), inject=False)
            self._wandb_run.log(results, step=self._step)
            artifact = wandb.Artifact(f"evaluation-{self._wandb_run.id}", type="evaluation")
            for path in (path for pattern in RESULT_FILES for path in sorted(self.folder.glob(pattern))):
                artifact.add_file(str(path), name=str(path.relative_to(self.folder)))
            self._wandb_run.log_artifact(artifact)
        if failed and self._wandb_run is not None:
            self._wandb_run.finish(exit_code=1)
        # end_training() would also destroy the process group, which heartbeats still use.
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _open(self, name: str, settings: Row) -> None:
        kind = self.config.kind
        if not self.accelerator.log_with:  # accelerate drops trackers that are not installed
            raise UserError(f"the {kind} package is missing: pip install {kind}")
        if kind == "tensorboard":
            # TensorBoard takes plain values only.
            flat = {key: value for key, value in flatten(settings).items() if value not in (None, {})}
            plain = {key: v if isinstance(v, (bool, int, float, str)) else str(v) for key, v in flat.items()}
            self.accelerator.init_trackers(kind, {"name": name, **plain})  # the tracker's name becomes its folder
            self._log(f"tensorboard: tensorboard --logdir {self.folder / kind}")
            return
        import wandb  # takes seconds to import

        self.folder.mkdir(parents=True, exist_ok=True)
        # Artifacts wait here for their upload. By default they wait in the home folder, and a copied run lacks them.
        os.environ.setdefault("WANDB_DATA_DIR", str(self.folder.resolve() / "wandb"))
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # else wandb advertises Weave if openai is imported
        mode = wandb_mode(self.config.mode, os.environ)
        reason = " (no login found)" if self.config.mode == "auto" and "WANDB_MODE" not in os.environ else ""
        options = {
            "entity": self.config.entity,
            "name": name,
            "dir": str(self.folder),
            "id": wandb_run_id(self.folder),
            "resume": "allow",
            "settings": wandb.Settings(silent=True, console="off", **WANDB_TIMEOUTS),
        }

        def start(mode: str) -> None:
            self.accelerator.init_trackers(self.config.project, dict(settings), {"wandb": options | {"mode": mode}})

        try:
            start(mode)
        except Exception as error:  # no network, a wrong key, a server that is down
            if mode != "online":
                raise
            wandb.teardown()  # otherwise wandb keeps the run's id in use
            self.accelerator.trackers.clear()
            mode, reason = "offline", f" ({one_line(error)})"
            start(mode)
        run = self._wandb_run = self.accelerator.get_tracker("wandb", unwrap=True)
        self._step = run.starting_step  # wandb drops smaller steps, and a resumed run may have no row left to send
        if mode == "offline":
            self._log(f"wandb: offline{reason}; to upload later: wandb login && wandb sync {run.settings.sync_dir}")
        elif mode == "online":
            self._log(f"wandb: {run.url}")
        for phase in settings.get("phases", {}):
            run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")


def wandb_mode(mode: str, environment: Mapping[str, str]) -> str:
    """Return the mode in which wandb starts. Without a login, ``auto`` is offline, so that wandb does not ask for one.
    A login is WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, or an entry for the server in the netrc file."""
    if mode != "auto":
        return mode
    if "WANDB_MODE" in environment:
        return environment["WANDB_MODE"]
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    try:
        hosts = netrc.netrc(environment.get("NETRC") or Path.home() / ".netrc").hosts
    except (OSError, netrc.NetrcParseError):
        return "offline"
    return "online" if host in hosts else "offline"


def wandb_run_id(folder: Path) -> str:
    """Return the id of the run's wandb run: the id saved in ``folder`` if ``metrics.jsonl`` exists, else a new one."""
    file = folder / "wandb-run-id"
    if not ((folder / "metrics.jsonl").exists() and file.exists()):
        write_checksummed_json(file, uuid.uuid4().hex[:12])
    return str(read_checksummed_json(file))


def _numbers(row: Row, prefix: str) -> dict[str, float]:
    flat = flatten(row, "/").items()
    return {f"{prefix}{key}": v for key, v in flat if isinstance(v, (int, float)) and math.isfinite(v)}
