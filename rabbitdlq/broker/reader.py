"""The byte stream between us and the broker, shared with the client library.

aiormq reads and writes through a pair of streams that its public ``transport_factory`` makes. Ours hand on what is the
library's (opening, channels, declarations, errors), and take out what has to be fast or exact:

- **Lifted channels** (:meth:`FrameTransport.lift`): the content of a channel that consumes or publishes goes straight
  to whoever lifted it, many messages for one read, and never through the library's queues, tasks and decoders.
- **Headers byte for byte.** On every other channel a content header is wrapped: the library, which loses types and ends
  the connection over a text that is not UTF-8, sees a valid table with one byte-string entry, which is the original
  (:func:`original_properties` takes it out again).
- **Nothing on a closed channel.** When the broker closes a channel over one bad publish, the library goes on writing
  those that were waiting, and the broker then closes the whole connection ("expected 'channel.open'").
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import aiormq.connection
import aiormq.exceptions as lower
from yarl import URL

from rabbitdlq.broker.frames import (
    CHANNEL_CLOSE,
    CONNECTION_BLOCKED,
    CONNECTION_UNBLOCKED,
    DELIVER,
    FRAME,
    GET_OK,
    HEADER,
    METHOD,
    RETURN,
    text_of,
)
from rabbitdlq.texts import shorten
from rabbitdlq.wire import Properties

__all__ = ["FrameTransport", "Lifting", "original_properties"]

_OPEN_OK, _CLOSE = (struct.pack(">HH", 10, method) for method in (41, 50))
_CHANNEL_OPEN, _CHANNEL_CLOSE_OK = (struct.pack(">HH", 20, method) for method in (10, 41))
_HEARTBEAT = FRAME.pack(8, 0, 0) + b"\xce"
_FLAG_HEADERS = 1 << 13
_ENTRY = "raw"
#: what is taken from the socket at once; asyncio itself reads no more
_READ_BYTES = 262_144
#: what is joined to one write at most
_WRITE_BYTES = 262_144
#: bytes that the socket has not taken, beyond which nothing more is published: the broker does not read for now
_CLOGGED_BYTES = 1_000_000
#: seconds in which the library has to see some frame, or it takes the connection for dead
_SIGN_OF_LIFE = 1.0

#: close with a reset: what the other side has not read yet, it never will
_RESET = struct.pack("ii", 1, 0)

#: takes a frame's kind and payload; says whether it was its own
Lifting = Callable[[int, bytes], bool]


def original_properties(decoded_headers: Any) -> Properties:
    """The message's own properties out of the table the library decoded; raises :class:`WireError` if broken."""
    return Properties.parse(bytes(decoded_headers[_ENTRY]))


class FrameTransport(aiormq.connection.TransportFactory):
    """Opens TCP or TLS as the library would; reads through a :class:`FrameReader`, writes by a :class:`FrameWriter`."""

    def __init__(self, scheme: str) -> None:
        self._factory = (
            aiormq.connection.TLSTransportFactory() if scheme == "amqps" else aiormq.connection.TCPTransportFactory()
        )
        self._reader: FrameReader | None = None
        self._writer: FrameWriter | None = None
        #: is told why the broker has blocked the connection, and None when it goes on
        self.on_blocked: Callable[[str | None], None] = lambda _: None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The pair of streams the library reads from and writes to."""
        reader, writer = await self._factory.create(url, **kwargs)
        self._writer = FrameWriter(writer)
        self._reader = FrameReader(reader, self._writer.channel_closed, self._blocked)
        return cast(asyncio.StreamReader, self._reader), cast(asyncio.StreamWriter, self._writer)

    def _blocked(self, reason: str | None) -> None:
        self.on_blocked(reason)

    def lift(self, channel: int, taker: Lifting) -> None:
        """Give the frames of this channel to ``taker`` first; those it declines go to the library."""
        assert self._reader is not None
        self._reader.lifted[channel] = taker

    def let_go(self, channel: int, taker: Lifting) -> None:
        """The frames of this channel are the library's again, unless somebody else has lifted a new one meanwhile."""
        assert self._reader is not None
        if self._reader.lifted.get(channel) == taker:
            del self._reader.lifted[channel]

    def write(self, channel: int, frames: bytes) -> None:
        """Write frames of this channel, together with whatever else is written in this turn of the event loop."""
        assert self._writer is not None
        self._writer.join(channel, frames)

    def pause_reading(self) -> None:
        """Leave what comes on this connection unread: once the buffers between are full, the broker waits.

        Nothing is answered meanwhile, so whoever pauses must not wait for an answer before :meth:`resume_reading`.
        """
        assert self._reader is not None
        self._reader.going.clear()

    def resume_reading(self) -> None:
        """Read on."""
        assert self._reader is not None
        self._reader.going.set()

    @property
    def is_clogged(self) -> bool:
        """Whether the socket takes no more for now."""
        return self._writer is not None and self._writer.waiting_bytes > _CLOGGED_BYTES

    async def drain(self) -> None:
        """Return when the socket has taken most of what was written."""
        assert self._writer is not None
        await self._writer.drained()

    def reset(self) -> None:
        """End the connection by a TCP reset: a broker that does not read for now forgets what it has not read."""
        if self._writer is not None:
            self._writer.reset()


