"""Reading the journal: from a point in time to its end as of now, and on."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from rabbitdlq import names
from rabbitdlq.broker import Channel, Connection, ConsumingChannel, Delivery, close_channel, new_id, translated
from rabbitdlq.broker.connection import CONNECT_TIMEOUT
from rabbitdlq.errors import BrokerError, BrokerUnavailable, PublishUnconfirmed
from rabbitdlq.journal.events import JournalEvent, marker
from rabbitdlq.journal.writer import JournalWriter
from rabbitdlq.topology import Topology

__all__ = ["JournalReader", "read_journal"]

log = structlog.stdlib.get_logger(__name__)

#: a stream gives as many unacknowledged events as this, and needs a limit
#: (https://www.rabbitmq.com/docs/streams#consuming)
PREFETCH = 1_000
ACK_EVERY = 250


class JournalReader:
    """A consumer of the journal that hands each event to ``on_event``, in the journal's order.

    A stream is read from ``since``; a live journal has no past, so only what is written from now on is seen.
    """

    def __init__(
        self,
        topology: Topology,
        writer: JournalWriter,
        on_event: Callable[[JournalEvent], None],
        *,
        skip_own: bool = False,
    ) -> None:
        """``skip_own``: what ``writer`` wrote is known to whoever listens, and is not decoded."""
        self._skipped = writer.source.encode() if skip_own else None
        self._topology = topology
        self._writer = writer
        self._on_event = on_event
        self._channel: ConsumingChannel | None = None
        self._connection: Connection | None = None
        self._since: datetime | None = None
        self._reading_back = asyncio.Lock()
        #: markers that were written; True once they have been read, False when they never will be
        self._awaited: dict[str, asyncio.Future[bool]] = {}
        self._unacked = 0
        #: between a successful start and the end, whoever ends it
        self._reading = False
        #: messages of events seen so far
        self.seen = 0

    async def start(self, connection: Connection, since: datetime | None, on_lost: Callable[[], None]) -> None:
        """Begin to read; ``on_lost`` is called when the reading ends by itself (leader moved, stream or line gone).

        Raises :class:`EntityNotFound` where there is no journal, :class:`AccessDenied` without the permission.
        """
        self._connection, self._since = connection, since

        def ended(_: str) -> None:
            if self._reading:
                self._reading = False
                for future in self._awaited.values():
                    _tell(future, False)
                on_lost()

        channel = await connection.channel()
        try:
            with translated(f"reading the journal {self._topology.journal_queue!r}"):
                async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                    queue, arguments = await self._source(channel, since)
        except BaseException:
            await close_channel(channel)
            raise
        self._channel = await ConsumingChannel.consume(
            connection, queue, self._take, ended, prefetch=PREFETCH, arguments=arguments, channel=channel
        )
        self._reading = True

    async def _source(self, channel: Channel, since: datetime | None) -> tuple[str, dict[str, Any]]:
        if self._topology.journal == "stream":
            return self._topology.journal_queue, {"x-stream-offset": since if since else "first"}
        declared = await channel.queue_declare("", exclusive=True, auto_delete=True)
        queue = str(declared.queue)
        await channel.queue_bind(queue, self._topology.journal_exchange, routing_key="#")
        return queue, {}

    def _take(self, delivery: Delivery) -> None:
        self.seen += 1
        if self._skipped is None or not delivery.mentions(self._skipped):
            for event in JournalEvent.decode_all(delivery.body):
                self._on_event(event)
                if event.event == names.MARKER and event.marker in self._awaited:
                    _tell(self._awaited[event.marker], True)
        self._unacked += 1
        if self._unacked >= ACK_EVERY:
            self._unacked = 0
            delivery.channel.settle_up_to(delivery.tag)

    async def sync(self, timeout: timedelta) -> None:
        """Return when every event that was in the journal at the call has been handed out.

        A marker of our own is written and waited for. Raises :class:`BrokerError` where it cannot be written or is not
        seen in time.
        """
        if not self._reading:
            raise BrokerUnavailable(f"journal {self._topology.journal_queue!r}: it is not being read")
        word = new_id()
        future = self._awaited[word] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await self._writer.publish(marker(self._topology.name, word))
                read = await future
        except TimeoutError as error:
            raise BrokerUnavailable(
                f"journal {self._topology.journal_queue!r}: not read to its end within {timeout.total_seconds():g} s"
            ) from error
        finally:
            del self._awaited[word]
        if not read:
            raise BrokerUnavailable(f"journal {self._topology.journal_queue!r}: the reading ended before its end")

    async def read_back(self, since: datetime, timeout: timedelta) -> None:
        """Hand out what was written from ``since`` on, unless the reading began before; known events come again.

        Raises :class:`BrokerError` where it cannot be read to its end in time.
        """
        what = f"journal {self._topology.journal_queue!r}: not read back within {timeout.total_seconds():g} s"
        try:
            async with asyncio.timeout(timeout.total_seconds()), self._reading_back:
                await self._read_back(since, timeout * 2)
        except TimeoutError as error:
            self._since = None  # one try in a session: the next message would wait as long
            raise BrokerUnavailable(what) from error

    async def _read_back(self, since: datetime, timeout: timedelta) -> None:
        if self._connection is not None and self._since is not None and since < self._since:
            reader = JournalReader(self._topology, self._writer, self._on_event)
            try:
                await reader.start(self._connection, since, lambda: None)
                await reader.sync(timeout)
            finally:
                await reader.close()
            self._since = since

    async def close(self) -> None:
        """Stop reading."""
        self._reading = False
        if self._channel is not None:
            await self._channel.close()


def _tell(future: "asyncio.Future[bool]", read: bool) -> None:
    if not future.done():
        future.set_result(read)


async def read_journal(
    connection: Connection,
    topology: Topology,
    writer: JournalWriter,
    *,
    since: datetime | None = None,
    follow: bool = False,
    timeout: timedelta = timedelta(seconds=60),
) -> AsyncGenerator[JournalEvent, None]:
    """The events since then (all there are without ``since``), to the journal's end as of now, or on for ever.

    Markers are left out. An account that may not write to the journal reads until nothing came for two seconds.
    Raises :class:`BrokerUnavailable` when reading stops before the end.
    """
    events: asyncio.Queue[JournalEvent | None] = asyncio.Queue()
    lost = False

    def on_lost() -> None:
        nonlocal lost
        lost = True
        events.put_nowait(None)

    reader = JournalReader(topology, writer, events.put_nowait)
    await reader.start(connection, since, on_lost)
    syncing = None if follow else asyncio.create_task(_end(reader, events, timeout))
    earliest = since or datetime.min.replace(tzinfo=UTC)
    try:
        while (event := await events.get()) is not None:
            # a stream is entered at the start of a chunk, which may begin earlier
            if event.event != names.MARKER and event.at >= earliest:
                yield event
        if lost:
            raise BrokerUnavailable(f"journal {topology.journal_queue!r}: the broker ended the reading")
        if syncing is not None:
            await syncing
    finally:
        if syncing is not None:
            syncing.cancel()
        await reader.close()


async def _end(reader: JournalReader, events: "asyncio.Queue[JournalEvent | None]", timeout: timedelta) -> None:
    """Put the end's sign into the queue once everything before it is there."""
    try:
        await reader.sync(timeout)
    except (BrokerUnavailable, PublishUnconfirmed):
        raise  # what comes behind was not read: that must not look like the end
    except BrokerError as error:
        log.debug("journal_marker_unwritable", error=str(error))
        quiet, deadline = 0, asyncio.get_running_loop().time() + timeout.total_seconds()
        while quiet < 4 and asyncio.get_running_loop().time() < deadline:
            seen = reader.seen
            await asyncio.sleep(0.5)
            quiet = quiet + 1 if reader.seen == seen else 0
    finally:
        events.put_nowait(None)
