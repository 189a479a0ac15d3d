"""Handlers in processes: what one of them does to itself is its own attempt's failure, and nothing else."""

import asyncio
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import structlog.testing

from rabbitdlq import ConfigurationError, Consumer, Message, Topology, names
from rabbitdlq.errors import HandlersAbandoned
from tests.broker.kit import Bench, until
from tests.broker.looks import rests
from tests.unit import isolated

QUORUM = pytest.mark.parametrize("queue_type", ["quorum"])
SHORT = timedelta(milliseconds=300)


def alive_children() -> set[int]:
    """The processes that a fork server of this process has made."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rsplit(")", 1)[1].split()[:2]
            command = Path(f"/proc/{parent}/cmdline").read_text()
            mother = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[1]
        except (OSError, ValueError):
            continue
        if state != "Z" and "forkserver" in command and int(mother) == os.getpid():
            found.add(int(entry.parent.name))
    return found


@QUORUM
async def test_crashes_park_their_own_messages_with_a_readable_history_and_neighbours_succeed(
    bench: Bench, tmp_path: Path
) -> None:
    topology = await bench.declared()
    path = str(tmp_path / "noted")
    crashes = [{"do": "segfault"}, {"do": "exit", "code": 3}, {"do": "exit", "code": 0}, {"do": "memory"}]
    stuck = {"do": "deaf", "path": str(tmp_path / "deaf")}
    fine = [{"do": "wait", "seconds": 0.02 * number, "path": path} for number in range(12)]
    ids = await bench.send(topology, *crashes, stuck)
    await bench.send(topology, *fine)

    consumer = await bench.drain(
        topology,
        isolated.plain,
        isolation="process",
        max_memory="256MiB",
        concurrency=4,
        # so long that none of the others runs into them on a machine that stands still for a moment
        soft_timeout=timedelta(seconds=2.5),
        hard_timeout=timedelta(seconds=2.7),
        breaker=None,
    )

    summary = consumer.summary
    assert (summary.succeeded, summary.retried, summary.parked, summary.too_late) == (12, 10, 5, 0)
    assert Path(path).read_text().count("cleaned up") == 12, "each neighbour ran once, to its end"
    async with bench.dlq(topology) as dlq:
        letters = {letter.id: letter for letter in await dlq.peek_all()}
    told = [
        (letters[id].reason, letters[id].error.type, letters[id].error.message)  # type: ignore[union-attr]
        for id in ids
    ]
    assert told == [
        (names.CRASHED, "HandlerDied", "the process of the handler ended with SIGSEGV"),
        (names.CRASHED, "HandlerDied", "the process of the handler ended with exit code 3"),
        (names.CRASHED, "HandlerDied", "the process of the handler ended with exit code 0"),
        (names.EXHAUSTED, "MemoryError", ""),
        (names.TIMEOUT, "HandlerTimeout", "the handler took longer than 2.7 s"),
    ]
    for id, letter in letters.items():
        assert letter.attempts == 3
        assert [record.attempt for record in letter.history] == [1, 2, 3]
        assert len({record.error_type for record in letter.history}) == 1, id
    for id, place in ((ids[0], "in _mischief"), (ids[3], "in _mischief"), (ids[4], "in plain")):
        error = letters[id].error
        assert error is not None
        assert place in (error.traceback or ""), "where it was"
    assert not alive_children()


@QUORUM
async def test_at_the_soft_timeout_a_plain_function_may_clean_up(bench: Bench, tmp_path: Path) -> None:
    topology = await bench.declared(["100ms"])
    path = tmp_path / "noted"
    await bench.send(topology, {"do": "wait", "path": str(path)})

    await bench.drain(topology, isolated.plain, isolation="process", soft_timeout=SHORT)

    assert path.read_text().splitlines()[1::2] == ["cleaned up"] * 2
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.reason, letter.attempts) == (names.TIMEOUT, 2)


@QUORUM
@pytest.mark.parametrize("do", ["wait", "deaf"])
async def test_told_to_stop_handlers_are_interrupted_and_their_messages_keep_their_attempts(
    bench: Bench, do: str, tmp_path: Path
) -> None:
    topology = await bench.declared()
    path = tmp_path / "noted"
    await bench.send(topology, *[{"do": do, "path": str(path)}] * 2)
    consumer = bench.consumer(topology, isolated.plain, isolation="process", concurrency=2, grace=SHORT)
    task = asyncio.create_task(consumer.run())
    await until(lambda: path.exists() and len(path.read_text().splitlines()) == 2, "both run")
    began = path.read_text()

    consumer.stop()
    await asyncio.wait_for(task, 15)

    assert consumer.summary.released == 2
    assert ("cleaned up" in path.read_text()) is (do == "wait")
    await rests(bench, topology.name, 2)
    for line in began.splitlines():
        assert not Path(f"/proc/{line.split()[1]}").exists()


@QUORUM
async def test_in_threads_an_async_handler_that_blocks_does_not_stop_the_others(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(4))
    together = threading.Barrier(4)

    async def handle(_: Message) -> None:
        together.wait(10)  # on one event loop they would wait for each other for ever

    consumer = await bench.drain(topology, handle, isolation="thread")

    assert consumer.summary.succeeded == 4


@QUORUM
async def test_when_too_many_are_left_to_themselves_the_consumer_ends_with_an_error(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(12))
    release = threading.Event()

    def handle(_: Message) -> None:
        release.wait(30)

    consumer = bench.consumer(
        topology, handle, concurrency=4, soft_timeout=SHORT, hard_timeout=SHORT, breaker=None, grace=SHORT
    )
    with structlog.testing.capture_logs() as logs, pytest.raises(HandlersAbandoned, match="more than the 10 that"):
        await asyncio.wait_for(consumer.run(), 20)
    release.set()

    (told,) = [line for line in logs if line["event"] == "too_many_abandoned"]
    assert 10 < told["count"] <= 14, "four at most are given up at one look"


async def test_what_cannot_run_in_a_process_is_refused_at_once() -> None:
    async def handle(_: Message) -> None: ...

    with pytest.raises(ConfigurationError, match=r"handler: .* cannot be found by another process"):
        Consumer(Topology("orders", ["1s"]), handle, url="amqp://127.0.0.1/", isolation="process")
    with pytest.raises(ConfigurationError, match="max_memory: with isolation 'async'"):
        Consumer(Topology("orders", ["1s"]), handle, url="amqp://127.0.0.1/", max_memory="1GiB")
