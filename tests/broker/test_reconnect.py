"""Lines that break, freeze and come back; queues that are deleted under a consumer."""

import asyncio
from collections import Counter

import pytest

from rabbitdlq import Message, Permanent
from rabbitdlq.consumer.session import Session
from rabbitdlq.errors import BrokerUnavailable
from rabbitdlq.journal import JournalEvent, JournalWriter
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, consumed, rests
from tests.broker.proxy import Proxy, consuming


async def test_a_deleted_work_queue_is_declared_again_and_consumed_within_seconds(bench: Bench) -> None:
    """C10: the broker cancels the consumer, and the worker idles without a word."""
    topology = await bench.declared()
    handled: list[str] = []

    async def handler(message: Message) -> None:
        handled.append(message.payload)

    async with bench.running(topology, handler):
        await bench.send(topology, "before")
        await until(lambda: handled, "the first message")
        channel = await bench.raw.channel()
        await channel.queue_delete(topology.name)
        await channel.close()
        await until(lambda: consumed(bench, topology.name), "the queue is there and consumed", 10)
        await bench.send(topology, "after")
        await until(lambda: "after" in handled, "the message after", 10)


@pytest.mark.parametrize("last_word", [None, Permanent("hopeless")], ids=["success", "failure"])
@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_handler_that_ends_after_its_connection_was_lost_settles_nothing(
    bench: Bench, last_word: Exception | None
) -> None:
    """C21: the ack of a delivery taken before a reconnect was an error that ended the worker, or a second copy."""
    topology = await bench.declared()
    (sent,) = await bench.send(topology, "x")
    release: list[asyncio.Event] = []
    async with Proxy(bench.url) as proxy:

        async def handler(message: Message) -> None:
            release.append(asyncio.Event())
            await release[-1].wait()
            if last_word:
                raise last_word

        async with bench.running(topology, handler, url=proxy.url) as consumer:
            await until(lambda: len(release) == 1, "the handler runs")
            assert proxy.cut() >= 1
            await until(lambda: len(release) == 2, "the broker delivers it again")
            release[0].set()
            await until(lambda: consumer.summary.too_late == 1, "the first handler's end")
            assert await bench.raw.count(topology.dlq) == 0
            release[1].set()
            await until(lambda: consumer.summary.succeeded + consumer.summary.parked == 1, "the second handler's end")
    assert len(release) == 2
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        assert [letter.id for letter in await dlq.peek_all()] == ([sent] if last_word else [])


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_frozen_network_is_given_up_and_consuming_goes_on_after_the_thaw(bench: Bench) -> None:
    """C22: the connection comes back, its channels and consumers do not."""
    topology = await bench.declared()
    handled: list[str] = []

    async def handler(message: Message) -> None:
        handled.append(message.payload)

    async with Proxy(bench.url, heartbeat=1) as proxy, bench.running(topology, handler, url=proxy.url):
        await bench.send(topology, "before")
        await until(lambda: handled, "the first message")
        lines = proxy.accepted
        proxy.freeze()
        await bench.send(topology, "while frozen")
        await until(lambda: proxy.accepted > lines, "it has noticed, and tries another connection")
        assert handled == ["before"]
        proxy.thaw()
        await bench.send(topology, "after")
        await until(lambda: {*handled} == {"before", "while frozen", "after"}, "the message after the thaw", 30)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_connection_lost_while_the_journal_is_read_is_noticed_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end was waited for to the deadline, although nothing could come any more: half a minute without work."""
    topology = await bench.declared()
    handled: list[str] = []
    markers = 0
    publish = JournalWriter.publish

    async def handler(message: Message) -> None:
        handled.append(message.payload)

    async with Proxy(bench.url) as proxy:

        async def publish_and_lose_the_line(writer: JournalWriter, event: JournalEvent) -> None:
            nonlocal markers
            markers += 1
            if markers == 2:
                # the marker is written, and the line on which it would be read is gone
                assert proxy.cut(consuming) == 1
            await publish(writer, event)

        monkeypatch.setattr(JournalWriter, "publish", publish_and_lose_the_line)
        async with bench.running(topology, handler, url=proxy.url):
            await bench.send(topology, "before")
            await until(lambda: handled, "the first message")
            proxy.cut(consuming)
            await bench.send(topology, "after")
            await until(lambda: "after" in handled, "the message after", 20)
    assert markers == 3


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_broker_that_refuses_connections_for_a_while_is_tried_again(bench: Bench) -> None:
    topology = await bench.declared()
    handled: list[str] = []

    async def handler(message: Message) -> None:
        handled.append(message.payload)

    async with Proxy(bench.url) as proxy, bench.running(topology, handler, url=proxy.url):
        await bench.send(topology, "before")
        await until(lambda: handled, "the first message")
        proxy.refuse()
        proxy.cut()
        await until(lambda: proxy.refused >= 2, "two attempts to come back")
        proxy.accept()
        await bench.send(topology, "after")
        await until(lambda: "after" in handled, "the message after", 15)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_start_that_is_lost_when_messages_may_have_come_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that began at once had blocked the event loop: the consumer ended, and blamed the broker."""
    topology = await bench.declared(["50ms"])
    take, lost = Session._take, list[int]()

    async def lose(session: Session, prefetch: int) -> None:
        if not lost:
            lost.append(prefetch)
            raise BrokerUnavailable("consuming: no answer in time")
        await take(session, prefetch)

    monkeypatch.setattr(Session, "_take", lose)
    await bench.send(topology, "x")
    consumer = await bench.drain(topology, lambda _: None)
    assert (len(lost), consumer.summary.succeeded) == (1, 1)


async def test_settling_one_of_several_leaves_its_neighbours_alone(bench: Bench) -> None:
    """C45: an ack or a nack with ``multiple`` settles those that are still being worked on."""
    topology = await bench.declared(["10m"])
    runs: Counter[str] = Counter()
    hold = asyncio.Event()

    async def handler(message: Message) -> None:
        runs[message.payload] += 1
        if message.payload == "last fails":
            raise RuntimeError
        if message.payload != "last succeeds" and runs[message.payload] == 1:
            await hold.wait()

    async with Proxy(bench.url) as proxy, bench.running(topology, handler, url=proxy.url) as consumer:
        await bench.send(topology, "held 1", "held 2", "last fails", "last succeeds")
        await until(lambda: consumer.summary.retried == consumer.summary.succeeded == 1, "the last two are settled")
        assert runs == dict.fromkeys(["held 1", "held 2", "last fails", "last succeeds"], 1)
        # both are told to the broker at once, some milliseconds after they were settled
        await rests(bench, topology.rungs[0].queue, 1)
        proxy.cut()
        await until(lambda: consumer.summary.succeeded == 3, "the held ones, delivered again")
        hold.set()
        await until(lambda: consumer.summary.too_late == 2, "the first runs of the held ones end")
    assert runs == {"held 1": 2, "held 2": 2, "last fails": 1, "last succeeds": 1}
    await rests(bench, topology.rungs[0].queue, 1)
