"""Rungs that cannot be reached by a publish: nothing is lost, sent in a circle, or waits without a word."""

from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from rabbitdlq import Message, RetryAfter, Topology
from rabbitdlq.idempotency import MemoryStore
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, give_back
from tests.broker.proxy import Proxy, parking

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])

MINUTE = timedelta(minutes=1)


def events(logs: list[Any], name: str) -> list[Any]:
    return [line for line in logs if line["event"] == name]


async def claimed(topology: Topology, *ids: str) -> tuple[MemoryStore, dict[str, str]]:
    """A store in which somebody else works on these; with the tokens of the claims."""
    store = MemoryStore()
    await store.open()
    return store, {id: (await store.claim(f"{topology.name}:{id}", MINUTE)).token for id in ids}


async def test_what_cannot_be_postponed_is_kept_and_health_says_so(bench: Bench) -> None:
    """Given back it would be here again at once, each time a delivery nearer to the queue's limit."""
    topology = await bench.declared(["50ms"])
    store, tokens = await claimed(topology, "m")
    seen: list[Message] = []

    async def handler(message: Message) -> None:
        seen.append(message)

    await bench.send(topology, 1, message_id="m")
    async with Proxy(bench.url) as proxy:
        with capture_logs() as logs:
            async with bench.running(topology, handler, url=proxy.url, idempotency=store) as consumer:
                await until(lambda: consumer.summary.postponed, "it can be")
                proxy.refuse(parking)
                proxy.cut(parking)
                await until(lambda: events(logs, "rung_unreachable"), "it cannot be any more")
                await until(lambda: consumer.health().check("parking").status == "degraded", "that is told")
                told = consumer.health().check("parking").text
                before = consumer.summary.postponed
                proxy.accept()
                await until(lambda: consumer.summary.postponed > before, "it can be again")
                assert consumer.health().check("parking").status == "ok"
                proxy.refuse(parking)
                proxy.cut(parking)
                await until(lambda: len(events(logs, "rung_unreachable")) >= 2, "again it cannot be")
                await store.release(f"{topology.name}:m", tokens["m"])
    assert told == "1 messages wait for a rung that cannot be reached"
    await bench.drain(topology, handler, idempotency=store)
    assert [message.attempt for message in seen] == [1], "the end of the consumer gave it back"
    assert seen[0].headers.get("x-delivery-count", 0) <= 1
    assert await all_empty(bench, topology)


async def test_what_is_kept_holds_up_no_suspect_behind_it(bench: Bench) -> None:
    """What a crash brought back runs one at a time: all waited for the one that waited for its rung."""
    topology = await bench.declared(["50ms"])
    store, _ = await claimed(topology, "m")
    await bench.send(topology, "claimed", message_id="m")
    await bench.send(topology, *range(5))
    await give_back(bench, topology, 6)
    done: list[object] = []

    async def handler(message: Message) -> None:
        done.append(message.payload)

    async with Proxy(bench.url) as proxy:
        proxy.refuse(parking)
        async with bench.running(topology, handler, url=proxy.url, idempotency=store) as consumer:
            await until(lambda: len(done) == 5, "the others are done")
            await until(lambda: consumer.health().check("parking").text.startswith("1 messages wait"), "it is kept")
    assert sorted(map(str, done)) == list("01234")


async def test_a_rung_that_is_gone_is_declared_again(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    store, tokens = await claimed(topology, "a", "b")
    handled: list[str] = []

    async def handler(message: Message) -> None:
        handled.append(message.id)

    await bench.send(topology, 1, message_id="a")
    await bench.send(topology, 1, message_id="b")
    async with bench.running(topology, handler, idempotency=store, concurrency=2) as consumer:
        await until(lambda: consumer.summary.postponed, "they go round")
        channel = await bench.raw.channel()
        await channel.exchange_delete(topology.retry_exchange)
        await bench.send(topology, 1, message_id="c")
        await until(lambda: "c" in handled, "others do not wait for them")
        before = consumer.summary.postponed
        await until(lambda: consumer.summary.postponed > before + 2, "and they go round again")
        for id, token in tokens.items():
            await store.release(f"{topology.name}:{id}", token)
        await until(lambda: len(handled) == 3, "all are handled")
    assert await all_empty(bench, topology)


async def test_after_a_wait_on_the_last_rung_no_attempt_is_lost_where_rungs_cannot_be_reached(bench: Bench) -> None:
    """A nack leads on from the rung it left: from the last one into the dead-letter queue."""
    topology = await bench.declared(["50ms", "60ms", "70ms"])
    attempts: list[int] = []
    async with Proxy(bench.url) as proxy:

        async def handler(message: Message) -> None:
            attempts.append(message.attempt)
            if message.attempt == 1:
                raise RetryAfter(0.065)
            if message.attempt == 2:
                proxy.refuse(parking)
                proxy.cut(parking)
            if message.attempt < 4:
                raise ValueError("again")

        await bench.send(topology, 1)
        with capture_logs() as logs:
            async with bench.running(topology, handler, url=proxy.url) as consumer:
                await until(lambda: events(logs, "rung_unreachable"), "the rung cannot be reached")
                proxy.accept()
                await until(lambda: consumer.summary.succeeded, "it goes on")
    assert attempts == [1, 2, 3, 4]
    assert await bench.raw.count(topology.dlq) == 0
