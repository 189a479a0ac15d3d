"""What a consumer says of itself while the broker, the network and its handlers do what they do."""

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest

from rabbitdlq import ConsumerGroup, Message, Permanent
from rabbitdlq.consumer.health import Health
from rabbitdlq.status import StatusServer
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, consumed
from tests.broker.proxy import Proxy

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])


async def test_health_turns_red_when_the_broker_cancels_the_consumer_and_green_when_it_is_back(bench: Bench) -> None:
    """C10: the queue was deleted, the worker idled, and every probe was content."""
    topology = await bench.declared()
    handled: list[str] = []
    seen: list[Health] = []

    async def handler(message: Message) -> None:
        handled.append(message.payload)

    async with bench.running(topology, handler) as consumer:
        assert consumer.health().status == "down", "it does not consume yet"
        await until(lambda: consumer.health().status == "ok", "it consumes")
        channel = await bench.raw.channel()
        began = time.monotonic()
        await channel.queue_delete(topology.name)
        await channel.close()

        def red() -> bool:
            seen.append(consumer.health())
            return seen[-1].status == "down"

        await until(red, "it is told of", 5)
        assert time.monotonic() - began < 5
        assert "cancelled" in seen[-1].check("consuming").text
        assert seen[-1].live, "a restart would help nobody"
        await until(lambda: consumer.health().status == "ok", "it consumes again", 15)
        assert await consumed(bench, topology.name)
        await bench.send(topology, "after")
        await until(lambda: handled, "the message after")
        assert consumer.signs.reconnects == 1
    assert (consumer.health().status, consumer.health().live) == ("down", False)


async def test_a_network_that_freezes_with_messages_in_flight_is_survived_and_told_of(bench: Bench) -> None:
    """C22: three heartbeats of silence, then all comes back but the consuming."""
    topology = await bench.declared(["10m"])
    begun: list[str] = []
    hold = asyncio.Event()

    async def handler(message: Message) -> None:
        begun.append(message.payload)
        if message.payload != "after":
            await hold.wait()
        if message.payload == "hopeless":
            raise Permanent("hopeless")

    # with the usual heartbeats the same takes 27 seconds to be noticed
    async with Proxy(bench.url, heartbeat=1) as proxy, bench.running(topology, handler, url=proxy.url) as consumer:
        sent = await bench.send(topology, "held", "hopeless")
        await until(lambda: len(begun) == 2, "two are in flight")
        lines = proxy.accepted
        proxy.freeze()
        await until(lambda: consumer.health().status == "down", "it is told of", 45)
        assert consumer.health().live
        # until it has tried to come back: the broker has missed its heartbeats as well by then
        await until(lambda: proxy.accepted > lines, "it tries another connection", 30)
        hold.set()
        await until(lambda: consumer.summary.too_late == 2, "what was in flight is the broker's again")
        proxy.thaw()
        thawed = time.monotonic()
        await bench.send(topology, "after")
        await until(lambda: consumer.health().status != "down", "it consumes again", 30)
        await until(lambda: "after" in begun, "the message after", 30)
        assert time.monotonic() - thawed < 30
        await until(lambda: consumer.summary.parked == 1, "the one is parked")
        await until(lambda: consumer.summary.succeeded == 2, "the others succeed")
    assert sorted(begun) == ["after", "held", "held", "hopeless", "hopeless"]
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        assert [letter.id for letter in await dlq.peek_all()] == [sent[1]]


async def test_a_network_that_does_not_come_back_is_told_of_and_tried_again(bench: Bench) -> None:
    topology = await bench.declared()

    async def handler(_: Message) -> None:
        pass

    async with Proxy(bench.url) as proxy, bench.running(topology, handler, url=proxy.url) as consumer:
        await until(lambda: consumer.health().status == "ok", "it consumes")
        proxy.refuse()
        proxy.cut()
        await until(lambda: proxy.refused >= 1, "it tries again")
        lost = consumer.health()
        assert (lost.status, lost.live) == ("down", True)
        since = lost.check("consuming").since
        assert since is not None
        assert since < datetime.now(UTC)
        await until(lambda: proxy.refused >= 3, "and again")
        assert consumer.health().check("consuming").since == since, "a failed try is no new beginning"
        proxy.accept()
        await until(lambda: consumer.health().status == "ok", "it consumes again")


