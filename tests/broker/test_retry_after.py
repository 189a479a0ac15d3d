"""Failures that say how long to wait, and messages that wait without having failed."""

import itertools
import time
from datetime import timedelta

import pytest

from rabbitdlq import Breaker, Message, RetryAfter, Topology, names
from rabbitdlq.broker import Outgoing
from rabbitdlq.wire import Headers, Properties
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty

LADDER = ["100ms", "400ms", "700ms"]


class Scripted:
    """A handler that does, attempt by attempt, what it was told, and notes when."""

    def __init__(self, *steps: Exception | None) -> None:
        self.steps = steps
        self.runs: list[tuple[int, float, Message]] = []

    async def __call__(self, message: Message) -> None:
        self.runs.append((message.attempt, time.monotonic(), message))
        step = self.steps[len(self.runs) - 1]
        if step is not None:
            raise step

    @property
    def attempts(self) -> list[int]:
        return [attempt for attempt, _, _ in self.runs]

    def waits(self) -> list[float]:
        times = [at for _, at, _ in self.runs]
        return [after - before for before, after in itertools.pairwise(times)]


async def test_a_message_waits_on_the_first_rung_that_is_slow_enough_and_its_attempts_stay_counted(
    bench: Bench,
) -> None:
    topology = await bench.declared(LADDER)
    handler = Scripted(
        RetryAfter(0.3, "429"), ValueError("plain"), RetryAfter(timedelta(milliseconds=50)), ValueError("x")
    )
    await bench.send(topology, {"n": 1}, headers={"mine": 5}, message_id="order-1")
    consumer = await bench.drain(topology, handler)

    assert handler.attempts == [1, 2, 3, 4]
    first, second, third = handler.waits()
    assert first >= 0.4, "the second rung, not the first"
    assert second >= 0.4, "after two failures the second rung again: the place on the ladder is not what counts"
    assert third >= 0.7
    assert all(message.headers["mine"] == 5 and message.id == "order-1" for _, _, message in handler.runs)
    assert {(message.exchange, message.routing_key) for _, _, message in handler.runs} == {("", topology.name)}
    assert (consumer.summary.retried, consumer.summary.parked) == (3, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.attempts, letter.reason, letter.lap) == (4, "exhausted", 1)
    assert [record.attempt for record in letter.history] == [1, 2, 3, 4]
    assert not letter.history_partial
    assert letter.history[0].error_type == "RetryAfter"
    assert names.FAILURES not in letter.properties.table


async def test_it_recovers_after_a_wait_that_is_longer_than_the_ladder(bench: Bench) -> None:
    topology = await bench.declared(LADDER)
    handler = Scripted(RetryAfter(3600), None)
    await bench.send(topology, {"n": 1})
    await bench.drain(topology, handler)

    assert handler.attempts == [1, 2]
    assert handler.waits()[0] >= 0.7, "the slowest rung there is"
    assert await all_empty(bench, topology)


async def test_nothing_that_would_harm_it_in_a_rung_goes_with_it(bench: Bench) -> None:
    """An expiration would end its wait early, another account's user id closes the channel."""
    topology = await bench.declared(LADDER)
    handler = Scripted(RetryAfter(0.3), None)
    await bench.raw.publish(
        topology.name,
        b'{"n": 1}',
        expiration="60000",
        user_id="guest",
        headers=Headers({"CC": [topology.name + "-other"], "mine": "x"}),
        message_id="a",
    )
    await bench.drain(topology, handler)

    assert handler.attempts == [1, 2]
    again = handler.runs[1][2]
    assert again.properties.expiration is None
    assert again.headers["mine"] == "x"
    assert '"expiration":"60000"' in again.headers[names.ORIGINAL]


