"""Kinds of failures on a real broker: parked at once, tried fewer times, dropped, of another type."""

import pytest
from pydantic import BaseModel

from rabbitdlq import Drop, External, Message, Permanent, Rule, Transient, handler, names
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
