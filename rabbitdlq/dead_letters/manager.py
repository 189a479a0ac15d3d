"""``DLQManager``: everything that can be done with the dead letters of one work queue. Every door uses this class."""

import asyncio
import getpass
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from rabbitdlq import journal, names
from rabbitdlq.broker import (
    Connection,
    Outgoing,
    PublishLink,
    close_channel,
    count_messages,
    new_id,
    queue_counts,
)
from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters.browse import Browser, Held
from rabbitdlq.dead_letters.replay import PUBLISH_TIMEOUT, Replayer, ReplayReport
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import (
    AmbiguousDeadLetter,
    BrokerError,
    ConfigurationError,
    DeadLetterNotFound,
    DeadLettersInUse,
    EntityNotFound,
)
from rabbitdlq.failure import Failure
from rabbitdlq.journal import HistoryIndex, JournalEvent, JournalWriter, read_journal
from rabbitdlq.message import Message, message_of
from rabbitdlq.parking import Parking, new_park_id, park_properties
from rabbitdlq.producer import encode_payload
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties, WireError

__all__ = ["DLQManager", "QueueSummary"]


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """How one work queue stands. Counts are of messages ready for delivery; None where the queue does not exist."""

    queue: str
    #: waiting for a consumer
    waiting: int | None
    #: waiting on the ladder, by rung
    on_ladder: Mapping[str, int | None]
    dead: int | None
    consumers: int | None

    def as_json(self) -> dict[str, Any]:
        """As ``rabbitdlq dlq summary --json`` shows it."""
        return {
            "queue": self.queue,
            "waiting": self.waiting,
            "on_ladder": dict(self.on_ladder),
            "dead": self.dead,
            "consumers": self.consumers,
        }


