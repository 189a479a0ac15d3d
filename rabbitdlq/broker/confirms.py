"""Publishes out, confirms in: what a publishing channel does for every single message."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import aiormq.exceptions as lower

from rabbitdlq.broker.connection import Channel, Connection, close_channel
from rabbitdlq.broker.frames import (
    BASIC_ACK,
    BASIC_NACK,
    BODY,
    CHANNEL_CLOSE,
    HEADER,
    METHOD,
    RETURN,
    content_frames,
    content_header,
    parse_confirm,
    parse_return,
    publish_method,
)
from rabbitdlq.wire import Properties, WireError

__all__ = ["Lost", "Nacked", "PublishingChannel", "Returned"]

#: seconds between looks for publishes whose confirm is late; a timer for each would cost more than the publish
_LOOK_EVERY = 0.1
#: ways (exchange, key) whose first frame is kept; a producer with more of them is not held up, only a little slower
_KEPT_WAYS = 1_000


class Returned(Exception):
    """No queue took the message."""


class Nacked(Exception):
    """The broker refused the message."""


class Lost(Exception):
    """The channel ended before the confirm; the cause says why, and ``alone`` whether it was the only one on it."""

    def __init__(self, cause: BaseException, *, alone: bool) -> None:
        super().__init__(str(cause))
        self.__cause__ = self.cause = cause
        self.alone = alone


class _Waiting(NamedTuple):
    #: the message id as it is on the wire: of two texts one may be no UTF-8, and come back as the other
    key: bytes
    future: "asyncio.Future[None]"
    #: by the event loop's clock
    deadline: float


class PublishingChannel:
    """A confirming channel whose frames are ours: each publish is a future that its confirm resolves."""

    def __init__(self, connection: Connection, channel: Channel) -> None:
        self._frames = connection.frames
        self._frame_max = connection.frame_max
        self._channel = channel
        self._number = channel.number
        self._loop = asyncio.get_running_loop()
        self._ways: dict[tuple[str, str, bool], bytes] = {}
        self._over = False
        self._tag = 0
        #: by delivery tag, in order: "all up to" is taken from the front
        self._waiting: dict[int, _Waiting] = {}
        self._looking: asyncio.Handle | None = None
        self._by_id: dict[bytes, asyncio.Future[None]] = {}
        self._returned: tuple[int, str] | None = None
        self._missing = 0
        channel.closing.add_done_callback(self._closed)
        self._frames.lift(self._number, self._take)

    @classmethod
    async def open(cls, connection: Connection) -> "PublishingChannel":
        """A channel of its own; raises :class:`BrokerError` where there is none to be had."""
        return cls(connection, await connection.channel(confirms=True))

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be published on it any more."""
        # the library notices the broker's close some turns later, when the number may belong to another channel already
        return self._over or bool(self._channel.is_closed)

    def with_id(self, message_id: str) -> "asyncio.Future[None] | None":
        """The publish under way that has this id: a second beside it could not be told apart when one is returned."""
        future = self._by_id.get(message_id.encode("utf-8", "surrogateescape"))
        return None if future is None or future.done() else future

    def publish(
        self, way: tuple[str, str, bool], message_id: str, properties: bytes, body: bytes, deadline: float
    ) -> "asyncio.Future[None]":
        """Write one message its way (exchange, routing key, mandatory); the future ends with its confirm.

        It raises :class:`Returned`, :class:`Nacked`, :class:`Lost`, or :class:`TimeoutError` when no confirm came
        by the deadline (by the event loop's clock, and a tenth of a second). No other publish with this id may be
        under way, and the properties have to fit into a frame.
        """
        method = self._ways.get(way)
        if method is None:
            if len(self._ways) >= _KEPT_WAYS:
                self._ways.clear()
            exchange, routing_key, mandatory = way
            method = publish_method(self._number, exchange.encode(), routing_key.encode(), mandatory)
            self._ways[way] = method
        future: asyncio.Future[None] = self._loop.create_future()
        if self.is_closed:
            future.set_exception(Lost(lower.ChannelInvalidStateError("the channel is closed"), alone=False))
            return future
        key = message_id.encode("utf-8", "surrogateescape")
        self._tag += 1
        self._waiting[self._tag] = _Waiting(key, future, deadline)
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_EVERY, self._look)
        self._by_id[key] = future
        self._frames.write(
            self._number, b"".join((method, *content_frames(self._number, properties, body, self._frame_max)))
        )
        return future

    def _take(self, kind: int, payload: bytes) -> bool:
        if kind == METHOD:
            method = payload[:4]
            if method in (BASIC_ACK, BASIC_NACK):
                self._confirm(*parse_confirm(payload), arrived=method == BASIC_ACK)
                return True
            if method == RETURN:
                self._returned = parse_return(payload)
                return True
            if method == CHANNEL_CLOSE:
                self._over = True
            return False
        if self._returned is None:
            return False
        if kind == HEADER:
            self._missing, raw = content_header(payload)
            self._give_back(raw, *self._returned)
        elif kind == BODY:
            self._missing -= len(payload)
        if not self._missing:
            self._returned = None
        return True

    def _look(self) -> None:
        """Give up what is late. Its tag stays: a confirm that comes all the same finds the future done."""
        now, late = self._loop.time(), False
        for waiting in self._waiting.values():
            late = late or not waiting.future.done()
            if waiting.deadline <= now and not waiting.future.done():
                waiting.future.set_exception(TimeoutError())
        self._looking = self._loop.call_later(_LOOK_EVERY, self._look) if late else None

    def _confirm(self, tag: int, multiple: bool, *, arrived: bool) -> None:
        for key, future, _ in self._up_to(tag) if multiple else self._only(tag):
            if self._by_id.get(key) is future:
                del self._by_id[key]
            if future.done():
                continue  # it was returned, or its caller waits no more
            if arrived:
                future.set_result(None)
            else:
                future.set_exception(Nacked())

    def _give_back(self, raw: bytes, code: int, text: str) -> None:
        """A confirm follows, which then finds the future done."""
        try:
            key = (Properties.parse(raw).message_id or "").encode("utf-8", "surrogateescape")
        except WireError:
            key = b""
        future = self._by_id.get(key)
        if future is not None and not future.done():
            future.set_exception(Returned(code, text))
        elif future is None:
            # whose it was cannot be told, and the confirm that follows would make a success of it: each is tried alone
            self._fail_all(Lost(lower.ChannelInvalidStateError(f"returned without a known id: {text}"), alone=False))

    def _only(self, tag: int) -> Iterator[_Waiting]:
        found = self._waiting.pop(tag, None)
        if found is not None:
            yield found

    def _up_to(self, tag: int) -> Iterator[_Waiting]:
        for each in list(itertools.takewhile(tag.__ge__, self._waiting)):
            yield self._waiting.pop(each)

    def _fail_all(self, error: Lost) -> None:
        for _, future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def _closed(self, closing: "asyncio.Future[object]") -> None:
        self._frames.let_go(self._number, self._take)
        error = None if closing.cancelled() else closing.exception()
        cause = error or lower.ChannelInvalidStateError("the channel was closed")
        if self._looking is not None:
            self._looking.cancel()
        self._fail_all(Lost(cause, alone=len(self._waiting) == 1))
        self._waiting, self._by_id = {}, {}

    async def close(self) -> None:
        """Close the channel; what has no confirm by then is not known to have arrived."""
        await close_channel(self._channel)
