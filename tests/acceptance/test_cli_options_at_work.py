"""Options that could be without effect and nobody would see it: each is seen doing what it says."""

import asyncio
import json
import time

from rabbitdlq import DLQManager, Message
from tests.acceptance.cli import HANDLERS, Shell
from tests.acceptance.test_status import ask, two_ports  # noqa: F401 - a fixture
from tests.broker.kit import until
from tests.broker.operator_kit import letters_left, park

SLOW = f"""{HANDLERS}
async def slow(message: Message) -> None:
    note(message, "started")
    try:
        await asyncio.sleep(50)
    except asyncio.CancelledError:
        note(message, "cancelled")
        if message.payload == "deaf":
            await asyncio.sleep(50)
        raise
"""
LOOKING = f"""{HANDLERS}
import sqlite3

async def looks(message: Message) -> None:
    with sqlite3.connect("done.db") as store:
        ((ends,),) = store.execute("SELECT ends FROM rabbitdlq_idempotency")
    note(message, f"{{ends / 1000 - time.time():.0f}}")

async def handle(message: Message) -> None:
    note(message, "succeeded")
"""


async def test_a_handler_that_is_too_slow_is_cancelled_and_one_that_is_deaf_is_given_up(shell: Shell) -> None:
    shell.write_topology(["100ms"])
    await shell.declare()
    shell.write("work.py", SLOW)
    await shell.bench.send(shell.topology, "deaf", "well-behaved")
    times = ("--soft-timeout", "200ms", "--hard-timeout", "900ms")
    began = time.monotonic()

    done = await shell("consume", shell.queue, "--handler", "work:slow", "--drain", "--no-breaker", *times)

    assert time.monotonic() - began < 45, "nobody waits for the fifty seconds of a handler"
    assert done.code == 0, done.err
    assert done.lines[-1] == "0 succeeded, 2 retried, 2 parked"
    assert sorted(what for what, _, _ in shell.noted()) == ["cancelled"] * 4 + ["started"] * 4
    listed = await shell("dlq", "list", shell.queue, "--json")
    errors = {letter["payload"]: letter["error"]["message"] for letter in listed.json}
    assert [letter["reason"] for letter in listed.json] == ["timeout"] * 2
    assert "0.2" in errors["well-behaved"]
    assert "0.9" in errors["deaf"]


async def test_what_was_done_is_not_done_again_and_a_claim_ends_with_its_lease(shell: Shell) -> None:
    await shell.declare()
    shell.write("work.py", LOOKING)
    consume = ("consume", shell.queue, "--drain", "--idempotency", "sqlite:done.db")

    async def send(id: str) -> None:
        for _ in range(2):
            await shell.raw.publish(shell.queue, b"1", message_id=id)

    await send("twice")
    usual = await shell(*consume, "--handler", "work:looks", "--concurrency", "1")
    (shell.folder / "done.db").unlink()
    await send("again")
    longer = await shell(*consume, "--handler", "work:looks", "--concurrency", "1", "--lease", "20m")

    for done in (usual, longer):
        assert (done.code, done.lines[-1]) == (0, "1 succeeded, 0 retried, 0 parked, 1 done before")
    leases = {id: int(seconds) for seconds, id, _ in shell.noted()}
    assert 900 < leases["twice"] <= 990, "the hard timeout and 90 s"
    assert 1_100 < leases["again"] <= 1_200


async def test_probes_are_answered_at_the_address_that_was_given(shell: Shell, two_ports: int) -> None:  # noqa: F811
    await shell.declare()
    shell.write("work.py", LOOKING)
    consume = ("consume", shell.queue, "--handler", "work:handle", "--status-port", str(two_ports))

    running = await shell.start(*consume, "--status-host", "127.0.0.2", "--log-format", "json")
    await running.says("status_served")

    def at(host: str) -> int:
        return ask(two_ports, "/live", host)[0]

    assert await asyncio.to_thread(at, "127.0.0.2") == 200
    assert await asyncio.to_thread(at, "127.0.0.1") == 0
    running.process.terminate()
    done = await running.end()
    served = next(json.loads(line) for line in done.lines if "status_served" in line)
    assert served["url"] == f"http://127.0.0.2:{two_ports}"


async def test_letters_go_through_an_exchange_with_the_key_that_was_given(shell: Shell) -> None:
    await shell.declare()
    exchange = await shell.raw.exchange(f"{shell.queue}-elsewhere")
    queues = [await shell.raw.queue(f"{shell.queue}-{name}") for name in ("blue", "green")]
    for queue in queues:
        await shell.raw.bind(queue, exchange, f"paint.{queue.rpartition('-')[2]}")
    ids = await park(shell.bench, shell.topology, b"1", b"2")

    words = ("--all", "--to-exchange", exchange, "--to-routing-key", "paint.green")
    done = await shell("dlq", "replay", shell.queue, *words)

    assert (done.code, done.lines[-1]) == (0, "replayed 2, stayed 0")
    assert [await letters_left(shell.bench, queue) for queue in queues] == [[], ids]


async def test_as_much_of_a_canary_may_fail_as_was_said(shell: Shell) -> None:
    await shell.declare()
    ids = await park(shell.bench, shell.topology, b'"bad"', b'"good"', b'"good"', b'"good"', b'"bad"', b'"good"')
    replay = ("dlq", "replay", shell.queue, "--all", "--canary", "2", "--json")

    async def handle(message: Message) -> None:
        if message.payload == "bad":
            raise LookupError("no address")

    async with shell.bench.running(shell.topology, handle):
        enough = await shell(*replay, "--abort-above", "50%")
        async with shell.bench.dlq(shell.topology) as dlq:
            await until(lambda: _count(dlq, 2), "the bad ones are back")
        await park(shell.bench, shell.topology, b'"good"', first=len(ids))
        too_much = await shell(*replay, "--abort-above", "49%")

    assert enough.code == 0, enough.err
    assert [enough.json[0][name] for name in ("done", "left", "aborted")] == [6, 0, None]
    assert too_much.code == 3, too_much.err
    assert [too_much.json[0][name] for name in ("done", "left")] == [2, 1]
    assert "more than 49%" in too_much.err


async def _count(dlq: DLQManager, count: int) -> bool:
    return await dlq.count() == count
