"""Looking into a dead-letter queue without harm: exclusive, in order, and everything goes back where it was.

Letters are held unacknowledged while they are looked at. A classic queue puts a returned message back into its old
place. A quorum queue puts it behind those returned before, which after an earlier look are all of them: seven taken and
returned stand behind the rest (seen on 3.10, 4.0 and 4.3, with and without a delivery limit). So a quorum queue is
always taken to its end, and returned as a whole: consumers are cancelled first, because returned messages go to any
consumer still there, then the channels are closed in the order in which they were filled.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Self

from rabbitdlq.broker import (
    Channel,
    Connection,
    ConsumingChannel,
    Delivery,
    close_channel,
    count_messages,
    translated,
)
from rabbitdlq.broker.connection import CONNECT_TIMEOUT
from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters.lock import release_lock, take_lock
from rabbitdlq.dead_letters.traits import Traits, traits_of
from rabbitdlq.errors import BrokerError, BrokerUnavailable
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties, WireError

__all__ = ["Browser", "Held"]

#: bodies that one channel may hold, and two of them are in memory at once; the broker limits by count only, so the
#: count follows the size seen
CHUNK_BYTES = 32 * 1024 * 1024
FIRST_CHUNK, GROWTH, LARGEST_CHUNK = 4, 8, 2_000
QUIET_SECONDS = 2.0
STALLED_SECONDS = 60.0
#: what a held letter takes beside its bytes
HELD_BYTES = 1_500
#: for letters to be ready again after they were given back; somebody else may take them away at once
RETURN_SECONDS = 5.0


class Held:
    """A dead letter and the unacknowledged delivery it came in."""

    __slots__ = ("_browser", "_delivery", "_letter", "_queue", "_traits", "_wire")

    def __init__(self, browser: "Browser", queue: str, delivery: Delivery) -> None:
        self._browser = browser
        self._queue = queue
        self._delivery = delivery
        self._letter: DeadLetter | None = None
        self._traits: Traits | None = None
        self._wire: Properties | None = None

    @property
    def body(self) -> bytes:
        """The message's body."""
        return self._delivery.body

    @property
    def encoded(self) -> bytes:
        """The message's properties as they are on the wire."""
        return self._delivery.encoded

    @property
    def wire(self) -> Properties:
        """The message's properties, read at the first look."""
        if self._wire is None:
            try:
                self._wire = self._delivery.properties()
            except WireError:
                self._wire = Properties()  # shown as far as it can be
        return self._wire

    @property
    def letter(self) -> DeadLetter:
        """All of it, read at the first look."""
        if self._letter is None:
            self._letter = DeadLetter.parse(self._queue, self.body, self.wire)
        return self._letter

    def forget(self) -> None:
        """Keep the bytes and the traits only; looking reads them again."""
        self._letter = self._wire = None

    @property
    def traits(self) -> Traits:
        """What bulk operations have to know, which is quicker to read."""
        if self._traits is None:
            self._traits = traits_of(self._queue, self.body, self._delivery.encoded)
        return self._traits

    @property
    def size(self) -> int:
        """Bytes that it takes here, roughly."""
        return self._delivery.size + HELD_BYTES

    @property
    def channel(self) -> ConsumingChannel:
        """Where it is held."""
        return self._delivery.channel

    def remove(self) -> None:
        """Take it out of the queue for good; raises :class:`BrokerUnavailable` where the channel is gone already."""
        if not self._delivery.ack():
            raise BrokerUnavailable(f"removing dead letter {self.traits.id!r} from the queue: the connection was lost")
        self._browser.note_removed(self._delivery)

    async def settled(self) -> None:
        """Return when the broker has seen the removal; raises :class:`BrokerError` where that is not certain."""
        await self._delivery.channel.arrived()


