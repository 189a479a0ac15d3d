"""Looking into a dead-letter queue without harm: exclusive, in order, and everything goes back where it was.

Letters are held unacknowledged while they are looked at. A classic queue puts a returned message back into its old
place. A quorum queue puts it behind those returned before, which after an earlier look are all of them: seven taken and
returned stand behind the rest (seen on 3.10, 4.0 and 4.3, with and without a delivery limit). So a quorum queue is
always taken to its end, and returned as a whole: consumers are cancelled first, because returned messages go to any
consumer still there, then the channels are closed in the order in which they were filled.

If this process is killed, what was taken by then goes behind what was not. So letters that are not too large are taken
all at once, as far as the broker goes, before most of them are looked at; and by consumers of one channel that follow
one another, because of several channels that die together the order is lost. Where what is not looked at yet would take
too much room here, it waits at the broker (:mod:`rabbitdlq.dead_letters.incoming`).
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
from rabbitdlq.dead_letters.incoming import AHEAD_BYTES, HELD_BYTES, Incoming
from rabbitdlq.dead_letters.lock import release_lock, take_lock
from rabbitdlq.dead_letters.traits import Traits, traits_of
from rabbitdlq.errors import BrokerError, BrokerUnavailable
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties, WireError

__all__ = ["Browser", "Held"]

#: what may be on its way here at once where a queue is taken as a whole, and else; the broker limits by count only
WHOLE_BYTES, CHUNK_BYTES = 320 * 1024 * 1024, 32 * 1024 * 1024
#: taken first, to learn how large they are
SAMPLES = (4, 32, 256)
#: by one consumer: a prefetch has sixteen bits; and of large ones
MAX_PREFETCH, LARGEST_CHUNK = 65_535, 2_000
#: of one channel whose connection dies a quorum queue takes the letters back in the order of its consumers' names, as
#: long as these are few: of 32 on 3.10, 4.0 and 4.3, of 60 on 4.3 only
CONSUMERS_OF_A_CHANNEL = 32
QUIET_SECONDS = 2.0
STALLED_SECONDS = 60.0
#: for letters to be ready again after they were given back; somebody else may take them away at once
RETURN_SECONDS = 5.0
_LOOK_SECONDS = 0.01


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
        self._consuming: dict[ConsumingChannel, Incoming] = {}
        #: the channel that is being filled, and what comes on it; and how many consumers there have been
        self._reading: tuple[ConsumingChannel, Incoming] | None = None
        self._discarding = False
        self._consumers = 0
        self._largest = 0
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

    async def read(self, limit: int | None = None, *, acting: bool = False) -> AsyncGenerator[Held, None]:
        """The letters that were there at entering, oldest first, at most ``limit``.

        ``acting``: some are removed while the others are still read. What the caller does not keep is gone from memory.
        Ends early where somebody else took letters away; and ``acting`` where letters are so large, all of a sudden,
        that no more can be kept: those after them come when reading has begun anew (:meth:`give_back`).
        """
        async with contextlib.aclosing(self._take(limit, acting)) as deliveries:
            async for delivery in deliveries:
                yield Held(self, self._topology.name, delivery)

    async def _take(self, limit: int | None, acting: bool = False) -> AsyncGenerator[Delivery, None]:
        """The letters, one after the other, while the next ones are on their way.

        Removing one makes room for another. Where that comes while its consumer is cancelled, the broker puts it
        behind the rest (seen on 3.10). So nothing is handed out to be removed before its consumer is gone.
        """
        kept_bytes, is_full = 0, False
        left = self.count - self._taken if limit is None else min(limit, self.count - self._taken)
        while left > 0 and not self._ended_early and not is_full:
            size = self._size_for(left, acting)
            kept: deque[Delivery] = deque()
            channel, incoming = await self._consume(size)
            self._consuming[channel] = incoming
            seen = 0
            # a busy broker may be silent for a while before it sends many or large ones (seen on 3.10)
            patience = QUIET_SECONDS if size <= SAMPLES[-1] else QUIET_SECONDS * 10
            while seen < size:
                delivery = await self._next(incoming, patience)
                if delivery is None:
                    await self._cancel(channel)  # before it answers to that, it sends what is on its way
                    if incoming.is_empty() or (delivery := await incoming.get()) is None:
                        break
                seen += 1
                self._taken += 1
                self._filled[channel] += 1
                self._largest = max(self._largest, incoming.largest)
                if self._on_progress is not None:
                    self._on_progress(self._taken, self.count)
                if acting:
                    kept_bytes += delivery.size
                    is_full = is_full or (bool(kept) and kept_bytes > AHEAD_BYTES)
                    if not is_full:
                        kept.append(delivery)
                else:
                    yield delivery
            await self._cancel(channel)
            left -= seen
            self._ended_early = seen < size
            while kept:
                delivery = kept.popleft()
                kept_bytes -= delivery.size
                yield delivery

    def _size_for(self, left: int, acting: bool) -> int:
        """How many to take at once: some to learn their size; all if they are small; else as many as may be held."""
        fitting = max(1, CHUNK_BYTES // (self._largest + 1))
        known = 0
        for sample in SAMPLES:
            known += sample
            if self._taken < known:
                return min(left, sample, fitting)
        most = min(left, MAX_PREFETCH)
        if not acting and most * (self._largest + HELD_BYTES) <= WHOLE_BYTES:
            return most
        return min(left, LARGEST_CHUNK, fitting)

    async def _consume(self, size: int) -> tuple[ConsumingChannel, Incoming]:
        """The channel at hand and what comes on it, or a new one when it has had as many as keep the order."""
        tag = f"look-{self._consumers:04d}"
        self._consumers += 1
        if self._reading is not None and self._consumers % CONSUMERS_OF_A_CHANNEL:
            self._reading[1].due = size
            await self._reading[0].consume_more(self._topology.dlq, prefetch=size, consumer_tag=tag)
            return self._reading
        incoming = Incoming(self._connection)
        incoming.due = size
        if self._discarding:
            incoming.discard()
        channel = await ConsumingChannel.consume(
            self._connection,
            self._topology.dlq,
            incoming.take,
            incoming.end,
            prefetch=size,
            consumer_tag=tag,
        )
        self._filled[channel] = 0
        self._reading = channel, incoming
        return self._reading

    async def _next(self, incoming: Incoming, patience: float) -> Delivery | None:
        """The next one; None where there is none left, raises :class:`BrokerUnavailable` where the line is gone."""
        if not incoming.is_empty() and (delivery := await incoming.get()) is not None:
            return delivery  # most are there already, and a deadline costs more than the letter
        waited = 0.0
        while waited < STALLED_SECONDS:
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    delivery = await incoming.get()
            except TimeoutError:
                waited += QUIET_SECONDS
                if waited < patience:
                    continue
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
        if self._consuming.pop(channel, None) is not None:
            await channel.cancel()

    async def _come(self, incoming: Incoming) -> None:
        """Wait for what is on its way: the broker sends it before it answers to a cancel, which has a deadline."""
        quiet = 0
        while incoming.due > 0 and not incoming.ended and quiet * _LOOK_SECONDS < QUIET_SECONDS:
            due = incoming.due
            await asyncio.sleep(_LOOK_SECONDS)
            quiet = quiet + 1 if incoming.due == due else 0

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
        self._reading, self._consumers, self._discarding = None, 0, False
        self._taken, self._ended_early = 0, False
        self.count = await count_messages(self._control, self._topology.dlq)

    async def _return_all(self, control: Channel) -> None:
        # first of all: a consumer still there would share what follows with the next one, and mix up the order
        self._discarding = True
        if self._reading is not None:
            self._reading[1].discard()
        for channel, incoming in list(self._consuming.items()):
            await self._come(incoming)
            await self._cancel(channel)
            unseen = incoming.drain()
            self._taken += unseen
            self._filled[channel] += unseen
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
                    await asyncio.sleep(_LOOK_SECONDS)
        except (BrokerError, TimeoutError):
            return False
        return True
