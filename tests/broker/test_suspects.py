"""The lane of what a crash brought back: it never stays shut, nobody waits there for ever, no innocent is blamed."""

import asyncio
import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rabbitdlq import Message, Topology, names
from rabbitdlq.consumer import pausing, suspects
from rabbitdlq.consumer.suspects import MAX_STARTS
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, give_back, journal_of, tell_started
from tests.broker.proxy import Proxy
from tests.broker.test_breaker import QUICK, Provider, opened
from tests.broker.worker import Order, worker_process

one_queue_type = pytest.mark.parametrize("queue_type", ["quorum"])


class Slow:
    """A handler that waits to be let go, and notes whom it saw."""

    def __init__(self) -> None:
        self.seen: list[Message] = []
        self.go = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.seen.append(message)
        await self.go.wait()


@one_queue_type
async def test_a_suspect_that_goes_back_unbegun_with_its_line_makes_room_for_the_next(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    await bench.send(topology, "busy", "a", "b")
    handler = Slow()
    async with (
        Proxy(bench.url) as proxy,
        bench.running(topology, handler, url=proxy.url, concurrency=1, prefetch=5) as consumer,
    ):
        await until(lambda: consumer.signs.vitals().waiting == 2, "the handler is at work, two wait behind it")
        for _ in range(2):
            proxy.cut()
            await until(lambda: consumer.signs.vitals().waiting == 0, "taken back")
            await until(lambda: consumer.signs.vitals().waiting == 3, "all three are here again, and suspect")
        handler.go.set()
        await until(lambda: consumer.summary.succeeded == 3, "each has its turn")
    assert await all_empty(bench, topology)


@one_queue_type
async def test_a_suspect_that_a_pause_gives_back_makes_room_for_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pausing, "KEPT_FOR", timedelta(milliseconds=100))
    topology = await bench.declared(["50ms", "60ms"])
    provider = Provider()
    await bench.send(topology, *range(20))
    async with bench.running(topology, provider, breaker=QUICK, concurrency=1, prefetch=10) as consumer:
        await opened(consumer)
        # what it holds goes back: the next session, or a classic queue, calls it redelivered
        await give_back(bench, topology, 20)
        await until(lambda: consumer.signs.vitals().breaker, "known to be open")
        await until(lambda: consumer.summary.released > 0, "what was kept is given back")
        provider.down = False
        await until(lambda: len(set(provider.done)) == 20, "all are handled when it is well again")


