"""Other queues on the same exchange, other work queues with the same delays: nobody gets what is not theirs."""

from collections import Counter

import pytest

from rabbitdlq import Message
from rabbitdlq.topology import WorkBinding
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, rests


async def test_a_sibling_queue_sees_each_message_once_through_retries_parking_and_replay(bench: Bench) -> None:
    """C3: a retry or replay through the first exchange reaches the siblings again."""
    exchange = await bench.raw.exchange(bench.topology().name + "-shop")
    topology = await bench.declared(bindings=[WorkBinding(exchange, "order.*")])
    sibling = await bench.raw.queue(f"{topology.name}-sibling")
    await bench.raw.bind(sibling, exchange, "order.#")
    attempts: Counter[str] = Counter()
    broken = True

    async def handler(message: Message) -> None:
        assert (message.exchange, message.routing_key) == (exchange, "order.created")
        attempts[message.payload] += 1
        if message.payload == "fails" and broken:
            raise RuntimeError

    async with bench.running(topology, handler) as consumer:
        for payload in ("fails", "works"):
            await bench.send(topology, payload, exchange=exchange, routing_key="order.created")
        await rests(bench, topology.dlq, 1)
        broken = False
        async with bench.dlq(topology) as dlq:
            assert (await dlq.replay_all()).done == 1
        await until(lambda: consumer.summary.succeeded == 2, "the replayed message is handled")

    assert attempts == {"works": 1, "fails": 4}
    assert await all_empty(bench, topology)
    assert sorted([body for body, _, _ in await bench.raw.take_all(sibling)]) == [b'"fails"', b'"works"']


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_sibling_with_a_ladder_of_its_own_retries_beside_it(bench: Bench) -> None:
    """C3, C20: both fail what they both got, each after the same delay, and each gets back its own."""
    exchange = await bench.raw.exchange(bench.topology().name + "-shop", "fanout")
    binding = WorkBinding(exchange, "", "fanout")
    one, two = [await bench.declared(["300ms"], bindings=[binding]) for _ in range(2)]
    attempts: Counter[tuple[str, int]] = Counter()

    async def handler(message: Message) -> None:
        attempts[message.queue, message.attempt] += 1
        raise RuntimeError(message.queue)

    async with bench.running(one, handler), bench.running(two, handler):
        await bench.send(one, "x", exchange=exchange)
        await rests(bench, one.dlq, 1)
        await rests(bench, two.dlq, 1)

    assert attempts == {(queue.name, attempt): 1 for queue in (one, two) for attempt in (1, 2)}
    for topology in (one, two):
        async with bench.dlq(topology) as dlq:
            (letter,) = await dlq.peek_all()
        assert letter.queue == topology.name
        assert [record.error_message for record in letter.history] == [topology.name] * 2


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_messages_on_long_rungs_do_not_hold_up_those_on_short_ones(bench: Bench) -> None:
    """C4: in one delay queue with an expiration per message, a long delay in front blocks the short ones."""
    topology = await bench.declared(["200ms", "10m"])
    back: list[str] = []

    async def handler(message: Message) -> None:
        if message.attempt == 2 and message.payload == "quick":
            back.append(message.payload)
            return
        raise RuntimeError

    async with bench.running(topology, handler):
        await bench.send(topology, *["slow"] * 5)
        await rests(bench, topology.rungs[1].queue, 5)
        await bench.send(topology, "quick")
        await until(lambda: back, "the quick one is back while the slow ones wait")
    assert await bench.raw.count(topology.rungs[1].queue) == 5
