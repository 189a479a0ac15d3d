"""Appending to the journal: confirmed, under a deadline, and never in the way of the work."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import structlog

from rabbitdlq import names
from rabbitdlq.broker import Blocked, Outgoing, PublishLink, new_id
from rabbitdlq.errors import BrokerError
from rabbitdlq.journal.events import Entry, JournalEvent
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties

__all__ = ["JournalWriter"]

log = structlog.stdlib.get_logger(__name__)

#: events in one message, and bytes after which no more are added
BATCH_EVENTS, BATCH_BYTES = 200, 100_000
#: what is kept of the events that come while the broker takes no publishes; more are lost
MOST_KEPT_BYTES = 16 * 1024 * 1024


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

    While an alarm of the broker blocks the connection nobody waits at all. The events are kept, as far as there is room
    for them, and written when the alarm is over; until then only this process knows of them.
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
        link.on_blocked = self._blocked
        self._under_way: dict[str, _Batch] = {}
        self._kept_bytes = 0
        #: events that the journal will never have, by what is known
        self.lost = 0
        #: since when no write has succeeded, and why; None while all is well
        self.failing: tuple[datetime, str] | None = None

    async def append(self, event: Entry | JournalEvent) -> bool:
        """Publish the event and wait for its confirm; False where that failed."""
        return await self.begin(event)

    def begin(self, event: Entry | JournalEvent) -> "asyncio.Future[bool]":
        """As :meth:`append`, for who has something to do meanwhile."""
        kind = event.event
        body = event.encode()
        if self._link.blocked is not None:
            return self._begin_blocked(event, body)
        return self._gather(kind, event, body)

    def _gather(self, kind: str, event: Entry | JournalEvent, body: bytes) -> "asyncio.Future[bool]":
        gathered = self._gathered.setdefault(kind, deque())
        if not gathered or gathered[-1].full:
            gathered.append(_Batch())
        written = gathered[-1].add(event, body)
        if kind not in self._writing:
            self._writing[kind] = asyncio.create_task(self._write(kind, gathered))
        return written

    def _begin_blocked(self, event: Entry | JournalEvent, body: bytes) -> "asyncio.Future[bool]":
        """Keep the event for later, and let nobody wait for it."""
        # told late, after the end of what began, a start would be taken for that of a crash
        if event.event == names.STARTED or self._kept_bytes + len(body) > MOST_KEPT_BYTES:
            self.lost += event.event != names.STARTED
            written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        else:
            self._kept_bytes += len(body)
            written = self._gather(event.event, event, body)
        if not written.done():
            written.set_result(False)
        return written

    def _blocked(self, blocked: Blocked | None) -> None:
        if blocked is None:
            log.info("journal_goes_on", queue=self._topology.name, kept_bytes=self._kept_bytes, lost_events=self.lost)
            self._kept_bytes = 0
            return
        self.failing = self.failing or (blocked.since, f"the broker takes no publishes: {blocked.reason}")
        log.warning(
            "journal_blocked",
            queue=self._topology.name,
            reason=blocked.reason,
            consequence="events are kept in this process until the alarm is over",
        )
        for gathered in self._gathered.values():
            for batch in gathered:
                batch.tell(False)
                self._kept_bytes += batch.size
        for batch in self._under_way.values():
            batch.tell(False)

    async def close(self) -> None:
        """Write what is under way; what an alarm has kept from being written goes with this process."""
        tasks = list(self._writing.values())
        if tasks and self._link.blocked is None:
            await asyncio.wait(tasks, timeout=self._timeout.total_seconds())
        kept = sum(len(batch.events) for gathered in self._gathered.values() for batch in gathered)
        kept += sum(len(batch.events) for batch in self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if kept:
            self.lost += kept
            log.error("journal_events_lost", queue=self._topology.name, lost_events=kept)

    async def _write(self, kind: str, gathered: deque[_Batch]) -> None:
        try:
            while gathered:
                if self._link.blocked is not None:
                    await self._link.unblocked()
                batch = self._under_way[kind] = gathered.popleft()
                written = False
                try:
                    written = await self._put(batch)
                except Exception:  # those who wait, and the next batch, must not suffer from a fault of ours
                    log.exception("journal_unwritable", queue=self._topology.name, lost_events=len(batch.events))
                finally:
                    batch.tell(written)
                del self._under_way[kind]
                if not written and kind != names.STARTED and self._link.blocked is not None:
                    gathered.appendleft(batch)  # the broker has not read it
                elif not written:
                    self.lost += len(batch.events)
        finally:
            self._under_way.pop(kind, None)
            del self._writing[kind]

    async def _put(self, batch: _Batch) -> bool:
        try:
            await self._publish(batch.events[0], b"\n".join(batch.bodies))
        except BrokerError as error:
            if self._link.blocked is not None:
                return False  # told once, when it began
            self.failing = self.failing or (datetime.now(UTC), str(error))
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
        self.failing = None
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
