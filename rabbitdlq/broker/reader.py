"""The byte stream from the broker, with message headers kept as they came.

The client library decodes every header table while it reads frames: types are lost, and a text that is not UTF-8 or a
date beyond year 9999 ends the connection, again after every redelivery. This reader sits between socket and library
(aiormq's ``transport_factory``) and wraps each content header: the library sees a valid table with one byte-string
entry, which is the original (:func:`original_properties` takes it out again).

The writer beside it mends one thing more: when the broker closes a channel over one bad publish, the library goes on
writing those that were waiting, and the broker then closes the whole connection ("expected 'channel.open'").
"""

import asyncio
import hashlib
import struct
from collections.abc import Callable
from typing import Any, cast

import aiormq.connection
import aiormq.exceptions as lower
from yarl import URL

from rabbitdlq.wire import Properties, WireError, shorten

__all__ = ["FrameTransport", "original_properties", "publish_key"]

_FRAME = struct.Struct(">BHI")
_METHOD, _HEADER = 1, 2
_DELIVER, _RETURN, _GET_OK = (struct.pack(">HH", 60, method) for method in (60, 50, 71))
_OPEN_OK, _CLOSE = (struct.pack(">HH", 10, method) for method in (41, 50))
_CHANNEL_OPEN, _CHANNEL_CLOSE, _CHANNEL_CLOSE_OK = (struct.pack(">HH", 20, method) for method in (10, 40, 41))
_FLAG_HEADERS, _FLAG_MESSAGE_ID = 1 << 13, 1 << 7
_ENTRY = "raw"


def original_properties(decoded_headers: Any) -> Properties:
    """The message's own properties out of the table the library decoded; raises :class:`WireError` if broken."""
    return Properties.parse(bytes(decoded_headers[_ENTRY]))


class FrameTransport(aiormq.connection.TransportFactory):
    """Opens TCP or TLS as the library would; reads through a :class:`FrameReader`, writes by a :class:`FrameWriter`."""

    def __init__(self, scheme: str) -> None:
        self._factory = (
            aiormq.connection.TLSTransportFactory() if scheme == "amqps" else aiormq.connection.TCPTransportFactory()
        )

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The pair of streams the library reads from and writes to."""
        reader, writer = await self._factory.create(url, **kwargs)
        frame_writer = FrameWriter(writer)
        return (
            cast(asyncio.StreamReader, FrameReader(reader, frame_writer.channel_closed)),
            cast(asyncio.StreamWriter, frame_writer),
        )


class FrameWriter:
    """Hands frames on, but those for a channel that the broker has closed: they would end the connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._closed: set[int] = set()

    def channel_closed(self, channel: int) -> None:
        """The broker closed the channel: answer at once, and write nothing more on it until it is opened anew."""
        self._closed.add(channel)
        self._writer.write(_FRAME.pack(_METHOD, channel, 4) + _CHANNEL_CLOSE_OK + b"\xce")

    def write(self, data: bytes) -> None:
        """Write the frames, all of one channel, that the library puts together."""
        if self._closed:
            kind, channel, _ = _FRAME.unpack_from(data)
            if channel in self._closed:
                if kind != _METHOD or data[_FRAME.size : _FRAME.size + 4] != _CHANNEL_OPEN:
                    return
                self._closed.discard(channel)
        self._writer.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class FrameReader:
    """Reads whole frames ahead and hands their bytes on. It has what aiormq's frame receiver calls, and no more."""

    def __init__(self, reader: asyncio.StreamReader, on_channel_closed: Callable[[int], None] | None = None) -> None:
        self._reader = reader
        self._on_channel_closed = on_channel_closed
        self._ahead = b""
        self._opened = False
        #: channels whose next content header belongs to a returned publish
        self._returning: set[int] = set()

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
            self._ahead += await self._frame()
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    async def _frame(self) -> bytes:
        start = await self._reader.readexactly(_FRAME.size)
        if start.startswith(b"AMQP"):
            return start + await self._reader.readexactly(1)
        kind, channel, size = _FRAME.unpack(start)
        rest = await self._reader.readexactly(size + 1)
        if kind == _METHOD and not self._opened:
            self._watch_opening(rest)
        if kind == _METHOD and rest[:4] == _CHANNEL_CLOSE and self._on_channel_closed is not None:
            self._on_channel_closed(channel)
        if kind == _HEADER:
            payload = self._wrapped(channel, rest[:-1])
        elif kind == _METHOD and rest[:4] in (_DELIVER, _RETURN, _GET_OK):
            if rest[:4] == _RETURN:
                self._returning.add(channel)
            payload = _legible(rest[:-1])
        else:
            return start + rest
        return _FRAME.pack(kind, channel, len(payload)) + payload + rest[-1:]

    def _watch_opening(self, method: bytes) -> None:
        """Raise the broker's own words when it ends the opening: the library would only say that it expected others."""
        self._opened = method[:4] == _OPEN_OK
        if method[:4] == _CLOSE:
            (code,) = struct.unpack_from(">H", method, 4)
            text = method[7 : 7 + method[6]].decode("utf-8", "backslashreplace")
            if code in {403, 530}:
                raise lower.ConnectionNotAllowed(text)
            raise lower.ConnectionClosed(code, text)

    def _wrapped(self, channel: int, payload: bytes) -> bytes:
        fixed, raw = payload[:12], payload[12:]
        entry = bytes([len(_ENTRY)]) + _ENTRY.encode() + b"x" + struct.pack(">I", len(raw)) + raw
        table = struct.pack(">I", len(entry)) + entry
        if channel not in self._returning:
            return fixed + struct.pack(">H", _FLAG_HEADERS) + table
        # the library finds the publish that a return belongs to by its message id
        self._returning.discard(channel)
        return fixed + struct.pack(">H", _FLAG_HEADERS | _FLAG_MESSAGE_ID) + table + _returned_key(raw)


def publish_key(message_id: str) -> str:
    """The name under which the library keeps a publish until its confirm: ASCII and short, whatever the id is."""
    return hashlib.sha1(message_id.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()


def _returned_key(raw: bytes) -> bytes:
    try:
        message_id = Properties.parse(raw).message_id
    except WireError:
        message_id = None
    key = publish_key(message_id).encode() if message_id else b""
    return bytes([len(key)]) + key


def _legible(payload: bytes) -> bytes:
    r"""The method frame with exchange and routing key in valid UTF-8; other bytes are written as ``\xff``."""
    if payload.isascii():
        return payload
    at = 4
    if payload[:4] == _DELIVER:
        at += 1 + payload[at] + 9
    elif payload[:4] == _RETURN:
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
