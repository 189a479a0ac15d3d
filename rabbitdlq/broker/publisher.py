"""Publishing that is certain: mandatory, confirmed, under a deadline. What returns without an error has arrived."""

import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import aiormq.exceptions as lower

from rabbitdlq.broker.confirms import Lost, Nacked, PublishingChannel, Returned
from rabbitdlq.broker.connection import Connection
from rabbitdlq.broker.translate import LOWER_ERRORS, cancelled_by_us, nacked, translate, unroutable
from rabbitdlq.errors import (
    BrokerUnavailable,
    ConfigurationError,
    PublishRefused,
    PublishUnconfirmed,
    RabbitDLQError,
)
from rabbitdlq.limits import MAX_EXCHANGE_BYTES, MAX_NAME_BYTES, check_name
from rabbitdlq.wire import Properties, WireError

__all__ = ["Deadline", "Outgoing", "Publisher", "new_id"]

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
    #: the properties' bytes and the id among them, where they are known already; then the properties are not looked at
    encoded: bytes | None = None
    message_id: str | None = None

    @property
    def id(self) -> str:
        """The message id; empty where there is none."""
        return self.message_id or self.properties.message_id or ""

    @property
    def what(self) -> str:
        """For error texts."""
        return f"publishing to {self.exchange or 'the default exchange'} with key {self.routing_key!r}"


class Deadline(NamedTuple):
    """Until when something has to be done, and how long that was when it was begun."""

    seconds: float
    #: by the event loop's clock
    at: float

    @classmethod
    def after(cls, timeout: timedelta) -> "Deadline":
        """So long from now."""
        seconds = timeout.total_seconds()
        return cls(seconds, asyncio.get_running_loop().time() + seconds)


