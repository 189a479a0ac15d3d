"""Once, not twice: messages that come again, and processes that die at each point in between."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rabbitdlq import ConfigurationError, Drop, Message, Permanent, Topology, names
from rabbitdlq.consumer import Breaker
from rabbitdlq.errors import AlreadyDone, IdempotencyError
from rabbitdlq.idempotency import Claim, MemoryStore
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, journal_of, rests
from tests.broker.once_worker import Job, done, prepare, run

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])

MINUTE = timedelta(minutes=1)


class Counting:
    """A handler that notes whom it saw, and does what it is told first."""

    def __init__(self, *steps: Exception | None) -> None:
        self.steps = list(steps)
        self.seen: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.seen.append(message)
        step = self.steps.pop(0) if self.steps else None
        if step is not None:
            raise step


async def test_a_message_that_comes_twice_is_handled_once(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    handler, store = Counting(), MemoryStore()
    await bench.send(topology, 1, message_id="a")
    await bench.send(topology, 1, message_id="a")
    await bench.send(topology, 2, message_id="b")
    consumer = await bench.drain(topology, handler, idempotency=store, concurrency=1)

    assert [message.payload for message in handler.seen] == [1, 2]
    assert [message.idempotency_key for message in handler.seen] == [f"{topology.name}:a", f"{topology.name}:b"]
    assert (consumer.summary.succeeded, consumer.summary.skipped) == (2, 1)
    assert await all_empty(bench, topology)


async def test_a_failure_gives_the_claim_back_and_a_parked_message_can_be_replayed(bench: Bench) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    handler, store = Counting(ValueError("1"), ValueError("2"), ValueError("3")), MemoryStore()
    await bench.send(topology, 1, message_id="a")
    await bench.drain(topology, handler, idempotency=store)
    async with bench.dlq(topology) as dlq:
        await dlq.replay_all()
    await bench.drain(topology, handler, idempotency=store)
    assert [(message.lap, message.attempt) for message in handler.seen] == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert (await store.claim(f"{topology.name}:a", MINUTE)).state == "done"


async def test_in_progress_elsewhere_waits_on_the_first_rung_and_spends_no_attempt(bench: Bench) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    handler, store = Counting(), MemoryStore()
    await store.open()
    claim = await store.claim(f"{topology.name}:a", MINUTE)
    await bench.send(topology, 1, message_id="a", headers={"mine": 1})
    async with bench.running(topology, handler, idempotency=store) as consumer:
        await until(lambda: consumer.summary.postponed >= 5, "it goes round more often than there are attempts")
        assert handler.seen == []
        await store.release(f"{topology.name}:a", claim.token)
        await until(lambda: consumer.summary.succeeded, "handled when the other has given it back")
    (message,) = handler.seen
    assert (message.attempt, message.lap, message.headers["mine"]) == (1, 1, 1)
    assert (message.exchange, message.routing_key) == ("", topology.name)
    assert await all_empty(bench, topology)


async def test_between_failures_it_keeps_its_count(bench: Bench) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    store = MemoryStore()
    handler = Counting(ValueError("1"), ValueError("2"), ValueError("3"))

    class Busy(MemoryStore):
        """Says "busy" every second time."""

        asked = 0

        async def claim(self, key: str, lease: timedelta) -> Claim:
            self.asked += 1
            return Claim("busy") if self.asked % 2 else await store.claim(key, lease)

        async def release(self, key: str, token: str) -> None:
            await store.release(key, token)

    await store.open()
    await bench.send(topology, 1, message_id="a")
    consumer = await bench.drain(topology, handler, idempotency=Busy())
    assert [message.attempt for message in handler.seen] == [1, 2, 3]
    assert (consumer.summary.postponed, consumer.summary.retried, consumer.summary.parked) == (3, 2, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert [record.attempt for record in letter.history] == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "state"), [(None, "done"), (Drop("no use"), "done"), (Permanent("no"), "new"), (AlreadyDone("x"), "done")]
)
async def test_what_becomes_of_the_claim(bench: Bench, error: Exception | None, state: str) -> None:
    topology = await bench.declared(["50ms"])
    store = MemoryStore()
    await bench.send(topology, 1, message_id="a")
    consumer = await bench.drain(topology, Counting(error), idempotency=store)
    assert (await store.claim(f"{topology.name}:a", MINUTE)).state == state
    assert consumer.summary.succeeded == (1 if error is None or isinstance(error, AlreadyDone) else 0)
    assert consumer.summary.retried == 0


async def test_a_message_without_an_id_runs_as_often_as_it_comes(bench: Bench) -> None:
    """Two messages that are equal are two: an id derived from their content must not make one of them."""
    topology = await bench.declared(["50ms", "60ms"])
    handler = Counting(ValueError("the first one fails"))
    await bench.raw.publish(topology.name, b"1")
    await bench.raw.publish(topology.name, b"1")
    await bench.drain(topology, handler, idempotency=MemoryStore(), concurrency=1)
    assert sorted(message.attempt for message in handler.seen) == [1, 1, 2]
    assert {message.idempotency_key for message in handler.seen} == {None}


async def test_the_key_can_be_a_function_of_the_message(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    handler = Counting()
    for n in range(3):
        await bench.send(topology, {"order": n // 2}, message_id=f"m{n}")
    await bench.drain(
        topology,
        handler,
        idempotency=MemoryStore(),
        idempotency_key=lambda message: f"order-{message.payload['order']}",
        concurrency=1,
    )
    assert [message.id for message in handler.seen] == ["m0", "m2"]


async def test_two_queues_of_one_event_share_a_store_and_each_does_its_own_work(bench: Bench) -> None:
    """The handler of the second one never ran: the key was done, by another queue's handler."""
    store = MemoryStore()
    for _ in range(2):
        topology, handler = await bench.declared(["50ms"]), Counting()
        for id in "ab":
            await bench.send(topology, {"order": 17}, message_id=id)
        consumer = await bench.drain(
            topology,
            handler,
            idempotency=store,
            idempotency_key=lambda message: f"order-{message.payload['order']}",
            concurrency=1,
        )
        assert [message.idempotency_key for message in handler.seen] == [f"{topology.name}:order-17"]
        assert (consumer.summary.succeeded, consumer.summary.skipped) == (1, 1)