class Browser:
    """Holds the lock of one dead-letter queue, and what was read of it. Used as an async context manager.

    Entering raises :class:`DeadLettersInUse` where another operator is at it, and :class:`EntityNotFound` where there
    is no dead-letter queue.
    """

    def __init__(
        self,
        connection: Connection,
        topology: Topology,
        who: str,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        doing: str = "looking",
    ) -> None:
        """``who`` and ``doing`` (one word) are told to whoever finds the letters in use.

        ``on_progress`` is told how many letters have come, of how many; also while the rest is taken at the end.
        """
        self._on_progress = on_progress
        self._connection = connection
        self._topology = topology
        self._who = who
        self._doing = doing
        self._control: Channel | None = None
        #: in the order in which they were filled, and how many letters each holds
        self._filled: dict[ConsumingChannel, int] = {}
        self._consuming: list[ConsumingChannel] = []
        self._chunk = FIRST_CHUNK
        self._taken = 0
        self._ended_early = False
        #: dead letters that were ready when the browser was entered
        self.count = 0

    async def __aenter__(self) -> Self:
        self._control = await self._connection.channel()
        try:
            # only whoever holds the lock gets a count that nobody takes from
            await count_messages(self._control, self._topology.dlq)
            await take_lock(self._connection, self._topology, self._who, self._doing)
            try:
                self.count = await count_messages(self._control, self._topology.dlq)
            except BaseException:
                await release_lock(self._control, self._topology)
                raise
        except BaseException:
            await close_channel(self._control)
            raise
        return self

    async def read(self, limit: int | None = None) -> AsyncGenerator[Held, None]:
        """The letters that were there at entering, oldest first, at most ``limit``.

        Memory is bounded: what the caller does not keep is gone. Ends early where somebody else took letters away.
        """
        async with contextlib.aclosing(self._take(limit)) as deliveries:
            async for delivery in deliveries:
                yield Held(self, self._topology.name, delivery)

    async def _take(self, limit: int | None) -> AsyncGenerator[Delivery, None]:
        """The letters, one after the other; while some are looked at, the next ones are on their way."""
        left = self.count - self._taken if limit is None else min(limit, self.count - self._taken)
        filling = self._begin(left)
        try:
            while filling is not None:
                size, task = filling
                chunk = await task
                left -= len(chunk)
                if len(chunk) < size:
                    self._ended_early = True
                else:
                    average = sum([len(delivery.body) for delivery in chunk]) // size + 1
                    self._chunk = max(1, min(self._chunk * GROWTH, LARGEST_CHUNK, CHUNK_BYTES // average))
                filling = self._begin(left)
                while chunk:
                    yield chunk.popleft()
        finally:
            if filling is not None:
                # to its end: a call that is cancelled half-way closes its channel, and the order is lost
                await asyncio.gather(filling[1], return_exceptions=True)

    def _begin(self, left: int) -> "tuple[int, asyncio.Task[deque[Delivery]]] | None":
        size = min(self._chunk, left)
        return None if size <= 0 or self._ended_early else (size, asyncio.create_task(self._fill(size)))

    async def _fill(self, size: int) -> deque[Delivery]:
        """Up to ``size`` letters on a channel of their own.

        None is handed out before all of them are here and the consumer is cancelled: acknowledging one would make
        room for another, which nobody had counted.
        """
        arrived: asyncio.Queue[Delivery | None] = asyncio.Queue()
        channel = await ConsumingChannel.consume(
            self._connection,
            self._topology.dlq,
            arrived.put_nowait,
            lambda _: arrived.put_nowait(None),
            prefetch=size,
        )
        self._filled[channel] = 0
        self._consuming.append(channel)
        filling: deque[Delivery] = deque()
        while len(filling) < size and (delivery := await self._next(arrived)) is not None:
            self._taken += 1
            self._filled[channel] += 1
            filling.append(delivery)
            if self._on_progress is not None:
                self._on_progress(self._taken, self.count)
        await self._cancel(channel)
        return filling

    async def _next(self, arrived: "asyncio.Queue[Delivery | None]") -> Delivery | None:
        """The next one; None where there is none left, raises :class:`BrokerUnavailable` where the line is gone."""
        if not arrived.empty():  # most are there already, and a deadline costs more than the letter
            delivery = arrived.get_nowait()
            if delivery is not None:
                return delivery
            arrived.put_nowait(None)
        waited = 0.0
        while waited < STALLED_SECONDS:
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    delivery = await arrived.get()
            except TimeoutError:
                waited += QUIET_SECONDS
                if self._control is not None and not await count_messages(self._control, self._topology.dlq):
                    return None
                continue
            if delivery is None:
                raise BrokerUnavailable(f"reading {self._topology.dlq!r}: the connection or the queue was lost")
            return delivery
        raise BrokerUnavailable(f"reading {self._topology.dlq!r}: nothing came for {STALLED_SECONDS:g} s")

    def note_removed(self, delivery: Delivery) -> None:
        """One less to wait for when its channel is closed."""
        self._filled[delivery.channel] -= 1

    async def _cancel(self, channel: ConsumingChannel) -> None:
        if channel in self._consuming:
            self._consuming.remove(channel)
            await channel.cancel()

    async def purge(self) -> int:
        """Delete every letter that is ready; gives their number."""
        assert self._control is not None
        with translated(f"purging {self._topology.dlq!r}"):
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds() * 6):
                return (await self._control.queue_purge(self._topology.dlq)).message_count or 0

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._control is not None:
            await self._return_all(self._control)
            await release_lock(self._control, self._topology)
            await close_channel(self._control)

    async def give_back(self) -> None:
        """Put everything that is held back into its place and keep the lock; reading begins anew after it.

        The broker ends a channel that holds letters for longer than its consumer timeout, half an hour by default
        (https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout).
        """
        assert self._control is not None
        await self._return_all(self._control)
        self._filled.clear()
        self._taken, self._ended_early, self._chunk = 0, False, FIRST_CHUNK
        self.count = await count_messages(self._control, self._topology.dlq)

    async def _return_all(self, control: Channel) -> None:
        # first of all: a consumer still there would share what follows with the next one, and mix up the order
        for channel in list(self._consuming):
            await self._cancel(channel)
        if (self._topology.dlq_type or self._topology.queue_type) == "quorum" and self._filled:
            with contextlib.suppress(BrokerError):  # the line is gone: the broker returns everything by itself
                async with contextlib.aclosing(self._take(None)) as rest:
                    async for _ in rest:
                        pass
        await self._give_back(control)

    async def _give_back(self, control: Channel) -> None:
        """Close the channels one after the other, the next when the letters of the one before are ready again.

        A quorum queue has them back a moment after the channel's closing is confirmed: of two channels closed in a row
        the second one's letters may come first, and whoever looks next may not see them (both seen on 4.3).
        """
        ready, waiting = 0, True
        try:
            ready = await count_messages(control, self._topology.dlq)
        except BrokerError:
            waiting = False
        # what was removed has to be heard of before a channel is closed; of all at once, since that takes its time
        await asyncio.gather(*(channel.heard() for channel in self._filled))
        for channel, held in self._filled.items():
            await channel.close()
            ready += held
            waiting = waiting and await self._is_ready(control, ready)

    async def _is_ready(self, control: Channel, count: int) -> bool:
        """Wait until so many letters are there; False where somebody else takes them away meanwhile."""
        try:
            async with asyncio.timeout(RETURN_SECONDS):
                while await count_messages(control, self._topology.dlq) < count:
                    await asyncio.sleep(0.01)
        except (BrokerError, TimeoutError):
            return False
        return True
