"""Dead letters that others moved back: a shovel, which is what the management UI's "Move messages" starts."""

import pytest

from rabbitdlq import Message, Topology, WorkBinding
from rabbitdlq.local_broker import BrokerAddress
from tests.broker.kit import Bench, until
from tests.broker.looks import is_told, rests
from tests.broker.operator_kit import Management, nack_away


async def _move(broker: BrokerAddress, source: str, target: str) -> None:
    """Move what is in one queue to another, with the parameters of the management UI."""
    async with Management.of(broker) as management:
        path = f"parameters/shovel/{{v}}/move-{source}"
        await management.put(
            path,
            value={
                "src-uri": f"amqp:///{management.vhost}",
                "src-queue": source,
                "src-protocol": "amqp091",
                "src-prefetch-count": 1000,
                "src-delete-after": "queue-length",
                "dest-protocol": "amqp091",
                "dest-uri": f"amqp:///{management.vhost}",
                "dest-add-forward-headers": False,
                "ack-mode": "on-confirm",
                "dest-queue": target,
            },
        )

        async def gone() -> bool:
            return await management.get(path) is None

        await until(gone, "the shovel has ended")


class _Runs:
    """A handler that fails until it is mended, and what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self.origins: set[tuple[str, str]] = set()

    async def __call__(self, message: Message) -> None:
        self.seen.append((message.id, message.lap, message.attempt))
        self.origins.add((message.exchange, message.routing_key))
        raise OSError(f"lap {message.lap}, attempt {message.attempt}")


async def _topology(bench: Bench) -> tuple[Topology, str]:
    exchange = await bench.raw.exchange(f"shop-{bench.queue_type}-{id(bench)}")
    return await bench.declared(["20ms", "30ms"], bindings=[WorkBinding(exchange, "order.*")]), exchange


async def test_a_parked_letter_that_a_shovel_moved_back_has_a_full_new_lap(bench: Bench, broker: BrokerAddress) -> None:
    topology, exchange = await _topology(bench)
    await bench.raw.publish("order.created", b"{}", exchange=exchange, message_id="a", content_type="application/json")
    runs = _Runs()

    async with bench.running(topology, runs):
        await rests(bench, topology.dlq, 1)
        await _move(broker, topology.dlq, topology.name)
        await until(lambda: len(runs.seen) == 6, "three attempts more")
        await rests(bench, topology.dlq, 1)

    assert runs.seen == [("a", lap, attempt) for lap in (1, 2) for attempt in (1, 2, 3)]
    assert runs.origins == {(exchange, "order.created")}
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    is_told(letter, 3)
    assert (letter.lap, letter.exchange, letter.routing_key) == (2, exchange, "order.created")
    assert [record.error_message for record in letter.history] == [f"lap 2, attempt {n}" for n in (1, 2, 3)]


async def test_a_bare_letter_that_a_shovel_moved_back_has_all_attempts_too(bench: Bench, broker: BrokerAddress) -> None:
    """Below 4.0 the broker counts on in the x-death of before: it must not be believed."""
    topology, exchange = await _topology(bench)
    await bench.raw.publish("order.created", b"{}", exchange=exchange, message_id="a", content_type="application/json")
    await nack_away(bench, topology.name, times=3)
    await rests(bench, topology.dlq, 1)
    runs = _Runs()

    await _move(broker, topology.dlq, topology.name)
    async with bench.running(topology, runs):
        await rests(bench, topology.dlq, 1)

    assert [attempt for _, _, attempt in runs.seen] == [1, 2, 3]
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    is_told(letter, 3)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_letter_goes_round_by_shovel_as_often_as_one_likes(bench: Bench, broker: BrokerAddress) -> None:
    topology, _ = await _topology(bench)
    await bench.raw.publish(topology.name, b"{}", message_id="a")
    runs = _Runs()

    async with bench.running(topology, runs):
        for lap in range(1, 5):
            await until(lambda lap=lap: len(runs.seen) == 3 * lap, "a lap is over")
            await rests(bench, topology.dlq, 1)
            if lap < 4:
                await _move(broker, topology.dlq, topology.name)

    assert runs.seen == [("a", lap, attempt) for lap in (1, 2, 3, 4) for attempt in (1, 2, 3)]


async def test_letters_moved_to_another_queue_are_only_moved(bench: Bench, broker: BrokerAddress) -> None:
    """Headers that say where a letter is from survive a stay elsewhere, and bring it back by replay of its queue."""
    topology, exchange = await _topology(bench)
    shelf = await bench.raw.queue(f"{topology.name}-shelf")
    await bench.raw.publish("order.created", b"{}", exchange=exchange, message_id="a", content_type="application/json")

    async with bench.running(topology, _Runs()):
        await rests(bench, topology.dlq, 1)
    await _move(broker, topology.dlq, shelf)
    await rests(bench, shelf, 1)
    await _move(broker, shelf, topology.dlq)

    await rests(bench, topology.dlq, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
        is_told(letter, 3)
        assert (letter.lap, letter.exchange, letter.routing_key) == (1, exchange, "order.created")
        assert (await dlq.replay("a")).done == 1