async def test_a_letter_that_the_broker_parks_bare_after_such_a_wait_tells_its_attempts(bench: Bench) -> None:
    topology = await bench.declared(["100ms", "200ms"])
    attempts = 0

    async def handler(_: Message) -> None:
        nonlocal attempts
        attempts += 1
        consumer.stop()  # by whoever waits for the attempt it would be stopped too late
        raise RetryAfter(0.15)

    await bench.send(topology, {"n": 1}, message_id="m")
    async with bench.running(topology, handler) as consumer:
        await until(lambda: attempts, "the first attempt")
    await until(lambda: _waits(bench, topology), "back in the work queue")
    channel = await bench.raw.channel()
    got = await channel.basic_get(topology.name)
    await channel.basic_nack(got.delivery.delivery_tag, requeue=False)  # type: ignore[union-attr, arg-type]
    await channel.close()

    await until(lambda: _rests(bench, topology), "parked bare")
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.bare
    assert letter.attempts == 2


async def test_the_wait_is_kept_too_while_the_breaker_pauses_and_no_attempt_is_spent(bench: Bench) -> None:
    """Every failure after the breaker had opened went to the first rung: asked for 6 s, it was back after 0.3 s."""
    topology = await bench.declared(["50ms", "1500ms"])
    runs: dict[int, list[tuple[int, float]]] = {}
    busy = True

    async def handler(message: Message) -> None:
        runs.setdefault(message.payload, []).append((message.attempt, time.monotonic()))
        if busy:
            raise RetryAfter(1, "429")

    def back() -> bool:
        """Whether one has run twice with the same number."""
        return any(len(of) > 1 and of[0][0] == of[1][0] for of in runs.values())

    await bench.send(topology, *range(8))
    breaker = Breaker(min_attempts=4, first_pause="200ms", longest_pause="200ms")
    async with bench.running(topology, handler, concurrency=4, breaker=breaker) as consumer:
        await until(back, "one that was postponed is back")
        busy = False
        await until(lambda: consumer.summary.succeeded == 8, "all are done")
    assert consumer.summary.postponed
    for of in runs.values():
        assert all(after - before >= 1.5 for (_, before), (_, after) in itertools.pairwise(of)), of
    assert consumer.summary.parked == 0
    assert await all_empty(bench, topology)


class Busy(RetryAfter):
    """One with a constructor of its own, which does not call ours."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds


async def test_one_that_does_not_say_how_long_is_a_failure_like_any_other(bench: Bench) -> None:
    """Its attempts ended without an outcome, and the broker parked it without its story."""
    topology = await bench.declared(["50ms", "60ms"])
    handler = Scripted(Busy(1), Busy(2), Busy(3))
    await bench.send(topology, {"n": 1})
    consumer = await bench.drain(topology, handler)

    assert (handler.attempts, consumer.summary.retried, consumer.summary.parked) == ([1, 2, 3], 2, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.reason, letter.bare) == ("exhausted", False)


async def _waits(bench: Bench, topology: Topology) -> bool:
    return await bench.raw.count(topology.name) == 1


async def _rests(bench: Bench, topology: Topology) -> bool:
    return await bench.raw.count(topology.dlq) == 1


@pytest.mark.parametrize("told", [5, -1, "x"])
async def test_the_header_counts_only_on_what_came_from_a_rung_without_a_nack(bench: Bench, told: object) -> None:
    """Anybody may publish a header of that name."""
    topology = await bench.declared(["50ms", "60ms"])
    handler = Scripted(ValueError("1"), ValueError("2"), ValueError("3"))
    properties = Properties(message_id="f", headers=Headers({names.FAILURES: told}))
    await bench.raw.republish(Outgoing("", topology.name, b"{}", properties))
    await bench.drain(topology, handler)
    assert handler.attempts == [1, 2, 3]


async def test_a_replayed_letter_begins_anew(bench: Bench) -> None:
    topology = await bench.declared(["50ms", "100ms"])
    handler = Scripted(RetryAfter(0.08), ValueError("2"), ValueError("3"), ValueError("1"), None)
    await bench.send(topology, {"n": 1})
    await bench.drain(topology, handler)
    async with bench.dlq(topology) as dlq:
        await dlq.replay_all()
    await bench.drain(topology, handler)
    assert handler.attempts == [1, 2, 3, 1, 2]
    assert [message.lap for _, _, message in handler.runs] == [1, 1, 1, 2, 2]
