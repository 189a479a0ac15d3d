"""Messages that take the process down with them: parked in the end, and alone."""

import asyncio
import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rabbitdlq import Message, names
from rabbitdlq.consumer.company import Company
from rabbitdlq.consumer.suspects import MAX_STARTS
from rabbitdlq.topology import Topology
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, give_back, journal_of, publish_many, rests, tell_started
from tests.broker.worker import Order, worker_process


async def test_a_killer_is_parked_and_the_fifty_beside_it_are_handled(bench: Bench, tmp_path: Path) -> None:
    """C34. Everything that was prefetched comes back after each crash, and is as often redelivered as the killer."""
    topology = await bench.declared(["50ms", "60ms"])
    orders = [Order(n, deadly=1 if n == 20 else 0) for n in range(51)]
    await publish_many(bench, topology, map(asdict, orders))

    runs, deaths = [], 0
    while not await _parked(bench, topology):
        assert deaths <= MAX_STARTS + 1, "the killer goes on killing"
        async with worker_process(
            bench.url, topology, tmp_path / str(deaths), f"w{deaths}", concurrency=5, drain=True
        ) as worker:
            deaths += await worker.ended() != 0
        runs += worker.runs

    assert deaths == MAX_STARTS + 1, "one crash made it suspect, three more convicted it"
    assert await all_empty(bench, topology)
    assert {run.n for run in runs if run.what == "succeeded"} == {order.n for order in orders if not order.deadly}
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.payload["n"] == 20
    assert (letter.reason, letter.attempts) == ("crashed", 1)
    assert letter.error is not None
    assert letter.error.type == "HandlerCrashed"
    assert letter.error.message.startswith("its handler was begun 3 times, and each time the process was gone")
    journal = await journal_of(bench, topology)
    starts = Counter(event.message_id for event in journal if event.event == names.STARTED)
    # one whose ack goes down with the process runs again, and has ended each time
    starts.subtract(event.message_id for event in journal if event.event == names.ENDED)
    assert {id: unended for id, unended in starts.items() if unended} == {letter.id: MAX_STARTS}


async def _parked(bench: Bench, topology: Topology) -> bool:
    return await bench.raw.count(topology.dlq) > 0


class Looking:
    """A handler that notes how many run at a time, and whom."""

    def __init__(self) -> None:
        self.seen: list[Message] = []
        self.running = 0
        self.most = 0
        self.go = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.seen.append(message)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
        finally:
            self.running -= 1


async def on_its_last(bench: Bench, topology: Topology) -> None:
    """A message that a crash brought back, and that one more beginning without an end convicts."""
    handler = Looking()
    handler.go.set()
    await bench.send(topology, "x", message_id="m")
    await bench.drain(topology, handler)
    await bench.send(topology, "x", message_id="m")
    await give_back(bench, topology, 1)
    await tell_started(bench, topology, handler.seen[0], MAX_STARTS - 1)


