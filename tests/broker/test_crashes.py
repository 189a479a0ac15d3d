"""Consumers that die without a goodbye, brokers that restart: nothing is lost, and nothing is counted twice."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from rabbitdlq import Connection, DLQManager, Message, Permanent, Topology
from rabbitdlq.local_broker import LocalBroker
from rabbitdlq.local_broker.home import NodeHome
from rabbitdlq.local_broker.setup import environment, server_program
from tests.broker.kit import Bench, Raw, until
from tests.broker.looks import all_empty, is_told, publish_many, rests
from tests.broker.proxy import Proxy, consuming, parking
from tests.broker.worker import Order, WorkerProcess, worker_process


async def test_a_consumer_killed_in_the_middle_loses_nothing_and_restarted_it_finishes(
    bench: Bench, tmp_path: Path
) -> None:
    topology = await bench.declared(["100ms", "150ms"])
    dead = set(range(0, 60, 3))
    before = await _park_one(bench, topology)
    # the first worker has no hand free for what comes behind four that are held: it cannot be through
    held = range(44, 48)
    orders = [Order(n, failures=99 if n in dead else 0, takes=0.01, held=1 if n in held else 0) for n in range(60)]
    await publish_many(bench, topology, map(asdict, orders))

    async with worker_process(bench.url, topology, tmp_path / "first", "first", concurrency=4) as first:
        await until(lambda: first.count("failed") >= 10, "the first worker is in the middle")
        await first.kill()
    assert not await all_empty(bench, topology), "it was killed too late to prove anything"
    async with worker_process(bench.url, topology, tmp_path / "second", "second", drain=True, careful=True) as second:
        assert await second.ended() == 0

    assert await all_empty(bench, topology)
    handled = {run.n for run in first.runs + second.runs if run.what == "succeeded"}
    assert handled == set(range(60)) - dead
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
    assert letters[0].id == before
    parked = letters[1:]
    # the death between confirm and ack may park twice, under one park id
    assert {letter.payload["n"] for letter in parked} == dead
    assert len({letter.park_id for letter in parked}) == len(dead)
    for letter in parked:
        assert letter.attempts == 3
        assert [record.attempt for record in letter.history] == [1, 2, 3]


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_attempts_are_three_in_total_when_the_worker_changes_between_them(bench: Bench, tmp_path: Path) -> None:
    """C35: a count kept in a process's memory starts again with the process."""
    topology = await bench.declared(["1s", "100ms"])
    await publish_many(bench, topology, [asdict(Order(1, failures=99, held=2))])

    async with worker_process(bench.url, topology, tmp_path / "a", "a") as a:

        async def over() -> bool:
            """It waits for the second attempt, or this worker has begun that and comes to no end of it."""
            return a.count("started") == 2 or await bench.raw.count(topology.rungs[0].queue) == 1

        await until(over, "the first attempt")
        await a.kill()
    async with worker_process(bench.url, topology, tmp_path / "b", "b", careful=True) as b:
        await rests(bench, topology.dlq, 1)

    assert [(run.worker, run.attempt) for run in a.runs + b.runs if run.what == "failed"] == [
        ("a", 1),
        ("b", 2),
        ("b", 3),
    ]
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    is_told(letter, 3)
    assert [record.worker for record in letter.history] == ["a", "b", "b"]


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_consumer_killed_after_the_last_failure_and_before_parking_parks_it_once_when_another_comes(
    bench: Bench, tmp_path: Path
) -> None:
    topology = await bench.declared(["100ms", "150ms"])
    async with Proxy(bench.url) as proxy:
        async with worker_process(proxy.url, topology, tmp_path / "doomed", "doomed") as doomed:
            await publish_many(bench, topology, [asdict(Order(1, failures=99, held=3))])
            await until(lambda: doomed.count("started") == 3, "the last attempt")
            proxy.freeze(parking, ("broker",))
            doomed.go()
            await until(lambda: doomed.count("failed") == 3, "the last failure")
            await doomed.kill()
        proxy.cut()
    await rests(bench, topology.name, 1)
    assert await bench.raw.count(topology.dlq) == 0

    async with _heir(bench, topology, tmp_path) as heir:
        assert await heir.ended() == 0

    assert [run.attempt for run in heir.runs if run.what == "failed"] == [3]
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    is_told(letter, 3)
    assert [record.worker for record in letter.history] == ["doomed", "doomed", "heir"]


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_kill_between_the_publish_of_a_park_and_its_confirm_loses_none_of_200(
    bench: Bench, tmp_path: Path
) -> None:
    """C8: acked before the confirm, the letters that the broker had not taken would be gone."""
    topology = await bench.declared(["100ms"])
    # some fail for the last time when the line is frozen, however late that is
    orders = (Order(n, failures=99, held=0 if n % 10 else 2) for n in range(200))
    await publish_many(bench, topology, map(asdict, orders))
    async with Proxy(bench.url) as proxy:
        async with worker_process(proxy.url, topology, tmp_path / "doomed", "doomed", concurrency=200) as doomed:
            await until(lambda: doomed.count("failed") >= 220, "parks are under way")
            proxy.freeze(parking)
            before = doomed.count("failed")
            doomed.go()
            await until(lambda: doomed.count("failed") > before, "failures whose park is on its way")
            await doomed.kill()
        proxy.cut()
    async with _heir(bench, topology, tmp_path) as heir:
        assert await heir.ended() == 0
    await _are_200_letters(bench, topology)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_kill_between_the_confirm_of_a_park_and_its_ack_parks_twice_but_shows_and_replays_one(
    bench: Bench, tmp_path: Path
) -> None:
    """C8: the other way round, published and not acked: more than 200 lie in the queue, marked as copies."""
    topology = await bench.declared(["100ms"])
    async with Proxy(bench.url) as proxy:
        async with worker_process(proxy.url, topology, tmp_path / "doomed", "doomed", concurrency=300) as doomed:
            orders = (Order(n, failures=99, held=2 if n % 2 else 0) for n in range(200))
            await publish_many(bench, topology, map(asdict, orders))
            await until(lambda: doomed.count("started") == 400, "parks are under way, and 100 are held before theirs")
            proxy.freeze(consuming, ("broker",))
            doomed.go()
            await until(lambda: _more_than(bench, topology.dlq, 120), "parks without acks")
            await doomed.kill()
        proxy.cut()
    async with _heir(bench, topology, tmp_path) as heir:
        assert await heir.ended() == 0
    total = await bench.raw.count(topology.dlq)
    assert total > 200, "no letter was parked twice: this run proves nothing"
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
        assert {letter.payload["n"] for letter in letters} == set(range(200))
        assert len({letter.park_id for letter in letters}) == 200
        if (4, 0) <= bench.raw.connection.version < (4, 3):
            return  # these call every message from a rung redelivered: which of two is the copy cannot be told
        assert len(letters) == 200
        report = await dlq.replay_all()
    assert (report.done, report.duplicates) == (200, total - 200)
    await rests(bench, topology.name, 200)
    assert await bench.raw.count(topology.dlq) == 0


