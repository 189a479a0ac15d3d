"""Stopping: what runs may finish, what does not is given back, and no attempt is spent on it."""

import asyncio
import threading
from datetime import timedelta

import pytest

from rabbitdlq import Message, Permanent
from rabbitdlq.consumer import draining
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, is_told, rests
from tests.broker.proxy import Proxy, parking


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_handler_may_finish_within_the_grace_and_what_had_not_begun_goes_back_at_once(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(10))
    started: list[int] = []
    may_finish = asyncio.Event()

    async def handler(message: Message) -> None:
        started.append(message.payload)
        await may_finish.wait()

    consumer = bench.consumer(topology, handler, concurrency=1, prefetch=10)
    running = asyncio.create_task(consumer.run())
    await until(lambda: started, "the first handler runs")
    await rests(bench, topology.name, 0)  # the others are prefetched
    consumer.stop()
    await rests(bench, topology.name, 9)
    assert not running.done()
    may_finish.set()
    summary = await asyncio.wait_for(running, 10)

    assert (summary.succeeded, summary.released, started) == (1, 9, [0])
    assert await bench.raw.count(topology.name) == 9


@pytest.mark.parametrize("in_thread", [False, True], ids=["async def", "def"])
async def test_a_handler_beyond_the_grace_is_released_without_spending_an_attempt(
    bench: Bench, in_thread: bool
) -> None:
    topology = await bench.declared()
    await bench.send(topology, {"order": 1})
    attempts: list[int] = []
    release = threading.Event()

    def plain(message: Message) -> None:
        attempts.append(message.attempt)
        if attempts == [1, 2]:
            release.wait(30)
        raise RuntimeError(f"attempt {message.attempt}")

    async def asynchronous(message: Message) -> None:
        if len(attempts) == 1:
            attempts.append(message.attempt)
            await asyncio.sleep(30)
        plain(message)

    handler = plain if in_thread else asynchronous
    consumer = bench.consumer(topology, handler, grace=timedelta(milliseconds=100))
    running = asyncio.create_task(consumer.run())
    await until(lambda: attempts == [1, 2], "the second attempt runs")
    consumer.stop()
    summary = await asyncio.wait_for(running, 10)
    release.set()
    assert (summary.retried, summary.released, summary.parked) == (1, 1, 0)
    await rests(bench, topology.name, 1)

    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, 1)
    assert attempts == [1, 2, 2, 3]
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    is_told(letter, 3)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_second_stop_ends_the_grace(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, {"order": 1})
    started = asyncio.Event()

    async def handler(message: Message) -> None:
        started.set()
        await asyncio.sleep(60)

    consumer = bench.consumer(topology, handler, grace=timedelta(seconds=60))
    running = asyncio.create_task(consumer.run())
    await asyncio.wait_for(started.wait(), 10)
    consumer.stop()
    await asyncio.sleep(0)
    assert not running.done()
    consumer.stop()
    assert (await asyncio.wait_for(running, 10)).released == 1
    await rests(bench, topology.name, 1)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_what_is_being_settled_is_not_interrupted_by_the_end_of_the_grace(bench: Bench) -> None:
    topology = await bench.declared()
    (sent,) = await bench.send(topology, {"order": 1})
    async with Proxy(bench.url) as proxy:

        async def handler(message: Message) -> None:
            proxy.freeze(parking)
            raise Permanent

        consumer = bench.consumer(topology, handler, url=proxy.url, grace=timedelta(milliseconds=50))
        running = asyncio.create_task(consumer.run())
        await until(lambda: any(parking(line) for line in proxy.lines), "it parks")
        consumer.stop()
        consumer.stop()
        done, _ = await asyncio.wait([running], timeout=0.5)  # ten times the grace
        assert not done
        proxy.thaw()
        summary = await asyncio.wait_for(running, 10)
    assert (summary.parked, summary.released) == (1, 0)
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        assert [letter.id for letter in await dlq.peek_all()] == [sent]


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_consumer_that_is_trying_to_come_back_stops_at_once(bench: Bench) -> None:
    topology = await bench.declared()
    handled: list[str] = []

    async def handler(message: Message) -> None:
        handled.append(message.payload)

    async with Proxy(bench.url) as proxy:
        consumer = bench.consumer(topology, handler, url=proxy.url)
        running = asyncio.create_task(consumer.run())
        await bench.send(topology, "x")
        await until(lambda: handled, "it works")
        proxy.refuse()
        proxy.cut()
        await until(lambda: proxy.refused >= 2, "it tries to come back")
        consumer.stop()
        await asyncio.wait_for(running, 2)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_draining_waits_for_what_is_on_the_ladder(bench: Bench) -> None:
    topology = await bench.declared(["1s"])
    await bench.send(topology, "x")
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            first.stop()
            raise RuntimeError

    async with bench.running(topology, handler) as first:
        await until(lambda: first.summary.retried == 1, "it has failed once")
    assert attempts == [1]
    await bench.drain(topology, handler)
    assert attempts == [1, 2]
    assert await all_empty(bench, topology)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_draining_looks_at_the_ladder_itself_and_not_only_at_what_it_remembers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that has not seen the failure knows of no retry, nor does one whose journal cannot be read."""
    topology = await bench.declared(["4s"])
    await bench.send(topology, "x")
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise RuntimeError

    # as many looks as without a memory: by those at the work queue alone it would end after a third of the delay
    assert draining.LOOKS * draining.POLL_SECONDS < 4 / 3
    monkeypatch.setattr(draining, "LOOKS_WITH_RETRIES_OUT", draining.LOOKS)
    await bench.drain(topology, handler)

    assert attempts == [1, 2]
    assert await all_empty(bench, topology)
