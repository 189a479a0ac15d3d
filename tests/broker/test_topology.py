"""What the broker holds after a topology was declared: exactly that, on every version, however often it is declared."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import aiormq.abc
import pytest

from rabbitdlq import (
    Connection,
    EntityNotFound,
    Message,
    Topology,
    TopologyMismatch,
    WorkBinding,
    apply_topology,
    check_topology,
)
from rabbitdlq.broker import Channel, ensure_topology
from rabbitdlq.local_broker import BrokerAddress
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, is_told, rests
from tests.broker.operator_kit import Management, account, nack_away

quorum_only = pytest.mark.parametrize("queue_type", ["quorum"])

#: queues, exchanges, bindings; each a text, so that they can be compared as sets
Held = tuple[set[str], set[str], set[str]]


def _texts(entries: Iterable[tuple[Any, ...]]) -> set[str]:
    return {json.dumps(entry, sort_keys=True) for entry in entries}


async def _held(management: Management, topology: Topology) -> Held:
    """What the broker holds under this topology's name, and what is bound to its work queue."""

    def ours(name: str) -> bool:
        return name == topology.name or name.startswith(f"{topology.name}.")

    queues = await management.get("queues/{v}?disable_stats=true&enable_queue_totals=true")
    exchanges = await management.get("exchanges/{v}")
    bindings = await management.get("bindings/{v}")
    return (
        _texts((queue["name"], True, queue["arguments"]) for queue in queues if ours(queue["name"])),
        _texts(
            (exchange["name"], exchange["type"], exchange["durable"], exchange["arguments"])
            for exchange in exchanges
            if ours(exchange["name"])
        ),
        _texts(
            (entry["source"], entry["destination"], entry["destination_type"], entry["routing_key"], entry["arguments"])
            for entry in bindings
            if entry["source"] and (ours(entry["source"]) or ours(entry["destination"]))
        ),
    )


def _wanted(topology: Topology, connection: Connection) -> Held:
    entities = topology.entities(connection.version)
    return (
        _texts((queue.name, True, dict(queue.arguments)) for queue in entities.queues),
        _texts(
            (exchange.name, exchange.type, True, dict(exchange.arguments))
            for exchange in entities.exchanges
            if not exchange.theirs
        ),
        _texts(
            (entry.source, entry.destination, entry.destination_type, entry.routing_key, dict(entry.arguments))
            for entry in entities.bindings
        ),
    )


# --- declared as designed


async def test_the_broker_holds_exactly_what_the_topology_says(bench: Bench, broker: BrokerAddress) -> None:
    exchange = await bench.raw.exchange(f"shop-{bench.queue_type}-{id(bench)}")
    topology = bench.topology(["1s", "5s", "30s"], bindings=[WorkBinding(exchange, "order.*")])

    async with Management.of(broker) as management:
        await apply_topology(bench.raw.connection, topology)
        assert await _held(management, topology) == _wanted(topology, bench.raw.connection)
        assert (await check_topology(bench.raw.connection, topology)).findings == ()
        await apply_topology(bench.raw.connection, topology)
        assert await _held(management, topology) == _wanted(topology, bench.raw.connection)


@quorum_only
async def test_the_arguments_are_those_of_the_design(bench: Bench, broker: BrokerAddress) -> None:
    topology = await bench.declared(["5s", "30s"])
    name, version = topology.name, bench.raw.connection.version
    at_least_once = {
        "x-queue-type": "quorum",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    work: dict[str, Any] = {**at_least_once, "x-dead-letter-exchange": f"{name}.dead"}
    if version >= (3, 13):
        work["x-delivery-limit"] = 22
    unlimited = {"x-delivery-limit": -1} if version >= (4, 0) else {}
    rung = {**at_least_once, **unlimited, "x-dead-letter-exchange": f"{name}.return"}

    async with Management.of(broker) as management:
        found = {
            queue["name"]: queue["arguments"]
            for queue in await management.get("queues/{v}?disable_stats=true&enable_queue_totals=true")
            if queue["name"].startswith(name)
        }
    journal = found.pop(f"{name}.journal")
    assert (journal["x-queue-type"], journal["x-max-age"]) == ("stream", "604800s")
    assert found == {
        name: work,
        f"{name}.dlq": {"x-queue-type": "quorum", **unlimited},
        f"{name}.retry.1.5s": {**rung, "x-message-ttl": 5_000, "x-dead-letter-routing-key": f"{name}.retry.1"},
        f"{name}.retry.2.30s": {**rung, "x-message-ttl": 30_000, "x-dead-letter-routing-key": f"{name}.retry.2"},
    }


@quorum_only
async def test_two_that_declare_at_the_same_time_do_not_disturb_each_other(bench: Bench, broker: BrokerAddress) -> None:
    topology = bench.topology()
    async with await Connection.open(bench.url) as one, await Connection.open(bench.url) as other:
        await asyncio.gather(*(apply_topology(connection, topology) for connection in (one, other, one, other)))

    async with Management.of(broker) as management:
        assert await _held(management, topology) == _wanted(topology, bench.raw.connection)


@pytest.mark.parametrize("queue_type", ["classic"])
async def test_a_ladder_of_thirty_two_rungs_is_climbed_to_its_end(bench: Bench, broker: BrokerAddress) -> None:
    topology = await bench.declared([f"{number}ms" for number in range(1, 33)])
    async with Management.of(broker) as management:
        assert await _held(management, topology) == _wanted(topology, bench.raw.connection)
    await bench.raw.publish(topology.name, message_id="a")
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        raise OSError("no")

    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, 1)
    assert attempts == list(range(1, 34))
    async with bench.dlq(topology) as dlq:
        is_told((await dlq.peek())[0], 33)


