"""The ladder where it is not as it should be: a rung that is missing, counts from an earlier life."""

import aiormq.abc
import pytest

from rabbitdlq import Message
from rabbitdlq.broker import Channel
from rabbitdlq.local_broker import BrokerAddress
from tests.broker.kit import Bench, until
from tests.broker.looks import consumed, is_told, rests, shovel
from tests.broker.operator_kit import Management, policy_known


@pytest.mark.parametrize("how", ["unbound", "deleted"])
async def test_with_a_rung_missing_the_attempts_are_the_same_and_end_in_the_dead_letter_queue(
    bench: Bench, how: str
) -> None:
    """A message whose key leads nowhere starts from the first rung again: by the rung alone it never gets further."""
    topology = await bench.declared(["100ms", "150ms", "200ms"])
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        raise RuntimeError(f"attempt {message.attempt}")

    async with bench.running(topology, handler) as consumer:
        await until(lambda: consumed(bench, topology.name), "it consumes, and will not mend the ladder")
        one, two = topology.rungs[:2]
        channel = await bench.raw.channel()
        if how == "deleted":
            await channel.queue_delete(two.queue)
        else:
            await channel.queue_unbind(two.queue, topology.retry_exchange, routing_key=one.key)
        await channel.close()
        await bench.send(topology, {"order": 1})
        await rests(bench, topology.dlq, 1)
    assert attempts == [1, 2, 3, 4]
    assert consumer.summary.parked == 1
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    is_told(letter, 4)


async def test_a_letter_the_broker_parked_moved_back_by_a_shovel_has_a_full_new_lap(bench: Bench) -> None:
    """Below 4.0 the broker goes on counting in the x-death that such a message brings along."""
    topology = await bench.declared()
    channel = await bench.raw.channel()
    await bench.raw.publish(topology.name, b'{"order": 1}', message_id="m")
    for _ in range(topology.max_attempts):
        got = await until(lambda: _get(channel, topology.name), "it comes back")
        await channel.basic_nack(got, requeue=False)
    await channel.close()
    await rests(bench, topology.dlq, 1)
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        raise RuntimeError(f"attempt {message.attempt}")

    async with bench.running(topology, handler) as consumer:
        assert await shovel(bench, topology.dlq, topology.name) == 1
        await rests(bench, topology.dlq, 1)
        assert attempts == [1, 2, 3]
        async with bench.dlq(topology) as dlq:
            (letter,) = await dlq.peek_all()
        is_told(letter, 3)
        # and once more, now with our story in its headers
        assert await shovel(bench, topology.dlq, topology.name) == 1
        await until(lambda: consumer.summary.parked == 2, "it is parked again")
    assert attempts == [1, 2, 3, 1, 2, 3]
    async with bench.dlq(topology) as dlq:
        (again,) = await dlq.peek_all()
    is_told(again, 3)
    assert again.lap == letter.lap + 1
    assert again.park_id != letter.park_id
    assert [record.at for record in again.history] > [record.at for record in letter.history]


async def _get(channel: Channel, queue: str) -> int | None:
    got: aiormq.abc.DeliveredMessage = await channel.basic_get(queue)
    return got.delivery_tag


async def test_a_policy_that_names_another_dead_letter_exchange_changes_nothing(
    bench: Bench, broker: BrokerAddress
) -> None:
    """C59: what a queue was declared with goes before what a policy says."""
    topology = await bench.declared()
    elsewhere = await bench.raw.queue(f"{topology.name}-elsewhere")
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        raise RuntimeError("no")

    async with (
        Management.of(broker) as management,
        management.policy(topology.name, dead_letter_exchange="", dead_letter_routing_key=elsewhere),
    ):
        await policy_known(broker, topology.name, "dead-letter-exchange")
        await bench.send(topology, 1)
        async with bench.running(topology, handler):
            await rests(bench, topology.dlq, 1)
    assert attempts == [1, 2, 3]
    assert await bench.raw.count(elsewhere) == 0
