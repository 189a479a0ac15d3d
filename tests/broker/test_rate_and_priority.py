"""How fast a queue is worked on, and which of several goes first."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rabbitdlq import ConfigurationError, Consumer, ConsumerGroup, Message, Topology, TopologyMismatch
from tests.broker.kit import Bench, until
from tests.broker.looks import publish_many, rests

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])

Handle = Callable[[Message], Awaitable[None]]


async def two_queues(bench: Bench, bulk: int = 200) -> tuple[Topology, Topology]:
    critical, slow = await bench.declared(), await bench.declared()
    await publish_many(bench, slow, range(bulk))
    return critical, slow


class Floor:
    """Where handlers of several queues work: who began when, and how many at once. It opens when all are there."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.open = asyncio.Event()
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.running: dict[str, int] = {}
        self.most: dict[str, int] = {}

    def handler(self, name: str) -> Handle:
        async def handle(_: Message) -> None:
            self.begun.append(name)
            self.running[name] = self.running.get(name, 0) + 1
            for key, now in ((name, self.running[name]), ("all", sum(self.running.values()))):
                self.most[key] = max(self.most.get(key, 0), now)
            await self.open.wait()
            await asyncio.sleep(self.seconds)
            self.running[name] -= 1
            self.ended.append(name)

        return handle


async def all_here(consumers: list[Consumer], count: int) -> None:
    """Return when so many messages are begun or wait here: whom a busy broker keeps waiting goes after the others."""

    def here() -> bool:
        told = [consumer.health() for consumer in consumers]
        return sum(each.in_flight + each.waiting for each in told) == count

    await until(here, f"{count} messages are here")


async def ended(group: ConsumerGroup, running: "asyncio.Task[Any]") -> None:
    group.stop()
    await asyncio.wait_for(running, 20)


async def test_messages_are_begun_at_the_rate_and_a_stop_gives_back_what_waits(bench: Bench) -> None:
    topology = await bench.declared()
    await publish_many(bench, topology, range(40))
    begun: list[float] = []

    async def handler(_: Message) -> None:
        begun.append(time.monotonic())

    consumer = bench.consumer(topology, handler, rate="20/s", concurrency=10)
    running = asyncio.create_task(consumer.run())
    await until(lambda: len(begun) >= 25, "25 are done")
    assert begun[24] - begun[0] >= (24 - 10) / 20  # ten at most are made up for
    consumer.stop()
    summary = await asyncio.wait_for(running, 5)

    assert summary.succeeded == len(begun)
    await rests(bench, topology.name, 40 - len(begun))


async def test_a_slow_rate_prefetches_no_more_than_it_gets_through_in_some_minutes(bench: Bench) -> None:
    topology = await bench.declared()
    await publish_many(bench, topology, range(20))
    done: list[Message] = []

    async def three_prefetched() -> bool:
        return await bench.raw.count(topology.name) == 20 - 1 - 3

    async with bench.running(topology, done.append, rate="36/h", concurrency=10):
        await until(lambda: done, "the first one")
        await until(three_prefetched, "it holds three")
    assert len(done) == 1
    await rests(bench, topology.name, 19)


async def test_a_slow_queue_never_starves_a_critical_one(bench: Bench) -> None:
    """200 slow messages are there first and take every slot that they may; 20 critical ones come one by one.

    Each finds the slot that is kept for it, though the three slow ones that take the others' places do not end before
    it is done. Without a group that shares its slots fairly it would wait for one of them.
    """
    critical, slow = await two_queues(bench)
    begun = ended_slow = 0
    may_end, paid = asyncio.Semaphore(0), list[int]()

    async def work(_: Message) -> None:
        nonlocal begun, ended_slow
        begun += 1
        await may_end.acquire()
        ended_slow += 1

    async def pay(message: Message) -> None:
        paid.append(message.payload)
        assert begun - ended_slow <= 3

    consumers = [
        bench.consumer(slow, work, concurrency=8),
        bench.consumer(critical, pay, concurrency=2, priority=10),
    ]
    group = ConsumerGroup(consumers, slots=4)
    running = asyncio.create_task(group.run())
    for number in range(20):
        await until(lambda ends=3 * number: begun == ends + 3, "the slow queue has all slots but one")
        for _ in range(3):
            may_end.release()
        await bench.send(critical, number)
        await until(lambda count=number: len(paid) > count, "the critical one is done")
    for _ in range(200):
        may_end.release()
    await ended(group, running)
    assert (paid, consumers[1].summary.succeeded) == (list(range(20)), 20)