async def test_a_blocked_event_loop_and_handlers_that_take_too_long_are_told_of(bench: Bench) -> None:
    """The event loop cannot answer for itself: the status server has a thread of its own."""
    topology = await bench.declared(["10m"])
    answers: list[tuple[int, dict[str, object]]] = []
    hold = asyncio.Event()

    def ask(path: str) -> tuple[int, dict[str, object]]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def until_it_is_told() -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end and not (answers and answers[-1][0] == 503):
            answers.append(ask("/health"))
            time.sleep(0.05)

    async def handler(message: Message) -> None:
        if message.payload == "blocks":
            asking = asyncio.get_running_loop().run_in_executor(None, until_it_is_told)
            while not asking.done() and not (answers and answers[-1][0] == 503):
                time.sleep(0.05)
            return
        with contextlib.suppress(asyncio.CancelledError):
            await hold.wait()
        await hold.wait()

    soft, hard = timedelta(seconds=0.4), timedelta(seconds=1)
    async with bench.running(topology, handler, soft_timeout=soft, hard_timeout=hard) as consumer:
        with StatusServer([consumer], 0) as server:
            await until(lambda: consumer.health().status == "ok", "it consumes")
            await bench.send(topology, "blocks")
            await until(lambda: consumer.summary.succeeded == 1, "the handler has ended")
            code, body = answers[-1]
            assert code == 503
            assert "event_loop" in json.dumps(body)
            assert (await asyncio.to_thread(ask, "/live"))[0] == 200
            await bench.send(topology, "hangs")
            await until(lambda: "1 beyond" in consumer.health().check("handlers").text, "it is overdue")
            await until(lambda: "1 abandoned" in consumer.health().check("handlers").text, "it is abandoned")
            assert (await asyncio.to_thread(ask, "/health"))[1]["status"] == "degraded"
            hold.set()
            await until(lambda: consumer.health().check("handlers").status == "ok", "it has ended after all")


async def test_a_queue_that_is_drained_is_well_while_another_one_of_its_group_is_at_work(bench: Bench) -> None:
    """The process was told to be beyond help as soon as its quickest queue was done."""
    quick, slow = await bench.declared(["100ms"]), await bench.declared(["100ms"])
    await bench.send(quick, 1)
    await bench.send(slow, 1)
    hold = asyncio.Event()

    async def handler(message: Message) -> None:
        if message.queue == slow.name:
            await hold.wait()

    consumers = [bench.consumer(topology, handler, drain=True) for topology in (quick, slow)]

    def ask(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    with StatusServer(consumers, 0) as server:
        running = asyncio.create_task(ConsumerGroup(consumers).run())
        await until(lambda: consumers[0].signs.vitals().phase == "ended", "one has nothing more to do", 20)
        assert [await asyncio.to_thread(ask, path) for path in ("/live", "/health")] == [200, 200]
        assert consumers[0].health().check("consuming").text == "drained: everything is done"
        assert (await asyncio.to_thread(ask, "/metrics")) == 200
        hold.set()
        await asyncio.wait_for(running, 20)
    assert [consumer.health().status for consumer in consumers] == ["ok", "ok"]


async def test_one_that_was_to_drain_and_was_stopped_before_is_not_well(bench: Bench) -> None:
    topology = await bench.declared(["10m"])
    await bench.send(topology, 1)

    async def handler(_: Message) -> None:
        raise RuntimeError("again")

    async with bench.running(topology, handler, drain=True) as consumer:
        await until(lambda: consumer.summary.retried == 1, "it waits on the ladder")
    assert (consumer.health().status, consumer.health().live) == ("down", False)
