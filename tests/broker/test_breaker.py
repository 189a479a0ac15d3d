"""An outage of what handlers need: the consumer pauses, probes and goes on, and no message pays for it."""

import asyncio
import collections
import socket
from datetime import timedelta
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from rabbitdlq import Consumer, External, Message, Permanent
from rabbitdlq.consumer import Breaker
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, rests
from tests.broker.proxy import Proxy, consuming

#: times short enough for a test
QUICK = Breaker(first_pause=timedelta(milliseconds=200), longest_pause=timedelta(milliseconds=800))

one_queue_type = pytest.mark.parametrize("queue_type", ["quorum"])


class Provider:
    """What the handler needs. It is down until somebody repairs it."""

    def __init__(self, error: type[BaseException] = External, *, down: bool = True) -> None:
        self.down = down
        self.error = error
        self.calls: list[int] = []
        self.done: list[int] = []

    async def __call__(self, message: Message) -> None:
        self.calls.append(message.payload)
        await asyncio.sleep(0.001)
        if self.down:
            raise self.error("503 Service Unavailable")
        self.done.append(message.payload)


async def opened(consumer: Consumer) -> None:
    await until(lambda: position(consumer) == "open", "the breaker opens")


def position(consumer: Consumer) -> str:
    assert consumer.breaker_state is not None
    return consumer.breaker_state.position


def waiting(consumer: Consumer) -> int:
    """How many it holds and has not begun."""
    return consumer.signs.vitals().waiting


async def takes_no_more(bench: Bench, consumer: Consumer, total: int, prefetch: int) -> None:
    """Return when what was begun is in the queue again, and its places in the prefetch were not filled.

    The count of consumers would not tell: a quorum queue counts one that is cancelled as long as it holds something.
    """

    async def settled() -> bool:
        return await bench.raw.count(consumer.queue) + waiting(consumer) == total

    await until(settled, "it has taken no more")
    assert waiting(consumer) < prefetch


def events(logs: list[Any], name: str) -> list[Any]:
    return [line for line in logs if line["event"] == name]


async def test_an_outage_puts_nothing_into_the_dead_letter_queue_and_spends_a_probe_a_pause(bench: Bench) -> None:
    topology = await bench.declared()  # three attempts, all over within half a second without a breaker
    await bench.send(topology, *range(50))
    provider = Provider()
    with capture_logs() as logs:

        def calls() -> int:
            """Those that were no probes."""
            return len(provider.calls) - len(events(logs, "breaker_probing"))

        async with bench.running(topology, provider, concurrency=5, breaker=QUICK) as consumer:
            await opened(consumer)
            state = consumer.breaker_state
            assert state is not None
            assert (state.attempts, state.failures) == (5, 5)
            assert state.probes == len(events(logs, "breaker_probe_failed"))
            assert state.next_probe_at is not None or state.position == "half-open"
            await until(lambda: not consumer.summary.retried < 4, "the first ones are settled")
            assert calls() <= 10  # five that opened it, and what ran beside them
            await until(lambda: len(events(logs, "breaker_probe_failed")) >= 4, "four probes fail")
            assert calls() <= 10
            provider.down = False
            await until(lambda: len(provider.done) == 50, "all are done")
            assert position(consumer) == "closed"
            await rests(bench, topology.dlq, 0)
    assert sorted(provider.done) == list(range(50))
    assert consumer.summary.parked == 0
    assert consumer.summary.succeeded == 50
    assert consumer.summary.retried <= 5
    assert await all_empty(bench, topology)
    (first,) = events(logs, "breaker_opened")
    assert (first["attempts"], first["failures"], first["error_type"]) == (5, 5, "External")
    pauses = [line["pause_s"] for line in events(logs, "breaker_probe_failed")]
    assert pauses[0] < pauses[2]
    assert max(pauses) <= 0.8 * 1.2 + 0.1
    (closed,) = events(logs, "breaker_closed")
    assert closed["open_for_s"] > 0.5
    assert closed["failed_probes"] == len(pauses)


