"""Memory and disk alarms: the broker takes no publishes, and everything else has to go on.

They run on a private node, because an alarm is one of the whole broker. Another that may be alarmed is named by
``RABBITDLQ_ALARM_URL`` and ``RABBITDLQ_ALARM_CTL``, the command that is its ``rabbitmqctl``.
"""

import asyncio
import os
import shlex
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from rabbitdlq import Connection, Message, Permanent
from rabbitdlq.idempotency import MemoryStore
from rabbitdlq.local_broker import LocalBroker
from rabbitdlq.local_broker.home import NodeHome
from rabbitdlq.local_broker.setup import environment, server_program
from tests.broker.kit import Bench, Raw, until
from tests.broker.looks import all_empty, is_told, rests
from tests.broker.operator_kit import events_of

RAISE = {"memory": ["set_vm_memory_high_watermark", "0.000001"], "disk": ["set_disk_free_limit", "900000GB"]}
LOWER = {"memory": ["set_vm_memory_high_watermark", "0.4"], "disk": ["set_disk_free_limit", "50MB"]}


class Alarms:
    """Raises and lowers the alarms of one broker."""

    def __init__(self, url: str, command: Sequence[str], surroundings: dict[str, str] | None) -> None:
        self.url = url
        self._command = command
        self._surroundings = surroundings
        self._raised: set[str] = set()

    async def raised(self, kind: str) -> None:
        self._raised.add(kind)
        await self._run(RAISE[kind])

    async def lowered(self, kind: str) -> None:
        await self._run(LOWER[kind])
        self._raised.discard(kind)

    async def all_lowered(self) -> None:
        for kind in list(self._raised):
            await self.lowered(kind)

    async def _run(self, words: Sequence[str]) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, *words, env=self._surroundings, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()


@pytest.fixture
async def alarms(request: pytest.FixtureRequest) -> AsyncIterator[Alarms]:
    """A broker that may be alarmed; it is not, afterwards."""
    if "RABBITDLQ_ALARM_URL" in os.environ:
        found = Alarms(os.environ["RABBITDLQ_ALARM_URL"], shlex.split(os.environ["RABBITDLQ_ALARM_CTL"]), None)
    else:
        node: LocalBroker = request.getfixturevalue("private_node")
        home = NodeHome(node.status().home)
        state, server = home.read(), server_program()
        assert state is not None
        assert server is not None
        found = Alarms(node.address().url, [str(server.with_name("rabbitmqctl"))], environment(home, state))
    try:
        yield found
    finally:
        await found.all_lowered()


@pytest.fixture
async def bench(alarms: Alarms) -> AsyncIterator[Bench]:
    """A workplace on that broker."""
    async with await Connection.open(alarms.url, "rabbitdlq tests") as connection:
        raw = Raw(connection)
        yield Bench(alarms.url, raw, "quorum")
        await raw.delete_everything()


@pytest.mark.parametrize("kind", ["memory", "disk"])
async def test_all_goes_on_under_an_alarm_and_nothing_is_lost(alarms: Alarms, bench: Bench, kind: str) -> None:
    """Handlers waited for the journal's deadline at every failure, and parks that had been given up came after all."""
    topology = await bench.declared(["100ms", "200ms"])
    go = asyncio.Event()
    dead_runs: list[float] = []

    async def handler(message: Message) -> None:
        if message.payload == "before":
            return
        await go.wait()
        if message.payload == "fails once" and message.attempt == 1:
            raise RuntimeError("once")
        if message.payload == "hopeless":
            dead_runs.append(time.monotonic())
            raise Permanent("hopeless")
        if message.payload == "fails always":
            raise RuntimeError("always")

    sent = {
        payload: await bench.send(topology, *[payload] * count)
        for payload, count in {"succeeds": 40, "fails once": 40, "hopeless": 10, "fails always": 10}.items()
    }
    patience = timedelta(seconds=2)
    with capture_logs() as logs:
        async with bench.running(topology, handler, concurrency=4, park_timeout=patience, breaker=None) as consumer:
            await until(lambda: consumer.health().check("consuming").status == "ok", "it consumes")
            await alarms.raised(kind)
            began = time.monotonic()
            go.set()
            await until(lambda: consumer.health().check("parking").status == "degraded", "it is told of", 5)
            parking = consumer.health().check("parking")
            assert f"low on {kind}" in parking.text
            assert consumer.health().check("journal").status == "degraded"
            assert consumer.health().status == "degraded"
            assert consumer.health().live
            await until(lambda: consumer.summary.succeeded == 80, "successes are acked, after failures too", 15)
            # all that shall be parked is left to the broker, which parks it bare at the end of the ladder
            await until(lambda: consumer.summary.left_to_broker >= 20, "parks fall back", 15)

            async def all_parked() -> bool:
                return await bench.raw.count(topology.dlq) == 20

            await until(all_parked, "the broker parks", 15)
            took = time.monotonic() - began
            # one wait of the parks' patience, not one a message; and none of the journal's five seconds
            assert took < 10, took
            assert await all_empty(bench, topology)
            await alarms.lowered(kind)
            await until(lambda: consumer.health().check("journal").status == "ok", "the journal goes on")
            await until(lambda: "blocked" not in consumer.health().check("parking").text, "parking goes on")
            (late,) = await bench.send(topology, "hopeless")
            await until(lambda: consumer.summary.parked == 1, "parks are whole again", 10)
            await asyncio.sleep(0.5)  # what was given up must not arrive after all: it would have by now
    assert await bench.raw.count(topology.dlq) == 21
    assert await all_empty(bench, topology)
    assert consumer.signs.writer.lost == 0
    told = [event.message_id or "" for event in await events_of(bench, topology, "failed")]
    thrice = [*sent["hopeless"], *sent["fails always"]]
    assert sorted(told) == sorted([*sent["fails once"], *thrice * 3, late]), "each attempt is told of, once"
    async with bench.dlq(topology) as dlq:
        assert sorted(letter.id for letter in await dlq.peek_all()) == sorted([*thrice, late])
        is_told(await dlq.get(thrice[-1]), 3)
    assert sum(line["event"] == "journal_blocked" for line in logs) == 1
    assert not [line for line in logs if line["event"] == "journal_unwritable"]