async def test_what_a_crash_brought_back_runs_one_at_a_time_and_what_is_new_does_not_wait_for_it(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    await bench.send(topology, *range(5))
    await give_back(bench, topology, 5)
    await bench.send(topology, *range(10, 14))
    handler = Looking()
    async with bench.running(topology, handler, concurrency=10, prefetch=20):
        await until(lambda: len(handler.seen) == 5, "the four new ones, and one of the five")
        assert sorted(message.payload for message in handler.seen)[1:] == [10, 11, 12, 13]
        assert handler.running == 5
        handler.go.set()
        await until(lambda: len(handler.seen) == 9, "the others")
    assert await all_empty(bench, topology)
    events = [event.event for event in await journal_of(bench, topology)]
    assert Counter(events) == {names.STARTED: 5, names.ENDED: 5}


async def test_who_was_beside_new_killers_time_and_again_is_not_blamed_for_their_crashes(
    bench: Bench, tmp_path: Path
) -> None:
    """What is new does not wait for suspects, so three killers that came one by one got an innocent convicted."""
    topology = await bench.declared(["50ms"])
    await publish_many(bench, topology, [asdict(Order(0, held=1))])
    for life in range(MAX_STARTS):
        async with worker_process(bench.url, topology, tmp_path / f"{life}", f"w{life}", concurrency=5) as worker:
            await until(lambda running=worker: running.count("started") == 1, "the innocent runs")
            await publish_many(bench, topology, [asdict(Order(life + 1, deadly=1))])
            assert await worker.ended() != 0
    async with worker_process(bench.url, topology, tmp_path / "last", "last", concurrency=5) as worker:
        await until(lambda: worker.count("started") == 1, "the innocent runs for the last time")
        await publish_many(bench, topology, [asdict(Order(9, deadly=1))])
        await rests(bench, topology.name, 0)  # the new one is there, and waits
        worker.go()
        assert await worker.ended() != 0
    assert [(run.n, run.what) for run in worker.runs][:2] == [(0, "started"), (0, "succeeded")]


async def test_on_its_last_beginning_a_message_is_alone_with_all_queues_of_the_process(bench: Bench) -> None:
    """A crash takes all of them down: an innocent of one queue was parked for the killer of another."""
    topology, other = await bench.declared(["50ms"]), await bench.declared(["50ms"])
    slow, last = Looking(), Looking()
    await on_its_last(bench, topology)

    async with bench.running(other, slow, concurrency=1, prefetch=1) as beside:
        await bench.send(other, *range(3))
        await until(lambda: slow.running == 1, "the other queue is at work")
        async with bench.running(topology, last):
            await until(lambda: Company.of_this_loop().holder is not None, "it waits for the other one's end")
            slow.go.set()
            await until(lambda: last.running == 1, "its handler runs")
            assert (slow.running, len(slow.seen)) == (0, 1)
            # the next of the other queue has come, and waits
            await until(lambda: beside.health().in_flight == 1, "the next one has come")
            assert (slow.running, len(slow.seen)) == (0, 1)
            last.go.set()
            await until(lambda: len(slow.seen) == 3, "the others go on")
    assert await all_empty(bench, topology)
    assert await bench.raw.count(topology.dlq) == 0


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_who_blocks_the_event_loop_until_the_connection_is_lost_has_not_ended(bench: Bench) -> None:
    """It ran without end, always in its first attempt: its ack came too late each time."""
    topology = await bench.declared(["50ms"])
    seen: list[Message] = []

    async def block(message: Message) -> None:
        seen.append(message)
        if len(seen) > 1:
            time.sleep(4.5)  # heartbeats of a second: by then the broker has hung up

    await bench.send(topology, "x", message_id="m")
    await bench.drain(topology, block)
    await bench.send(topology, "x", message_id="m")
    await give_back(bench, topology, 1)
    await tell_started(bench, topology, seen[0], MAX_STARTS - 1)

    async with bench.running(topology, block, url=f"{bench.url}?heartbeat=1"):
        await rests(bench, topology.dlq, 1)
    assert len(seen) == 2, "the third beginning convicted it"
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.reason == "crashed"


async def test_three_beginnings_without_an_end_park_it_without_another_run(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    handler = Looking()
    handler.go.set()
    await bench.send(topology, "x", message_id="m")
    await bench.drain(topology, handler)
    (message,) = handler.seen
    await bench.send(topology, "x", message_id="m")
    await give_back(bench, topology, 1)
    await tell_started(bench, topology, message, MAX_STARTS)

    consumer = await bench.drain(topology, handler)
    assert len(handler.seen) == 1
    assert consumer.summary.parked == 1
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.id, letter.reason) == ("m", "crashed")
    # mended and sent back it starts without a past
    async with bench.dlq(topology) as dlq:
        await dlq.replay_all()
    await bench.drain(topology, handler)
    assert [seen.lap for seen in handler.seen] == [1, 2]


@pytest.mark.parametrize("how", ["fails", "is released", "is given up"])
async def test_a_handler_that_ends_in_any_way_is_not_blamed(bench: Bench, how: str) -> None:
    topology = await bench.declared(["50ms"])
    await bench.send(topology, "x", "y")
    await give_back(bench, topology, 2)
    entered = asyncio.Event()
    over = asyncio.Event()

    async def handler(_: Message) -> None:
        entered.set()
        if how == "fails":
            raise ValueError("x")
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                if how == "is released":
                    raise

    limit = timedelta(milliseconds=100) if how == "is given up" else None
    consumer = bench.consumer(
        topology, handler, grace=timedelta(), soft_timeout=limit, hard_timeout=limit, concurrency=2
    )
    task = asyncio.create_task(consumer.run())
    try:
        await asyncio.wait_for(entered.wait(), 10)
        if how != "is released":
            await until(lambda: consumer.summary.retried + consumer.summary.parked >= 2, "both have failed")
    finally:
        consumer.stop()
        over.set()
    await asyncio.wait_for(task, 30)
    counts = Counter(event.event for event in await journal_of(bench, topology))
    assert counts[names.STARTED] == counts[names.ENDED] >= 1


async def test_a_message_that_failed_and_came_back_from_a_rung_is_no_suspect(bench: Bench) -> None:
    """From 4.0 to 4.2 such a message is called redelivered, too."""
    topology = await bench.declared(["50ms", "60ms"])

    async def handler(message: Message) -> None:
        if message.attempt < 3:
            raise ValueError("again")

    await bench.send(topology, *range(3))
    await bench.drain(topology, handler)
    assert names.STARTED not in {event.event for event in await journal_of(bench, topology)}


async def test_what_a_crash_brought_back_is_suspect_in_that_attempt_only_and_no_copy(
    bench: Bench,
) -> None:
    """From 4.0 on a nack carries the queue's count of crashes up the ladder; equal messages were taken for copies."""
    topology = await bench.declared(["50ms", "60ms", "70ms"])
    for _ in range(2):
        await bench.send(topology, "x", message_id="m", timestamp=datetime(2026, 1, 1, tzinfo=UTC))
    await give_back(bench, topology, 2)

    async def failing(_: Message) -> None:
        raise ValueError("no crash")

    await bench.drain(topology, failing)
    started = [event.attempt for event in await journal_of(bench, topology) if event.event == names.STARTED]
    assert started == [1, 1]
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
        assert [(letter.id, letter.attempts, letter.repeated) for letter in letters] == [("m", 4, False)] * 2
        assert (await dlq.replay_all()).done == 2
    await rests(bench, topology.name, 2)


async def test_on_the_ladder_each_attempt_counts_its_own_crashes(bench: Bench) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    await on_its_last(bench, topology)
    attempts: list[int] = []

    async def failing(message: Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("no crash")

    await bench.drain(topology, failing)
    assert attempts == [1, 2, 3]
    await rests(bench, topology.dlq, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.reason == "exhausted"
