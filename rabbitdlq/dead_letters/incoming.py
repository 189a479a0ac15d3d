"""What comes on a consuming channel, and how far it may be ahead of whoever looks at it.

The broker limits what is on its way by number only. Of letters that are larger than those before them any number is
too many. So the connection is not read while too many bytes wait here to be looked at: TCP makes the broker wait. But
not for long: where it can send nothing for half a minute it ends the connection (seen on 3.10, 4.0 and 4.3, and also
where a megabyte was read every eight seconds, which the buffers between swallow). So some are read from time to time
all the same, up to a limit at which whoever looks has taken too long.
"""

import asyncio

from rabbitdlq.broker import Connection, Delivery

__all__ = ["AHEAD_BYTES", "HELD_BYTES", "Incoming"]

#: what may wait here to be looked at
AHEAD_BYTES = 96 * 1024 * 1024
#: what may wait here at most, because the broker cannot wait
MOST_BYTES = 320 * 1024 * 1024
#: what is read for the broker's sake, and how often
TRICKLE_BYTES, TRICKLE_SECONDS = 4 * 1024 * 1024, 8.0
#: what a held letter takes beside its bytes
HELD_BYTES = 1_500


class Incoming:
    """The deliveries of one channel, in their order; :meth:`take` and :meth:`end` are what the channel calls."""

    def __init__(self, connection: Connection) -> None:
        self._frames = connection.frames
        self._queue: asyncio.Queue[Delivery | None] = asyncio.Queue()
        self._discarding = False
        #: beyond which reading is paused
        self._limit = AHEAD_BYTES
        #: is set while the connection is not read
        self._trickling: asyncio.TimerHandle | None = None
        #: bytes that wait to be looked at
        self.ahead = 0
        #: bytes of the largest that has come
        self.largest = 0
        #: deliveries that were asked for and have not come yet
        self.due = 0
        #: the channel, the consumer or the connection is gone: no more comes
        self.ended = False

    def take(self, delivery: Delivery) -> None:
        """One has come."""
        self.due -= 1
        self.largest = max(self.largest, delivery.size)
        if self._discarding:
            delivery.forget()
        self._put(delivery)
        if self.ahead > self._limit and self._trickling is None and not self._discarding:
            self._frames.pause_reading()
            self._trickling = asyncio.get_running_loop().call_later(TRICKLE_SECONDS, self._trickle)

    def _put(self, delivery: Delivery) -> None:
        self._queue.put_nowait(delivery)
        self.ahead += delivery.size + HELD_BYTES

    def end(self, _: str) -> None:
        """No more comes."""
        self.ended = True
        self._queue.put_nowait(None)

    def is_empty(self) -> bool:
        """Whether :meth:`get` would wait."""
        return self._queue.empty()

    async def get(self) -> Delivery | None:
        """The next one; None, again and again, when no more comes."""
        delivery = await self._queue.get()
        if delivery is None:
            self._queue.put_nowait(None)
            return None
        self.ahead -= delivery.size + HELD_BYTES
        if self.ahead <= AHEAD_BYTES:
            self._limit = AHEAD_BYTES
            self._go_on()
        return delivery

    def discard(self) -> None:
        """Nobody looks any more: keep the bytes neither of what waits here nor of what still comes."""
        self._discarding = True
        for delivery in self._emptied():
            delivery.forget()
            self._put(delivery)
        self._go_on()

    def drain(self) -> int:
        """Take out what waits here, unseen; gives its number."""
        count = len(self._emptied())
        self._go_on()
        return count

    def _emptied(self) -> list[Delivery]:
        waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        self.ahead = 0
        if self.ended:
            self._queue.put_nowait(None)
        return [delivery for delivery in waiting if delivery is not None]

    def _trickle(self) -> None:
        if self.ahead <= MOST_BYTES:
            self._limit = self.ahead + TRICKLE_BYTES
            self._go_on()

    def _go_on(self) -> None:
        if self._trickling is not None:
            self._trickling.cancel()
            self._trickling = None
            self._frames.resume_reading()
