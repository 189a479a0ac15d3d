"""Appending to the journal: confirmed, under a deadline, and never in the way of the work."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

import structlog

from rabbitdlq import names
from rabbitdlq.broker import Outgoing, PublishLink, new_id
from rabbitdlq.errors import BrokerError
from rabbitdlq.journal.events import Entry, JournalEvent
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties

__all__ = ["JournalWriter"]

log = structlog.stdlib.get_logger(__name__)

#: events in one message, and bytes after which no more are added
BATCH_EVENTS, BATCH_BYTES = 200, 100_000


@dataclass(slots=True)
class _Batch:
    """Events of one kind that go into one message, and whoever waits for its confirm."""

    events: list[Entry | JournalEvent] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    size: int = 0
    waiting: "list[asyncio.Future[bool]]" = field(default_factory=list)

    def add(self, event: Entry | JournalEvent, body: bytes) -> "asyncio.Future[bool]":
        """One more; the future says whether it was written."""
        self.events.append(event)
        self.bodies.append(body)
        self.size += len(body)
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting.append(written)
        return written

    def tell(self, written: bool) -> None:
        """It was written, or it was not."""
        for future in self.waiting:
            if not future.done():
                future.set_result(written)

    @property
    def full(self) -> bool:
        """Whether the next event belongs into another one."""
        return len(self.events) >= BATCH_EVENTS or self.size >= BATCH_BYTES


class JournalWriter:
    """Writes events. A journal that cannot be written is logged; the message goes its way all the same.

    While one message of events is under way, those that come meanwhile are gathered for the next: an event alone waits
    for nobody, and a thousand failures at once are a few messages.
    """

    def __init__(self, topology: Topology, link: PublishLink, timeout: timedelta = timedelta(seconds=5)) -> None:
        self._topology = topology
        self._link = link
        self._timeout = timeout
        #: on every event of this writer, so that who keeps its own in mind need not read them back
        self.source = new_id()
        #: by the kind of event, which is the routing key
        self._gathered: dict[str, deque[_Batch]] = {}
        self._writing: dict[str, asyncio.Task[None]] = {}

    async def append(self, event: Entry | JournalEvent) -> bool:
        """Publish the event and wait for its confirm; False where that failed."""
        return await self.begin(event)

    def begin(self, event: Entry | JournalEvent) -> "asyncio.Future[bool]":
        """As :meth:`append`, for who has something to do meanwhile."""
        kind = event.event
        body = event.encode()
        gathered = self._gathered.setdefault(kind, deque())
        if not gathered or gathered[-1].full:
            gathered.append(_Batch())
        written = gathered[-1].add(event, body)
        if kind not in self._writing:
            self._writing[kind] = asyncio.create_task(self._write(kind, gathered))
        return written

    async def _write(self, kind: str, gathered: deque[_Batch]) -> None:
        try:
            while gathered:
                batch = gathered.popleft()
                written = False
                try:
                    written = await self._put(batch)
                except Exception:  # those who wait, and the next batch, must not suffer from a fault of ours
                    log.exception("journal_unwritable", queue=self._topology.name, lost_events=len(batch.events))
                finally:
                    batch.tell(written)
        finally:
            del self._writing[kind]

    async def _put(self, batch: _Batch) -> bool:
        try:
            await self._publish(batch.events[0], b"\n".join(batch.bodies))
        except BrokerError as error:
            for event in batch.events:
                log.warning(
                    "journal_unwritable",
                    queue=event.queue,
                    lost_event=event.event,
                    message_id=event.message_id,
                    attempt=event.attempt,
                    error=str(error),
                )
            return False
        return True

    async def publish(self, event: JournalEvent) -> None:
        """Publish the event by itself and wait for its confirm; raises :class:`BrokerError`."""
        await self._publish(event, event.encode())

    async def _publish(self, first: Entry | JournalEvent, body: bytes) -> None:
        outgoing = Outgoing(
            exchange=self._topology.journal_exchange,
            routing_key=first.event,
            body=body,
            properties=Properties(
                content_type="application/json" if b"\n" not in body else "application/jsonl",
                delivery_mode=2,
                message_id=new_id(),
                correlation_id=None if first.event == names.MARKER else self.source,
                timestamp=int(first.at.timestamp()),
                app_id="rabbitdlq",
            ),
        )
        # "live": with nobody listening there is no queue to take it, and that is no error
        await self._link.publish(outgoing, timeout=self._timeout, mandatory=self._topology.journal == "stream")