@quorum_only
async def test_an_exchange_of_the_application_is_taken_as_it_is(bench: Bench) -> None:
    exchange = f"shop-{id(bench)}"
    channel = await bench.raw.channel()
    await channel.exchange_declare(exchange, exchange_type="direct", durable=False, auto_delete=True)
    topology = await bench.declared(bindings=[WorkBinding(exchange, "created", "topic")])
    await bench.raw.publish("created", b"1", exchange=exchange, message_id="a")

    assert await bench.raw.count(topology.name) == 1
    assert (await check_topology(bench.raw.connection, topology)).findings == ()


@quorum_only
async def test_a_binding_to_a_headers_exchange_keeps_its_arguments(bench: Bench, broker: BrokerAddress) -> None:
    exchange = f"shop-{id(bench)}"
    bench.raw.extra_exchanges.append(exchange)
    arguments = {"x-match": "all", "kind": "order", "big": True, "size": 7}
    topology = await bench.declared(bindings=[WorkBinding(exchange, type="headers", arguments=arguments)])

    async with Management.of(broker) as management:
        assert await _held(management, topology) == _wanted(topology, bench.raw.connection)


@quorum_only
async def test_without_the_right_to_declare_only_existence_is_checked(bench: Bench, broker: BrokerAddress) -> None:
    topology = await bench.declared()
    async with (
        Management.of(broker) as management,
        account(management, f"{topology.name}-ro", configure="^$", write=".*", read=".*") as url,
        await Connection.open(url) as connection,
    ):
        report = await ensure_topology(connection, topology)
        assert (report.findings, report.arguments_compared) == ((), False)
        channel = await bench.raw.channel()
        await channel.queue_delete(topology.dlq)
        await channel.close()
        missing = rf"queue '{topology.dlq}': missing, and this account may not declare .*topology apply"
        with pytest.raises(EntityNotFound, match=missing):
            await ensure_topology(connection, topology)


# --- C19: what exists otherwise


async def _delay_changed(bench: Bench, topology: Topology) -> Topology:
    await apply_topology(bench.raw.connection, topology)
    return Topology(topology.name, ["5s", "31s"], queue_type=topology.queue_type)


async def _ladder_longer(bench: Bench, topology: Topology) -> Topology:
    await apply_topology(bench.raw.connection, topology)
    return Topology(topology.name, ["5s", "30s", "1m"], queue_type=topology.queue_type)


async def _ladder_shorter(bench: Bench, topology: Topology) -> Topology:
    await apply_topology(bench.raw.connection, topology)
    return Topology(topology.name, ["5s"], queue_type=topology.queue_type)


async def _type_changed(bench: Bench, topology: Topology) -> Topology:
    await apply_topology(bench.raw.connection, topology)
    return Topology(topology.name, topology.delays, queue_type="classic")


async def _no_delay(bench: Bench, topology: Topology) -> Topology:
    await bench.raw.queue(topology.rungs[0].queue, x_queue_type="quorum")
    return topology


async def _dlx_added(bench: Bench, topology: Topology) -> Topology:
    unlimited = {"x_delivery_limit": -1} if bench.raw.connection.version >= (4, 0) else {}
    await bench.raw.queue(topology.dlq, x_queue_type="quorum", x_dead_letter_exchange="elsewhere", **unlimited)
    return topology


async def _durable_flipped(bench: Bench, topology: Topology) -> Topology:
    channel = await bench.raw.channel()
    await channel.exchange_declare(topology.dlx, exchange_type="fanout", durable=False)
    await channel.close()
    return topology


