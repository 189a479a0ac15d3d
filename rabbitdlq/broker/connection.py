"""Connections to the broker: opened under a deadline, watched, closed, described without secrets."""

import asyncio
import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, cast

import aio_pika
import aiormq.abc
import aiormq.channel
import aiormq.exceptions
from yarl import URL

from rabbitdlq.broker.reader import FrameTransport
from rabbitdlq.broker.translate import AT_BEHIND_HOST, shown_url, translated
from rabbitdlq.errors import BrokerUnavailable, ConfigurationError
from rabbitdlq.topology import Version

__all__ = ["DEFAULT_URL", "Channel", "Connection"]

DEFAULT_URL = "amqp://guest:guest@127.0.0.1:5672/"
#: a frozen network is noticed after about three of these (https://www.rabbitmq.com/docs/heartbeats)
HEARTBEAT_SECONDS = 8
CONNECT_TIMEOUT = timedelta(seconds=10)
CLOSE_TIMEOUT = timedelta(seconds=5)
_URL_FORM = "write amqp://user:password@host:port/vhost, with characters like / @ # : of a password as %2F %40 %23 %3A"

#: a channel of the layer under aio-pika: frames and tags as they are on the wire
Channel = aiormq.channel.Channel


class _RawConnection(aio_pika.Connection):
    """aio-pika's connection, reading through our transport."""

    def __init__(self, url: URL, *args: Any, **kwargs: Any) -> None:
        super().__init__(url, *args, **kwargs)
        self.frames = FrameTransport(self.url.scheme)
        self.kwargs["transport_factory"] = self.frames


@dataclass(frozen=True, slots=True)
class _Server:
    version: Version
    frame_max: int
    vhost: str


class Connection:
    """One AMQP connection. Used as an async context manager it closes itself."""

    def __init__(self, raw: _RawConnection, server: _Server, url: str) -> None:
        self._raw = raw
        #: where channels of ours read and write their content
        self.frames = raw.frames
        self._server = server
        self._url = url

    @classmethod
    async def open(cls, url: str, name: str = "rabbitdlq", timeout: timedelta = CONNECT_TIMEOUT) -> "Connection":
        """A connection; ``name`` is shown in the management UI.

        Raises :class:`ConfigurationError` for a URL that is none, :class:`AccessDenied` for wrong credentials or
        virtual host, :class:`BrokerUnavailable` where nothing answers before the deadline.
        """
        checked = _checked_url(url)
        what = f"connecting to {shown_url(url)}"
        with translated(what), _speaking_amqp():
            async with asyncio.timeout(timeout.total_seconds()):
                raw = cast(
                    _RawConnection,
                    await aio_pika.connect(
                        checked,
                        connection_class=_RawConnection,
                        client_properties={"connection_name": name},
                    ),
                )
        transport = raw.transport
        if transport is None:
            raise BrokerUnavailable(f"{what}: the connection was lost")
        lower = cast(aiormq.connection.Connection, transport.connection)
        version = str(_text(lower.server_properties.get("version"))) if lower.server_properties else ""
        # a limit of 0 means none, but a frame has to end somewhere
        frame_max = lower.connection_tune.frame_max or 131_072
        return cls(raw, _Server(parse_version(version), frame_max, lower.vhost), url)

    @property
    def version(self) -> Version:
        """The broker's version, for instance (4, 0, 5)."""
        return self._server.version

    @property
    def frame_max(self) -> int:
        """The largest frame in bytes: a message's headers have to fit into one."""
        return self._server.frame_max

    @property
    def vhost(self) -> str:
        """The virtual host."""
        return self._server.vhost

    @property
    def user(self) -> str:
        """The account's name."""
        return URL(self._url).user or "guest"

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return shown_url(self._url)

    @property
    def is_open(self) -> bool:
        """Whether it is still there, as far as the client has noticed."""
        transport = self._raw.transport
        # aio-pika's own flag follows only its own close(), not a line that was lost
        if self._raw.is_closed or transport is None:
            return False
        return bool(cast(aiormq.connection.Connection, transport.connection).is_opened)

    async def channel(self, *, confirms: bool = False) -> Channel:
        """A new channel; with ``confirms`` every publish on it is confirmed."""
        if not self.is_open:
            raise BrokerUnavailable(f"{self.shown}: the connection is closed")
        with translated(f"opening a channel on {self.shown}"):
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                transport = self._raw.transport
                if transport is None:
                    raise ConnectionError("the connection is closed")
                try:
                    channel = await transport.connection.channel(publisher_confirms=confirms, on_return_raises=True)
                except RuntimeError as error:  # what the library says when the line went just now
                    raise ConnectionError(str(error)) from error
                return cast(Channel, channel)

    async def close(self) -> None:
        """Close it, under a deadline: a peer that does not answer is left."""
        with contextlib.suppress(Exception), translated("closing a connection"):
            async with asyncio.timeout(CLOSE_TIMEOUT.total_seconds()):
                await self._raw.close()

    def reset(self) -> None:
        """End it at once; what the broker has not read yet, as on a connection that it has blocked, is forgotten."""
        self.frames.reset()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@contextlib.contextmanager
