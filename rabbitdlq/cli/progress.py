"""Progress of long work on stderr: a bar on a terminal, a plain line every few seconds elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rabbitdlq.cli.options import err, say

__all__ = ["Reporter"]

PLAIN_EVERY_SECONDS = 5.0


class Reporter:
    """Shows how far work has come. Used as a context manager."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what = what
        self._total = total
        self._said = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=err(),
                transient=True,
            )
            self._task = self._bar.add_task(what, total=total)

    def at(self, done: int, total: int | None = None) -> None:
        """So many are done, of so many."""
        self._total = total if total is not None else self._total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total)
        elif time.monotonic() - self._said >= PLAIN_EVERY_SECONDS:
            self._said = time.monotonic()
            say(f"{self._what}: {done:,}{'' if self._total is None else f' of {self._total:,}'}")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
