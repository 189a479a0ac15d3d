"""Handlers that take too long: cancelled, given up, told of; and nobody waits behind them."""

import asyncio
import threading
import time
from datetime import timedelta

import pytest
import structlog.testing

from rabbitdlq import ConfigurationError, Consumer, Message, Topology, handler, names
from tests.broker.kit import Bench, until

QUORUM = pytest.mark.parametrize("queue_type", ["quorum"])
SHORT = timedelta(milliseconds=200)


@QUORUM
async def test_a_handler_is_cancelled_at_the_soft_timeout_and_may_clean_up(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, "slow")
    cleaned: list[int] = []

    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    @handler(soft_timeout=SHORT)
    async def handle(message: Message) -> None:
        try:
            await wait_for_ever()
        finally:
            await asyncio.sleep(0)
            cleaned.append(message.attempt)

    summary = (await bench.drain(topology, handle)).summary

    assert cleaned == [1, 2, 3]
    assert (summary.retried, summary.parked) == (2, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.reason, letter.attempts) == (names.TIMEOUT, 3)
    assert letter.error is not None
    assert (letter.error.type, letter.error.message) == ("HandlerTimeout", "the handler took longer than 0.2 s")
    assert "in wait_for_ever" in (letter.error.traceback or ""), "where it was, not only that it was late"
    assert all(200 <= (record.duration_ms or 0) < 20_000 for record in letter.history)


@QUORUM
async def test_a_handler_that_succeeds_while_it_is_cancelled_has_succeeded(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, "slow")

    @handler(soft_timeout=SHORT)
    async def handle(_: Message) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return  # it was enough

    summary = (await bench.drain(topology, handle)).summary

    assert (summary.succeeded, summary.retried, summary.parked) == (1, 0, 0)


@QUORUM
async def test_a_handler_that_is_deaf_is_given_up_and_others_take_its_place(bench: Bench) -> None:
    topology = await bench.declared()
    deaf, fine = await bench.send(topology, "deaf", "fine")
    release, handled = asyncio.Event(), []

    @handler(soft_timeout=SHORT, hard_timeout=SHORT)
    async def handle(message: Message) -> None:
        while message.payload == "deaf" and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        handled.append(message.id)

    with structlog.testing.capture_logs() as logs:
        consumer = Consumer(topology, handle, url=bench.url, concurrency=1, drain=True)
        running = asyncio.create_task(consumer.run())
        async with bench.dlq(topology) as dlq:
            await until(dlq.count, "the deaf one's message is parked")
            assert handled == [fine], "with one handler at a time"
            release.set()
            await asyncio.wait_for(running, 20)
            (letter,) = await dlq.peek_all()

    assert (letter.id, letter.reason, letter.attempts) == (deaf, names.TIMEOUT, 3)
    assert handled == [fine, deaf, deaf, deaf], "they go on, and nobody waits for them"
    summary = consumer.summary
    assert (summary.succeeded, summary.retried, summary.parked, summary.too_late) == (1, 2, 1, 0)
    told = [line["event"] for line in logs if line["event"].startswith("handler_")]
    assert sorted(told) == ["handler_abandoned"] * 3 + ["handler_ended_late"] * 3


@QUORUM
async def test_a_plain_function_is_left_alone_until_the_hard_timeout(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, "slow")
    release = threading.Event()
    began: list[float] = []

    def handle(_: Message) -> None:
        began.append(time.monotonic())
        release.wait(20)

    consumer = Consumer(
        topology, handle, url=bench.url, concurrency=1, drain=True, soft_timeout=SHORT, hard_timeout=SHORT * 3
    )
    await asyncio.wait_for(consumer.run(), 20)
    release.set()

    assert len(began) == 3
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.reason == names.TIMEOUT
    assert letter.error is not None
    assert letter.error.message == "the handler took longer than 0.6 s"
    assert all((record.duration_ms or 0) >= 600 for record in letter.history)


@QUORUM
async def test_a_handler_that_blocks_the_event_loop_is_told_of_with_its_stack(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rabbitdlq.consumer.pulse.Pulse.__init__.__defaults__", (0.3,))
    topology = await bench.declared()
    await bench.send(topology, "blocking")

    def wait_for_the_database() -> None:
        time.sleep(1.5)

    @handler(soft_timeout=SHORT * 10)
    async def handle(_: Message) -> None:
        wait_for_the_database()

    with structlog.testing.capture_logs() as logs:
        summary = (await bench.drain(topology, handle)).summary

    assert summary.succeeded == 1
    # a machine that stands still for a moment is told of as well
    stacks = [line["stack"] for line in logs if line["event"] == "event_loop_blocked"]
    assert sum("in wait_for_the_database" in stack for stack in stacks) == 1
    assert max(line["blocked_s"] for line in logs if line["event"] == "event_loop_freed") >= 1


@pytest.mark.parametrize(
    ("soft", "hard", "what"),
    [
        (timedelta(), None, "soft_timeout: 0 s is not above zero"),
        (None, -SHORT, "hard_timeout: -0.2 s is not above zero"),
        (SHORT * 2, SHORT, "soft_timeout: 0.4 s is above hard_timeout, 0.2 s"),
    ],
)
async def test_timeouts_that_make_no_sense_are_refused(
    soft: timedelta | None, hard: timedelta | None, what: str
) -> None:
    async def handle(_: Message) -> None: ...

    with pytest.raises(ConfigurationError, match=what):
        Consumer(Topology("orders", ["1s"]), handle, url="amqp://127.0.0.1/", soft_timeout=soft, hard_timeout=hard)


@QUORUM
async def test_a_timeout_above_the_brokers_is_warned_of(bench: Bench) -> None:
    topology = await bench.declared()

    async def handle(_: Message) -> None: ...

    for prefetch, hard, warned in ((10, 31, True), (10, 29, False), (20, 29, True), (None, 15, False)):
        with structlog.testing.capture_logs() as logs:
            await bench.drain(topology, handle, prefetch=prefetch, hard_timeout=timedelta(minutes=hard))
        assert any(line["event"] == "timeout_above_brokers" for line in logs) is warned


@QUORUM
async def test_a_soft_timeout_that_does_nothing_is_told_at_the_start(bench: Bench) -> None:
    topology = await bench.declared()

    with structlog.testing.capture_logs() as logs:
        await bench.drain(topology, print, soft_timeout=SHORT)

    (told,) = [line for line in logs if line["event"] == "soft_timeout_ignored"]
    assert (told["queue"], told["soft_timeout_s"], told["hard_timeout_s"]) == (topology.name, 0.2, 900)
