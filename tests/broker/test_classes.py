"""Kinds of failures on a real broker: parked at once, tried fewer times, dropped, of another type."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from rabbitdlq import Drop, External, Message, Permanent, RetryAfter, Rule, Transient, handler, names
from tests.broker.kit import Bench
from tests.broker.operator_kit import events_of

QUORUM = pytest.mark.parametrize("queue_type", ["quorum"])


class Order(BaseModel):
    """What the handler takes."""

    id: int
    total: float


@QUORUM
async def test_other_peoples_exceptions_are_what_the_consumer_was_told(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, "transient", "external", "fewer", "permanent", "drop", "fine")
    ran: list[tuple[str, int]] = []

    @handler(
        classify={
            TimeoutError: Transient,
            ConnectionError: External,
            ConnectionRefusedError: Rule(External, max_attempts=2),
            LookupError: Permanent,
        }
    )
    async def handle(message: Message) -> None:
        ran.append((message.payload, message.attempt))
        errors = {
            "transient": TimeoutError(),
            "external": ConnectionResetError("by peer"),
            "fewer": ConnectionRefusedError("nobody listens"),
            "permanent": KeyError("address"),
            "drop": Drop("the customer is gone"),
        }
        if message.payload in errors:
            raise errors[message.payload]

    summary = (await bench.drain(topology, handle)).summary

    attempts = {payload: max(attempt for told, attempt in ran if told == payload) for payload, _ in ran}
    assert attempts == {"transient": 3, "external": 3, "fewer": 2, "permanent": 1, "drop": 1, "fine": 1}
    assert (summary.succeeded, summary.retried, summary.parked, summary.dropped) == (1, 5, 4, 1)
    async with bench.dlq(topology) as dlq:
        reasons = {letter.payload: (letter.reason, letter.attempts) for letter in await dlq.peek_all()}
    assert reasons == {
        "transient": (names.EXHAUSTED, 3),
        "external": (names.EXHAUSTED, 3),
        "fewer": (names.EXHAUSTED, 2),
        "permanent": (names.PERMANENT, 1),
    }


@QUORUM
async def test_what_a_handler_drops_is_gone_and_the_journal_says_why(bench: Bench) -> None:
    topology = await bench.declared()
    (id,) = await bench.send(topology, "old")

    async def handle(message: Message) -> None:
        if message.attempt == 1:
            raise ConnectionError("once")
        raise Drop("offer has ended")

    summary = (await bench.drain(topology, handle)).summary

    assert (summary.retried, summary.dropped) == (1, 1)
    async with bench.dlq(topology) as dlq:
        assert await dlq.count() == 0
    assert await bench.raw.count(topology.name) == 0
    (event,) = await events_of(bench, topology, names.DROPPED)
    assert (event.message_id, event.attempt, event.reason, event.who) == (id, 2, "offer has ended", None)


@QUORUM
async def test_a_payload_of_another_type_is_parked_at_once_with_its_fields_named(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, {"id": 1, "total": "2.5"}, {"id": "x"})
    seen: list[Order] = []

    @handler(payload_type=Order)
    def handle(message: Message) -> None:
        seen.append(message.payload)

    summary = (await bench.drain(topology, handle)).summary

    assert seen == [Order(id=1, total=2.5)]
    assert (summary.succeeded, summary.retried, summary.parked) == (1, 0, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert (letter.reason, letter.attempts, letter.payload) == (names.INVALID, 1, {"id": "x"})
    assert letter.error is not None
    assert letter.error.message == (
        "not a valid Order: id: Input should be a valid integer, unable to parse string as an integer (it is 'x'); "
        "total: Field required"
    )


async def grouped(message: Message) -> None:
    """At the top of the module, where another process finds it."""
    async with asyncio.TaskGroup() as tasks:
        for kind in message.payload:
            tasks.create_task(_fails(kind))


async def _fails(kind: str) -> None:
    errors: dict[str, Exception] = {
        "permanent": Permanent("no such customer"),
        "drop": Drop("the customer is gone"),
        "external": External("503"),
        "later": RetryAfter(0.1, "429"),
        "value": ValueError("no order 17"),
        "key": KeyError("address"),
    }
    raise errors[kind]


@QUORUM
@pytest.mark.parametrize("isolation", ["async", "thread", "process"])
async def test_what_the_tasks_of_a_group_raise_is_what_they_say(bench: Bench, isolation: Any) -> None:
    """Each was tried again to its end, and its letter said 'unhandled errors in a TaskGroup (1 sub-exception)'."""
    topology = await bench.declared(["50ms", "100ms"])
    payloads = [["permanent"], ["value"], ["drop"], ["key"], ["permanent", "key"], ["permanent", "drop"], ["later"]]
    await bench.send(topology, *payloads)

    consumer = await bench.drain(topology, grouped, isolation=isolation, classify={ValueError: Permanent}, breaker=None)

    assert (consumer.summary.dropped, consumer.summary.parked) == (1, 6)
    async with bench.dlq(topology) as dlq:
        letters = {" ".join(letter.payload): letter for letter in await dlq.peek_all()}
    told = {
        name: (letter.reason, letter.attempts, letter.error.type, letter.error.message)
        for name, letter in letters.items()
        if letter.error is not None
    }
    two = "unhandled errors in a TaskGroup (2 sub-exceptions): Permanent: no such customer; "
    assert told == {
        "permanent": (names.PERMANENT, 1, "Permanent", "no such customer"),
        "value": (names.PERMANENT, 1, "ValueError", "no order 17"),
        "key": (names.EXHAUSTED, 3, "KeyError", "'address'"),
        "permanent key": (names.EXHAUSTED, 3, "ExceptionGroup", two + "KeyError: 'address'"),
        "permanent drop": (names.PERMANENT, 1, "ExceptionGroup", two + "Drop: the customer is gone"),
        "later": (names.EXHAUSTED, 3, "RetryAfter", "429"),
    }
    error = letters["key"].error
    assert error is not None
    assert error.traceback is not None
    assert ", in grouped\n" in error.traceback
    assert ", in _fails\n" in error.traceback
