"""Deliveries in, settlements out: what a consuming channel does for every single message.

The channel itself (opening, consuming, cancelling, errors) is the client library's. Its content is lifted out of the
stream before the library sees it, and acks are written without it: for each message the library would run two tasks,
three queues and two decoders, and write each ack alone.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import structlog

from rabbitdlq.broker.connection import CONNECT_TIMEOUT, Channel, Connection, close_channel
from rabbitdlq.broker.frames import (
    BODY,
    CHANNEL_CLOSE,
    DELIVER,
    HEADER,
    METHOD,
    Deliver,
    How,
    content_header,
    parse_deliver,
    settle_frame,
    text_of,
)
from rabbitdlq.broker.settlements import Settlements
from rabbitdlq.broker.translate import translated
from rabbitdlq.errors import BrokerError
from rabbitdlq.wire import Properties

__all__ = ["ConsumingChannel", "Delivery"]

log = structlog.stdlib.get_logger(__name__)

#: seconds for which an ack may wait for others to be told with it; a crash in between means that the handler runs again
ACK_DELAY = 0.002
#: a quorum queue's channel keeps settlements to itself while more than this many are under way to the queue, and drops
#: them when it is closed: of 2,000 acks told one by one, up to 1,967 were never heard of (3.10, 4.0 and 4.3)
KEPT_FROM = 16
#: seconds in which they go out after the last one has arrived at the channel; with it none was lost
GOING_OUT = 0.25


class Delivery:
    """A message that the broker waits to hear about. It can be settled once, on its own channel only."""

    __slots__ = ("_raw", "body", "channel", "exchange", "redelivered", "routing_key", "tag")

    def __init__(self, channel: "ConsumingChannel", told: Deliver, raw: bytes, body: bytes) -> None:
        self.channel = channel
        self.tag = told.tag
        self.redelivered = told.redelivered
        self.exchange = text_of(told.exchange)
        self.routing_key = text_of(told.routing_key)
        self.body = body
        self._raw = raw

    def properties(self) -> Properties:
        """The message's properties, byte for byte; raises :class:`WireError` where they are broken."""
        return Properties.parse(self._raw)

    @property
    def encoded(self) -> bytes:
        """The bytes of the message's properties."""
        return self._raw

    @property
    def size(self) -> int:
        """Bytes of body and properties."""
        return len(self.body) + len(self._raw)

    def forget(self) -> None:
        """Keep what settling it takes, and none of its bytes."""
        self.body = self._raw = b""

    def mentions(self, word: bytes) -> bool:
        """Whether these bytes stand somewhere in the properties, which need not be read to know."""
        return word in self._raw

    @property
    def gone(self) -> bool:
        """Whether the channel is closed: the broker has taken the message back and delivers it again."""
        return self.channel.is_closed

    def ack(self) -> bool:
        """The message is done with; False where that comes too late. The broker is told within ``ACK_DELAY``."""
        return self.channel.settle(self.tag, "ack")

    def nack(self, *, requeue: bool) -> bool:
        """Back into the work queue, or out through its dead-letter exchange; False where that comes too late."""
        return self.channel.settle(self.tag, "back" if requeue else "dead")


