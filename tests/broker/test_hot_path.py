"""Deliveries in, settlements out, on a real broker: what one frame tells, and what is certain when a channel ends."""

import asyncio
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from rabbitdlq import Connection, Message
from rabbitdlq.broker import ConsumingChannel, Delivery
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, publish_many, rests
from tests.broker.worker import Order, worker_process


async def held(connection: Connection, queue: str, count: int) -> tuple[ConsumingChannel, list[Delivery]]:
    """A channel of its own that holds so many deliveries, and takes no more."""
    deliveries: list[Delivery] = []
    channel = await ConsumingChannel.consume(connection, queue, deliveries.append, lambda _: None, prefetch=count)
    await until(lambda: len(deliveries) == count, "all of them are here")
    await channel.cancel()
    return channel, deliveries


async def test_settled_in_any_order_each_ends_as_it_was_told(bench: Bench) -> None:
    """C45, and the order in which handlers end: a frame that says "and all before" must not reach who still works."""
    topology = await bench.declared(["1h"])
    await publish_many(bench, topology, range(60))
    channel, deliveries = await held(bench.raw.connection, topology.name, 60)
    # nothing contiguous at first, then the rest but every seventh, which stays open
    acked = [place for place in range(60) if place % 3 == 0]
    dead = [place for place in range(60) if place % 3 == 1 and place % 7]
    for place in acked:
        assert deliveries[place].ack()
    channel.flush()
    for place in dead:
        assert deliveries[place].nack(requeue=False)
    assert not deliveries[acked[0]].ack(), "a second answer would close the channel"
    await channel.arrived()
    await rests(bench, topology.rungs[0].queue, len(dead))

    await channel.close()

    await rests(bench, topology.name, 60 - len(acked) - len(dead))
    left = {int(body) for body, _, _ in await bench.raw.take_all(topology.name)}
    assert left == set(range(60)) - set(acked) - set(dead)
    assert not deliveries[1].ack(), "the broker has it back"


async def test_what_was_settled_before_a_channel_is_closed_stays_settled(bench: Bench) -> None:
    """A quorum queue's channel drops acks that it has not passed on: up to 1,967 of 2,000 came back."""
    topology = await bench.declared()
    await publish_many(bench, topology, range(1_000))
    async with await Connection.open(bench.url) as connection:
        channel, deliveries = await held(connection, topology.name, 1_000)
        for delivery in deliveries[::2]:  # no two of them are neighbours: a frame each
            delivery.ack()
        await channel.close()

    await rests(bench, topology.name, 500)
    left = {int(body) for body, _, _ in await bench.raw.take_all(topology.name)}
    assert left == set(range(1, 1_000, 2))


async def test_a_slow_handler_does_not_hold_back_the_acks_of_its_neighbours(bench: Bench) -> None:
    topology = await bench.declared()
    release = asyncio.Event()

    async def handler(message: Message) -> None:
        if message.payload == 0:
            await release.wait()

    await publish_many(bench, topology, range(100))
    async with bench.running(topology, handler, concurrency=10, prefetch=10):
        # the prefetch is one more than the slow one leaves room for: unacknowledged neighbours would end it here
        await until(lambda: _none_waits(bench, topology.name), "all others are acknowledged")
        release.set()
    assert await all_empty(bench, topology)


async def _none_waits(bench: Bench, queue: str) -> bool:
    return await bench.raw.count(queue) == 0


async def test_a_stop_in_the_middle_of_fast_work_runs_nothing_twice(bench: Bench) -> None:
    topology = await bench.declared()
    await publish_many(bench, topology, range(3_000))
    runs: Counter[int] = Counter()

    async def handler(message: Message) -> None:
        runs[message.payload] += 1
        if len(runs) == 1_000:
            first.stop()
            await asyncio.sleep(0.01)

    async with bench.running(topology, handler, concurrency=50, prefetch=200) as first:
        # a second stop, as at the end of this block, would not wait for handlers
        await until(lambda: first.summary.succeeded >= 1_000, "the first thousand")
    assert len(runs) < 3_000, "it was stopped too late to prove anything"
    await bench.drain(topology, handler)

    assert set(runs) == set(range(3_000))
    assert set(runs.values()) == {1}


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_kill_in_the_middle_of_fast_work_runs_some_again_and_loses_none(bench: Bench, tmp_path: Path) -> None:
    """Acks told together: what was handled and not told yet runs again, at most what was prefetched."""
    topology = await bench.declared()
    # all are there before it begins, and as many as it has hands are held near the end: it cannot be through
    orders = (Order(n, held=1 if 2_000 <= n < 2_050 else 0) for n in range(3_000))
    await publish_many(bench, topology, map(asdict, orders))
    async with worker_process(bench.url, topology, tmp_path / "first", "first", concurrency=50) as first:
        await until(lambda: first.count("succeeded") >= 500, "the first worker is in the middle")
        await first.kill()
    assert await bench.raw.count(topology.name), "it was killed too late to prove anything"
    async with worker_process(bench.url, topology, tmp_path / "second", "second", drain=True, careful=True) as second:
        assert await second.ended() == 0

    assert await all_empty(bench, topology)
    runs = Counter(run.n for run in first.runs + second.runs if run.what == "succeeded")
    assert set(runs) == set(range(3_000))
    again = [n for n, count in runs.items() if count > 1]
    assert len(again) <= 100, "twice the concurrency is what is prefetched"
    assert max(runs.values()) <= 2