class Publisher:
    """A confirming channel of a connection; one that an error closed is opened again for the next publish."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: PublishingChannel | None = None
        self._opening = asyncio.Lock()
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)
        #: the way whose names were looked at last
        self._checked: tuple[str, str] | None = None

    @classmethod
    async def open(cls, connection: Connection) -> "Publisher":
        """A publisher whose channel is open: then publishes go out in the order in which they are begun.

        Where it cannot be opened the connection is closed, and a :class:`BrokerError` raised.
        """
        publisher = cls(connection)
        try:
            await publisher._open_channel()
        except BaseException:
            await connection.close()
            raise
        return publisher

    @property
    def connection(self) -> Connection:
        """The connection it publishes on."""
        return self._connection

    @property
    def is_ready(self) -> bool:
        """Whether its channel is open: then so is the connection, as far as the client has noticed."""
        return self._channel is not None and not self._channel.is_closed

    @property
    def is_clogged(self) -> bool:
        """Whether the socket takes no more for now, as with a broker that is blocked by an alarm."""
        return self._connection.frames.is_clogged

    async def drained(self) -> None:
        """Return when the socket takes more."""
        await self._connection.frames.drain()

    def begin(self, outgoing: Outgoing, deadline: Deadline, *, mandatory: bool = True) -> "asyncio.Future[None] | None":
        """Write it at once where nothing is in the way, else None: then :meth:`publish` it, which can wait.

        The future ends with the confirm; what it raises is for :meth:`failed`. Raises :class:`PublishRefused` for what
        cannot be sent.
        """
        channel = self._channel
        encoded, message_id = self._encode(outgoing)
        if channel is None or channel.is_closed or self.is_clogged or channel.with_id(message_id) is not None:
            return None
        way = (outgoing.exchange, outgoing.routing_key, mandatory)
        return channel.publish(way, message_id, encoded, outgoing.body, deadline.at)

    async def publish(self, outgoing: Outgoing, *, timeout: timedelta, mandatory: bool = True) -> None:
        """Publish and wait for the confirm, all within the timeout.

        Raises :class:`Unroutable` when no queue took it, :class:`PublishRefused` when the broker nacked it or closed
        the channel over it, :class:`PublishUnconfirmed` when no confirm came in time (it may have arrived),
        :class:`AccessDenied`, :class:`EntityNotFound`, or :class:`BrokerUnavailable` when nothing could be sent.
        """
        deadline = Deadline.after(timeout)
        confirm = self.begin(outgoing, deadline, mandatory=mandatory)
        if confirm is None:
            confirm = await self._begin_late(outgoing, deadline, mandatory)
        try:
            await confirm
        except asyncio.CancelledError as error:
            if cancelled_by_us():
                raise
            raise self._told(error, outgoing, deadline, sent=True) from error
        except Exception as error:
            await self.failed(error, outgoing, deadline, mandatory=mandatory)

    async def _begin_late(self, outgoing: Outgoing, deadline: Deadline, mandatory: bool) -> "asyncio.Future[None]":
        """When there is a channel, the socket takes more, and nothing of the same id is under way."""
        try:
            async with asyncio.timeout_at(deadline.at):
                while True:
                    channel = await self._open_channel()
                    other = channel.with_id(outgoing.id)
                    if self.is_clogged:
                        await self.drained()
                    elif other is not None:
                        await asyncio.wait([other])
                    elif (confirm := self.begin(outgoing, deadline, mandatory=mandatory)) is not None:
                        return confirm
        except BaseException as error:
            told = self._told(error, outgoing, deadline, sent=False)
            if told is error:
                raise
            raise told from error

    async def failed(
        self, error: BaseException, outgoing: Outgoing, deadline: Deadline, *, mandatory: bool = True
    ) -> None:
        """What a publish came to whose future raised: an error of ours, or nothing if it went well at a second try.

        One bad publish closes the channel over all that are under way: each is tried alone, and the bad one is told by
        that. What had arrived already arrives twice, under the same id.
        """
        by_neighbour = isinstance(error, Lost) and not (error.alone and isinstance(error.cause, lower.ChannelClosed))
        if not (by_neighbour and self._connection.is_open):
            raise self._told(error, outgoing, deadline, sent=True) from error
        try:
            async with asyncio.timeout_at(deadline.at), self._alone:
                channel = await PublishingChannel.open(self._connection)
                try:
                    encoded, message_id = self._encode(outgoing)
                    way = (outgoing.exchange, outgoing.routing_key, mandatory)
                    await channel.publish(way, message_id, encoded, outgoing.body, deadline.at)
                finally:
                    await channel.close()
        except BaseException as again:
            told = self._told(again, outgoing, deadline, sent=True)
            if told is again:
                raise
            raise told from again

    def _told(  # noqa: PLR0911 - one return a kind of error
        self, error: BaseException, outgoing: Outgoing, deadline: Deadline, *, sent: bool
    ) -> BaseException:
        """The error as the caller is told it."""
        match error:
            case Returned():
                return unroutable(outgoing.what)
            case Nacked():
                return nacked(outgoing.what)
            case Lost(cause=cause):
                return self._refusal(cause, outgoing, sent=sent)
            case TimeoutError() if sent:
                return PublishUnconfirmed(
                    f"{outgoing.what}: no confirm within {deadline.seconds:g} s; is the broker blocked by an alarm?"
                )
            case TimeoutError():
                return BrokerUnavailable(
                    f"{outgoing.what}: not sent within {deadline.seconds:g} s; is the broker blocked by an alarm?"
                )
            case asyncio.CancelledError() if not cancelled_by_us():
                # a channel that closes cancels what waits on it; our own cancellation goes through
                return PublishUnconfirmed(f"{outgoing.what}: the connection was lost before the confirm")
            case _ if isinstance(error, LOWER_ERRORS) and not isinstance(error, RabbitDLQError):
                return self._refusal(error, outgoing, sent=sent)
            case _:
                return error

    def _refusal(self, error: BaseException, outgoing: Outgoing, *, sent: bool) -> Exception:
        ours = translate(error, outgoing.what)
        if isinstance(error, lower.ChannelPreconditionFailed):
            return PublishRefused(str(ours))
        if sent and isinstance(ours, BrokerUnavailable):
            # one without a text would be told by its class: "CancelledError; the connection was lost"
            said = f"{ours};" if str(error) else f"{outgoing.what}:"
            return PublishUnconfirmed(f"{said} the connection was lost before the confirm")
        return ours

    def _encode(self, outgoing: Outgoing) -> tuple[bytes, str]:
        try:
            encoded = outgoing.properties.encode() if outgoing.encoded is None else outgoing.encoded
        except WireError as error:
            raise PublishRefused(f"{outgoing.what}: {error}") from error
        message_id = outgoing.id
        if not message_id:
            raise PublishRefused(f"{outgoing.what}: a message without an id cannot be told apart when it is returned")
        if len(encoded) + _HEADER_FRAME_OVERHEAD > self._connection.frame_max:
            raise PublishRefused(
                f"{outgoing.what}: {len(encoded):,} bytes of properties and headers do not fit into one frame of "
                f"{self._connection.frame_max:,}; put large values into the body"
            )
        if self._checked != (outgoing.exchange, outgoing.routing_key):
            self._check_names(outgoing)
            self._checked = (outgoing.exchange, outgoing.routing_key)
        return encoded, message_id

    def _check_names(self, outgoing: Outgoing) -> None:
        try:
            if outgoing.exchange:
                check_name("exchange", outgoing.exchange, MAX_EXCHANGE_BYTES)
            if len(outgoing.routing_key.encode()) > MAX_NAME_BYTES:
                raise PublishRefused(f"{outgoing.what}: a routing key has at most {MAX_NAME_BYTES} bytes")
        except (ConfigurationError, UnicodeEncodeError) as error:
            raise PublishRefused(f"{outgoing.what}: {error}") from error

    async def _open_channel(self) -> PublishingChannel:
        async with self._opening:
            if self._channel is None or self._channel.is_closed:
                self._channel = await PublishingChannel.open(self._connection)
            return self._channel

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close()


def new_id() -> str:
    """A fresh message id."""
    return os.urandom(16).hex()
