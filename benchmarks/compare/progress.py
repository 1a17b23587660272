"""How far a comparison is and how long it will take: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any


class Shown:
    """A block in which progress is shown.

    Args:
        out: where files go, told at the beginning.
    """

    def __init__(self, out: Path) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = Console(width=None if sys.stdout.isatty() else 180)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self._tasks: dict[str, Any] = {}
        self._out = out

    def __enter__(self) -> Shown:
        self._say(f"files: {self._out}")
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int, seconds_left: float | None) -> None:
        """A launch has ended."""
        left = "" if seconds_left is None else f"about {duration(seconds_left)} left in this stage"
        stage = what.partition(" ")[0]
        if self._bar.disable:
            if done == 1 or done % 10 == 0 or done == total:
                self._say(f"{stage}: {done} of {total} launches, {left}")
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(what, total=total, left=left)
        self._bar.update(self._tasks[stage], description=what, completed=done, total=total, left=left)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def duration(seconds: float) -> str:
    """Seconds for a person: 40 s, 3 min."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
