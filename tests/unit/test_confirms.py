"""Publishes out, confirms in: against a broker in memory, which answers late, for several at once, or not at all."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import pytest
from pamqp import commands

from rabbitdlq import Connection, Producer
from rabbitdlq.broker import Outgoing, Publisher
from rabbitdlq.errors import BrokerUnavailable, ConfigurationError, PublishRefused, PublishUnconfirmed, Unroutable
from rabbitdlq.wire import Properties
from tests.unit.fake_broker import FakeBroker, body_frame, header_frame, method_frame

SOON = timedelta(seconds=10)
URL = "amqp://guest:guest@nowhere/?heartbeat=0"


@pytest.fixture
async def publisher(broker: FakeBroker) -> AsyncIterator[Publisher]:
    async with await Connection.open(URL) as connection:
        yield await Publisher.open(connection)


def outgoing(message_id: str) -> Outgoing:
    return Outgoing("", "orders", b"{}", Properties(message_id=message_id))


async def begun(publisher: Publisher, broker: FakeBroker, ids: Iterable[str], timeout: timedelta = SOON) -> list[Any]:
    """Publishes under way, none of them confirmed."""
    broker.on_publish = lambda *_: True
    tasks = [asyncio.create_task(publisher.publish(outgoing(id), timeout=timeout)) for id in ids]
    while len(broker.published) < len(tasks):
        await asyncio.sleep(0)
    return tasks


async def results(tasks: list[Any]) -> list[type]:
    return [type(each) for each in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)]


async def test_one_answer_speaks_for_all_before_it_and_for_none_behind(
    broker: FakeBroker, publisher: Publisher
) -> None:
    tasks = await begun(publisher, broker, "abcdef")
    broker.send(method_frame(commands.Basic.Ack(delivery_tag=2)))
    broker.send(method_frame(commands.Basic.Nack(delivery_tag=4, multiple=True)))
    while not tasks[3].done():
        await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, True, True, True, False, False]

    broker.send(method_frame(commands.Basic.Ack(delivery_tag=6, multiple=True)))

    none = type(None)
    assert await results(tasks) == [PublishRefused, none, PublishRefused, PublishRefused, none, none]


async def test_no_confirm_in_time_is_not_known_and_a_late_one_disturbs_nobody(
    broker: FakeBroker, publisher: Publisher
) -> None:
    tasks = await begun(publisher, broker, "ab", timedelta(milliseconds=100))
    began = time.monotonic()
    assert await results(tasks) == [PublishUnconfirmed, PublishUnconfirmed]
    assert time.monotonic() - began < 2

    broker.send(method_frame(commands.Basic.Ack(delivery_tag=2, multiple=True)))
    broker.on_publish = lambda *_: False
    await publisher.publish(outgoing("a"), timeout=SOON)


async def test_the_deadline_holds_when_the_channel_is_closed_and_each_is_tried_alone(
    broker: FakeBroker, publisher: Publisher
) -> None:
    """Each try began a time of its own: a second became four."""
    tasks = await begun(publisher, broker, map(str, range(30)), timedelta(milliseconds=400))
    began = time.monotonic()
    broker.send(method_frame(commands.Channel.Close(406, "PRECONDITION_FAILED", 60, 40)))

    assert set(await results(tasks)) == {PublishUnconfirmed}
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("message_id", ["\udcc3\udca9", "caf\udce9", "ü"])
async def test_a_return_is_found_by_the_bytes_of_the_id(
    broker: FakeBroker, publisher: Publisher, message_id: str
) -> None:
    r"""Written as two odd bytes, it came back as the letter that these two are."""
    broker.on_publish = broker.give_back

    with pytest.raises(Unroutable):
        await publisher.publish(outgoing(message_id), timeout=SOON)


@pytest.mark.parametrize("properties", [Properties(message_id="nobody's").encode(), b"\x20\x00\xff"])
async def test_a_return_of_nobody_makes_no_success_of_what_is_under_way(
    broker: FakeBroker, publisher: Publisher, properties: bytes
) -> None:
    (task,) = await begun(publisher, broker, "a")
    broker.on_publish = lambda *_: False
    returned = commands.Basic.Return(312, "NO_ROUTE", "", "orders")
    broker.send(method_frame(returned), header_frame(properties, 2), body_frame(b"{}"))
    broker.send(method_frame(commands.Basic.Ack(delivery_tag=1)))

    await asyncio.wait_for(task, 10)
    assert len(broker.published) == 2, "it was not tried alone, though it may have been the one"


async def test_nothing_more_is_written_while_the_broker_does_not_read(broker: FakeBroker, publisher: Publisher) -> None:
    """Given up, it lay in memory all the same, and was sent when the alarm had ended."""
    broker.unread = 10_000_000
    drained = asyncio.Event()
    broker.drain = drained.wait  # type: ignore[method-assign, assignment]

    with pytest.raises(BrokerUnavailable, match="not sent"):
        await publisher.publish(outgoing("a"), timeout=timedelta(milliseconds=100))
    assert broker.published == []

    waiting = asyncio.create_task(publisher.publish(outgoing("b"), timeout=SOON))
    await asyncio.sleep(0.05)
    broker.unread = 0
    drained.set()
    await asyncio.wait_for(waiting, 10)


@pytest.mark.parametrize("cut", [1, 5, 100])
async def test_a_greeting_in_pieces_is_a_greeting(broker: FakeBroker, cut: int) -> None:
    """A heartbeat was put in front of one that came in two reads."""
    whole = broker.send

    async def in_pieces(data: bytes) -> None:
        for at in range(0, len(data), cut):
            broker.reader.feed_data(data[at : at + cut])
            await asyncio.sleep(0)

    sending: set[asyncio.Task[None]] = set()

    def send(*frames: bytes) -> None:
        if broker.published or len(sending) > 3:
            whole(*frames)
        else:
            sending.add(asyncio.create_task(in_pieces(b"".join(frames))))

    broker.send = send  # type: ignore[method-assign]
    async with await Connection.open(URL) as connection:
        assert connection.is_open


async def many(count: int, taken: list[int]) -> AsyncIterator[int]:
    for number in range(count):
        taken.append(number)
        yield number


async def test_a_slow_reader_of_reports_holds_back_the_input(broker: FakeBroker) -> None:
    taken: list[int] = []
    async with Producer(URL, window=10) as producer:
        async for report in producer.send_all("orders", many(200, taken)):
            assert report.error is None
            assert len(taken) <= report.place + 12
            await asyncio.sleep(0.001)
    assert len(broker.published) == 200


async def test_a_stream_that_nobody_reads_any_more_takes_no_more(broker: FakeBroker) -> None:
    taken: list[int] = []
    async with Producer(URL, window=10) as producer:
        reports = producer.send_all("orders", many(10_000, taken))
        async for _ in reports:
            break
        await reports.aclose()
        by_then = len(taken)
        await asyncio.sleep(0.05)
        assert len(taken) == by_then < 30


async def test_payloads_that_cannot_be_sent_leave_the_event_loop_its_turn(broker: FakeBroker) -> None:
    async def bad() -> AsyncIterator[object]:
        for _ in range(3_000):
            yield object()

    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    async with Producer(URL, window=10) as producer:
        errors = [type(report.error) async for report in producer.send_all("orders", bad())]
    beside.cancel()

    assert errors == [ConfigurationError] * 3_000
    assert turns > 200


@pytest.mark.parametrize("options", [{"message_id": 17}, {"content_type": 5}])
async def test_what_is_no_text_is_a_word_of_ours(broker: FakeBroker, options: dict[str, Any]) -> None:
    async with Producer(URL) as producer:
        with pytest.raises(ConfigurationError):
            await producer.send("orders", {}, **options)
    assert broker.published == []


async def test_a_lost_connection_is_told_in_words_and_not_by_a_class_of_the_library(
    broker: FakeBroker, publisher: Publisher
) -> None:
    """The text was "...: CancelledError; the connection was lost", as if somebody had cancelled the publish."""
    (task,) = await begun(publisher, broker, "a")
    await publisher._connection.close()

    with pytest.raises(PublishUnconfirmed, match=r"key 'orders': the connection was lost before the confirm$"):
        await task
    for error, text in (
        (asyncio.CancelledError(), "'orders': the connection was lost before the confirm"),
        (ConnectionResetError("reset by peer"), "'orders': reset by peer; the connection was lost before the confirm"),
    ):
        assert str(publisher._refusal(error, outgoing("a"), sent=True)).endswith(f"key {text}")