async def test_one_that_waits_too_long_for_its_turn_is_postponed_and_stays_a_suspect(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker would close the channel over what is not settled in half an hour."""
    monkeypatch.setattr(suspects, "HELD_FOR", 0.0)
    topology = await bench.declared(["50ms", "60ms"])
    await bench.send(topology, *range(3))
    await give_back(bench, topology, 3)
    handler = Slow()
    async with bench.running(topology, handler, concurrency=5, soft_timeout=timedelta(seconds=20)) as consumer:
        await until(lambda: consumer.summary.postponed >= 4, "the two others go round, one of them twice")
        assert len(handler.seen) == 1
        handler.go.set()
        await until(lambda: consumer.summary.succeeded == 3, "each has its turn")
    assert [message.attempt for message in handler.seen] == [1, 1, 1]
    assert await all_empty(bench, topology)
    starts = [event.message_id for event in await journal_of(bench, topology) if event.event == names.STARTED]
    assert len(set(starts)) == 3, "what was postponed was as suspect as before"


@one_queue_type
@pytest.mark.parametrize(("ago", "parked"), [(timedelta(seconds=20), 0), (timedelta(minutes=20), 1)])
async def test_equal_messages_without_ids_are_not_blamed_for_each_others_handlers_at_work(
    bench: Bench, ago: timedelta, parked: int
) -> None:
    """Their ids are the same; but no handler that is alive began before the hard timeout."""
    topology = await bench.declared(["50ms"])
    handler = Slow()
    handler.go.set()
    await bench.raw.publish(topology.name, b"{}")
    await bench.drain(topology, handler)
    await tell_started(bench, topology, handler.seen[0], MAX_STARTS, ago)
    await bench.raw.publish(topology.name, b"{}")
    await give_back(bench, topology, 1)
    consumer = await bench.drain(topology, handler)
    assert (consumer.summary.succeeded, consumer.summary.parked) == (1 - parked, parked)


@one_queue_type
async def test_nor_are_different_messages_with_one_id(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    handler = Slow()
    handler.go.set()
    await bench.send(topology, "the one that crashed", message_id="m")
    await bench.drain(topology, handler)
    await tell_started(bench, topology, handler.seen[0], MAX_STARTS, timedelta(minutes=1))
    await bench.send(topology, "another", message_id="m")
    await give_back(bench, topology, 1)
    consumer = await bench.drain(topology, handler)
    assert (consumer.summary.succeeded, consumer.summary.parked) == (1, 0)


async def _killed_until_parked(
    bench: Bench, topology: Topology, folder: Path, *, most: int, parked: int = 1, **options: Any
) -> tuple[int, set[int]]:
    """How many processes died of it, and what was handled."""
    deaths, handled = 0, set[int]()
    while await bench.raw.count(topology.dlq) < parked:
        assert deaths <= most, "the killer goes on killing"
        async with worker_process(
            bench.url, topology, folder / str(deaths), "always the same name", drain=True, **options
        ) as worker:
            deaths += await worker.ended() != 0
        handled |= {run.n for run in worker.runs if run.what == "succeeded"}
    return deaths, handled


async def test_a_killer_is_parked_though_its_claim_outlives_each_process(bench: Bench, tmp_path: Path) -> None:
    """While it is claimed by the process that died it is postponed, which the broker takes for a new beginning."""
    topology = await bench.declared(["50ms", "60ms"])
    await bench.send(topology, asdict(Order(1, deadly=1)), *(asdict(Order(n)) for n in range(2, 6)))
    deaths, handled = await _killed_until_parked(
        bench, topology, tmp_path, most=MAX_STARTS + 1, store=str(tmp_path / "store.db")
    )
    assert deaths == MAX_STARTS + 1
    assert await all_empty(bench, topology)
    assert handled == {2, 3, 4, 5}
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.payload["n"], letter.reason, letter.attempts) == (1, "crashed", 1)
    assert names.SUSPECT not in letter.properties.table


@one_queue_type
async def test_without_a_journal_that_keeps_anything_crashes_are_counted_across_postponements(
    bench: Bench, tmp_path: Path
) -> None:
    """The broker's own count begins anew with each publish into a rung."""
    topology = await bench.declared(["50ms", "60ms"], journal="live", crash_limit=2)
    await bench.send(topology, asdict(Order(1, deadly=1)))
    deaths, _ = await _killed_until_parked(bench, topology, tmp_path, most=6, store=str(tmp_path / "store.db"))
    assert deaths >= 2
    assert await all_empty(bench, topology)


@one_queue_type
async def test_a_killer_without_an_id_is_parked_alone(bench: Bench, tmp_path: Path) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    for order in (Order(1, deadly=1), *(Order(n) for n in range(2, 6))):
        await bench.raw.publish(topology.name, json.dumps(asdict(order)).encode(), content_type="application/json")
    deaths, handled = await _killed_until_parked(bench, topology, tmp_path, most=MAX_STARTS + 2)
    assert deaths <= MAX_STARTS + 2
    assert await all_empty(bench, topology)
    assert handled == {2, 3, 4, 5}
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.payload["n"], letter.reason) == (1, "crashed")


@pytest.mark.parametrize("queue_type", ["classic"])
async def test_a_count_of_another_queue_says_nothing_of_a_killer(bench: Bench, tmp_path: Path) -> None:
    """ "Move messages" and shovels copy headers, and a classic queue does not write them anew."""
    topology = await bench.declared(["50ms", "60ms"])
    await bench.send(topology, asdict(Order(1, deadly=1)), headers={"x-acquired-count": 3})
    deaths, _ = await _killed_until_parked(bench, topology, tmp_path, most=MAX_STARTS + 1)
    assert deaths == MAX_STARTS + 1


async def test_what_a_graceful_stop_gave_back_is_no_suspect_where_the_broker_tells_the_two_apart(bench: Bench) -> None:
    """From 4.3 on, in quorum queues; elsewhere it runs one at a time, and is not blamed either."""
    topology = await bench.declared(["50ms"])
    handler = Slow()
    await bench.send(topology, *range(6))
    async with bench.running(topology, handler, concurrency=2, prefetch=6, grace=timedelta()) as consumer:
        await until(lambda: consumer.signs.vitals().waiting == 4, "all are here")
    assert consumer.summary.released == 6
    handler = Slow()
    tells = bench.queue_type == "quorum" and bench.raw.connection.version >= (4, 3)
    async with bench.running(topology, handler, concurrency=6) as consumer:
        await until(lambda: len(handler.seen) >= (6 if tells else 1), "they are begun")
        handler.go.set()
        await until(lambda: consumer.summary.succeeded == 6, "all are handled")
    events = {event.event for event in await journal_of(bench, topology)}
    assert (names.STARTED in events) is not tells
