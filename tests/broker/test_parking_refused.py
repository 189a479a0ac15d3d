"""A dead-letter queue that takes nothing: it is gone, or full. Nothing is lost, and nothing jams. C68."""

from collections.abc import AsyncIterator

import pytest

from rabbitdlq import Message
from rabbitdlq.broker import link
from rabbitdlq.local_broker import BrokerAddress
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, is_told, rests
from tests.broker.operator_kit import Management, policy_known


@pytest.fixture
async def management(broker: BrokerAddress) -> AsyncIterator[Management]:
    async with Management.of(broker) as client:
        yield client


class Failing:
    """A handler that fails until it is told to do better, and counts its runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.fails = True

    async def __call__(self, message: Message) -> None:
        self.runs += 1
        if self.fails:
            raise RuntimeError("no")


async def test_when_the_dead_letter_queue_is_gone_it_is_declared_again_and_nothing_is_lost(bench: Bench) -> None:
    """The broker would dead-letter into nothing: from a classic queue without a trace."""
    topology = await bench.declared()
    handler = Failing()
    async with bench.running(topology, handler) as consumer:
        await bench.send(topology, "first")
        await rests(bench, topology.dlq, 1)
        channel = await bench.raw.channel()
        await channel.queue_delete(topology.dlq)
        await channel.close()
        await bench.send(topology, *range(5))
        await until(lambda: consumer.summary.parked == 6, "all are parked with their story")
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
    assert sorted(letter.payload for letter in letters) == list(range(5))
    for letter in letters:
        is_told(letter, 3)
    assert await all_empty(bench, topology)


async def test_a_dead_letter_queue_that_is_full_jams_nothing_and_loses_nothing(
    bench: Bench, broker: BrokerAddress, management: Management
) -> None:
    """C1, the other way round: its messages wait on the slowest rung, and are tried again until there is room."""
    topology = await bench.declared()
    handler = Failing()
    async with management.policy(topology.dlq, max_length=2, overflow="reject-publish"):
        await policy_known(broker, topology.dlq, "max-length")
        await bench.send(topology, *range(10))
        async with bench.running(topology, handler, concurrency=2) as consumer:
            await until(lambda: consumer.summary.left_to_broker >= 15, "those without room go round")
            full = await bench.raw.count(topology.dlq)
            assert 2 <= full <= 4, "a queue may take a few more than its length"
            handler.fails = False
            await bench.send(topology, "new")
            await until(lambda: consumer.summary.succeeded == 11 - full, "what waited for room and what is new")
    assert await bench.raw.count(topology.dlq) == full
    assert await all_empty(bench, topology)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_when_there_is_room_again_they_are_parked(
    bench: Bench, broker: BrokerAddress, management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel of RabbitMQ 3.10 that was refused once is refused for ever."""
    monkeypatch.setattr(link, "_RENEW_AGAIN", 0.5)
    topology = await bench.declared()
    # one after the other: those under way at once may all be let in
    async with bench.running(topology, Failing(), concurrency=1) as consumer:
        async with management.policy(topology.dlq, max_length=1, overflow="reject-publish"):
            await policy_known(broker, topology.dlq, "max-length")
            await bench.send(topology, *range(10))
            await until(lambda: consumer.summary.left_to_broker >= 10, "there is no room")
        await until(lambda: consumer.summary.parked == 10, "all have found room")
    async with bench.dlq(topology) as dlq:
        assert sorted(letter.payload for letter in await dlq.peek_all()) == list(range(10))
    assert await all_empty(bench, topology)


@pytest.mark.parametrize("queue_type", ["classic"])
async def test_a_full_dead_letter_queue_and_a_consumer_that_ends(
    bench: Bench, broker: BrokerAddress, management: Management
) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    async with management.policy(topology.dlq, max_length=1, overflow="reject-publish"):
        await policy_known(broker, topology.dlq, "max-length")
        await bench.send(topology, *range(8))
        async with bench.running(topology, Failing()) as consumer:
            await until(lambda: consumer.summary.left_to_broker >= 3, "there is no room")
    full = await bench.raw.count(topology.dlq)
    seen: list[int] = []

    async def handler(message: Message) -> None:
        seen.append(message.payload)

    await bench.drain(topology, handler)
    assert len(set(seen)) == len(seen) == 8 - full