async def test_a_consumer_that_starts_under_an_alarm_works(alarms: Alarms, bench: Bench) -> None:
    topology = await bench.declared(["100ms"])
    await bench.send(topology, *["x"] * 20)
    await alarms.raised("memory")

    async def handler(message: Message) -> None:
        if message.attempt == 1:
            raise RuntimeError("once")

    async with bench.running(topology, handler, breaker=None) as consumer:
        await until(lambda: consumer.summary.succeeded == 20, "all of it is worked on", 15)
        await alarms.lowered("memory")
        await until(lambda: consumer.health().check("journal").status == "ok", "the journal goes on", 10)
    assert await all_empty(bench, topology)
    assert len(await events_of(bench, topology, "failed")) == 20


async def test_a_park_that_waits_is_made_when_a_short_alarm_is_over(alarms: Alarms, bench: Bench) -> None:
    topology = await bench.declared(["10m"])
    (sent,) = await bench.send(topology, "x")
    go = asyncio.Event()

    async def handler(_: Message) -> None:
        await go.wait()
        raise Permanent("hopeless")

    async with bench.running(topology, handler) as consumer:
        await until(lambda: consumer.health().in_flight == 1, "the handler runs")
        await alarms.raised("disk")
        go.set()
        await until(lambda: consumer.health().check("parking").status == "degraded", "it is blocked", 5)
        await alarms.lowered("disk")
        await until(lambda: consumer.summary.parked == 1, "it is parked, whole", 10)
    async with bench.dlq(topology) as dlq:
        assert [(letter.id, letter.reason) for letter in await dlq.peek_all()] == [(sent, "permanent")]


async def test_a_consumer_that_is_stopped_under_an_alarm_ends_and_says_what_the_journal_has_lost(
    alarms: Alarms, bench: Bench
) -> None:
    topology = await bench.declared(["10m"])
    await bench.send(topology, *["x"] * 5)
    await alarms.raised("memory")

    async def handler(_: Message) -> None:
        raise RuntimeError("boom")

    with capture_logs() as logs:
        async with bench.running(topology, handler, breaker=None) as consumer:
            await until(lambda: consumer.summary.retried == 5, "all have failed", 10)
            await until(lambda: consumer.health().check("journal").status == "degraded", "it is blocked", 5)
            began = time.monotonic()
        assert time.monotonic() - began < 5
    assert [line["lost_events"] for line in logs if line["event"] == "journal_events_lost"] == [5]
    assert consumer.signs.writer.lost == 5


@pytest.mark.parametrize("patience", ["200ms", "5m"])
async def test_what_is_to_be_postponed_under_an_alarm_is_kept_and_holds_up_nobody(
    alarms: Alarms, bench: Bench, patience: str
) -> None:
    """Each of them held a worker for as long as the alarm lasted: with as many as there are, consuming stopped.

    Neither the first try holds one, which may take its whole time (here more than this test has), nor what comes after.
    """
    topology = await bench.declared(["300ms"])
    store = MemoryStore()
    await store.open()
    busy = await bench.send(topology, *["busy"] * 4)
    tokens = {id: (await store.claim(f"{topology.name}:{id}", timedelta(minutes=20))).token for id in busy}
    await bench.send(topology, *["good"] * 30)
    at_once, running, handled = 0, 0, list[str]()

    async def handler(message: Message) -> None:
        nonlocal at_once, running
        running += 1
        at_once = max(at_once, running)
        await asyncio.sleep(0.02)
        running -= 1
        handled.append(message.payload)

    await alarms.raised("memory")
    options = {"idempotency": store, "concurrency": 2, "prefetch": 10, "park_timeout": patience}
    async with bench.running(topology, handler, **options) as consumer:
        await until(lambda: len(handled) == 30, "the others are worked on", 20)
        await until(lambda: "4 messages wait for a rung" in consumer.health().check("parking").text, "that is told", 5)
        assert "low on memory" in consumer.health().check("parking").text
        assert (at_once, consumer.health().in_flight, consumer.summary.postponed) == (2, 0, 0)
        if patience == "5m":
            await alarms.lowered("memory")
            await until(lambda: consumer.summary.postponed >= 4, "they are postponed when it is over", 20)
            for id, token in tokens.items():
                await store.release(f"{topology.name}:{id}", token)
            await until(lambda: handled.count("busy") == 4, "and worked on", 20)
            await until(lambda: consumer.health().check("parking").status == "ok", "nothing is kept any more", 5)
    assert (at_once, len(handled)) == (2, 34 if patience == "5m" else 30)
    if patience == "200ms":
        assert (consumer.summary.released, consumer.summary.too_late) == (4, 0), "the end gives them back"
        await rests(bench, topology.name, 4)
