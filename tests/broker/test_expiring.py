"""Messages with an expiration: they may end, but they do not vanish."""

from datetime import timedelta

import pytest

from rabbitdlq import Message, Permanent, apply_topology
from tests.broker.kit import Bench
from tests.broker.looks import all_empty, rests, shovel


async def test_a_message_that_expires_with_no_consumer_there_rests_in_the_dead_letter_queue(bench: Bench) -> None:
    """C16: work queue, retry queue and back by expiries alone is a loop that the broker drops without a trace."""
    topology = await bench.declared()
    (sent,) = await bench.send(topology, {"order": 1}, expiration=timedelta(milliseconds=200))
    await rests(bench, topology.dlq, 1)
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
        assert (letter.id, letter.reason, letter.attempts) == (sent, "expired", 0)
        assert (letter.queue, letter.routing_key) == (topology.name, topology.name)
        assert (await dlq.replay_all()).done == 1
    await rests(bench, topology.name, 1)


async def test_a_letter_of_a_message_with_an_expiration_does_not_expire_nor_does_its_replay(bench: Bench) -> None:
    """C31: with the expiration in the copy it vanishes from the dead-letter queue."""
    topology = await bench.declared()
    await bench.send(topology, {"order": 1}, expiration=timedelta(seconds=60))

    async def handler(message: Message) -> None:
        assert message.properties.expiration == "60000"
        raise Permanent

    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
        assert letter.wire.expiration is None
        assert letter.original["expiration"] == "60000"
        await dlq.replay_all()
    taken = await bench.raw.take(topology.name)
    assert taken is not None
    assert taken[1].expiration is None


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_after_an_upgrade_of_the_broker_an_expired_letter_moved_back_is_not_doubled(bench: Bench) -> None:
    """A broker that tells of last deaths must not route by the first one as well, as older ones have to."""
    topology = await bench.declared(["10m"])
    outdated = topology.outdated_bindings(bench.raw.connection.version)
    if not outdated:
        pytest.skip("this broker is one of the older ones")
    channel = await bench.raw.channel()
    for binding in outdated:
        arguments = dict(binding.arguments)
        await channel.exchange_bind(destination=binding.destination, source=binding.source, arguments=arguments)
    await channel.close()
    await apply_topology(bench.raw.connection, topology)
    await bench.send(topology, {"order": 1}, expiration=timedelta(milliseconds=1))
    await rests(bench, topology.dlq, 1)
    assert await shovel(bench, topology.dlq, topology.name) == 1

    async def handler(message: Message) -> None:
        raise RuntimeError

    async with bench.running(topology, handler):
        await rests(bench, topology.rungs[0].queue, 1)
    assert await bench.raw.count(topology.dlq) == 0
