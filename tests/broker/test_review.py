"""What a review found, held: nothing that is two is taken for one, and one bad message fails alone."""

import asyncio
import uuid
from collections import Counter
from datetime import timedelta

import pytest

from rabbitdlq import (
    ConfigurationError,
    Consumer,
    Message,
    Permanent,
    PublishRefused,
    Topology,
    WorkBinding,
)
from rabbitdlq.broker import Outgoing, Publisher
from rabbitdlq.wire import Headers, Properties
from tests.broker.kit import Bench, until

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])


async def park_at_once(message: Message) -> None:
    if message.lap == 1:
        raise Permanent("no")


async def test_messages_that_a_producer_gave_the_same_id_and_body_are_all_sent_back(bench: Bench) -> None:
    """Their park ids are equal, and taking four of them for copies of the first lost four."""
    topology = await bench.declared()
    for _ in range(5):
        await bench.raw.publish(topology.name, b'{"report": 1}', message_id="nightly-report", delivery_mode=2)
    await bench.drain(topology, park_at_once)

    async with bench.dlq(topology) as dlq:
        assert len(await dlq.peek_all()) == 5
        await dlq.drop("nightly-report", archive=None)
        assert await dlq.count() == 4, "equal in all: one of them is dropped, not all"
        report = await dlq.replay_all()
    assert (report.done, report.duplicates) == (4, 0)
    assert await bench.raw.count(topology.name) == 4


async def test_a_consumer_runs_once_and_says_so(bench: Bench) -> None:
    topology = await bench.declared()
    consumer = await bench.drain(topology, park_at_once)

    with pytest.raises(ConfigurationError, match="runs once"):
        await consumer.run()


async def test_a_header_of_its_publisher_does_not_choose_where_a_bare_letter_is_sent(bench: Bench) -> None:
    topology = await bench.declared(["20ms"])
    other = await bench.raw.queue(f"t-other-{uuid.uuid4().hex[:8]}")
    await bench.raw.publish(topology.name, b"{}", message_id="m", headers=Headers({"dlq-queue": other}))
    channel = await bench.raw.channel()
    for _ in range(2):
        got = await until(lambda: _got(channel, topology), "the message")
        await channel.basic_nack(got, requeue=False)
    await until(lambda: bench.raw.count(topology.dlq), "the broker parked it")

    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
        assert (letter.bare, letter.queue) == (True, topology.name)
        await dlq.replay_all()
    assert (await bench.raw.count(topology.name), await bench.raw.count(other)) == (1, 0)


async def _got(channel: object, topology: Topology) -> int | None:
    delivered = await channel.basic_get(topology.name)  # type: ignore[attr-defined]
    return getattr(delivered.delivery, "delivery_tag", None)


async def test_one_publish_that_the_broker_refuses_does_not_fail_those_beside_it(bench: Bench) -> None:
    topology = await bench.declared()
    publisher = Publisher(bench.raw.connection)

    def outgoing(number: int) -> Outgoing:
        # a foreign user id closes the channel with 406, as a message that is too large does
        user = "somebody-else" if number == 20 else None
        return Outgoing("", topology.name, b"{}", Properties(message_id=str(number), user_id=user))

    results = await asyncio.gather(
        *(publisher.publish(outgoing(number), timeout=timedelta(seconds=20)) for number in range(41)),
        return_exceptions=True,
    )
    await publisher.close()

    assert {number: type(result) for number, result in enumerate(results) if result is not None} == {20: PublishRefused}
    arrived = Counter(wire.message_id for _, wire, _ in await bench.raw.take_all(topology.name))
    assert set(arrived) == {str(number) for number in range(41)} - {"20"}


async def test_a_history_that_two_messages_of_one_id_share_is_marked_partial(bench: Bench) -> None:
    topology = await bench.declared(["300ms", "300ms"])
    for body in (b'"A"', b'"B"'):
        await bench.raw.publish(topology.name, body, message_id="shared")

    def fail(message: Message) -> None:
        raise RuntimeError(f"{message.payload} {message.attempt}")

    await bench.drain(topology, fail)

    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
    assert len(letters) == 2
    assert letters[0].history_partial, "its first attempts may be the other's"


async def test_a_first_letter_is_complete_although_it_failed_before_the_consumer_looks_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has to be there before the first delivery is: this one waits in the work queue when it starts."""
    topology = await bench.declared(["20ms", "20ms"])
    (message_id,) = await bench.send(topology, "x")

    async def fail(message: Message) -> None:
        first.stop()  # by whoever waits for the failure it would be stopped too late
        raise RuntimeError(f"attempt {message.attempt}")

    async with bench.running(topology, fail) as first:
        await until(lambda: first.summary.retried == 1, "one failure")
    await until(lambda: bench.raw.count(topology.name), "it is back in the work queue")
    monkeypatch.setattr("rabbitdlq.consumer.session.JOURNAL_MARGIN", -timedelta(minutes=1))
    consumer = Consumer(Topology(topology.name, ["20ms", "20ms"]), _permanent, url=bench.url, drain=True)
    await asyncio.wait_for(consumer.run(), 60)

    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.id, letter.history_partial) == (message_id, False)
    assert [record.error_message for record in letter.history][:1] == ["attempt 1"]


def _permanent(message: Message) -> None:
    raise Permanent("no")


@pytest.mark.parametrize("key", ["retry.1", "retry.2", "retry.3"])
async def test_a_publishers_routing_key_is_not_taken_for_a_rung(bench: Bench, key: str) -> None:
    """A direct exchange picks the rung by key, and a first failure comes with its publisher's."""
    exchange = await bench.raw.exchange(f"t-shop-{uuid.uuid4().hex[:8]}")
    topology = await bench.declared(["30ms", "30ms"], bindings=[WorkBinding(exchange, "#")])
    await bench.raw.publish(key, b"{}", exchange=exchange, message_id="m", headers=Headers({"CC": ["retry.2"]}))
    attempts: list[int] = []

    def fail(message: Message) -> None:
        attempts.append(message.attempt)
        assert message.routing_key == key
        raise RuntimeError("no")

    await bench.drain(topology, fail)

    assert attempts == [1, 2, 3]
    assert await bench.raw.count(topology.dlq) == 1
