"""Reading from the broker: frames in any chunks, headers byte for byte, and what the client library has to keep to."""

import ast
import asyncio
import inspect
import logging
import socket
import struct
import textwrap
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import aiormq.abc
import aiormq.channel
import aiormq.connection
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from rabbitdlq.broker import Connection, Outgoing, Publisher, original_properties
from rabbitdlq.broker.reader import FrameReader, FrameWriter
from rabbitdlq.errors import BrokerError, BrokerUnavailable, PublishRefused, PublishUnconfirmed, Unroutable
from rabbitdlq.wire import Headers, Properties, WireError
from tests.unit.fake_broker import FakeBroker, body_frame, header_frame, method_frame
from tests.unit.strategies import properties, quick

DEADLINE = timedelta(seconds=10)


async def received(chunks: list[bytes]) -> list[Any]:
    """What the library's own receiver makes of the bytes behind our reader."""
    stream = asyncio.StreamReader()
    receiver = aiormq.connection.FrameReceiver(FrameReader(stream))  # type: ignore[arg-type]

    async def feed() -> None:
        for chunk in chunks:
            stream.feed_data(chunk)
            await asyncio.sleep(0)
        stream.feed_eof()

    feeding = asyncio.create_task(feed())
    frames: list[Any] = []
    try:
        async for _, channel, frame in receiver:
            frames.append((channel, frame))
    except aiormq.exceptions.AMQPConnectionError:
        await feeding
        return frames
    raise AssertionError("the end of the stream was not told")


def read(data: bytes, sizes: list[int] | None = None) -> list[Any]:
    chunks, at = [], 0
    for size in sizes or []:
        chunks.append(data[at : at + size])
        at += size
    return asyncio.run(received([*chunks, data[at:]]))


def short(name: bytes | str) -> bytes:
    data = name.encode() if isinstance(name, str) else name
    return bytes([len(data)]) + data


def method(
    kind: type[Frame] = commands.Basic.Deliver, exchange: bytes | str = "", key: bytes | str = "orders"
) -> bytes:
    """A method that tells exchange and key, which may be no UTF-8 on the wire."""
    fixed = {
        commands.Basic.Deliver: short("ctag-größe") + struct.pack(">QB", 7, 1),
        commands.Basic.Return: struct.pack(">H", 312) + short("NO_ROUTE größe"),
        commands.Basic.GetOk: struct.pack(">QB", 7, 1),
    }[kind]
    rest = struct.pack(">I", 9) if kind is commands.Basic.GetOk else b""
    payload = struct.pack(">I", kind.index) + fixed + short(exchange) + short(key) + rest
    return struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce"


class TestFrames:
    @given(
        messages=st.lists(st.tuples(properties, st.binary(max_size=40), st.integers(1, 3)), max_size=4),
        sizes=st.lists(st.integers(1, 30), max_size=60),
    )
    @quick
    def test_headers_arrive_byte_for_byte_however_the_stream_is_cut(
        self, messages: list[tuple[Properties, bytes, int]], sizes: list[int]
    ) -> None:
        stream = b"".join(
            method_frame(commands.Basic.Deliver("ctag", 1, False, "", "orders"), channel)
            + header_frame(value.encode(), len(body), channel)
            + (body_frame(body, channel) if body else b"")
            for value, body, channel in messages
        )

        frames = read(stream + method_frame(commands.Basic.CancelOk("ctag"), 9), sizes)

        headers = [frame.properties.headers for _, frame in frames if isinstance(frame, ContentHeader)]
        assert [original_properties(each).encode() for each in headers] == [value.encode() for value, _, _ in messages]
        bodies = [frame.value for _, frame in frames if isinstance(frame, ContentBody)]
        assert bodies == [body for _, body, _ in messages if body]
        assert [channel for channel, frame in frames if isinstance(frame, ContentHeader)] == [
            channel for _, _, channel in messages
        ]
        assert (frames[-1][0], type(frames[-1][1])) == (9, commands.Basic.CancelOk)

    @pytest.mark.parametrize(
        "broken", [b"", b"\xff", b"\xff\xff", b"\x20\x00\xff\xff\xff\xff", b"\x20\x00\x00\x00\x00\x05\x01aZ??"]
    )
    def test_properties_that_are_broken_do_not_break_the_connection(self, broken: bytes) -> None:
        """One such message ended the connection, again after every redelivery."""
        stream = method() + header_frame(broken, 2) + body_frame(b"{}")

        (_, _), (_, header), (_, body) = read(stream)

        assert body.value == b"{}"
        with pytest.raises(WireError):
            original_properties(header.properties.headers)

    @pytest.mark.parametrize("kind", [commands.Basic.Deliver, commands.Basic.Return, commands.Basic.GetOk])
    @pytest.mark.parametrize(
        ("raw", "shown"),
        [
            (b"orders", "orders"),
            ("größe".encode(), "größe"),
            (b"caf\xe9", "caf\\xe9"),
            (b"", ""),
            # written out it is longer than a short string may be, and the cut must not go through a character
            (b"\xff" + "é".encode() * 127, "\\xff" + "é" * 125),
            (b"\xff" * 255, "\\xff" * 63 + "\\xf"),
        ],
    )
    def test_names_that_are_not_utf8_are_written_out(self, kind: type[Frame], raw: bytes, shown: str) -> None:
        stream = method(kind, raw, raw) + header_frame(Properties(message_id="1").encode(), 0)

        (_, told), (_, header) = read(stream)

        assert (told.exchange, told.routing_key) == (shown, shown)
        assert original_properties(header.properties.headers) == Properties(message_id="1")
        if kind is commands.Basic.Deliver:
            assert (told.consumer_tag, told.delivery_tag, told.redelivered) == ("ctag-größe", 7, True)
        elif kind is commands.Basic.GetOk:
            assert (told.delivery_tag, told.redelivered, told.message_count) == (7, True, 9)

    def test_the_end_of_the_stream_is_an_error_also_between_two_frames(self) -> None:
        """As an end without error it failed whoever waited with a bare Exception, which nobody expects.

        That the end is told is what :func:`read` insists on.
        """
        assert len(read(method() + header_frame(b"\x00\x00", 0))) == 2
        assert len(read(method() + header_frame(b"\x00\x00", 0)[:-3])) == 1


