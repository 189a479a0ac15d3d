"""The way into the dead-letter queue: by the consumer with the whole story, by the broker where that cannot be."""

import time
from datetime import timedelta

import aiormq.abc
import pytest

from rabbitdlq import Message, Permanent
from rabbitdlq.topology import WorkBinding
from tests.broker.kit import Bench
from tests.broker.looks import all_empty, is_told, rests
from tests.broker.proxy import Proxy, parking


async def test_a_message_that_keeps_failing_exists_once_and_rests_in_the_dead_letter_queue(bench: Bench) -> None:
    """C36, C37: failures that are acked away leave no letter; a copy beside an unsettled original makes two."""
    topology = await bench.declared()
    (sent,) = await bench.send(topology, {"order": 1})

    async def handler(message: Message) -> None:
        raise RuntimeError("no")

    async with bench.running(topology, handler) as consumer:
        await rests(bench, topology.dlq, 1)
    assert consumer.summary.parked == 1
    # stopped, it holds nothing any more: an unsettled original would be ready again
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.id == sent


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_with_the_parking_connection_cut_the_broker_parks_and_the_journal_has_the_errors(bench: Bench) -> None:
    topology = await bench.declared()
    cut: list[int] = []
    async with Proxy(bench.url) as proxy:

        async def handler(message: Message) -> None:
            if message.payload == "warm up":
                raise Permanent
            if message.attempt == 3:
                proxy.refuse(parking)
                cut.append(proxy.cut(parking))
            raise RuntimeError(f"failed the {message.attempt}. time")

        async with bench.running(topology, handler, url=proxy.url):
            await bench.send(topology, "warm up")
            await rests(bench, topology.dlq, 1)
            (sent,) = await bench.send(topology, {"order": 1})
            await rests(bench, topology.dlq, 2)
    assert cut == [1]
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        _, bare = await dlq.peek_all()
        letter = await dlq.get(sent)
    assert bare.bare
    assert (bare.reason, bare.attempts, bare.queue, bare.payload) == ("exhausted", 3, topology.name, {"order": 1})
    is_told(letter, 3)
    assert [record.error_message for record in letter.history] == [f"failed the {n}. time" for n in (1, 2, 3)]
    assert letter.error is not None
    assert letter.error.message == "failed the 3. time"
    assert letter.error.traceback is not None
    assert letter.max_attempts == 3


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_park_whose_confirm_is_lost_with_the_line_is_sent_again_and_both_copies_are_one_letter(
    bench: Bench,
) -> None:
    topology = await bench.declared()
    async with Proxy(bench.url) as proxy:

        async def handler(message: Message) -> None:
            if message.payload != "warm up":
                proxy.freeze(parking, ("client",))
            raise Permanent(message.payload)

        async with bench.running(topology, handler, url=proxy.url) as consumer:
            await bench.send(topology, "warm up")
            await rests(bench, topology.dlq, 1)
            (sent,) = await bench.send(topology, "arrives, and nobody knows")
            await rests(bench, topology.dlq, 2)
            proxy.thaw()
            assert proxy.cut(parking) == 1
            await rests(bench, topology.dlq, 3)
        assert consumer.summary.parked == 2
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        _, letter = await dlq.peek_all()
        assert letter.id == sent
        assert not letter.bare
        is_told(letter, 1)
        report = await dlq.replay(sent)
    assert (report.done, report.duplicates) == (1, 1)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_park_that_is_not_confirmed_in_time_is_left_to_the_broker(bench: Bench) -> None:
    topology = await bench.declared()
    (sent,) = await bench.send(topology, {"order": 1})
    async with Proxy(bench.url) as proxy:

        async def handler(message: Message) -> None:
            if message.attempt == 3:
                proxy.freeze(parking, ("broker",))
            raise RuntimeError(f"failed the {message.attempt}. time")

        async with bench.running(topology, handler, url=proxy.url, park_timeout=timedelta(seconds=1)):
            await rests(bench, topology.dlq, 1)
    async with bench.dlq(topology) as dlq:
        letter = await dlq.get(sent)
    assert letter.bare
    is_told(letter, 3)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_permanent_failure_that_cannot_be_parked_is_retried_and_parked_later_with_its_story(
    bench: Bench,
) -> None:
    topology = await bench.declared()
    await bench.send(topology, {"order": 1})
    async with Proxy(bench.url) as proxy:

        async def handler(message: Message) -> None:
            if message.attempt == 1:
                proxy.refuse(parking)
                proxy.cut(parking)
            else:
                proxy.accept()
            raise Permanent(f"hopeless, seen {message.attempt} times")

        async with bench.running(topology, handler, url=proxy.url):
            await rests(bench, topology.dlq, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.reason == "permanent"
    is_told(letter, 2)
    assert [record.error_message for record in letter.history] == ["hopeless, seen 1 times", "hopeless, seen 2 times"]


async def test_a_foreign_consumer_that_only_nacks_climbs_the_ladder_to_the_dead_letter_queue(bench: Bench) -> None:
    """C14: the newest x-death entry tells of the last rung, not of the queue the message failed in."""
    exchange = await bench.raw.exchange(bench.topology().name + "-shop")
    topology = await bench.declared(["200ms", "400ms"], bindings=[WorkBinding(exchange, "order.*")])
    seen: list[float] = []
    channel = await bench.raw.channel()

    async def nack(delivered: aiormq.abc.DeliveredMessage) -> None:
        seen.append(time.monotonic())
        assert delivered.delivery_tag is not None
        await channel.basic_nack(delivered.delivery_tag, requeue=False)

    await channel.basic_consume(topology.name, nack)
    await bench.raw.publish("order.created", b'{"order": 1}', exchange=exchange, message_id="m1")
    await rests(bench, topology.dlq, 1)
    await channel.close()

    assert len(seen) == 3
    assert seen[1] - seen[0] >= 0.2
    assert seen[2] - seen[1] >= 0.4
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        letter = await dlq.get("m1")
    assert letter.bare
    assert (letter.reason, letter.attempts, letter.queue) == ("exhausted", 3, topology.name)
    assert (letter.exchange, letter.routing_key) == (exchange, "order.created")
    assert letter.moved_to_dlq_at is not None
    assert letter.history_partial


@pytest.mark.parametrize(
    ("text", "header_bytes"),
    [("x" * 300_000, 0), ("äöü€𝄞" * 12_000, 0), ("äöü€𝄞" * 12_000, 120_000)],
    ids=["300 kB of ASCII", "180 kB of many-byte characters", "and 120 kB of headers"],
)
@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_an_error_text_larger_than_a_frame_is_cut_and_parked_once(
    bench: Bench, text: str, header_bytes: int
) -> None:
    """C5: the text in a header went over the frame size, which ended the connection, again after each redelivery."""
    topology = await bench.declared()
    large = {f"h{n}": "ä" * 500 for n in range(header_bytes // 1_008)}
    (sent,) = await bench.send(topology, {"order": 1}, headers=large or None)

    async def handler(message: Message) -> None:
        raise RuntimeError(text)

    async with Proxy(bench.url) as proxy:
        async with bench.running(topology, handler, url=proxy.url) as consumer:
            await rests(bench, topology.dlq, 1)
        assert proxy.accepted == 3, "a connection was lost on the way"
    assert (consumer.summary.retried, consumer.summary.parked) == (2, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.id == sent
    assert dict(letter.properties.table) == large
    assert letter.error is not None
    kept = letter.error.message.removesuffix(" …[cut]")
    assert len(kept) > 200
    assert letter.error.message != kept
    assert text.startswith(kept)
    if not header_bytes:
        is_told(letter, 3)
    assert len(letter.wire.encode()) < bench.raw.connection.frame_max
