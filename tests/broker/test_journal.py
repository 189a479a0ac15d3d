"""The journal: what it says of a run, how consumers read it, and that the work goes on without it."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rabbitdlq import Message, Topology
from rabbitdlq.broker import PublishLink
from rabbitdlq.journal import HistoryIndex, JournalEvent, JournalReader, JournalWriter, read_journal
from tests.broker.kit import Bench, until
from tests.broker.looks import consumed, exists, is_told, rests


async def _events(bench: Bench, topology: Topology) -> list[JournalEvent]:
    link = PublishLink(bench.url, "rabbitdlq tests journal")
    try:
        writer = JournalWriter(topology, link)
        return [event async for event in read_journal(bench.raw.connection, topology, writer)]
    finally:
        await link.close()


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_run_is_told_as_failures_recoveries_and_parks(bench: Bench) -> None:
    topology = await bench.declared()
    recovers, dies, works = await bench.send(topology, "recovers", "dies", "works")

    async def handler(message: Message) -> None:
        if message.payload == "dies" or (message.payload == "recovers" and message.attempt == 1):
            raise RuntimeError(f"{message.payload}, attempt {message.attempt}")

    async with bench.running(topology, handler, worker="w") as consumer:
        await rests(bench, topology.dlq, 1)
        await until(lambda: consumer.summary.succeeded == 2, "the others are handled")
    events = await _events(bench, topology)
    told = {
        sent: [(event.event, event.attempt, event.error_message) for event in events if event.message_id == sent]
        for sent in (recovers, dies, works)
    }
    assert told == {
        recovers: [("failed", 1, "recovers, attempt 1"), ("recovered", 2, None)],
        dies: [*(("failed", attempt, f"dies, attempt {attempt}") for attempt in (1, 2, 3)), ("parked", 3, None)],
        works: [],
    }
    assert {(event.queue, event.worker, event.lap, event.max_attempts) for event in events} == {
        (topology.name, "w", 1, 3)
    }
    (parked,) = [event for event in events if event.event == "parked"]
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (parked.park_id, parked.reason) == (letter.park_id, "exhausted")


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_live_journal_brings_histories_together_across_consumers_that_are_there(bench: Bench) -> None:
    topology = await bench.declared(["300ms", "300ms"], journal="live")

    def handler_of(name: str) -> Any:
        async def handler(message: Message) -> None:
            raise RuntimeError(f"{name}, attempt {message.attempt}")

        return handler

    # each takes one message at a time, and their number is odd: in turns, an attempt meets the other worker
    async with (
        bench.running(topology, handler_of("a"), worker="a", concurrency=1, prefetch=1),
        bench.running(topology, handler_of("b"), worker="b", concurrency=1, prefetch=1),
    ):
        await until(lambda: _consumers(bench, topology, 2), "both consume")
        await bench.send(topology, *range(21))
        await rests(bench, topology.dlq, 21)
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
    for letter in letters:
        is_told(letter, 3)
    assert any(len({record.worker for record in letter.history}) == 2 for letter in letters)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_live_journal_marks_a_history_from_before_its_start_as_partial(bench: Bench) -> None:
    topology = await bench.declared(["300ms", "100ms"], journal="live")
    await bench.send(topology, {"order": 1})

    async def handler(message: Message) -> None:
        if message.attempt == 1:
            first.stop()
        raise RuntimeError(f"attempt {message.attempt}")

    async with bench.running(topology, handler) as first:
        await until(lambda: first.summary.retried == 1, "the first attempt")
    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.attempts == 3
    assert [record.attempt for record in letter.history] == [2, 3]
    assert letter.history_partial
    assert letter.wire.table["dlq-history-partial"] is True


@pytest.mark.parametrize("lost", ["exchange", "binding"])
@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_journal_that_cannot_be_written_stops_no_work(bench: Bench, lost: str) -> None:
    topology = await bench.declared(["200ms", "300ms"])

    async def handler(message: Message) -> None:
        raise RuntimeError(f"attempt {message.attempt}")

    async with bench.running(topology, handler) as consumer:
        await until(lambda: consumed(bench, topology.name), "it consumes")
        await _spoil(bench, topology, lost)
        ids = await bench.send(topology, *range(20))
        await rests(bench, topology.dlq, 20)
    assert (consumer.summary.retried, consumer.summary.parked) == (40, 20)
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
    assert {letter.id for letter in letters} == set(ids)
    for letter in letters:
        assert letter.reason == "exhausted"
        # the consumer's own memory has the attempts that the journal was not told of
        is_told(letter, 3)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_attempts_the_journal_was_not_told_of_are_missing_for_the_next_worker_and_it_says_so(
    bench: Bench,
) -> None:
    topology = await bench.declared(["500ms", "100ms"])
    await bench.send(topology, {"order": 1})

    async def handler(message: Message) -> None:
        if message.attempt == 1:
            await _spoil(bench, topology, "exchange")
            first.stop()
        raise RuntimeError(f"attempt {message.attempt}")

    async with bench.running(topology, handler) as first:
        await until(lambda: first.summary.retried == 1, "the first attempt")
    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.attempts, letter.history_partial) == (3, True)
    assert [record.error_message for record in letter.history] == ["attempt 2", "attempt 3"]


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_deleted_journal_is_declared_again_and_the_work_goes_on(bench: Bench) -> None:
    topology = await bench.declared()

    async def handler(message: Message) -> None:
        raise RuntimeError(f"attempt {message.attempt}")

    async with bench.running(topology, handler):
        await until(lambda: consumed(bench, topology.name), "it consumes")
        channel = await bench.raw.channel()
        await channel.queue_delete(topology.journal_queue)
        await channel.close()
        await bench.send(topology, "while the journal is gone")
        await rests(bench, topology.dlq, 1)
        await until(lambda: exists(bench, topology.journal_queue), "the journal is there")
        await until(lambda: consumed(bench, topology.name), "and read, so that work is taken")
        (sent,) = await bench.send(topology, "after")
        await rests(bench, topology.dlq, 2)
    assert [event.event for event in await _events(bench, topology) if event.message_id == sent] == [
        "failed",
        "failed",
        "failed",
        "parked",
    ]


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_consumer_takes_no_work_before_it_has_read_the_journal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken before, a last attempt would be parked without the attempts that other workers have told of."""
    topology = await bench.declared()
    await bench.send(topology, "x")
    reading, may_go_on = asyncio.Event(), asyncio.Event()
    sync = JournalReader.sync

    async def held_up(reader: JournalReader, timeout: timedelta) -> None:
        reading.set()
        await may_go_on.wait()
        await sync(reader, timeout)

    monkeypatch.setattr(JournalReader, "sync", held_up)
    handled: list[str] = []

    async def handler(message: Message) -> None:
        handled.append(message.payload)

    async with bench.running(topology, handler):
        await reading.wait()
        assert not await consumed(bench, topology.name)
        may_go_on.set()
        await until(lambda: handled, "it works")