@one_queue_type
async def test_the_last_attempt_of_a_message_is_not_spent_on_an_outage(bench: Bench) -> None:
    """Messages that have one attempt left come back into an outage; without the breaker all of them would be parked."""
    topology = await bench.declared(["100ms"])
    await bench.send(topology, *range(10))
    seen: collections.Counter[int] = collections.Counter()
    down, done = True, []

    async def handler(message: Message) -> None:
        seen[message.payload] += 1
        if message.attempt == 1:
            raise RuntimeError("something else")
        if down:
            raise External("503")
        done.append(message.payload)

    slow = Breaker(min_attempts=13, share=0.2, first_pause=QUICK.first_pause, longest_pause=QUICK.longest_pause)
    async with bench.running(topology, handler, concurrency=1, prefetch=1, breaker=slow) as consumer:
        await opened(consumer)
        spent = consumer.summary.parked
        assert spent == 2, "the third one opened it, and is not parked"
        await asyncio.sleep(0.6)
        down = False
        await until(lambda: len(done) == 10 - spent, "all others are done")
        await rests(bench, topology.dlq, spent)


@one_queue_type
async def test_while_it_is_open_nothing_is_consumed_and_what_was_prefetched_costs_no_delivery_count(
    bench: Bench,
) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(30))
    counts: list[int] = []
    provider = Provider()

    async def handler(message: Message) -> None:
        counts.append(message.properties.table.number("x-delivery-count") or 0)
        counts.append(message.properties.table.number("x-acquired-count") or 0)
        await provider(message)

    breaker = Breaker(first_pause=timedelta(seconds=1), longest_pause=timedelta(seconds=1))
    async with bench.running(topology, handler, concurrency=5, prefetch=15, breaker=breaker) as consumer:
        await opened(consumer)
        await takes_no_more(bench, consumer, 30, 15)
        (extra,) = await bench.send(topology, 99)
        assert extra
        await takes_no_more(bench, consumer, 31, 15)
        provider.down = False
        await until(lambda: len(provider.done) == 31, "all are done")
    # those that failed before it opened have one on 4.0 to 4.2, where the count goes with them through the ladder
    assert sum(counts) <= 10
    assert max(counts) <= 1


@one_queue_type
async def test_a_permanent_failure_parks_at_once_and_as_a_probe_closes_the_breaker(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(6))
    down = True

    async def handler(message: Message) -> None:
        if down:
            raise External("503")
        if message.payload >= 5:
            raise Permanent("no such order")

    async with bench.running(topology, handler, concurrency=1, prefetch=1, breaker=QUICK) as consumer:
        await opened(consumer)
        down = False
        await until(lambda: consumer.summary.parked == 1, "the poison is parked")
        await until(lambda: consumer.summary.succeeded == 5, "the others are done")
        assert position(consumer) == "closed"
    await rests(bench, topology.dlq, 1)


@one_queue_type
@pytest.mark.parametrize("error", [KeyError, RuntimeError])
async def test_errors_that_nobody_named_are_retried_and_parked_as_ever(
    bench: Bench, error: type[BaseException]
) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(8))
    provider = Provider(error)
    consumer = await bench.drain(topology, provider, breaker=QUICK)

    assert (consumer.summary.parked, consumer.summary.postponed) == (8, 0)
    assert len(provider.calls) == 24
    assert position(consumer) == "closed"


async def fetch(message: Message) -> None:
    """Knows of no rules; at the top of the module, where another process finds it."""
    async with httpx.AsyncClient(verify=False, timeout=0.3) as client:
        await client.get(message.payload)


@one_queue_type
@pytest.mark.parametrize("isolation", ["async", "thread", "process"])
@pytest.mark.parametrize("error", ["ConnectError", "ReadTimeout"])
async def test_what_a_library_makes_of_a_failed_connection_or_of_no_answer_pauses_it_though_nobody_named_it(
    bench: Bench, error: str, isolation: Any
) -> None:
    """Without a word of the user everything was parked while the service was down."""
    topology = await bench.declared(["5s", "5s"])
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system takes connections, and nobody says a word
        host, port = server.getsockname()
        if error == "ConnectError":
            server.close()
        await bench.send(topology, *[f"http://{host}:{port}/{number}" for number in range(6)])
        breaker = Breaker(first_pause=timedelta(minutes=1))
        with capture_logs() as logs:
            async with bench.running(topology, fetch, isolation=isolation, breaker=breaker, concurrency=3) as consumer:
                await opened(consumer)
    (line,) = events(logs, "breaker_opened")
    assert (line["error_type"], line["failures"]) == (f"httpx.{error}", 5)


