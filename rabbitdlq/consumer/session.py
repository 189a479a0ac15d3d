"""One connection's worth of consuming: from connect to loss, cancel or stop."""

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import structlog

from rabbitdlq.broker import Channel, Connection, ConsumingChannel, Delivery, count_messages, ensure_topology
from rabbitdlq.errors import BrokerError
from rabbitdlq.journal import HistoryIndex, JournalReader, JournalWriter
from rabbitdlq.topology import Topology, Version

__all__ = ["Session"]

log = structlog.stdlib.get_logger(__name__)

#: how far before one lap the journal is read at start; for messages that waited longer it is read back when needed
JOURNAL_MARGIN = timedelta(minutes=1)
CATCH_UP_TIMEOUT = timedelta(seconds=30)


class Session:
    """A connection that consumes the work queue and tails the journal. Ends once, with a reason."""

    def __init__(
        self,
        topology: Topology,
        url: str,
        writer: JournalWriter,
        index: HistoryIndex,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        name: str,
        on_ready: "Callable[[Session], None]",
    ) -> None:
        """``prefetch``: what is consumed with from the start, 0 for not at all."""
        self._topology = topology
        self._url = url
        self._on_delivery = on_delivery
        self._prefetch = prefetch
        self._name = name
        self._on_ready = on_ready
        self.version: Version = ()
        self.vhost = ""
        self.reader = JournalReader(topology, writer, index.add, skip_own=True)
        self._connection: Connection | None = None
        self._channel: ConsumingChannel | None = None
        self._look: Channel | None = None
        self._taking = 0
        self._changing: asyncio.Future[None] | None = None
        self._repairing = asyncio.Lock()
        self._closing = False
        #: set when the session is over; :attr:`reason` says why
        self.ended = asyncio.Event()
        self.reason = ""
        #: the broker may have sent the first delivery
        self.began = False

    async def open(self) -> None:
        """Connect, see to the topology, read the journal to its end, and only then take work.

        Raises :class:`BrokerError` where any of it cannot be done; then nothing is left open.
        """
        try:
            self._connection = await Connection.open(self._url, self._name)
            await ensure_topology(self._connection, self._topology)
            await self._catch_up(self._connection)
            self.version, self.vhost = self._connection.version, self._connection.vhost
            self._on_ready(self)
            if self._prefetch:
                self.began = True
                await self._take(self._prefetch)
        except BaseException:
            await self.close()
            raise

    async def _catch_up(self, connection: Connection) -> None:
        since = datetime.now(UTC) - self._topology.lap - JOURNAL_MARGIN
        try:
            await self.reader.start(connection, since, lambda: self.end("the journal's reading ended"))
            await self.reader.sync(CATCH_UP_TIMEOUT)
        except BrokerError as error:
            # working without histories beats not working
            log.warning("journal_unreadable", queue=self._topology.name, error=str(error))

    def end(self, reason: str) -> None:
        """It cannot go on; the first reason counts."""
        if not self._closing and not self.ended.is_set():
            self.reason = reason
            self.ended.set()

    async def take(self, prefetch: int) -> None:
        """Consume with that prefetch from now on, with 0 not at all; what came before can still be settled.

        Raises :class:`BrokerError`. When the caller is cancelled the change is made all the same: a request that is
        given up closes the channel, and a consumer whose name we did not wait for could never be cancelled.
        """
        if self._changing is not None:
            with contextlib.suppress(BrokerError):
                await asyncio.shield(self._changing)
        if prefetch != self._taking:
            self._changing = asyncio.ensure_future(self._take(prefetch))
            await asyncio.shield(self._changing)

    async def stop_taking(self) -> None:
        """Tell the broker to send no more; what came before can still be settled."""
        await self.take(0)

    async def _take(self, prefetch: int) -> None:
        self._taking = 0
        if self._channel is not None:
            await self._channel.cancel()
        if prefetch and self._connection is not None:
            if self._channel is None:
                self._channel = await ConsumingChannel.consume(
                    self._connection, self._topology.name, self._on_delivery, self.end, prefetch=prefetch
                )
            else:
                await self._channel.consume_more(self._topology.name, prefetch=prefetch)
            self._taking = prefetch

    async def repair(self) -> None:
        """Declare what is missing of the topology. Raises :class:`BrokerError` where that cannot be done."""
        if self._connection is not None:
            async with self._repairing:
                await ensure_topology(self._connection, self._topology)

    async def idle_in_broker(self) -> bool:
        """Whether nothing waits in the work queue and on the ladder."""
        if self._connection is None:
            return False
        if self._look is None or self._look.is_closed:
            self._look = await self._connection.channel()
        for queue in (self._topology.name, *(rung.queue for rung in self._topology.rungs)):
            if await count_messages(self._look, queue):
                return False
        return True

    async def close(self) -> None:
        """Close channel and connection; what is still unsettled goes back to the work queue."""
        self._closing = True
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.gather(self._changing, return_exceptions=True)
        await self.reader.close()
        if self._channel is not None:
            await self._channel.close()
        if self._connection is not None:
            await self._connection.close()