async def test_a_store_that_is_down_spends_no_attempts_and_the_handler_does_not_run(bench: Bench) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    handler = Counting()

    class Down(MemoryStore):
        down = True

        async def claim(self, key: str, lease: timedelta) -> Claim:
            if self.down:
                raise IdempotencyError("idempotency store x: connection refused")
            return await super().claim(key, lease)

    store = Down()
    await bench.send(topology, 1, message_id="a")
    with capture_logs() as logs:
        async with bench.running(topology, handler, idempotency=store) as consumer:
            await until(lambda: consumer.summary.postponed >= 5, "it goes round more often than there are attempts")
            assert handler.seen == []
            store.down = False
            await until(lambda: consumer.summary.succeeded, "handled when the store is there again")
    assert [message.attempt for message in handler.seen] == [1]
    assert await all_empty(bench, topology)
    told = next(line for line in logs if line["event"] == "message_postponed")
    assert (told["log_level"], told["error"]) == ("warning", "idempotency store x: connection refused")


async def test_an_outage_of_the_store_opens_the_breaker(bench: Bench) -> None:
    topology = await bench.declared(["50ms", "60ms"])

    class Down(MemoryStore):
        async def claim(self, key: str, lease: timedelta) -> Claim:
            raise IdempotencyError("idempotency store x: connection refused")

    await bench.send(topology, *range(30))
    async with bench.running(topology, Counting(), idempotency=Down(), breaker=Breaker()) as consumer:
        await until(lambda: consumer.breaker_state and consumer.breaker_state.position == "open", "it pauses")
    assert (consumer.summary.retried, consumer.summary.parked) == (0, 0)


async def test_a_key_function_that_fails_is_a_failed_attempt(bench: Bench) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    handler = Counting()
    await bench.send(topology, {"no": "order"}, message_id="a")
    await bench.drain(
        topology, handler, idempotency=MemoryStore(), idempotency_key=lambda message: message.payload["order"]
    )
    assert handler.seen == []
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.error is not None
    assert (letter.reason, letter.error.type, letter.attempts) == ("exhausted", "KeyError", 3)


async def test_no_handler_begins_after_the_stop(bench: Bench) -> None:
    """The store may take its time; meanwhile the process was told to end."""
    topology = await bench.declared(["50ms"])
    handler = Counting()
    asked, answer = asyncio.Event(), asyncio.Event()

    class Slow(MemoryStore):
        async def claim(self, key: str, lease: timedelta) -> Claim:
            asked.set()
            await answer.wait()
            return await super().claim(key, lease)

    store = Slow()
    await bench.send(topology, 1, message_id="a")
    async with bench.running(topology, handler, idempotency=store) as consumer:
        await asyncio.wait_for(asked.wait(), 10)
        consumer.stop()
        answer.set()
    assert (handler.seen, consumer.summary.released) == ([], 1)
    await rests(bench, topology.name, 1)
    assert (await store.claim(f"{topology.name}:a", MINUTE)).state == "new"


