"""What an operator's tool holds: its connections, its place in the queue's lock, its name in the journal."""

import asyncio
import getpass
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from rabbitdlq import journal
from rabbitdlq.broker import Connection, PublishLink
from rabbitdlq.dead_letters.browse import Browser
from rabbitdlq.dead_letters.operation import Desk
from rabbitdlq.errors import DeadLettersInUse, ReadOnly
from rabbitdlq.journal import JournalWriter
from rabbitdlq.limits import TOPOLOGY_FORM, check_kind
from rabbitdlq.topology import Topology

__all__ = ["Session"]


class Session:
    """The connections to one dead-letter queue. Used as an async context manager."""

    def __init__(self, topology: Topology, *, url: str, who: str | None = None, read_only: bool = False) -> None:
        """``who`` is written to the journal; user and host of this process unless given.

        With ``read_only`` everything that changes something raises :class:`ReadOnly`. Raises
        :class:`ConfigurationError` for what is no topology.
        """
        check_kind("topology", topology, Topology, TOPOLOGY_FORM)
        self.topology = topology
        self._read_only = read_only
        self.who = who or f"{_user()}@{socket.gethostname()}"
        self._url = url
        self._link = PublishLink(url, f"rabbitdlq dlq {topology.name} {self.who}")
        self._writer = JournalWriter(topology, self._link)
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._one_at_a_time = asyncio.Lock()
        self._reading = False

    async def __aenter__(self) -> Self:
        await self._connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._link.close()
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                self._connection = await Connection.open(self._url, f"rabbitdlq dlq {self.topology.name} {self.who}")
            return self._connection

    @asynccontextmanager
    async def _aside(self) -> AsyncIterator[Connection]:
        """A connection that answers at once: the one on which letters are read may be paused meanwhile."""
        if not self._one_at_a_time.locked():
            yield await self._connected()
            return
        async with await Connection.open(self._url, f"rabbitdlq dlq {self.topology.name} {self.who}") as connection:
            yield connection

    @asynccontextmanager
    async def _browse(
        self, on_progress: Callable[[int, int], None] | None = None, doing: str = "looking"
    ) -> AsyncIterator[Browser]:
        for _ in range(3):  # a loop over each() that was left by break is closed in the event loop's next rounds
            await asyncio.sleep(0)
        if self._reading:  # whoever waits for his own loop to end waits for ever
            raise DeadLettersInUse(
                f"{self.topology.dlq!r} is in use: each() of this manager is still open; end or close it first"
            )
        async with (
            self._one_at_a_time,
            Browser(await self._connected(), self.topology, self.who, on_progress, doing=doing) as browser,
        ):
            yield browser

    def _check_writable(self, operation: str) -> None:
        if self._read_only:
            raise ReadOnly(f"{operation} of {self.topology.dlq!r}: refused, because this is read-only")

    async def _desk(self, connection: Connection | None = None) -> Desk:
        return Desk(self.topology, connection or await self._connected(), self._link, self._writer, self.who)

    async def _record(self, event: str, ids: list[str], count: int) -> None:
        # what was done is done: a line that is lost by now must not turn it into an error
        amqp_user = (self._connection or await self._connected()).user
        await self._writer.append(
            journal.operated(event, self.topology.name, who=self.who, amqp_user=amqp_user, ids=ids, count=count)
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"
