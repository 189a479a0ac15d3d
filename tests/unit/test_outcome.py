"""The decision after one run of the handler."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from rabbitdlq import names
from rabbitdlq.consumer.attempt import Completed, Failed, Interrupted
from rabbitdlq.consumer.classify import Kind, Rule
from rabbitdlq.consumer.outcome import Dropped, Park, Postponed, Released, Retry, Succeeded, decide, unreadable
from rabbitdlq.consumer.payload import InvalidPayload
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import Drop, External, Permanent, Transient
from rabbitdlq.failure import Failure
from rabbitdlq.message import Message, Undecodable, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties

ORDERS = Topology("orders", ("5s", "30s"))
AT = datetime(2024, 1, 1, tzinfo=UTC)
FAILURE = Failure("ValueError", "no")


def message(attempt: int) -> Message:
    way = Arrival(attempt - 1, attempt - 1, "shop", "k")
    return message_of(ORDERS, b"{}", Properties(message_id="17"), way, failures=attempt - 1)


def failed(kind: Kind = Transient, max_attempts: int | None = None) -> Failed:
    return Failed(FAILURE, Rule(kind, max_attempts), AT, 5.0)


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_a_handler_that_returned_has_succeeded(attempt: int) -> None:
    assert decide(ORDERS, message(attempt), Completed(5.0)) == Succeeded(5.0)


@pytest.mark.parametrize("attempt", [1, 3])
def test_what_the_handler_drops_is_dropped_at_any_attempt(attempt: int) -> None:
    assert decide(ORDERS, message(attempt), failed(Drop)) == Dropped(FAILURE, 5.0)


@pytest.mark.parametrize(("attempt", "most"), [(1, 1), (2, 2), (3, 2), (3, 9)])
def test_a_class_of_errors_may_have_fewer_attempts_and_never_more(attempt: int, most: int) -> None:
    told = most if most < ORDERS.max_attempts else None
    assert decide(ORDERS, message(attempt), failed(External, most)) == Park(FAILURE, AT, names.EXHAUSTED, 5.0, told)
    if attempt > 1:
        earlier = decide(ORDERS, message(1), failed(External, most))
        assert earlier == Retry(FAILURE, AT, ORDERS.rungs[0], 5.0)


@pytest.mark.parametrize("kind", [Transient, External])
@pytest.mark.parametrize(("attempt", "rung"), [(1, 0), (2, 1)])
def test_a_failure_with_attempts_left_waits_on_the_next_rung(attempt: int, rung: int, kind: Kind) -> None:
    assert decide(ORDERS, message(attempt), failed(kind)) == Retry(FAILURE, AT, ORDERS.rungs[rung], 5.0)


@pytest.mark.parametrize("attempt", [1, 3])
@pytest.mark.parametrize("kind", [External, Permanent, Drop])
def test_a_handler_that_was_kept_from_beginning_spends_no_attempt(attempt: int, kind: Kind) -> None:
    outcome = decide(ORDERS, message(attempt), replace(failed(kind), begun=False))
    assert outcome == Postponed("the handler could not be begun", 5.0, FAILURE)


@pytest.mark.parametrize("attempt", [3, 4, 99])
def test_a_failure_without_attempts_left_is_parked(attempt: int) -> None:
    assert decide(ORDERS, message(attempt), failed()) == Park(FAILURE, AT, names.EXHAUSTED, 5.0)


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_a_permanent_failure_is_parked_at_once(attempt: int) -> None:
    assert decide(ORDERS, message(attempt), failed(Permanent)) == Park(FAILURE, AT, names.PERMANENT, 5.0)


def test_the_ladder_of_the_topology_counts_not_the_one_the_message_was_opened_with() -> None:
    shorter = Topology("orders", ["5s"])

    assert decide(shorter, replace(message(2), max_attempts=3), failed()) == Park(FAILURE, AT, names.EXHAUSTED, 5.0)


@pytest.mark.parametrize("attempt", [1, 3])
def test_an_interrupted_handler_gives_the_message_back_with_no_attempt_spent(attempt: int) -> None:
    assert decide(ORDERS, message(attempt), Interrupted(5.0)) == Released(5.0)


def test_a_body_that_cannot_be_read_is_parked_without_a_retry() -> None:
    """C17: it will be no better the next time."""
    outcome = unreadable(Undecodable("body of 5 bytes is not valid application/json: x"))

    assert outcome.reason == names.UNDECODABLE
    assert outcome.failure.message.startswith("body of 5 bytes")
    assert outcome.at.tzinfo is not None


def test_a_payload_of_another_type_is_parked_without_a_retry() -> None:
    outcome = unreadable(InvalidPayload("not a valid Order: total: Field required"))

    assert (outcome.reason, outcome.failure.message) == (names.INVALID, "not a valid Order: total: Field required")


@pytest.mark.parametrize(
    ("attempt", "seconds", "rung"), [(1, -1, 0), (1, 5, 0), (1, 5.001, 1), (1, 3600, 1), (2, 1, 1), (2, 3600, 1)]
)
def test_a_failure_that_says_how_long_to_wait_goes_to_the_first_rung_ahead_that_is_slow_enough(
    attempt: int, seconds: float, rung: int
) -> None:
    delay = timedelta(seconds=seconds)
    asked = replace(failed(), retry_after=delay)

    assert decide(ORDERS, message(attempt), asked) == Retry(FAILURE, AT, ORDERS.rungs[rung], 5.0, delay)


def test_where_the_ladder_has_a_dip_the_slowest_rung_ahead_is_taken() -> None:
    dip = Topology("orders", ["5s", "60s", "10s"])
    asked = replace(failed(), retry_after=timedelta(minutes=5))

    assert decide(dip, message(1), asked) == Retry(FAILURE, AT, dip.rungs[1], 5.0, timedelta(minutes=5))


def test_asking_for_a_wait_gives_no_further_attempt() -> None:
    asked = replace(failed(), retry_after=timedelta(seconds=1))

    assert decide(ORDERS, message(3), asked) == Park(FAILURE, AT, names.EXHAUSTED, 5.0)