class FrameWriter:
    """Hands frames on, but those for a channel that the broker has closed: they would end the connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._closed: set[int] = set()
        self._joined: list[bytes] = []
        self._joined_bytes = 0

    def channel_closed(self, channel: int) -> None:
        """The broker closed the channel: answer at once, and write nothing more on it until it is opened anew."""
        self._closed.add(channel)
        self._flush()
        self._writer.write(FRAME.pack(METHOD, channel, 4) + _CHANNEL_CLOSE_OK + b"\xce")

    def join(self, channel: int, frames: bytes) -> None:
        """Write these frames at the end of this turn of the event loop: one write for all that come by then."""
        if channel in self._closed:
            return
        if not self._joined:
            asyncio.get_running_loop().call_soon(self._flush)
        self._joined.append(frames)
        self._joined_bytes += len(frames)
        if self._joined_bytes > _WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._joined:
            joined, self._joined, self._joined_bytes = self._joined, [], 0
            with contextlib.suppress(RuntimeError):  # the library has written the end before its channels know of it
                self._writer.write(b"".join(joined))

    @property
    def waiting_bytes(self) -> int:
        """What the socket has not taken yet."""
        return self._joined_bytes + self._writer.transport.get_write_buffer_size()

    async def drained(self) -> None:
        """Write what was joined, and wait while the socket takes no more."""
        self._flush()
        await self._writer.drain()

    def reset(self) -> None:
        """Throw away what waits here and at the other end."""
        self._joined, self._joined_bytes = [], 0
        with contextlib.suppress(OSError, AttributeError):  # it is gone already
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._writer.transport.abort()

    def write(self, data: bytes) -> None:
        """Write the frames, all of one channel, that the library puts together."""
        self._flush()  # what was said before stays before
        if self._closed:
            kind, channel, _ = FRAME.unpack_from(data)
            if channel in self._closed:
                if kind != METHOD or data[FRAME.size : FRAME.size + 4] != _CHANNEL_OPEN:
                    return
                self._closed.discard(channel)
        self._writer.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class FrameReader:
    """Takes whole frames out of the stream and hands the library's on. It has what aiormq calls, and no more."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        on_channel_closed: Callable[[int], None] | None = None,
        on_blocked: Callable[[str | None], None] | None = None,
    ) -> None:
        self._reader = reader
        self._on_channel_closed = on_channel_closed
        self._on_blocked = on_blocked
        #: of a frame whose end has not come yet
        self._rest = b""
        #: for the library
        self._ahead = b""
        self._opened = False
        self._told_at = 0.0
        #: who takes the frames of a channel before the library does
        self.lifted: dict[int, Lifting] = {}
        #: while it is not set, nothing is read
        self.going = asyncio.Event()
        self.going.set()

    def at_eof(self) -> bool:
        """Never, as far as the library is told.

        On a True it stops reading as if all were well, and what waits for the broker then fails with a bare
        ``Exception``; the read that follows a False raises the error that says it.
        """
        return False

    async def read(self, size: int = -1) -> bytes:
        """What is there, up to ``size`` bytes."""
        ahead, self._ahead = self._ahead, b""
        return ahead or await self._reader.read(size)

    async def readexactly(self, size: int) -> bytes:
        """``size`` bytes; raises :class:`asyncio.IncompleteReadError` at the end of the stream."""
        while len(self._ahead) < size:
            if not self.going.is_set():
                await self._pause()
                continue
            chunk = await self._reader.read(_READ_BYTES)
            if not chunk:
                raise asyncio.IncompleteReadError(self._ahead + self._rest, size)
            self._take(self._rest + chunk if self._rest else chunk)
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    async def _pause(self) -> None:
        """Wait to be resumed; the library, which sees nothing come meanwhile, is told that the broker is alive."""
        try:
            async with asyncio.timeout(_SIGN_OF_LIFE):
                await self.going.wait()
        except TimeoutError:
            self._ahead += _HEARTBEAT  # ahead are whole frames only, and none is left where more is asked for

    def _take(self, data: bytes) -> None:
        """Sort the whole frames: lifted ones to their takers, the others ahead for the library."""
        at, end, lifted = 0, len(data), self.lifted
        if not self._opened and data.startswith(b"AMQP"):
            self._ahead += data  # the broker's only answer to a protocol that it does not speak
            return
        passed: list[bytes] = []
        while end - at > FRAME.size:
            kind, channel, size = FRAME.unpack_from(data, at)
            stop = at + FRAME.size + size + 1
            if stop > end:
                break
            payload = data[at + FRAME.size : stop - 1]
            taker = lifted.get(channel)
            if taker is None or not taker(kind, payload):
                passed.append(self._passed(kind, channel, payload))
            at = stop
        self._rest = data[at:]
        now = asyncio.get_running_loop().time()
        if passed:
            self._told_at = now
        elif at and self._opened and now - self._told_at > _SIGN_OF_LIFE:
            # the broker sends no heartbeats while it sends messages, and the library sees none of these
            self._told_at = now
            passed.append(_HEARTBEAT)
        self._ahead += b"".join(passed)

    def _passed(self, kind: int, channel: int, payload: bytes) -> bytes:
        """The frame as the library may see it."""
        if kind == METHOD:
            method = payload[:4]
            if not self._opened:
                self._watch_opening(payload)
            if method == CHANNEL_CLOSE and self._on_channel_closed is not None:
                self._on_channel_closed(channel)
            if method in (CONNECTION_BLOCKED, CONNECTION_UNBLOCKED) and self._on_blocked is not None:
                self._on_blocked(text_of(payload[5 : 5 + payload[4]]) if method == CONNECTION_BLOCKED else None)
            if method in (DELIVER, RETURN, GET_OK):
                payload = _legible(payload)
        elif kind == HEADER:
            payload = _wrapped(payload)
        return FRAME.pack(kind, channel, len(payload)) + payload + b"\xce"

    def _watch_opening(self, method: bytes) -> None:
        """Raise the broker's own words when it ends the opening: the library would only say that it expected others."""
        self._opened = method[:4] == _OPEN_OK
        if method[:4] == _CLOSE:
            (code,) = struct.unpack_from(">H", method, 4)
            text = method[7 : 7 + method[6]].decode("utf-8", "backslashreplace")
            if code in {403, 530}:
                raise lower.ConnectionNotAllowed(text)
            raise lower.ConnectionClosed(code, text)


def _wrapped(payload: bytes) -> bytes:
    fixed, raw = payload[:12], payload[12:]
    entry = bytes([len(_ENTRY)]) + _ENTRY.encode() + b"x" + struct.pack(">I", len(raw)) + raw
    return fixed + struct.pack(">H", _FLAG_HEADERS) + struct.pack(">I", len(entry)) + entry


def _legible(payload: bytes) -> bytes:
    r"""The method frame with exchange and routing key in valid UTF-8; other bytes are written as ``\xff``."""
    if payload.isascii():
        return payload
    at = 4
    if payload[:4] == DELIVER:
        at += 1 + payload[at] + 9
    elif payload[:4] == RETURN:
        at += 2
        at += 1 + payload[at]
    else:
        at += 9
    legible, rest = payload[:at], payload[at:]
    for _ in ("exchange", "routing key"):
        text, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
        text = shorten(text.decode("utf-8", "backslashreplace"), 255, "").encode()
        legible += bytes([len(text)]) + text
    return legible + rest
