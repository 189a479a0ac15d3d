"""Publishing that is certain: mandatory, confirmed, under a deadline. What returns without an error has arrived."""

import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta

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

__all__ = ["Outgoing", "Publisher", "new_id", "too_late"]

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

    def begin(self, outgoing: Outgoing, *, timeout: timedelta, mandatory: bool = True) -> "asyncio.Future[None] | None":
        """Write it at once where nothing is in the way, else None: then :meth:`publish` it, which can wait.

        The future ends with the confirm; what it raises is for :meth:`failed`. Raises :class:`PublishRefused` for what
        cannot be sent.
        """
        channel = self._channel
        encoded, message_id = self._encode(outgoing)
        if channel is None or channel.is_closed or channel.with_id(message_id) is not None:
            return None
        return channel.publish(
            outgoing.exchange,
            outgoing.routing_key,
            message_id,
            encoded,
            outgoing.body,
            timeout=timeout.total_seconds(),
            mandatory=mandatory,
        )

    async def publish(self, outgoing: Outgoing, *, timeout: timedelta, mandatory: bool = True) -> None:
        """Publish and wait for the confirm.

        Raises :class:`Unroutable` when no queue took it, :class:`PublishRefused` when the broker nacked it or closed
        the channel over it, :class:`PublishUnconfirmed` when no confirm came in time (it may have arrived),
        :class:`AccessDenied`, :class:`EntityNotFound`, or :class:`BrokerUnavailable` when nothing could be sent.
        """
        confirm = self.begin(outgoing, timeout=timeout, mandatory=mandatory)
        if confirm is None:
            confirm = await self._begin_late(outgoing, timeout, mandatory)
        try:
            await confirm
        except asyncio.CancelledError as error:
            if cancelled_by_us():
                raise
            raise self._told(error, outgoing, timeout, sent=True) from error
        except Exception as error:
            await self.failed(error, outgoing, timeout=timeout, mandatory=mandatory)

    async def _begin_late(self, outgoing: Outgoing, timeout: timedelta, mandatory: bool) -> "asyncio.Future[None]":
        """When there is a channel, and nothing of the same id under way on it."""
        message_id = outgoing.id
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while True:
                    channel = await self._open_channel()
                    other = channel.with_id(message_id)
                    if other is not None:
                        await asyncio.wait([other])
                    elif (confirm := self.begin(outgoing, timeout=timeout, mandatory=mandatory)) is not None:
                        return confirm
        except BaseException as error:
            told = self._told(error, outgoing, timeout, sent=False)
            if told is error:
                raise
            raise told from error

    async def failed(
        self, error: BaseException, outgoing: Outgoing, *, timeout: timedelta, mandatory: bool = True
    ) -> None:
        """What a publish came to whose future raised: an error of ours, or nothing if it went well at a second try.

        One bad publish closes the channel over all that are under way: each is tried alone, and the bad one is told by
        that. What had arrived already arrives twice, under the same id.
        """
        match error:
            case Returned():
                raise unroutable(outgoing.what) from error
            case Nacked():
                raise nacked(outgoing.what) from error
            case Lost(cause=cause, alone=alone) if self._connection.is_open and not (
                alone and isinstance(cause, lower.ChannelClosed)
            ):
                pass
            case Lost(cause=cause):
                raise self._refusal(cause, outgoing, sent=True) from error
            case _:
                raise self._told(error, outgoing, timeout, sent=True) from error
        async with self._alone:
            channel = PublishingChannel(self._connection, await self._connection.channel(confirms=True))
            try:
                encoded, message_id = self._encode(outgoing)
                await channel.publish(
                    outgoing.exchange,
                    outgoing.routing_key,
                    message_id,
                    encoded,
                    outgoing.body,
                    timeout=timeout.total_seconds(),
                    mandatory=mandatory,
                )
            except Lost as again:
                raise self._refusal(again.cause, outgoing, sent=True) from again
            except (Returned, Nacked, TimeoutError) as again:
                await self.failed(again, outgoing, timeout=timeout)
            finally:
                await channel.close()

    def _told(self, error: BaseException, outgoing: Outgoing, timeout: timedelta, *, sent: bool) -> BaseException:
        """The error as the caller is told it."""
        match error:
            case RabbitDLQError():
                return error
            case TimeoutError():
                return too_late(outgoing, timeout, sent=sent)
            case asyncio.CancelledError():
                # a channel that closes cancels what waits on it; our own cancellation goes through
                if cancelled_by_us():
                    return error
                return PublishUnconfirmed(f"{outgoing.what}: the connection was lost before the confirm")
            case _ if isinstance(error, LOWER_ERRORS):
                return self._refusal(error, outgoing, sent=sent)
            case _:
                return error

    def _refusal(self, error: BaseException, outgoing: Outgoing, *, sent: bool) -> Exception:
        ours = translate(error, outgoing.what)
        if isinstance(error, lower.ChannelPreconditionFailed):
            return PublishRefused(str(ours))
        if sent and isinstance(ours, BrokerUnavailable):
            return PublishUnconfirmed(f"{ours}; the connection was lost before the confirm")
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


def too_late(outgoing: Outgoing, timeout: timedelta, *, sent: bool) -> RabbitDLQError:
    """The error of a publish that did not end in time."""
    seconds = timeout.total_seconds()
    if not sent:
        return BrokerUnavailable(f"{outgoing.what}: not sent within {seconds:g} s")
    return PublishUnconfirmed(f"{outgoing.what}: no confirm within {seconds:g} s; is the broker blocked by an alarm?")


def new_id() -> str:
    """A fresh message id."""
    return os.urandom(16).hex()
