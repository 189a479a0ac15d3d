"""Looks at a broker that several test files share."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

from aiormq.exceptions import ChannelNotFoundEntity

from rabbitdlq import Connection, DeadLetter, Message, Producer, Topology
from rabbitdlq.broker import PublishLink, close_channel
from rabbitdlq.consumer.suspects import start_key
from rabbitdlq.journal import JournalEvent, JournalWriter, read_journal, started
from rabbitdlq.wire import Properties
from tests.broker.kit import Bench, until

__all__ = [
    "all_empty",
    "consumed",
    "exists",
    "give_back",
    "is_told",
    "journal_of",
    "publish_many",
    "rests",
    "shovel",
    "tell_started",
]


async def publish_many(bench: Bench, topology: Topology, payloads: Iterable[Any]) -> None:
    """Publish with many in flight; every one is confirmed."""

    async def stream() -> AsyncIterator[Any]:
        for payload in payloads:
            yield payload

    async with Producer(bench.url) as producer:
        async for report in producer.send_all(topology.name, stream()):
            assert report.error is None


async def journal_of(bench: Bench, topology: Topology) -> list[JournalEvent]:
    """Every event that its journal has by now."""
    link = PublishLink(bench.url, "tests")
    try:
        async with await Connection.open(bench.url) as connection:
            return [event async for event in read_journal(connection, topology, JournalWriter(topology, link))]
    finally:
        await link.close()


async def tell_started(
    bench: Bench, topology: Topology, message: Message, times: int, ago: timedelta = timedelta(minutes=30)
) -> None:
    """What the journal has of processes that began the message's handler, so long ago and before, and died of it."""
    link = PublishLink(bench.url, "tests")
    writer = JournalWriter(topology, link)
    for n in range(times):
        at = datetime.now(UTC) - ago - timedelta(minutes=n)
        assert await writer.append(started(message, start_key(message)[-1], f"dead-{n}", at))
    await link.close()


async def give_back(bench: Bench, topology: Topology, count: int) -> None:
    """What a process that dies does with what it had: the broker delivers it again, and calls it redelivered."""
    channel = await bench.raw.channel()
    got: asyncio.Queue[object] = asyncio.Queue()

    async def take(message: object) -> None:
        got.put_nowait(message)

    await channel.basic_qos(prefetch_count=count)
    await channel.basic_consume(topology.name, take)
    for _ in range(count):
        await asyncio.wait_for(got.get(), 10)
    await channel.close()


async def rests(bench: Bench, queue: str, count: int) -> None:
    """Wait until exactly so many messages are ready in the queue."""

    async def reached() -> bool:
        found = await bench.raw.count(queue)
        assert found <= count, f"{queue}: {found} messages, only {count} expected"
        return found == count

    await until(reached, f"{count} messages in {queue}")


async def all_empty(bench: Bench, topology: Topology) -> bool:
    """Whether nothing is ready in the work queue and on the ladder."""
    queues = [topology.name, *(rung.queue for rung in topology.rungs)]
    return not any([await bench.raw.count(queue) for queue in queues])


async def consumed(bench: Bench, queue: str) -> bool:
    """Whether the queue is there and has a consumer; the broker does not count those of a stream."""
    return bool(await _consumers(bench, queue))


async def exists(bench: Bench, queue: str) -> bool:
    """Whether the queue is there."""
    return await _consumers(bench, queue) is not None


async def _consumers(bench: Bench, queue: str) -> int | None:
    channel = await bench.raw.channel()
    try:
        return (await channel.queue_declare(queue, passive=True)).consumer_count or 0
    except ChannelNotFoundEntity:
        return None
    finally:
        await close_channel(channel)


def is_told(letter: DeadLetter, attempts: int) -> None:
    """The letter's history names each of so many attempts once, in order, and says that it is whole."""
    assert letter.attempts == attempts
    assert [record.attempt for record in letter.history] == list(range(1, attempts + 1))
    assert letter.history_partial is False


async def shovel(bench: Bench, source: str, target: str) -> int:
    """Move all messages as the management UI and the shovel plugin do: every property and header goes along."""
    moved = 0
    while (taken := await bench.raw.take(source)) is not None:
        body, properties, _ = taken
        values = {entry.name: getattr(properties, entry.name) for entry in fields(Properties)}
        await bench.raw.publish(target, body, **values)
        moved += 1
    return moved