@pytest.mark.parametrize("slots", [2, 4])
async def test_strictly_the_more_important_queue_is_worked_off_first(bench: Bench, slots: int) -> None:
    critical, slow = await two_queues(bench, 40)
    await publish_many(bench, critical, range(40))
    floor = Floor(0.01)
    consumers = [
        bench.consumer(slow, floor.handler("slow"), concurrency=8, prefetch=40),
        bench.consumer(critical, floor.handler("critical"), concurrency=8, prefetch=40, priority=2),
    ]
    group = ConsumerGroup(consumers, slots=slots)
    running = asyncio.create_task(group.run())
    await all_here(consumers, 80)
    before = len(floor.begun)
    floor.open.set()
    await until(lambda: len(floor.ended) == 80, "all are done")
    await ended(group, running)

    rest = floor.begun[before:]
    assert "slow" not in rest[: rest.count("critical")], floor.begun
    assert floor.most["slow"] <= slots - 1
    assert floor.most["all"] <= slots


async def test_by_weight_messages_are_begun_in_the_ratio_of_the_priorities(bench: Bench) -> None:
    heavy, light = await two_queues(bench, 90)
    await publish_many(bench, heavy, range(90))
    floor = Floor(0.01)
    consumers = [
        bench.consumer(light, floor.handler("light"), concurrency=6, prefetch=90),
        bench.consumer(heavy, floor.handler("heavy"), concurrency=6, prefetch=90, priority=3),
    ]
    group = ConsumerGroup(consumers, slots=4, priority="weighted")
    running = asyncio.create_task(group.run())
    await all_here(consumers, 180)
    floor.open.set()
    await until(lambda: len(floor.begun) >= 100, "100 are begun")
    start = max(floor.begun.index("light"), floor.begun.index("heavy"))
    window = floor.begun[start : start + 80]
    await ended(group, running)

    assert 2.2 <= window.count("heavy") / window.count("light") <= 4, window


async def test_each_consumer_keeps_its_own_concurrency_and_draining_ends_with_the_last(bench: Bench) -> None:
    critical, slow = await two_queues(bench, 12)
    await publish_many(bench, critical, range(12))
    floor = Floor(0.02)
    group = ConsumerGroup(
        [
            bench.consumer(slow, floor.handler("slow"), concurrency=2, drain=True),
            bench.consumer(critical, floor.handler("critical"), concurrency=3, drain=True),
        ]
    )
    running = asyncio.create_task(group.run())
    await until(lambda: sum(floor.running.values()) == 5, "each has as many at work as it may")
    floor.open.set()
    summary = await asyncio.wait_for(running, 30)

    assert (summary.succeeded, summary.parked) == (24, 0)
    assert (floor.most["slow"], floor.most["critical"], floor.most["all"]) == (2, 3, 5)


async def test_a_queue_that_cannot_start_ends_the_others_and_is_named(bench: Bench) -> None:
    good, bad = await bench.declared(), await bench.declared()
    changed = bench.topology(["7s"], name=bad.name)
    done: list[Message] = []

    async def never(_: Message) -> None:
        raise AssertionError

    group = ConsumerGroup([bench.consumer(good, done.append), bench.consumer(changed, never)])
    with pytest.raises(TopologyMismatch, match=bad.name):
        await asyncio.wait_for(group.run(), 20)
    await bench.send(good, 1)
    await rests(bench, good.name, 1)


async def test_what_makes_no_group_is_told(bench: Bench) -> None:
    one, two = bench.topology(), bench.topology()

    def consumer(topology: Topology, **options: Any) -> Consumer:
        return bench.consumer(topology, print, **options)

    for consumers, options, reason in (
        ([], {}, "there are none"),
        ([consumer(one), consumer(one)], {}, "has 2; raise its concurrency"),
        ([consumer(one), consumer(two, priority=2)], {"slots": 1}, "1 is too few"),
        ([consumer(one)], {"slots": 0}, "0 is too few"),
        ([consumer(one)], {"priority": "fair"}, "'fair' is neither 'strict' nor 'weighted'"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            ConsumerGroup(consumers, **options)
    with pytest.raises(ConfigurationError, match="priority: 0 is no whole number above 0"):
        consumer(one, priority=0)