class ConsumingChannel:
    """A channel that consumes one queue and hands every delivery to ``on_delivery``, inside the reading of the stream.

    ``on_end`` is called once, with the reason, when the broker ends it: consumer cancelled, channel closed, line lost.
    """

    def __init__(
        self,
        connection: Connection,
        channel: Channel,
        on_delivery: Callable[[Delivery], None],
        on_end: Callable[[str], None],
        *,
        prefetch: int,
    ) -> None:
        self._frames = connection.frames
        self._channel = channel
        self._number = channel.number
        self._on_delivery = on_delivery
        self._on_end = on_end
        self._prefetch = prefetch
        self._loop = asyncio.get_running_loop()
        self._consumer_tag = ""
        self._closing = False
        #: the broker has closed the channel
        self._over = False
        self._settlements = Settlements()
        self._flushing: asyncio.Handle | None = None
        #: answers written lately, and when the last was
        self._written = 0
        self._written_at = 0.0
        self._told: Deliver | None = None
        self._raw = b""
        self._missing = 0
        self._parts: list[bytes] = []

    @classmethod
    async def consume(
        cls,
        connection: Connection,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        on_end: Callable[[str], None],
        *,
        prefetch: int,
        arguments: dict[str, Any] | None = None,
        channel: Channel | None = None,
        consumer_tag: str | None = None,
    ) -> "ConsumingChannel":
        """Open a channel (or take the given one) and consume; the broker names the consumer unless it has a name.

        Raises :class:`BrokerError` where that cannot be done; the channel is closed then, with what it may hold.
        """
        channel = channel or await connection.channel()
        self = cls(connection, channel, on_delivery, on_end, prefetch=prefetch)
        channel.on_consumer_cancel_callbacks.add(lambda _: self._end("the broker cancelled the consumer"))
        channel.closing.add_done_callback(self._closed)
        self._frames.lift(self._number, self._take)
        try:
            await self.consume_more(queue, prefetch=prefetch, arguments=arguments, consumer_tag=consumer_tag)
        except BaseException:
            await self.close()
            raise
        return self

    async def consume_more(
        self,
        queue: str,
        *,
        prefetch: int,
        arguments: dict[str, Any] | None = None,
        consumer_tag: str | None = None,
    ) -> None:
        """Consume once more on the same channel, after :meth:`cancel`; raises :class:`BrokerError`."""
        self._prefetch = prefetch
        with translated(f"consuming {queue!r}"):
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                await self._channel.basic_qos(prefetch_count=prefetch)
                consumed = await self._channel.basic_consume(
                    queue, _never_called, arguments=arguments, consumer_tag=consumer_tag
                )
        self._consumer_tag = str(consumed.consumer_tag)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be settled any more."""
        return self._closing or self._over or bool(self._channel.is_closed)

    # --- in

    def _take(self, kind: int, payload: bytes) -> bool:
        if kind == BODY:
            if self._told is None:
                return False
            self._missing -= len(payload)
            if self._missing:
                self._parts.append(payload)
                return True
            if self._parts:
                payload = b"".join([*self._parts, payload])
                self._parts = []
            self._hand_out(payload)
            return True
        if kind == HEADER and self._told is not None:
            self._missing, self._raw = content_header(payload)
            if not self._missing:
                self._hand_out(b"")
            return True
        if kind == METHOD:
            if payload[:4] == DELIVER:
                self._told = parse_deliver(payload)
                self._settlements.opened(self._told.tag)
                return True
            if payload[:4] == CHANNEL_CLOSE:
                # the library notices some turns later, when the number may belong to another channel already
                self._over = True
        return False

    def _hand_out(self, body: bytes) -> None:
        told, self._told = self._told, None
        assert told is not None
        if self._closing:
            return
        try:
            self._on_delivery(Delivery(self, told, self._raw, body))
        except Exception:  # it would end the connection, with all that is under way
            log.exception("delivery_not_taken", delivery_tag=told.tag)

    # --- out

    def settle(self, tag: int, how: How) -> bool:
        """Settle a delivery; the broker is told together with its neighbours. False where that comes too late."""
        if self.is_closed:
            return False
        if not self._settlements.settle(tag, how):
            return False
        if not self._settlements.open or len(self._settlements) * 2 >= self._prefetch:
            self.flush()
        elif self._flushing is None:
            self._flushing = self._loop.call_later(ACK_DELAY, self.flush)
        return True

    def settle_up_to(self, tag: int) -> None:
        """Acknowledge this delivery and all before it, none of which may have been settled in another way."""
        if not self.is_closed:
            self._settlements.swept(tag)
            self._frames.write(self._number, settle_frame(self._number, "ack", tag, multiple=True))

    def flush(self) -> None:
        """Write what is settled and not told yet."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._over or self._channel.is_closed or not len(self._settlements):
            return
        frames = [settle_frame(self._number, how, tag, multiple) for how, tag, multiple in self._settlements.frames()]
        self._frames.write(self._number, b"".join(frames))
        now = self._loop.time()
        self._written = len(frames) + (self._written if now - self._written_at < GOING_OUT * 4 else 0)
        self._written_at = now

    async def arrived(self) -> None:
        """Return when every settlement so far is at the broker's end of the channel; raises :class:`BrokerError` else.

        An ack has no answer. The answer to a request sent after it on the same channel says that it has arrived there;
        a quorum queue may hear of it a moment later, see :meth:`close`.
        """
        self.flush()
        with translated("settling deliveries"):
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                await self._channel.basic_qos(prefetch_count=self._prefetch)

    # --- the end

    async def cancel(self) -> None:
        """Tell the broker to send no more; what came before can still be settled."""
        if self._channel.is_closed or not self._consumer_tag:
            return
        tag, self._consumer_tag = self._consumer_tag, ""
        with contextlib.suppress(BrokerError), translated("cancelling a consumer"):
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                await self._channel.basic_cancel(tag)

    async def close(self) -> None:
        """Tell what is settled, see to it that the queue hears of it, then close; the rest goes back to the queue."""
        if not self.is_closed:
            self._closing = True
            await self.heard()
        self._closing = True
        await close_channel(self._channel)

    async def heard(self) -> None:
        """Return when the queue has heard of what is settled, so that the channel can be closed."""
        self.flush()
        if self._written > KEPT_FROM and self._loop.time() - self._written_at < GOING_OUT * 4:
            with contextlib.suppress(BrokerError):  # a line that is lost has its own story
                await self.arrived()
                await asyncio.sleep(GOING_OUT)
                await self.arrived()
                self._written = 0

    def _closed(self, closing: "asyncio.Future[object]") -> None:
        self._frames.let_go(self._number, self._take)
        error = None if closing.cancelled() else closing.exception()
        why = f": {error}" if error is not None and str(error) else ""
        self._end(f"the channel was closed{why}")

    def _end(self, reason: str) -> None:
        if not self._closing:
            self._on_end(reason)


async def _never_called(_: object) -> None:
    """The library wants a callback; the deliveries are lifted out before it sees them."""