async def test_a_broker_that_restarts_or_is_killed_comes_back_with_every_letter_and_its_consumers_go_on(
    private_node: LocalBroker, tmp_path: Path
) -> None:
    """C33: a copy that was made transient by a retry, a park or a replay would be gone."""
    url = private_node.address().url
    async with _bench(url) as bench:
        resting = await bench.declared(["10m"])
        await _put_one_everywhere(bench, resting)
        busy = await bench.declared(["100ms", "2s"])
        async with worker_process(url, busy, tmp_path / "w", "w") as worker:
            await publish_many(bench, busy, (asdict(Order(n, failures=99)) for n in range(20)))
            await until(lambda: worker.count("failed") >= 30, "all of them have failed, some twice")
            if bench.raw.connection.version < (3, 13):
                # killed under load, 3.10.8 itself has lost messages between two rungs (12 of 20, in one run of ten):
                # never handed out again, in no queue any more; the README says so
                await asyncio.to_thread(private_node.restart)
            else:
                private_node.kill()
                await asyncio.to_thread(private_node.up)
            async with _bench(url) as again:
                async with again.dlq(busy) as dlq:
                    await _until_all_dead(private_node, lambda: _all_dead(again, busy, dlq, 20))
                assert worker.running
            await worker.kill()
            private_node.kill()
            await asyncio.to_thread(private_node.up)
            await asyncio.to_thread(_control, private_node, "eval", _ELECT)
            async with _bench(url) as again:
                for queue in (resting.name, resting.rungs[0].queue, resting.dlq):
                    taken = await again.raw.take(queue)
                    assert taken is not None, f"the message in {queue} is gone"
                    assert taken[1].delivery_mode == 2
                again.raw.topologies += [resting, busy]
                await again.raw.delete_everything()