@quorum_only
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_delay_changed, ["delays: the ladder there is 5s, 30s, the one asked for 5s, 31s", "--migrate"]),
        (_ladder_longer, ["delays: the ladder there is 5s, 30s, the one asked for 5s, 30s, 1m"]),
        (_ladder_shorter, ["delays: the ladder there is 5s, 30s, the one asked for 5s;"]),
        (_type_changed, ["queue '{name}.dlq': x-queue-type should be 'classic' but is 'quorum'", "drain the queue"]),
        (_no_delay, ["queue '{name}.retry.1.5s': x-", "but is 'none'"]),
        (_dlx_added, ["queue '{name}.dlq': x-dead-letter-exchange should be 'none' but is 'elsewhere'"]),
        (_durable_flipped, ["exchange '{name}.dlx': durable should be 'true' but is 'false'"]),
    ],
)
async def test_what_exists_otherwise_is_named_with_both_values_and_left_alone(
    bench: Bench, broker: BrokerAddress, change: Any, named: list[str]
) -> None:
    """C19: a changed argument was a 406 at start, naming one of them, with half of the rest declared."""
    topology, other = bench.topology(["5s", "30s"]), bench.topology()
    wanted = await change(bench, topology)
    async with Management.of(broker) as management:
        before = await _held(management, topology)
        with pytest.raises(TopologyMismatch, match="nothing was changed") as caught:
            await apply_topology(bench.raw.connection, wanted)
        assert await _held(management, topology) == before
    for text in named:
        assert text.replace("{name}", topology.name) in str(caught.value)

    await apply_topology(bench.raw.connection, other)
    assert (await check_topology(bench.raw.connection, other)).findings == (), "other queues go on"


@pytest.mark.parametrize(
    ("queue_type", "delays"),
    [
        ("quorum", ["30ms", "40ms"]),
        ("quorum", ["30ms"]),
        ("quorum", ["30ms", "40ms", "50ms"]),
        ("classic", ["800ms", "40ms", "50ms"]),
    ],
    ids=["changed", "shorter", "longer", "longer-classic"],
)
async def test_a_migrated_ladder_loses_nothing_and_brings_nothing_back_twice(
    bench: Bench, broker: BrokerAddress, delays: list[str]
) -> None:
    """C19: with the old rung bound beside the new one, a failed message waits in both and comes back twice."""
    old = await bench.declared(["800ms", "900ms"])
    # the work queue's limit counts crashes and rungs, and its argument cannot change
    new = bench.topology(delays, name=old.name, crash_limit=old.crash_limit + 2 - len(delays))
    await bench.raw.publish(old.name, message_id="failed twice")
    await nack_away(bench, old.name)
    channel = await bench.raw.channel()
    twice = await until(lambda: _get(channel, old.name), "it has failed once")
    await bench.raw.publish(old.name, message_id="failed once")
    for tag in (twice, await until(lambda: _get(channel, old.name), "the other one")):
        await channel.basic_nack(tag, requeue=False)

    async def both_are_out() -> bool:
        """Each on its rung; or in the work queue again, where the machine took its time."""
        return sum([await bench.raw.count(queue) for queue in (old.name, *(rung.queue for rung in old.rungs))]) == 2

    await until(both_are_out, "both have failed")
    await channel.close()

    await apply_topology(bench.raw.connection, new, migrate=True)
    async with Management.of(broker) as management:
        queues, exchanges, bindings = await _held(management, new)
    wanted = _wanted(new, bench.raw.connection)
    assert queues >= wanted[0]
    assert (exchanges, bindings) == wanted[1:]
    assert (await check_topology(bench.raw.connection, new)).findings == ()
    await bench.raw.publish(new.name, message_id="new")
    seen: dict[str, list[int]] = {"new": [], "failed once": [], "failed twice": []}

    async def handler(message: Message) -> None:
        seen[message.id].append(message.attempt)
        raise OSError("no")

    async with bench.running(new, handler):
        await rests(bench, new.dlq, 3)
        assert await all_empty(bench, new)
        assert await all_empty(bench, old)
    last = new.max_attempts
    assert seen == {
        "new": list(range(1, last + 1)),
        "failed once": list(range(2, last + 1)),
        # on a ladder that ends below it, its next failure is its last
        "failed twice": list(range(3, max(3, last) + 1)),
    }


async def _get(channel: Channel, queue: str) -> int | None:
    got: aiormq.abc.DeliveredMessage = await channel.basic_get(queue)
    return got.delivery_tag


@pytest.mark.parametrize("queue_type", ["classic"])
async def test_a_queue_of_somebody_elses_is_not_to_be_taken_over_by_a_setting(bench: Bench) -> None:
    topology = bench.topology()
    await bench.raw.queue(topology.name)
    with pytest.raises(TopologyMismatch, match=r"'x-dead-letter-exchange'|x-dead-letter-exchange should be") as refused:
        await apply_topology(bench.raw.connection, topology)
    assert "set the topology to what is there" not in str(refused.value)
    assert "drain the queue" in str(refused.value)
