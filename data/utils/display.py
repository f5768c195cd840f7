"""What a person sees while a run works: progress bars with an ETA for data, timed headings for stages."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LOG_WIDTH = 120
"""Columns of what is no terminal, unless ``COLUMNS`` says otherwise; rich would fold tables at 80."""


class Display:
    """Console of a run. Silent on processes other than the main one."""

    def __init__(self, enabled: bool = True) -> None:
        self.console = Console(quiet=not enabled, highlight=False)
        if not self.console.is_terminal and "COLUMNS" not in os.environ:
            self.console.width = LOG_WIDTH
        self.stages: list[tuple[str, float]] = []
        """Finished stages and their seconds."""
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}

    def line(self, text: str) -> None:
        """One plain line."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A heading before, the time it took after."""
        self.console.print(f"[bold]== {name}[/bold]")
        started = monotonic()
        try:
            yield
        finally:
            self._close_bar()
        seconds = monotonic() - started
        self.stages.append((name, seconds))
        self.line(f"   {name}: {seconds:.1f} s")

    def progress(self, what: str, done: int, total: int, after: float = 0.0) -> None:
        """Advance the bar ``what``; without a terminal a line every 10 seconds instead, the first ``after`` seconds."""
        if not self.console.is_terminal:
            self._progress_line(what, done, total, after)
            return
        if self._bar is None:
            columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn())
            times = (TextColumn("elapsed"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            self._bar = Progress(*columns, *times, console=self.console)
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total, completed=done)
        self._bar.update(self._tasks[what], completed=done, total=total)

    def _progress_line(self, what: str, done: int, total: int, after: float) -> None:
        now = monotonic()
        first, previous = self._tasks.setdefault(what, TaskID(int(now))), self._last_line.get(what)
        if now - first < after:
            return
        if previous is not None and now - previous < 10 and done < total:
            return
        if previous is None or done < total or now - previous >= 1:
            elapsed = now - first
            # Before a few percent are done the estimate would be a wild one: batches finish in waves.
            known = elapsed > 5 and 0.05 * total <= done < total
            left = f", about {elapsed / done * (total - done):.0f} s left" if known else ""
            self.line(f"   {what}: {done}/{total}{left}")
        self._last_line[what] = now

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._tasks, self._last_line = None, {}, {}


def duration(seconds: float) -> str:
    """Hours, minutes and seconds; a question mark where they cannot be told."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
