"""Console output of a run: progress bars with the remaining time, and headings of stages with their duration."""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from rich import progress as bars
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from drafthead.errors import visible

LOG_WIDTH = 120  # columns of output to files, unless `COLUMNS` is set; rich would fold tables at 80


class PlainConsole(Console):
    """A console that prints texts as they are, without markup, and makes control characters in them visible."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, keep="\n\t"))


class Display:
    """The console of a run. It prints only if ``enabled``, which is False in all processes but the main one."""

    def __init__(self, enabled: bool = True) -> None:
        self.console = PlainConsole(quiet=not enabled)
        if not self.console.is_terminal and "COLUMNS" not in os.environ:
            self.console.width = LOG_WIDTH
        self.stages: list[tuple[str, float]] = []  # finished ones, and their seconds
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}

    def line(self, text: str) -> None:
        self.console.print(visible(text), soft_wrap=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.console.print(f"== {visible(name)}", style="bold")
        started = monotonic()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.stop()
            self._bar, self._tasks, self._last_line = None, {}, {}
        seconds = monotonic() - started
        self.stages.append((name, seconds))
        self.line(f"   {name}: {seconds:.1f} s")

    def progress(self, label: str, done: int, total: int, after: float = 0.0) -> None:
        """Show ``done`` of ``total`` in the bar ``label``; without a terminal, every 10 s after ``after`` seconds."""
        if self.console.is_terminal:
            if self._bar is None:
                columns = (TextColumn("   {task.description}", markup=False), BarColumn(), MofNCompleteColumn())
                times = (TextColumn("elapsed"), TimeElapsedColumn(), TextColumn("left"), bars.TimeRemainingColumn())
                self._bar = Progress(*columns, *times, console=self.console)
                self._bar.start()
            if label not in self._tasks:
                self._tasks[label] = self._bar.add_task(label, total=total, completed=done)
            self._bar.update(self._tasks[label], completed=done, total=total)
            return
        now = monotonic()
        first, previous = self._tasks.setdefault(label, TaskID(int(now))), self._last_line.get(label)
        if now - first < after or (previous is not None and now - previous < 10 and done < total):
            return
        if previous is None or done < total or now - previous >= 1:
            elapsed = now - first
            # Batches finish in waves, so the first few percent allow no estimate.
            known = elapsed > 5 and 0.05 * total <= done < total
            left = f", about {elapsed / done * (total - done):.0f} s left" if known else ""
            self.line(f"   {label}: {done}/{total}{left}")
        self._last_line[label] = now


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds as h:mm:ss or m:ss; "?" if ``seconds`` is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