async def test_the_journal_has_the_reason_of_a_drop_before_the_store_says_that_it_is_done(bench: Bench) -> None:
    """A crash in between: the message comes again, and nobody asks the handler any more."""
    topology = await bench.declared(["50ms"])
    told: list[bool] = []

    class Asking(MemoryStore):
        async def complete(self, key: str, token: str) -> bool:
            events = await journal_of(bench, topology)
            told.append("no use" in [event.reason for event in events if event.event == names.DROPPED])
            return await super().complete(key, token)

    await bench.send(topology, 1, message_id="a")
    await bench.drain(topology, Counting(Drop("no use")), idempotency=Asking())
    assert told == [True]


async def test_a_store_that_fails_after_the_work_does_not_undo_it(bench: Bench) -> None:
    topology = await bench.declared(["50ms"])
    handler = Counting()

    class Down(MemoryStore):
        async def complete(self, key: str, token: str) -> bool:
            raise OSError("a store of somebody else's: connection refused")

    await bench.send(topology, 1, message_id="a")
    consumer = await bench.drain(topology, handler, idempotency=Down())
    assert (len(handler.seen), consumer.summary.succeeded) == (1, 1)
    assert await all_empty(bench, topology)


@pytest.mark.parametrize("plain", [True, False])
async def test_a_handler_that_was_given_up_keeps_its_claim_until_the_lease_ends(bench: Bench, plain: bool) -> None:
    topology = await bench.declared(["50ms", "60ms"])
    at_work, most = 0, 0
    over = asyncio.Event()

    async def deaf(_: Message) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        at_work -= 1

    def blocking(message: Message) -> None:
        asyncio.run_coroutine_threadsafe(deaf(message), loop).result()

    loop = asyncio.get_running_loop()
    limit = timedelta(milliseconds=100)
    await bench.send(topology, 1, message_id="a")
    try:
        async with bench.running(
            topology,
            blocking if plain else deaf,
            idempotency=MemoryStore(),
            soft_timeout=limit,
            hard_timeout=limit,
            grace=timedelta(),
        ) as consumer:
            await until(lambda: consumer.summary.retried == 1, "it was given up")
            await until(lambda: consumer.summary.postponed >= 3, "and is not run beside itself")
            over.set()
    finally:
        over.set()
    assert most == 1


async def test_a_lease_that_a_handler_may_outlast_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigurationError, match=r"lease: 60 s is below hard_timeout, 900 s"):
        bench.consumer(bench.topology(), Counting(), idempotency=MemoryStore(), lease=MINUTE)
    with pytest.raises(ConfigurationError, match="idempotency: the store"):
        bench.consumer(bench.topology(), Counting(), idempotency="mysql://x")


def job_of(bench: Bench, topology: Topology, database: Path) -> Job:
    settings = {
        "name": topology.name,
        "delays": [delay.total_seconds() for delay in topology.delays],
        "queue_type": topology.queue_type,
    }
    return Job(bench.url, settings, str(database))


@pytest.mark.parametrize("point", ["claimed", "worked", "committed", "completed"])
async def test_a_process_that_dies_anywhere_has_done_the_work_once(bench: Bench, tmp_path: Path, point: str) -> None:
    """The mark is in the transaction of the work."""
    topology, database = await bench.declared(["100ms", "150ms"]), tmp_path / "shop.db"
    prepare(database)
    await bench.send(topology, {"n": 1})
    job = job_of(bench, topology, database)
    assert await run(replace(job, die_at=point)) == -9
    assert done(database) == ([1] if point in ("committed", "completed") else [])
    assert await run(job) == 0
    assert done(database) == [1]
    assert await all_empty(bench, topology)


@pytest.mark.parametrize(("point", "times"), [("committed", 2), ("completed", 1)])
async def test_without_the_mark_in_the_transaction_one_gap_is_left(
    bench: Bench, tmp_path: Path, point: str, times: int
) -> None:
    """README says so: between the work and the word to the store."""
    topology, database = await bench.declared(["100ms", "150ms"]), tmp_path / "shop.db"
    prepare(database)
    await bench.send(topology, {"n": 1})
    job = replace(job_of(bench, topology, database), recorded=False)
    assert await run(replace(job, die_at=point)) == -9
    assert await run(job) == 0
    assert done(database) == [1] * times
    assert await all_empty(bench, topology)
