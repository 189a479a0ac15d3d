"""What the tests of the stores share."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from rabbitdlq.idempotency import IdempotencyStore, MemoryStore, SQLiteStore, store_of

__all__ = ["HOUR", "SHORT", "Clock", "Place", "until"]

HOUR = timedelta(hours=1)
#: a lease or a ``keep`` that is over soon, where a server's clock tells when
SHORT = timedelta(milliseconds=30)


class Clock:
    """A clock that is put forward by hand."""

    def __init__(self) -> None:
        """Begins at the time of the machine's clock, by which ``record`` goes."""
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        """The time."""
        return self.now


@dataclass
class Place:
    """Where stores of one kind keep their claims; each test has a namespace of its own."""

    url: str
    namespace: str
    clock: Clock | None = None

    def store(self, **options: Any) -> IdempotencyStore:
        """One more store there, not yet open."""
        options = {"namespace": self.namespace} | options
        if self.clock is None:
            return store_of(self.url, **options)
        if self.url == "memory:":
            return MemoryStore(clock=self.clock, **options)
        return SQLiteStore(self.url.removeprefix("sqlite:"), clock=self.clock, **options)

    @contextlib.asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[IdempotencyStore]:
        """One more store there."""
        async with self.store(**options) as store:
            yield store

    async def go_by(self, duration: timedelta) -> None:
        """Let so much time go by, by the clock of the store."""
        if self.clock is not None:
            self.clock.now += duration
        else:
            await asyncio.sleep(duration.total_seconds() + 0.01)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10) -> None:
    """Wait until the condition holds; fail where it does not in time."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "it has not come to be"
        await asyncio.sleep(0.01)