async def _until_all_dead(node: LocalBroker, all_dead: Callable[[], Awaitable[bool]]) -> None:
    """After a kill, RabbitMQ 3.10 leaves one quorum queue in some twenty without a leader, until it is told to elect.

    Such a queue is no business of this test; the README says what to do about it. Where a leader is, nothing happens.
    """
    for _ in range(6):
        await asyncio.to_thread(_control, node, "eval", _ELECT)
        with contextlib.suppress(AssertionError):
            await until(all_dead, "every message is dead, and nothing is left", 15)
            return
    queues = _control(node, "list_queues", "name", "messages_ready", "messages_unacknowledged", "messages", "consumers")
    raise AssertionError(f"not every message is dead:\n{queues}\n{_control(node, 'eval', 'ets:tab2list(ra_state).')}")


_ELECT = "[ra:trigger_election({Name, node()}) || {Name, follower} <- ets:tab2list(ra_state)]."


def _control(node: LocalBroker, *words: str) -> str:
    home = NodeHome(node.status().home)
    state, server = home.read(), server_program()
    assert state is not None
    assert server is not None
    command = [str(server.with_name("rabbitmqctl")), *words]
    return subprocess.run(
        command, env=environment(home, state), check=True, capture_output=True, text=True, timeout=60
    ).stdout


@asynccontextmanager
async def _bench(url: str) -> AsyncIterator[Bench]:
    async with await Connection.open(url, "rabbitdlq tests") as connection:
        yield Bench(url, Raw(connection), "quorum")


async def _put_one_everywhere(bench: Bench, topology: Topology) -> None:
    """One message was replayed and waits, one has failed and is on the ladder, one is dead."""

    async def handler(message: Message) -> None:
        if message.payload == "retry":
            raise RuntimeError
        raise Permanent

    await bench.send(topology, "replay", "retry", "park")
    async with bench.running(topology, handler):
        await rests(bench, topology.dlq, 2)
        await rests(bench, topology.rungs[0].queue, 1)
    async with bench.dlq(topology) as dlq:
        assert (await dlq.replay_one()).done == 1


async def _all_dead(bench: Bench, topology: Topology, dlq: DLQManager, count: int) -> bool:
    """At least one letter of each; a broker killed while it dead-letters may do it again, which makes two of one."""
    if await dlq.count() < count or not await all_empty(bench, topology):
        return False
    return {letter.payload["n"] for letter in await dlq.peek_all()} == set(range(count))


def _heir(bench: Bench, topology: Topology, folder: Path) -> AbstractAsyncContextManager[WorkerProcess]:
    """Who does what a killed one left."""
    return worker_process(bench.url, topology, folder / "heir", "heir", drain=True, concurrency=200, careful=True)


async def _more_than(bench: Bench, queue: str, count: int) -> bool:
    return await bench.raw.count(queue) > count


async def _are_200_letters(bench: Bench, topology: Topology) -> None:
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
    assert {letter.payload["n"] for letter in letters} == set(range(200))
    assert len({letter.park_id for letter in letters}) == 200


async def _park_one(bench: Bench, topology: Topology) -> str:
    async with bench.dlq(topology) as dlq:
        return await dlq.push({"n": -1}, "of before")
