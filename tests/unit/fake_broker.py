"""A broker in memory: as much of AMQP 0-9-1 as the client library needs to connect, publish and consume."""

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import aiormq.connection
import pamqp.frame
import pytest
from pamqp import commands
from pamqp.base import Frame

from rabbitdlq.wire import Properties

__all__ = ["FakeBroker", "body_frame", "header_frame", "method_frame"]

_METHOD, _HEADER, _BODY = 1, 2, 3
_CAPABILITIES: dict[str, Any] = {"publisher_confirms": True, "basic.nack": True, "consumer_cancel_notify": True}
_START = commands.Connection.Start(
    server_properties={"version": "4.0.5", "capabilities": _CAPABILITIES}, mechanisms="PLAIN", locales="en_US"
)


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def method_frame(method: Frame, channel: int = 1) -> bytes:
    """A method's bytes."""
    return bytes(pamqp.frame.marshal(method, channel))


def header_frame(properties: bytes, size: int, channel: int = 1) -> bytes:
    """A content header's bytes, with the properties as they are."""
    return _frame(_HEADER, channel, struct.pack(">HHQ", 60, 0, size) + properties)


def body_frame(body: bytes, channel: int = 1) -> bytes:
    """A content body's bytes."""
    return _frame(_BODY, channel, body)


class FakeBroker:
    """The broker's end of one connection, and the stream writer that the library is given."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        #: what was published: exchange, key, properties, body
        self.published: list[tuple[str, str, Properties, bytes]] = []
        #: what to do with a publish; it is confirmed unless this answers by itself and says so
        self.on_publish: Callable[[commands.Basic.Publish, bytes, bytes], bool] = lambda *_: False
        #: methods that are not answered, by their name
        self.silent_on: set[str] = set()
        self._received = b""
        self._greeted = False
        self._publishing: commands.Basic.Publish | None = None
        self._header = b""
        self._body = b""
        self._size = 0
        #: by channel
        self._tags: dict[int, int] = {}
        self.consumer_tag = ""
        #: bytes that it pretends not to have read
        self.unread = 0
        self._closing = False

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what the next TCP connection leads to."""

        async def create(*_: Any, **__: Any) -> tuple[Any, Any]:
            return self.reader, self

        monkeypatch.setattr(aiormq.connection.TCPTransportFactory, "create", create)

    def send(self, *frames: bytes) -> None:
        """Let the client receive these."""
        self.reader.feed_data(b"".join(frames))

    def deliver(self, properties: bytes, body: bytes, *, tag: int = 1, key: str = "orders") -> None:
        """Hand out one message."""
        deliver = commands.Basic.Deliver(self.consumer_tag, tag, False, "", key)
        self.send(method_frame(deliver), header_frame(properties, len(body)), body_frame(body))

    def hang_up(self) -> None:
        """Close the line without a word."""
        if not self.reader.at_eof():
            self.reader.feed_eof()

    # --- what a stream writer has

    @property
    def transport(self) -> "FakeBroker":
        return self

    def get_write_buffer_size(self) -> int:
        return self.unread

    def write(self, data: bytes) -> None:
        self._received += data
        if not self._greeted and len(self._received) >= 8:
            self._received, self._greeted = self._received[8:], True
            self.send(method_frame(_START, 0))
        while len(self._received) >= 7:
            kind, channel, size = struct.unpack(">BHI", self._received[:7])
            if len(self._received) < size + 8:
                break
            raw, self._received = self._received[: size + 8], self._received[size + 8 :]
            self._take(kind, channel, raw)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True
        self.hang_up()

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)

    # --- what a broker does

    def _take(self, kind: int, channel: int, raw: bytes) -> None:
        if kind == _METHOD:
            method = pamqp.frame.unmarshal(raw)[2]
            assert isinstance(method, Frame)
            self._method(method, channel)
        elif kind == _HEADER:
            self._header, self._body = raw[7 + 12 : -1], b""
            (self._size,) = struct.unpack(">Q", raw[7 + 4 : 7 + 12])
            self._finish(channel)
        elif kind == _BODY:
            self._body += raw[7:-1]
            self._finish(channel)

    def _method(self, method: Frame, channel: int) -> None:
        if method.name in self.silent_on:
            return
        answers: dict[str, Frame] = {
            "Connection.StartOk": commands.Connection.Tune(channel_max=100, frame_max=131_072, heartbeat=0),
            "Connection.Open": commands.Connection.OpenOk(),
            "Connection.Close": commands.Connection.CloseOk(),
            "Channel.Open": commands.Channel.OpenOk(),
            "Channel.Close": commands.Channel.CloseOk(),
            "Confirm.Select": commands.Confirm.SelectOk(),
            "Basic.Qos": commands.Basic.QosOk(),
        }
        if isinstance(method, commands.Basic.Publish):
            self._publishing = method
        elif isinstance(method, commands.Basic.Consume):
            self.consumer_tag = str(method.consumer_tag)
            self.send(method_frame(commands.Basic.ConsumeOk(self.consumer_tag), channel))
        elif method.name in answers:
            self.send(method_frame(answers[method.name], channel))

    def _finish(self, channel: int) -> None:
        publish = self._publishing
        if publish is None or len(self._body) < self._size:
            return
        self._publishing = None
        tag = self._tags[channel] = self._tags.get(channel, 0) + 1
        properties = Properties.parse(self._header)
        self.published.append((publish.exchange or "", publish.routing_key or "", properties, self._body))
        if not self.on_publish(publish, self._header, self._body):
            self.send(method_frame(commands.Basic.Ack(delivery_tag=tag), channel))

    def give_back(self, publish: commands.Basic.Publish, header: bytes, body: bytes) -> bool:
        """Return a publish as unroutable, and confirm it, as the broker does."""
        returned = commands.Basic.Return(312, "NO_ROUTE", publish.exchange or "", publish.routing_key or "")
        self.send(method_frame(returned), header_frame(header, len(body)), *([body_frame(body)] if body else []))
        return False
