"""Messages of other people's programs: odd bodies, no headers, no ids, bytes that are no text, every AMQP type."""

import struct
from collections import Counter
from typing import Any

import pytest

from rabbitdlq import Message
from rabbitdlq.wire import Headers, Properties
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, is_told, rests


def _entry(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + value


def _sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


#: an entry of every type that RabbitMQ keeps as it is, with names and texts that are not UTF-8 among them
ENTRIES = [
    _entry(b"true", b"t\x01"),
    _entry(b"signed 8", b"b\x80"),
    _entry(b"unsigned 8", b"B\xff"),
    _entry(b"signed 16", b"s\x80\x00"),
    _entry(b"unsigned 16", b"u\xff\xff"),
    _entry(b"signed 32", b"I\x80\x00\x00\x00"),
    _entry(b"unsigned 32", b"i\xff\xff\xff\xff"),
    _entry(b"signed 64", b"l\x80\x00\x00\x00\x00\x00\x00\x00"),
    _entry(b"float", b"f" + struct.pack(">f", 0.1)),
    _entry(b"double", b"d" + struct.pack(">d", 1e300)),
    _entry(b"decimal", b"D\x02" + struct.pack(">i", -123)),
    _entry(b"text", b"S" + _sized("ä€𝄞".encode())),
    _entry(b"no text", b"S" + _sized(b"\xff\xfe")),
    _entry(b"bytes", b"x" + _sized(bytes(range(256)))),
    _entry(b"null", b"V"),
    _entry(b"date", b"T" + struct.pack(">Q", 1_700_000_000)),
    _entry(b"year 33658", b"T" + struct.pack(">Q", 10**12)),
    _entry(b"no date at all", b"T" + struct.pack(">Q", 2**64 - 1)),
    _entry(b"array", b"A" + _sized(b"t\x00V" + b"F" + _sized(b"\x01aV"))),
    _entry(b"table", b"F" + _sized(b"\x01kA" + _sized(b"") + b"\x01nb\x01")),
    _entry(b"\xff\xfe is no text", b"V"),
    _entry(b"", b"V"),
]
NOT_JSON = [b'{"a":', b"", b"\xff\xfe", bytes(3_000_000)]
NO_TEXT = b"\xff\xfe\x80".decode("utf-8", "surrogateescape")


class _Key(str):
    """A routing key that is not UTF-8: the client library asks a text for its bytes."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"key \xff\xfe"


async def test_every_header_and_property_survives_retry_parking_and_replay_byte_for_byte(bench: Bench) -> None:
    topology = await bench.declared()
    exchange = await bench.raw.exchange(f"{topology.name}-any", "fanout")
    await bench.raw.bind(topology.name, exchange, "")
    properties: dict[str, Any] = {
        "content_type": "application/x-" + NO_TEXT,
        "content_encoding": "x-" + NO_TEXT,
        "headers": Headers.parse(b"".join(ENTRIES)),
        "delivery_mode": 2,
        "priority": 7,
        "correlation_id": NO_TEXT,
        "reply_to": NO_TEXT,
        "message_id": "id-" + NO_TEXT,
        # milliseconds, against the standard
        "timestamp": 1_700_000_000_123,
        "type": NO_TEXT,
        "app_id": NO_TEXT,
        "cluster_id": NO_TEXT,
    }
    body = bytes(range(256))
    runs: list[Message] = []
    broken = True

    async def handler(message: Message) -> None:
        runs.append(message)
        if broken:
            raise RuntimeError

    await bench.raw.publish(_Key("?"), body, exchange=exchange, **properties)
    async with bench.running(topology, handler) as consumer:
        await rests(bench, topology.dlq, 1)
        broken = False
        async with bench.dlq(topology) as dlq:
            (letter,) = await dlq.peek_all()
            assert (await dlq.replay(letter.id)).done == 1
        await until(lambda: consumer.summary.succeeded, "the replayed message is handled")

    is_told(letter, 3)
    assert letter.id == r"id-\xff\xfe\x80"
    assert letter.routing_key == r"key \xff\xfe"
    assert letter.as_json()["created_at"] == "2023-11-14T22:13:20.123+00:00"
    seen = [message.properties for message in runs] + [letter.properties]
    for found in seen:
        ours = (b"x-death", b"x-first-death", b"x-last-death", b"x-delivery", b"x-acquired", b"dlq-")
        entries = [entry for entry in found.table.entries() if not entry[1:].startswith(ours)]
        assert sorted(entries) == sorted(ENTRIES)
        assert found.but(headers=None) == Properties(**{**properties, "headers": None})
    assert [message.body for message in runs] + [letter.body] == [body] * 5
    assert [(message.lap, message.attempt) for message in runs] == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert {(message.id, message.exchange, message.routing_key) for message in runs} == {
        (letter.id, exchange, letter.routing_key)
    }


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_bodies_that_are_not_json_are_parked_at_once_and_their_handler_never_called(bench: Bench) -> None:
    """C17: one such message came back thousands of times a second."""
    topology = await bench.declared()
    called: list[Message] = []

    async def handler(message: Message) -> None:
        called.append(message)

    bodies = {f"{n}, {kind}": body for n, body in enumerate(NOT_JSON) for kind in ("application/json", None)}
    for name, body in bodies.items():
        kind = None if name.endswith("None") else "application/json"
        await bench.raw.publish(topology.name, body, message_id=name, content_type=kind)
    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, len(bodies))
    assert not called
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
    assert {letter.id: letter.body for letter in letters} == bodies
    for letter in letters:
        assert letter.reason == "undecodable"
        is_told(letter, 1)
        assert letter.error is not None
        assert "is not valid application/json" in letter.error.message


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_messages_with_no_headers_or_null_headers_fail_like_others(bench: Bench) -> None:
    """C18: the failure path itself broke on them."""
    topology = await bench.declared()
    tables = {"no table": None, "empty": Headers(), "null": Headers({"k": None})}

    async def handler(message: Message) -> None:
        raise RuntimeError

    for name, headers in tables.items():
        await bench.raw.publish(topology.name, message_id=name, headers=headers)
    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, 3)
    async with bench.dlq(topology) as dlq:
        letters = {letter.id: letter for letter in await dlq.peek_all()}
    for name, headers in tables.items():
        is_told(letters[name], 3)
        assert dict(letters[name].properties.table) == dict(headers or {})


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_twins_without_an_id_keep_a_stable_one_and_stay_two(bench: Bench) -> None:
    """C13: an id made up anew on each trip loses the history; taken for an identity, it makes one of two."""
    topology = await bench.declared()
    attempts: Counter[tuple[str, int, int]] = Counter()
    broken = True

    async def handler(message: Message) -> None:
        attempts[message.id, message.lap, message.attempt] += 1
        if broken:
            raise RuntimeError(f"attempt {message.attempt}")

    for _ in range(2):
        await bench.raw.publish(topology.name, b'{"order": 1}', headers=Headers({"h": 1}))
    async with bench.running(topology, handler) as consumer:
        await rests(bench, topology.dlq, 2)
        async with bench.dlq(topology) as dlq:
            one, two = await dlq.peek_all()
            broken = False
            assert (await dlq.replay_all()).done == 2
        await until(lambda: consumer.summary.succeeded == 2, "both are handled after the replay")
    assert one.id == two.id
    assert one.id_derived
    assert one.as_json()["id_derived"] is True
    # whose of the two each record of the journal is cannot be told
    assert one.attempts == two.attempts == 3
    assert attempts == {(one.id, lap, attempt): 2 for lap, attempt in [(1, 1), (1, 2), (1, 3), (2, 1)]}


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_an_empty_body_goes_the_whole_way(bench: Bench) -> None:
    """C48: no content frame follows the header."""
    topology = await bench.declared()
    bodies: list[Any] = []
    broken = True

    async def handler(message: Message) -> None:
        bodies.append(message.payload)
        if broken:
            raise RuntimeError

    await bench.send(topology, b"")
    async with bench.running(topology, handler) as consumer:
        await rests(bench, topology.dlq, 1)
        async with bench.dlq(topology) as dlq:
            (letter,) = await dlq.peek_all()
            assert letter.body == b""
            assert letter.properties.content_type == "application/octet-stream"
            broken = False
            await dlq.replay_one()
        await until(lambda: consumer.summary.succeeded, "the replayed message is handled")
    assert bodies == [b""] * 4


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_message_that_died_in_other_peoples_queues_has_all_its_attempts_here(bench: Bench) -> None:
    """C14: the first entry of x-death tells of another queue, and its count is not ours."""
    topology = await bench.declared()
    theirs = await bench.raw.queue(
        f"{topology.name}-theirs",
        x_message_ttl=1,
        x_dead_letter_exchange="",
        x_dead_letter_routing_key=topology.name,
    )
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        raise RuntimeError

    await bench.raw.publish(theirs, message_id="m")
    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, 1)
    assert attempts == [1, 2, 3]
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.queue, letter.routing_key) == (topology.name, topology.name)
    is_told(letter, 3)