class TestContract:
    """What is counted on in aiormq beyond its documented use; one that changes it must not be taken unseen."""

    def test_the_librarys_receiver_calls_nothing_on_the_reader_that_ours_does_not_have(self) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(aiormq.connection.FrameReceiver)))
        called = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.reader"
        }

        assert called == {"at_eof", "read", "readexactly"}
        assert called <= {name for name, _ in inspect.getmembers(FrameReader, inspect.isfunction)}

    def test_a_connection_takes_a_transport_factory(self) -> None:
        assert "transport_factory" in inspect.signature(aiormq.connection.Connection).parameters
        for factory in (aiormq.connection.TCPTransportFactory, aiormq.connection.TLSTransportFactory):
            assert issubclass(factory, aiormq.connection.TransportFactory)
            assert list(inspect.signature(factory.create).parameters) == ["self", "url", "kwargs"]


@pytest.fixture
async def connection(broker: FakeBroker) -> AsyncIterator[Connection]:
    async with await Connection.open("amqp://guest:guest@nowhere/?heartbeat=0") as connection:
        yield connection


def outgoing(message_id: str = "17", **values: Any) -> Outgoing:
    return Outgoing("", "orders", values.pop("body", b"{}"), Properties(message_id=message_id, **values))


class TestWithTheLibrary:
    async def test_version_and_frame_size_are_the_brokers(self, connection: Connection) -> None:
        assert connection.version == (4, 0, 5)
        assert connection.frame_max == 131_072
        assert connection.is_open

    @pytest.mark.parametrize("body", [b"", b"{}", b"x" * 300_000])
    async def test_a_publish_arrives_byte_for_byte(
        self, broker: FakeBroker, connection: Connection, body: bytes
    ) -> None:
        value = Properties(message_id="caf\udce9", headers=Headers({"odd\udcff": 0.1}), timestamp=2**40, priority=0)

        await Publisher(connection).publish(Outgoing("shop", "k", body, value), timeout=DEADLINE)

        assert broker.published == [("shop", "k", value, body)]

    async def test_a_returned_publish_is_found_by_its_message_id_and_only_that_one(
        self, broker: FakeBroker, connection: Connection
    ) -> None:
        """C1: a returned publish was taken for a success."""
        broker.on_publish = lambda publish, header, body: (
            broker.give_back(publish, header, body) if b"lost" in header else False
        )
        publisher = Publisher(connection)

        results = await asyncio.gather(
            *(publisher.publish(outgoing(id), timeout=DEADLINE) for id in ("a", "lost\udcff", "b", "lost" + "é" * 120)),
            return_exceptions=True,
        )

        assert [type(result) for result in results] == [type(None), Unroutable, type(None), Unroutable]

    async def test_an_empty_body_without_a_way_is_returned_too(
        self, broker: FakeBroker, connection: Connection
    ) -> None:
        """C47: an unroutable publish with an empty body waited for ever."""
        broker.on_publish = broker.give_back

        with pytest.raises(Unroutable):
            await Publisher(connection).publish(outgoing(body=b""), timeout=DEADLINE)

    async def test_a_refused_publish_is_an_error(self, broker: FakeBroker, connection: Connection) -> None:
        """C40: a full target was taken for a success."""

        def nack(*_: object) -> bool:
            broker.send(method_frame(commands.Basic.Nack(delivery_tag=1)))
            return True

        broker.on_publish = nack

        with pytest.raises(PublishRefused, match="is the queue full"):
            await Publisher(connection).publish(outgoing(), timeout=DEADLINE)

    @pytest.mark.parametrize("late", [False, True], ids=["at once", "with a frame before"])
    async def test_a_line_that_ends_before_the_confirm_leaves_the_publish_unconfirmed(
        self, broker: FakeBroker, connection: Connection, late: bool
    ) -> None:
        """C8: neither taken for a success, nor a bare Exception that nobody catches."""

        def end(*_: object) -> bool:
            if late:  # the stream is at its end while the library is still busy with what came before
                broker.send(method_frame(commands.Connection.Unblocked(), 0))
            broker.hang_up()
            return True

        broker.on_publish = end

        with pytest.raises(PublishUnconfirmed):
            await Publisher(connection).publish(outgoing(), timeout=DEADLINE)

    async def test_a_line_that_ends_while_the_broker_is_asked_is_an_error_of_ours(
        self, broker: FakeBroker, connection: Connection
    ) -> None:
        broker.silent_on.add("Channel.Open")
        asking = asyncio.create_task(connection.channel())
        await asyncio.sleep(0)
        broker.send(method_frame(commands.Connection.Unblocked(), 0))
        broker.hang_up()

        with pytest.raises(BrokerError):
            await asyncio.wait_for(asking, 10)

    @pytest.mark.parametrize(
        "wrong",
        [
            Outgoing("größe", "k", b"", Properties(message_id="1")),
            Outgoing("", "ä" * 128, b"", Properties(message_id="1")),
            Outgoing("", "half \ud800", b"", Properties(message_id="1")),
            Outgoing("", "k", b"", Properties()),
            Outgoing("", "k", b"", Properties(message_id="1", priority=999)),
            Outgoing("", "k", b"", Properties(message_id="1", headers=Headers({"x": "y" * 131_072}))),
        ],
        ids=["exchange", "key", "half a pair", "no id", "priority", "frame"],
    )
    async def test_what_cannot_be_sent_is_refused_and_nothing_is_sent(
        self, broker: FakeBroker, connection: Connection, wrong: Outgoing
    ) -> None:
        with pytest.raises(PublishRefused):
            await Publisher(connection).publish(wrong, timeout=DEADLINE)

        assert broker.published == []
        assert connection.is_open

    async def test_waiting_for_a_publish_of_the_same_id_counts_towards_the_deadline(
        self, broker: FakeBroker, connection: Connection
    ) -> None:
        broker.on_publish = lambda *_: True  # never confirmed
        publisher = Publisher(connection)
        first = asyncio.create_task(publisher.publish(outgoing(), timeout=DEADLINE))
        await asyncio.sleep(0.05)

        with pytest.raises(BrokerUnavailable):
            await asyncio.wait_for(publisher.publish(outgoing(), timeout=timedelta(milliseconds=200)), 5)

        assert len(broker.published) == 1, "the second was sent beside the first"
        first.cancel()

    async def test_a_delivery_comes_with_its_own_properties(self, broker: FakeBroker, connection: Connection) -> None:
        taken: asyncio.Queue[aiormq.abc.DeliveredMessage] = asyncio.Queue()
        channel = await connection.channel()
        await channel.basic_consume("orders", taken.put)
        value = Properties(message_id="caf\udce9", headers=Headers({"d": 0.1}))

        broker.deliver(value.encode(), b"{}")

        delivered = await asyncio.wait_for(taken.get(), 10)
        assert original_properties(delivered.header.properties.headers) == value
        assert delivered.body == b"{}"

    async def test_a_cancelled_consumer_and_a_closed_channel_are_told(
        self, broker: FakeBroker, connection: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        """C10: the broker cancelled the consumer, and the worker idled for ever."""
        caplog.set_level(logging.CRITICAL, "aiormq")
        told: asyncio.Queue[str] = asyncio.Queue()
        channel = await connection.channel()
        channel.on_consumer_cancel_callbacks.add(lambda _: told.put_nowait("cancelled"))
        channel.closing.add_done_callback(lambda _: told.put_nowait("closed"))
        await channel.basic_consume("orders", lambda _: told.put("delivered"))

        broker.send(method_frame(commands.Basic.Cancel(broker.consumer_tag)))
        assert await asyncio.wait_for(told.get(), 10) == "cancelled"

        broker.send(method_frame(commands.Channel.Close(404, "NOT_FOUND", 60, 20)))
        assert await asyncio.wait_for(told.get(), 10) == "closed"
        assert channel.is_closed


async def test_what_is_joined_when_the_end_was_written_already_goes_nowhere_quietly() -> None:
    """A connection that is being closed: the library has said goodbye, and the channels do not know of it yet."""
    ours, theirs = socket.socketpair()
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    _, writer = await asyncio.open_connection(sock=ours)
    frames = FrameWriter(writer)
    writer.write_eof()
    frames.join(1, b"x")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    writer.close()
    theirs.close()
    assert not frames.waiting_bytes
    assert errors == []