def _speaking_amqp() -> Iterator[None]:
    """While connecting: who hangs up without a word of AMQP, as the management API does, may be no broker's port."""
    try:
        yield
    except aiormq.exceptions.AMQPConnectionError as error:
        if not isinstance(error.__cause__, asyncio.IncompleteReadError):
            raise
        raise ConnectionError(
            "closed by the other side before it was open; is that an AMQP port, or the one of the management API or of "
            "TLS (amqps://)?"
        ) from error


async def close_channel(channel: Channel) -> None:
    """Close a channel whatever state it is in; what it held unsettled goes back to its queue."""
    with contextlib.suppress(Exception), translated("closing a channel"):
        async with asyncio.timeout(CLOSE_TIMEOUT.total_seconds()):
            await channel.close()


def parse_version(text: str) -> Version:
    """The numbers of a version like ``4.0.5`` or ``3.13.0-rc.1``.

    >>> parse_version("3.13.0-rc.1")
    (3, 13, 0)
    """
    numbers: list[int] = []
    for part in text.split("-", 1)[0].split("+", 1)[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _text(value: object) -> object:
    return value.decode() if isinstance(value, bytes | bytearray) else value


def heartbeat_of(url: str) -> float:
    """Seconds after which a broker that hears nothing may hang up; infinite where heartbeats are switched off."""
    try:
        told = URL(url).query.get("heartbeat", "")
    except ValueError:  # whoever connects says what is wrong with it
        told = ""
    return (int(told) if told.isdecimal() else HEARTBEAT_SECONDS) or math.inf


def _checked_url(url: str) -> URL:
    try:
        parsed = URL(url)
        port = parsed.port
    except ValueError as error:
        raise ConfigurationError(f"broker URL: {error}; {_URL_FORM}") from error
    if AT_BEHIND_HOST.search(url):
        # what was meant to be the password has been read as port and path: it must not be shown
        raise ConfigurationError(f"broker URL: there is an @ behind the host; {_URL_FORM}")
    if parsed.scheme not in {"amqp", "amqps"}:
        raise ConfigurationError(f"broker URL: {shown_url(url)!r} is not amqp:// or amqps://; {_URL_FORM}")
    if not parsed.host:
        raise ConfigurationError(f"broker URL: {shown_url(url)!r} names no host; {_URL_FORM}")
    for name in ("cafile", "capath", "certfile", "keyfile"):
        path = parsed.query.get(name)
        if parsed.scheme == "amqps" and path is not None and not os.path.exists(path):
            raise ConfigurationError(f"broker URL: {name}: there is no {path}")
    heartbeat = parsed.query.get("heartbeat")
    # what the library cannot use is no heartbeat at all
    if heartbeat is not None and not (re.fullmatch(r"\d{1,5}", heartbeat, re.ASCII) and int(heartbeat) < 65_535):
        raise ConfigurationError(f"broker URL: heartbeat: {heartbeat!r} is no whole number of seconds below 65535")
    if heartbeat is None:
        parsed = parsed.update_query(heartbeat=HEARTBEAT_SECONDS)
    return parsed if port else parsed.with_port(5671 if parsed.scheme == "amqps" else 5672)
