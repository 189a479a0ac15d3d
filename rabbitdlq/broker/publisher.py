"""Publishing that is certain: mandatory, confirmed, under a deadline. What returns without an error has arrived."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import aiormq.exceptions as lower
from pamqp import commands

from rabbitdlq.broker.connection import Channel, Connection, close_channel
from rabbitdlq.broker.reader import publish_key
from rabbitdlq.broker.translate import LOWER_ERRORS, cancelled_by_us, translate
from rabbitdlq.errors import BrokerUnavailable, ConfigurationError, PublishRefused, PublishUnconfirmed
from rabbitdlq.limits import MAX_EXCHANGE_BYTES, MAX_NAME_BYTES, check_name
from rabbitdlq.wire import Properties, WireError

__all__ = ["Outgoing", "Publisher", "new_id"]

#: frame header, class, weight, body size, frame end
_HEADER_FRAME_OVERHEAD = 7 + 12 + 1
#: channels opened for publishes that are tried alone; a connection has a limit of them
ALONE_AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish."""

    exchange: str
    routing_key: str
    body: bytes
    properties: Properties

    @property
    def what(self) -> str:
        """For error texts."""
        return f"publishing to {self.exchange or 'the default exchange'} with key {self.routing_key!r}"


class _RawProperties(commands.Basic.Properties):
    """Properties that are encoded already. The library finds a returned publish by ``message_id``."""

    def __init__(self, encoded: bytes, message_id: str) -> None:
        super().__init__(message_id=publish_key(message_id))
        self._encoded = encoded

    def marshal(self) -> bytes:
        return self._encoded


class Publisher:
    """A confirming channel of a connection; one that an error closed is opened again for the next publish."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._under_way = 0
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)
        self._in_flight: dict[str, tuple[asyncio.Lock, int]] = {}

    @property
    def connection(self) -> Connection:
        """The connection it publishes on."""
        return self._connection

    async def publish(self, outgoing: Outgoing, *, timeout: timedelta, mandatory: bool = True) -> None:
        """Publish and wait for the confirm.

        Raises :class:`Unroutable` when no queue took it, :class:`PublishRefused` when the broker nacked it or closed
        the channel over it, :class:`PublishUnconfirmed` when no confirm came in time (it may have arrived),
        :class:`AccessDenied`, :class:`EntityNotFound`, or :class:`BrokerUnavailable` when nothing could be sent.
        """
        encoded, message_id = self._encode(outgoing)
        sending = False
        try:
            async with asyncio.timeout(timeout.total_seconds()), self._one_at_a_time(message_id):
                channel = await self._open_channel()
                sending = True
                self._under_way += 1
                try:
                    await self._send(channel, outgoing, encoded, mandatory)
                except (lower.ChannelClosed, lower.ChannelInvalidStateError) as error:
                    alone = self._under_way == 1 and isinstance(error, lower.ChannelClosed)
                    if alone or not self._connection.is_open:
                        raise
                    # one bad publish closes the channel over all that are under way: each is tried alone, and the
                    # bad one is told by that. What had arrived already arrives twice, under the same id
                    await self._send_alone(outgoing, encoded, mandatory)
                finally:
                    self._under_way -= 1
        except TimeoutError as error:
            if not sending:
                raise BrokerUnavailable(f"{outgoing.what}: not sent within {timeout.total_seconds():g} s") from error
            raise PublishUnconfirmed(
                f"{outgoing.what}: no confirm within {timeout.total_seconds():g} s; is the broker blocked by an alarm?"
            ) from error
        except LOWER_ERRORS as error:
            raise self._refusal(error, outgoing, sending) from error
        except asyncio.CancelledError as error:
            # a channel that closes cancels what waits on it; our own cancellation goes through
            if cancelled_by_us():
                raise
            raise PublishUnconfirmed(f"{outgoing.what}: the connection was lost before the confirm") from error

    async def _send(self, channel: Channel, outgoing: Outgoing, encoded: bytes, mandatory: bool) -> None:
        await channel.basic_publish(
            outgoing.body,
            exchange=outgoing.exchange,
            routing_key=outgoing.routing_key,
            properties=_RawProperties(encoded, outgoing.properties.message_id or ""),
            mandatory=mandatory,
        )

    async def _send_alone(self, outgoing: Outgoing, encoded: bytes, mandatory: bool) -> None:
        async with self._alone:
            channel = await self._connection.channel(confirms=True)
            try:
                await self._send(channel, outgoing, encoded, mandatory)
            finally:
                await close_channel(channel)

    def _refusal(self, error: BaseException, outgoing: Outgoing, sending: bool) -> Exception:
        ours = translate(error, outgoing.what)
        if isinstance(error, lower.ChannelPreconditionFailed):
            return PublishRefused(str(ours))
        if sending and isinstance(ours, BrokerUnavailable):
            return PublishUnconfirmed(f"{ours}; the connection was lost before the confirm")
        return ours

    def _encode(self, outgoing: Outgoing) -> tuple[bytes, str]:
        try:
            encoded = outgoing.properties.encode()
        except WireError as error:
            raise PublishRefused(f"{outgoing.what}: {error}") from error
        message_id = outgoing.properties.message_id
        if not message_id:
            raise PublishRefused(f"{outgoing.what}: a message without an id cannot be told apart when it is returned")
        if len(encoded) + _HEADER_FRAME_OVERHEAD > self._connection.frame_max:
            raise PublishRefused(
                f"{outgoing.what}: {len(encoded):,} bytes of properties and headers do not fit into one frame of "
                f"{self._connection.frame_max:,}; put large values into the body"
            )
        try:
            if outgoing.exchange:
                check_name("exchange", outgoing.exchange, MAX_EXCHANGE_BYTES)
            if len(outgoing.routing_key.encode()) > MAX_NAME_BYTES:
                raise PublishRefused(f"{outgoing.what}: a routing key has at most {MAX_NAME_BYTES} bytes")
        except (ConfigurationError, UnicodeEncodeError) as error:
            raise PublishRefused(f"{outgoing.what}: {error}") from error
        return encoded, message_id

    async def _open_channel(self) -> Channel:
        async with self._opening:
            if self._channel is None or self._channel.is_closed:
                self._channel = await self._connection.channel(confirms=True)
            return self._channel

    @asynccontextmanager
    async def _one_at_a_time(self, message_id: str) -> AsyncIterator[None]:
        """Two publishes with one id, in flight together, could not be told apart when one of them is returned."""
        lock, users = self._in_flight.get(message_id, (asyncio.Lock(), 0))
        self._in_flight[message_id] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._in_flight.pop(message_id)
            if users > 1:
                self._in_flight[message_id] = (lock, users - 1)

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await close_channel(self._channel)


def new_id() -> str:
    """A fresh message id."""
    return uuid.uuid4().hex
