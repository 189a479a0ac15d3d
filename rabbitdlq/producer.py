"""Publishing work: persistent, mandatory, confirmed, with an id and a timestamp, many in flight at once."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

from pydantic_core import PydanticSerializationError, to_json

from rabbitdlq.broker import Outgoing, PublishLink, PublishReport, PublishStream, ensure_topology, new_id
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.limits import TOPOLOGY_FORM, check_kind, checked_duration, optional_duration
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties, WireError, plain_properties

__all__ = ["Producer", "PublishReport", "encode_payload"]

_NONE = Properties()
DEFAULT_TIMEOUT = timedelta(seconds=30)


def encode_payload(payload: Any) -> tuple[bytes, str]:
    """Body and content type: bytes as they are, everything else as JSON (pydantic models too).

    Raises :class:`ConfigurationError` for what JSON cannot say.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload), "application/octet-stream"
    try:
        return to_json(payload, inf_nan_mode="constants"), "application/json"
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"payload of type {type(payload).__name__} cannot be sent: {error}") from error


def _outgoing(
    queue: str,
    payload: Any,
    *,
    message_id: str | None = None,
    headers: Mapping[str, Any] | None = None,
    content_type: str | None = None,
    exchange: str = "",
    routing_key: str | None = None,
    priority: int | None = None,
    expiration: timedelta | str | None = None,
    timestamp: datetime | None = None,
    correlation_id: str | None = None,
    type: str | None = None,
) -> Outgoing:
    """What :meth:`Producer.send` puts on the wire; raises :class:`ConfigurationError` for what cannot be sent."""
    body, default_type = encode_payload(payload)
    key = queue if routing_key is None else routing_key
    message_id, lasts = message_id or new_id(), optional_duration("expiration", expiration)
    try:
        seconds = time.time() if timestamp is None else timestamp.timestamp()
        if not headers and priority is None and expiration is None and correlation_id is None and type is None:
            encoded = plain_properties(content_type or default_type, message_id, int(seconds))
            return Outgoing(exchange, key, body, _NONE, encoded, message_id)
        properties = Properties(
            content_type=content_type or default_type,
            headers=Headers(headers) if headers else None,
            delivery_mode=2,
            priority=priority,
            correlation_id=correlation_id,
            expiration=None if lasts is None else str(round(lasts / timedelta(milliseconds=1))),
            message_id=message_id,
            timestamp=int(seconds),
            type=type,
        )
        encoded = properties.encode()
    except (WireError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"message for {queue!r}: {error}") from error
    return Outgoing(exchange, key, body, properties, encoded, message_id)


class Producer:
    """Sends to work queues and exchanges. Used as an async context manager it closes its connection.

    ::

        async with Producer("amqp://guest:guest@127.0.0.1/") as producer:
            await producer.send("orders", {"order": 17})
    """

    def __init__(self, url: str, *, window: int = 500, timeout: timedelta | str = DEFAULT_TIMEOUT) -> None:
        """``window``: publishes in flight at once; ``timeout``: for each publish, confirm included, like ``"30s"``."""
        if window < 1:
            raise ConfigurationError(f"window: {window} is below 1")
        self._link = PublishLink(url, "rabbitdlq producer")
        self._window = window
        self._in_flight = 0
        self._queueing: deque[asyncio.Future[None]] = deque()
        self._timeout = checked_duration("timeout", timeout)

    async def send(
        self,
        queue: str,
        payload: Any,
        *,
        message_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        content_type: str | None = None,
        exchange: str = "",
        routing_key: str | None = None,
        priority: int | None = None,
        expiration: timedelta | str | None = None,
        timestamp: datetime | None = None,
        correlation_id: str | None = None,
        type: str | None = None,
    ) -> str:
        """Publish one message and wait until the broker has confirmed it; gives the message's id.

        Goes to the work queue itself, or with ``exchange`` through an exchange of the application (then ``queue`` is
        only the default of ``routing_key``). Raises :class:`Unroutable`, :class:`PublishRefused`,
        :class:`PublishUnconfirmed` (it may have arrived), :class:`AccessDenied`, :class:`EntityNotFound`,
        :class:`BrokerUnavailable`, and :class:`ConfigurationError` for what cannot be sent.
        """
        outgoing = _outgoing(
            queue,
            payload,
            message_id=message_id,
            headers=headers,
            content_type=content_type,
            exchange=exchange,
            routing_key=routing_key,
            priority=priority,
            expiration=expiration,
            timestamp=timestamp,
            correlation_id=correlation_id,
            type=type,
        )
        while self._in_flight >= self._window:
            await self._room()
        self._in_flight += 1
        try:
            await self._link.publish(outgoing, timeout=self._timeout)
        finally:
            self._in_flight -= 1
            self._make_room()
        return outgoing.id

    async def _room(self) -> None:
        """Wait until one of those in flight has ended."""
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queueing.append(room)
        try:
            await room
        except asyncio.CancelledError:
            if not room.cancelled():
                self._make_room()  # it was ours, and goes to the next
            raise

    def _make_room(self) -> None:
        while self._queueing:
            room = self._queueing.popleft()
            if not room.done():
                room.set_result(None)
                return

    async def send_all(
        self, queue: str, payloads: AsyncIterator[Any], *, content_type: str | None = None, **options: Any
    ) -> AsyncGenerator[PublishReport, None]:
        """Publish a stream of payloads with a window of them in flight; a report for each, as confirms come.

        One that fails does not stop the others. Reports do not wait for the next payload: a slow source is told at
        once what became of its last one. Memory is bounded by the window, and by 64 MB of bodies in flight. What the
        source raises is raised here once everything that was begun has been reported. ``options`` are those of
        :meth:`send` but for the id, of which each payload gets its own. The window is this stream's, beside that of
        :meth:`send`.
        """
        if "message_id" in options:
            raise ConfigurationError("send_all: message_id: each payload needs an id of its own")
        stream = PublishStream(self._link, self._window, self._timeout)

        def outgoing_of(payload: Any) -> Outgoing:
            return _outgoing(queue, payload, content_type=content_type, **options)

        async with contextlib.aclosing(stream.run(payloads, outgoing_of)) as reports:
            async for report in reports:
                yield report

    async def declare(self, topology: Topology) -> None:
        """Declare the topology where it is missing, so that there is a queue to send to.

        Raises :class:`TopologyMismatch` where it exists otherwise, and :class:`EntityNotFound` where it is missing and
        this account may not declare.
        """
        check_kind("topology", topology, Topology, TOPOLOGY_FORM)
        await ensure_topology((await self._link.publisher()).connection, topology)

    async def connect(self) -> None:
        """Connect now, so that a wrong URL or a broker that is down shows before the first message."""
        await self._link.publisher()

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