class DLQManager:
    """The dead letters of one work queue: look, replay, drop, push. Used as an async context manager.

    ::

        async with DLQManager(Topology("orders", ["5s", "30s"]), url="amqp://guest:guest@127.0.0.1/") as dlq:
            for letter in await dlq.peek(10):
                print(letter.id, letter.reason, letter.error)
            await dlq.replay_all()

    Looking removes nothing and keeps the order. Every operation holds the queue's lock while it works and raises
    :class:`DeadLettersInUse` where another operator holds it. What changes something is written to the journal.
    """

    def __init__(self, topology: Topology, *, url: str, who: str | None = None) -> None:
        """``who`` is written to the journal; user and host of this process unless given."""
        self.topology = topology
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
    async def _browse(self) -> AsyncIterator[Browser]:
        for _ in range(3):  # a loop over each() that was left by break is closed in the event loop's next rounds
            await asyncio.sleep(0)
        if self._reading:  # whoever waits for his own loop to end waits for ever
            raise DeadLettersInUse(
                f"{self.topology.dlq!r} is in use: each() of this manager is still open; end or close it first"
            )
        async with self._one_at_a_time, Browser(await self._connected(), self.topology, self.who) as browser:
            yield browser

    # --- looking

    async def peek(self, limit: int = 20) -> list[DeadLetter]:
        """The oldest letters, at most ``limit``."""
        return [letter async for letter in self._letters(limit)]

    async def peek_all(self) -> list[DeadLetter]:
        """All letters, oldest first. For more than memory holds use :meth:`each`."""
        return [letter async for letter in self._letters(None)]

    async def each(self, limit: int | None = None) -> AsyncGenerator[DeadLetter, None]:
        """The letters one after the other, oldest first, in bounded memory; the lock is held until the end.

        Copies of one letter that a crash parked twice are shown once. Until it has ended or is closed, every other
        operation of this manager raises :class:`DeadLettersInUse`: collect the ids first, then change.
        """
        async with aclosing(self._letters(limit)) as letters:
            try:
                async for letter in letters:
                    self._reading = True
                    yield letter
            finally:
                self._reading = False

    async def _letters(self, limit: int | None) -> AsyncGenerator[DeadLetter, None]:
        seen: set[tuple[str, int]] = set()
        async with self._browse() as browser, aclosing(browser.read(limit)) as held_letters:
            async for held in held_letters:
                letter = held.letter
                if letter.repeated and letter.copy_key in seen:
                    continue
                if letter.copy_key is not None:
                    seen.add(letter.copy_key)
                yield letter

    async def get(self, id: str) -> DeadLetter:
        """The letter with this message id or park id; one that the broker parked bare gets its story from the journal.

        Raises :class:`DeadLetterNotFound`, or :class:`AmbiguousDeadLetter` where several have the id.
        """
        async with self._browse() as browser:
            letter = (await self._find(browser, id))[0].letter
        return await self._with_story(letter) if letter.bare or letter.history_partial else letter

    async def count(self) -> int:
        """Letters that are ready; needs no lock."""
        channel = await (await self._connected()).channel()
        try:
            return await count_messages(channel, self.topology.dlq)
        finally:
            await close_channel(channel)

    async def summary(self, queues: Iterable[Topology] | None = None) -> list[QueueSummary]:
        """How the work queues stand: waiting, on the ladder, dead. Of this manager's queue unless others are given."""
        connection = await self._connected()
        return [await _summary(connection, topology) for topology in queues or [self.topology]]

    async def _find(self, browser: Browser, wanted: str) -> list[Held]:
        """The one letter with that id, the oldest of several that are equal in all, and after it its copies."""
        found: list[Held] = []
        async with aclosing(browser.read()) as held_letters:
            async for held in held_letters:
                if wanted in (held.letter.id, held.letter.park_id):
                    found.append(held)
        if not found:
            raise DeadLetterNotFound(
                f"no dead letter {wanted!r} in {self.topology.dlq!r}; 'rabbitdlq dlq list {self.topology.name}' shows "
                "those there are"
            )
        letters = [held.letter for held in found]
        distinct = {letter.copy_key or index for index, letter in enumerate(letters)}
        if len(distinct) > 1:
            named = ", ".join(letter.park_id or "(parked bare, no park id)" for letter in letters[:20])
            raise AmbiguousDeadLetter(
                f"{len(distinct)} dead letters in {self.topology.dlq!r} have the id {wanted!r}; name one by its park "
                f"id: {named}"
            )
        return [found[0], *(held for held in found[1:] if held.letter.repeated)]

    async def _with_story(self, letter: DeadLetter) -> DeadLetter:
        """The letter with the attempts that the journal knows."""
        index, last = HistoryIndex(), None
        since = (letter.first_failed_at or letter.created_at or datetime.now(UTC)) - timedelta(minutes=1)
        try:
            async for event in read_journal(await self._connected(), self.topology, self._writer, since=since):
                if event.message_id == letter.id and event.event == names.FAILED:
                    index.add(event)
                    last = event
        except BrokerError:
            return letter
        history = tuple(index.history(letter.id, letter.lap, max(letter.attempts, self.topology.max_attempts)))
        if last is None or len(history) < len(letter.history):
            return letter
        return replace(
            letter,
            history=history,
            history_partial=len(history) < letter.attempts,
            error=letter.error or _failure(last),
            max_attempts=letter.max_attempts or last.max_attempts,
        )

    # --- changing

    async def push(
        self,
        message: Message | Any,
        error: BaseException | str,
        *,
        message_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> str:
        """Park a message by hand: one that a handler was given, or any payload. Gives its id once it is confirmed."""
        if not isinstance(message, Message):
            body, content_type = encode_payload(message)
            try:
                properties = Properties(
                    content_type=content_type,
                    delivery_mode=2,
                    message_id=message_id or new_id(),
                    timestamp=int(datetime.now(UTC).timestamp()),
                    headers=Headers(headers) if headers else None,
                )
                properties.encode()
            except WireError as broken:
                raise ConfigurationError(f"message for {self.topology.dlq!r}: {broken}") from broken
            message = message_of(self.topology, body, properties, Arrival(0, 0, "", self.topology.name), failures=-1)
        parking = Parking(
            reason=names.PUSHED,
            failure=Failure.of(error),
            history=(),
            worker=self.who,
            parked_at=datetime.now(UTC),
            park_id=new_park_id(message),
            history_partial=message.attempt > 0,
        )
        publisher = await self._link.publisher()
        outgoing = Outgoing(
            self.topology.dlx,
            self.topology.name,
            message.body,
            park_properties(message, parking, publisher.connection.frame_max),
        )
        await publisher.publish(outgoing, timeout=PUBLISH_TIMEOUT)
        await self._record(names.PUSHED, [message.id], 1)
        return message.id

    async def pop(self, id: str) -> DeadLetter:
        """Take a letter out of the queue for good and give it to the caller, who answers for it from then on."""
        letter = await self._remove(id)
        await self._record(names.POPPED, [letter.id], 1)
        return letter

    async def drop(self, id: str) -> DeadLetter:
        """Delete a letter; gives what it was."""
        letter = await self._remove(id)
        await self._record(names.DROPPED, [letter.id], 1)
        return letter

    async def _remove(self, wanted: str) -> DeadLetter:
        async with self._browse() as browser:
            copies = await self._find(browser, wanted)
            for held in copies:
                held.remove()
                await held.settled()
        return copies[0].letter

    async def purge(self) -> int:
        """Delete every letter; gives their number."""
        async with self._browse() as browser:
            count = await browser.purge()
        await self._record(names.PURGED, [], count)
        return count

    async def replay(self, id: str) -> ReplayReport:
        """Send one letter back to its work queue, for a new lap with all attempts."""

        async def chosen(browser: Browser) -> AsyncGenerator[Held, None]:
            for held in await self._find(browser, id):
                yield held

        return await self._replay(chosen, None, None)

    async def replay_one(self) -> ReplayReport:
        """Send the oldest letter back; an empty queue gives an empty report."""
        return await self._replay(lambda browser: browser.read(1), None, None)

    async def replay_all(
        self, *, on_progress: Callable[[ReplayReport], None] | None = None, stop: asyncio.Event | None = None
    ) -> ReplayReport:
        """Send back every letter that is there when it starts; what fails again meanwhile is not picked up.

        A letter that cannot be sent stays where it is, with the reason in the report, and the others go. ``stop``
        ends it between two letters.
        """
        return await self._replay(lambda browser: browser.read(), on_progress, stop)

    async def _replay(
        self,
        choose: Callable[[Browser], AsyncGenerator[Held, None]],
        on_progress: Callable[[ReplayReport], None] | None,
        stop: asyncio.Event | None,
    ) -> ReplayReport:
        report = ReplayReport()
        try:
            async with self._browse() as browser:
                report.found = browser.count
                async with aclosing(choose(browser)) as letters:
                    await Replayer(self._link, report, on_progress or (lambda _: None)).run(letters, stop)
        finally:
            if report.replayed:
                await self._record(names.REPLAYED, report.ids, report.replayed)
        return report

    async def _record(self, event: str, ids: list[str], count: int) -> None:
        # what was done is done: a line that is lost by now must not turn it into an error
        amqp_user = (self._connection or await self._connected()).user
        await self._writer.append(
            journal.operated(event, self.topology.name, who=self.who, amqp_user=amqp_user, ids=ids, count=count)
        )


async def _summary(connection: Connection, topology: Topology) -> QueueSummary:
    async def counts(queue: str) -> tuple[int | None, int | None]:
        channel = await connection.channel()  # a missing queue closes it
        try:
            return await queue_counts(channel, queue)
        except EntityNotFound:
            return None, None
        finally:
            await close_channel(channel)

    waiting, consumers = await counts(topology.name)
    return QueueSummary(
        queue=topology.name,
        waiting=waiting,
        on_ladder={rung.queue: (await counts(rung.queue))[0] for rung in topology.rungs},
        dead=(await counts(topology.dlq))[0],
        consumers=consumers,
    )


def _failure(event: JournalEvent) -> Failure:
    return Failure(event.error_type or "", event.error_message or "", event.traceback, event.fingerprint or "")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"
