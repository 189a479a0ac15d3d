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
    """Shows how far work has come, how fast it goes and how long it will take. Used as a context manager."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what = what
        self._total = total
        self._began = self._said = time.monotonic()
        self._done = 0
        #: those that were done before it began, by a run that is gone on with
        self._first: int | None = None
        self._waited_from: float | None = None
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=err(),
                transient=True,
            )
            self._task = self._bar.add_task(what, total=total, rate="")

    def at(self, done: int, total: int | None = None) -> None:
        """So many are done, of so many."""
        now = time.monotonic()
        if self._first is None or done <= self._first:
            self._first, self._began = done, now  # what came before says nothing of their speed
        self._done = done
        self._total = total if total is not None else self._total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, rate=f"{self._rate(now):,.0f}/s")
        elif now - self._said >= PLAIN_EVERY_SECONDS:
            self._said = now
            say(self._line(now))

    def waiting(self, waits: bool) -> None:
        """Nothing is being done but waiting for what others do."""
        if waits != (self._waited_from is not None):
            now = time.monotonic()
            if self._waited_from is not None:
                self._began += now - self._waited_from
            self._waited_from = now if waits else None
            what = f"{self._what}, waiting for what becomes of them" if waits else self._what
            if self._bar is not None:
                self._bar.update(self._task, description=what)
            elif waits:
                say(f"{what}: {self._done:,} so far")

    def _rate(self, now: float) -> float:
        return (self._done - (self._first or 0)) / max(now - self._began, 0.001)

    def _line(self, now: float) -> str:
        """``replaying orders: 1,200 of 20,000, 240/s, 78 s left``."""
        line = f"{self._what}: {self._done:,}"
        if self._total is None:
            return line
        rate = self._rate(now)
        left = f", {(self._total - self._done) / rate:,.0f} s left" if rate else ""
        return f"{line} of {self._total:,}, {rate:,.0f}/s{left}"

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
