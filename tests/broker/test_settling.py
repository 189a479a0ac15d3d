"""What becomes of messages whose settling meets something in its way: each of them once, and with its attempts."""

import asyncio
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from rabbitdlq import Message, RetryAfter, names
from rabbitdlq.broker import Outgoing
from rabbitdlq.idempotency import Claim, MemoryStore
from rabbitdlq.wire import Headers, Properties
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, give_back, rests
from tests.broker.proxy import Proxy, consuming, parking
from tests.broker.test_retry_after import LADDER, Scripted
from tests.broker.test_suspects import Slow

one_queue_type = pytest.mark.parametrize("queue_type", ["quorum"])


class BusyOnce(MemoryStore):
    """Says of the first key it is asked for that somebody else is at work, when it is told to go; of all others, and
    whatever was done before, that nobody is."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def claim(self, key: str, lease: timedelta) -> Claim:
        if self.asked.is_set():
            return Claim("new", "token")
        self.asked.set()
        await self.go.wait()
        return Claim("busy")


@pytest.mark.parametrize("what", ["asked to wait", "is postponed"])
async def test_what_the_broker_has_back_is_not_put_into_a_rung_as_well(bench: Bench, what: str) -> None:
    """Two would come of one."""
    topology = await bench.declared(LADDER)
    store = BusyOnce()
    runs: list[int] = []

    async def handler(message: Message) -> None:
        runs.append(message.attempt)
        if what == "asked to wait" and len(runs) == 1:
            store.asked.set()
            await store.go.wait()
            raise RetryAfter(0.3, "later")

    await bench.send(topology, 1, message_id="m")
    async with (
        Proxy(bench.url) as proxy,
        bench.running(
            topology, handler, url=proxy.url, idempotency=store if what == "is postponed" else None
        ) as consumer,
    ):
        await asyncio.wait_for(store.asked.wait(), 10)
        await until(lambda: consumer.health().status == "ok", "it consumes")
        assert proxy.cut(consuming) == 1
        await until(lambda: consumer.health().status == "down", "it knows that the line is lost")
        store.go.set()
        await until(lambda: consumer.summary.too_late == 1, "it comes too late")
        await until(lambda: consumer.summary.succeeded == 1, "it is here again")

    await bench.drain(topology, handler)
    assert runs == ([1, 1] if what == "asked to wait" else [1])
    assert await all_empty(bench, topology)


@one_queue_type
async def test_what_cannot_be_put_where_it_asked_to_wait_waits_in_the_rung_that_comes_next(bench: Bench) -> None:
    topology = await bench.declared(LADDER)
    handler = Scripted(RetryAfter(0.6), None)
    await bench.send(topology, 1)
    async with Proxy(bench.url) as proxy:
        proxy.refuse(parking)
        with capture_logs() as logs:
            async with bench.running(
                topology, handler, url=proxy.url, park_timeout=timedelta(milliseconds=300)
            ) as consumer:
                await until(lambda: consumer.summary.succeeded == 1, "it has come back")
    assert handler.attempts == [1, 2]
    (death,) = (each for each in handler.runs[1][2].properties.table["x-death"] if each["reason"] == "expired")
    assert death["queue"] == topology.rungs[0].queue
    assert [line["event"] for line in logs].count("rung_unreachable") == 1
    assert await all_empty(bench, topology)


async def test_on_a_ladder_of_one_rung_what_was_postponed_still_has_its_retry(bench: Bench) -> None:
    """From there a nack leads into the dead-letter queue."""
    topology = await bench.declared(["50ms"])
    handler, store = Scripted(ValueError("1"), ValueError("2")), BusyOnce()
    store.go.set()
    await bench.send(topology, 1, message_id="m")
    async with bench.running(topology, handler, idempotency=store) as consumer:
        await rests(bench, topology.dlq, 1)
    assert handler.attempts == [1, 2]
    assert (consumer.summary.postponed, consumer.summary.retried, consumer.summary.parked) == (1, 1, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.attempts, letter.reason, letter.bare) == (2, names.EXHAUSTED, False)


@one_queue_type
async def test_a_derived_id_is_no_key_after_a_wait_either(bench: Bench) -> None:
    topology = await bench.declared(LADDER)
    handler = Scripted(RetryAfter(0.3), None)
    await bench.raw.publish(topology.name, b"1")
    async with bench.running(topology, handler, idempotency=MemoryStore()) as consumer:
        await until(lambda: consumer.summary.succeeded == 1, "it has come back")
    first, again = (message for _, _, message in handler.runs)
    assert again.id == first.id
    assert (first.id_derived, again.id_derived) == (True, True)
    assert (first.idempotency_key, again.idempotency_key) == (None, None)


async def test_failures_that_a_foreign_message_claims_to_have_are_no_more_than_the_ladder_has(bench: Bench) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    handler = Scripted(ValueError("no"))
    properties = Properties(message_id="f", headers=Headers({names.FAILURES: 99}))
    await bench.raw.republish(Outgoing(topology.retry_exchange, topology.name, b"{}", properties))
    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, 1)
    assert handler.attempts == [topology.max_attempts + 1]
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.attempts, letter.reason) == (topology.max_attempts + 1, names.EXHAUSTED)
    assert await all_empty(bench, topology)


async def test_a_header_that_says_suspect_counts_only_on_what_came_from_a_rung(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    for _ in range(3):
        await bench.raw.publish(topology.name, headers=Headers({names.SUSPECT: "1 since 2024-01-01T12:00:00+00:00"}))
    handler = Slow()
    async with bench.running(topology, handler, concurrency=5) as consumer:
        await until(lambda: len(handler.seen) == 3, "all at once")
        handler.go.set()
        await until(lambda: consumer.summary.succeeded == 3, "all are handled")
    assert await all_empty(bench, topology)


async def test_suspects_that_wait_for_their_turn_are_given_back_at_the_stop(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    await bench.send(topology, *range(3))
    await give_back(bench, topology, 3)
    handler = Slow()
    async with bench.running(topology, handler, concurrency=5) as consumer:
        await until(lambda: handler.seen and consumer.signs.vitals().waiting == 2, "one is at work, two wait")
        consumer.stop()
        await rests(bench, topology.name, 2)
        assert consumer.summary.released == 2
        handler.go.set()
    assert (consumer.summary.succeeded, consumer.summary.released, len(handler.seen)) == (1, 2, 1)
    assert await bench.raw.count(topology.name) == 2