def test_the_index_is_bounded_and_forgets_what_was_untouched_longest() -> None:
    index = HistoryIndex(max_bytes=10_000)
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def failed(message_id: str, attempt: int) -> JournalEvent:
        at = start + timedelta(seconds=attempt)
        return JournalEvent(event="failed", at=at, queue="q", message_id=message_id, lap=1, attempt=attempt, worker="w")

    index.add(failed("touched again", 1))
    for n in range(15):
        index.add(failed(f"m{n}", 1))
    index.add(failed("touched again", 2))
    for n in range(15, 30):
        index.add(failed(f"m{n}", 1))
        assert index.size <= 10_000
    assert len(index.history("touched again", 1, 2)) == 2
    assert index.history("m0", 1, 1) == []
    assert len(index.history("m29", 1, 1)) == 1
    for event in ("parked", "recovered"):
        index.add(failed(event, 1))
        index.add(
            JournalEvent(event=event, at=start + timedelta(seconds=2), queue="q", message_id=event, lap=1, attempt=2)
        )
        assert index.history(event, 1, 1) == []


async def _spoil(bench: Bench, topology: Topology, what: str) -> None:
    channel = await bench.raw.channel()
    if what == "exchange":
        await channel.exchange_delete(topology.journal_exchange)
    else:
        await channel.queue_unbind(topology.journal_queue, topology.journal_exchange, routing_key="#")
    await channel.close()


async def _consumers(bench: Bench, topology: Topology, count: int) -> bool:
    channel = await bench.raw.channel()
    declared = await channel.queue_declare(topology.name, passive=True)
    await channel.close()
    return declared.consumer_count == count