@one_queue_type
async def test_failures_that_are_slow_pause_it_too(bench: Bench) -> None:
    """Five failures never fell into one window, and every message was parked."""
    topology = await bench.declared(["50ms", "50ms"])
    await bench.send(topology, *range(6))
    provider = Provider()

    async def slow(message: Message) -> None:
        await asyncio.sleep(0.3)
        await provider(message)

    breaker = Breaker(window="500ms", first_pause="200ms", longest_pause="200ms")
    async with bench.running(topology, slow, concurrency=1, prefetch=1, breaker=breaker) as consumer:
        await opened(consumer)
        state = consumer.breaker_state
        assert state is not None
        assert (state.attempts, state.failures) == (5, 5)
        provider.down = False
        await until(lambda: len(provider.done) == 6, "all are done")
    assert consumer.summary.parked == 0


@one_queue_type
async def test_they_pause_it_too_where_that_is_wanted_and_nothing_does_without_a_breaker(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(8))
    provider = Provider(KeyError)
    bug = Breaker(unknown=True, first_pause=timedelta(minutes=1))
    async with bench.running(topology, provider, breaker=bug) as consumer:
        await opened(consumer)
    assert consumer.summary.parked == 0

    consumer = await bench.drain(topology, Provider(External), breaker=None)
    assert consumer.summary.parked == 8 == await bench.raw.count(topology.dlq)
    assert consumer.breaker_state is None


@one_queue_type
async def test_a_message_that_always_fails_by_itself_pauses_nobody(bench: Bench) -> None:
    topology = await bench.declared(["20ms"] * 8)
    await bench.send(topology, 1)
    consumer = await bench.drain(topology, Provider(External), breaker=QUICK)

    assert (consumer.summary.retried, consumer.summary.parked) == (8, 1)


@one_queue_type
async def test_a_stop_while_it_is_paused_ends_at_once_and_gives_back_what_it_keeps(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(20))
    breaker = Breaker(first_pause=timedelta(minutes=1))
    provider = Provider()
    consumer = bench.consumer(topology, provider, concurrency=2, prefetch=10, breaker=breaker)
    running = asyncio.create_task(consumer.run())
    await opened(consumer)
    await takes_no_more(bench, consumer, 20, 10)
    kept = waiting(consumer)
    assert kept
    consumer.stop()
    summary = await asyncio.wait_for(running, 5)

    assert summary.released == kept
    assert summary.parked == 0
    await rests(bench, topology.name, 20)


@one_queue_type
async def test_it_stays_paused_when_the_connection_is_lost_and_then_probes_on_the_new_one(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(20))
    provider = Provider()
    breaker = Breaker(first_pause=timedelta(seconds=3))
    with capture_logs() as logs:
        async with (
            Proxy(bench.url) as proxy,
            bench.running(topology, provider, concurrency=2, breaker=breaker, url=proxy.url) as consumer,
        ):
            await opened(consumer)
            await takes_no_more(bench, consumer, 20, 4)
            calls = len(provider.calls)
            assert proxy.cut(consuming)
            await until(lambda: len(events(logs, "consumer_started")) == 2, "it has a new connection")
            await rests(bench, topology.name, 20)
            assert position(consumer) != "closed"
            assert len(provider.calls) - calls <= len(events(logs, "breaker_probing")), "nothing but probes is begun"
            provider.down = False
            await until(lambda: len(provider.done) == 20, "all are done")
    assert events(logs, "breaker_closed")


@one_queue_type
async def test_draining_waits_for_the_end_of_the_outage(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(10))
    provider = Provider()
    consumer = bench.consumer(topology, provider, concurrency=2, breaker=QUICK, drain=True)
    running = asyncio.create_task(consumer.run())
    await opened(consumer)
    with capture_logs() as logs:
        await until(lambda: len(events(logs, "breaker_probe_failed")) >= 2, "it says that it tries")
    assert not running.done()
    provider.down = False
    summary = await asyncio.wait_for(running, 20)

    assert (summary.succeeded, summary.parked) == (10, 0)
