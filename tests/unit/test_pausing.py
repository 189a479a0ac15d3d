"""The breaker's verdicts, put into practice: who is judged how, and which gate the workers have then."""

from datetime import UTC, datetime
from typing import cast

import pytest

from rabbitdlq import names
from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.attempt import Completed, Failed, Interrupted, Result
from rabbitdlq.consumer.breaker import Breaker, Circuit
from rabbitdlq.consumer.classify import UNKNOWN, Rule
from rabbitdlq.consumer.gate import Gate
from rabbitdlq.consumer.outcome import Outcome, Postponed, decide
from rabbitdlq.consumer.pausing import WHY, Pausing
from rabbitdlq.consumer.rate import Pacer
from rabbitdlq.consumer.workers import Workers
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import Drop, External, Permanent, Transient
from rabbitdlq.failure import Failure
from rabbitdlq.message import message_of
from rabbitdlq.rates import Rate
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties
from tests.unit.test_breaker import Clock

ORDERS = Topology("orders", ["5s"])


async def _nothing(_: Delivery) -> None: ...


class Consumer:
    """As much of a consumer as pausing touches; nothing of it runs."""

    def __init__(self, rate: Rate | None = None, *, unknown: bool = False) -> None:
        options, clock = Breaker(min_attempts=2, unknown=unknown), Clock()
        self.circuit = Circuit(options, clock, lambda: 1.0)
        self.pausing = Pausing("orders", options, 10, lambda: None)
        self.pausing.circuit = self.circuit
        self.workers = Workers(2, _nothing)
        self.gate = Gate(
            lambda: self.workers.wants,
            self.workers.nudge,
            circuit=self.circuit,
            pacer=None if rate is None else Pacer(rate, clock),
        )
        self.workers.gate = None if self.gate.always_open else self.gate
        self.pausing.govern(self.workers, self.gate)
        self.judged = 0

    def judge(self, result: Result, *, attempt: int = 1) -> Outcome:
        """The outcome of one more message's attempt."""
        self.judged += 1
        delivery = cast(Delivery, object())
        way = Arrival(attempt - 1, attempt - 1, "", "orders")
        message = message_of(ORDERS, b"{}", Properties(message_id=str(self.judged)), way, failures=attempt - 1)
        self.circuit.begin(delivery)
        outcome = self.pausing.judge(delivery, message, result, decide(ORDERS, message, result))
        self.circuit.gone(delivery)
        return outcome


def failed(rule: Rule | None = None, reason: str | None = None) -> Failed:
    return Failed(Failure("E", "no"), rule or Rule(External), datetime.now(UTC), 5.0, reason=reason)


@pytest.mark.parametrize("rate", [None, Rate.parse("10/s")])
def test_after_an_outage_the_workers_have_the_gate_that_they_had_before(rate: Rate | None) -> None:
    """A speed limit is there again; without one there is nothing to pass."""
    consumer = Consumer(rate)
    for _ in range(2):
        consumer.judge(failed())
    assert (consumer.circuit.position, consumer.pausing.prefetch) == ("open", 0)
    assert consumer.workers.gate is consumer.gate

    consumer.circuit.probe()
    assert consumer.pausing.prefetch == 0
    assert consumer.judge(Completed(1.0)).name == "succeeded"
    assert (consumer.circuit.position, consumer.pausing.prefetch) == ("closed", 10)
    assert consumer.workers.gate is (None if rate is None else consumer.gate)


def test_an_interruption_says_nothing() -> None:
    consumer = Consumer()
    for _ in range(2):
        consumer.judge(failed())
    consumer.circuit.probe()
    assert consumer.judge(Interrupted(1.0)).name == "released"
    assert consumer.circuit.position == "half-open"
    assert not consumer.circuit.blocked, "another probe may take its place"


def test_the_failure_that_opens_it_is_retried_as_ever_but_not_parked() -> None:
    retried = Consumer()
    assert [retried.judge(failed()).name for _ in range(2)] == ["retry", "retry"]
    parked = Consumer()
    assert parked.judge(failed(), attempt=2).name == "parked", "nobody knows of an outage yet"
    last = parked.judge(failed(), attempt=2)
    assert isinstance(last, Postponed)
    assert (last.why, last.failure) == (WHY, Failure("E", "no"))


@pytest.mark.parametrize("attempt", [1, 2])
def test_what_had_begun_before_it_opened_and_fails_now_spends_no_attempt(attempt: int) -> None:
    consumer = Consumer()
    for _ in range(2):
        consumer.judge(failed())
    assert consumer.judge(failed(), attempt=attempt).name == "postponed"
    assert consumer.judge(failed(Rule(Permanent))).name == "parked"
    assert consumer.judge(Completed(1.0)).name == "succeeded"
    assert consumer.circuit.position == "open"


@pytest.mark.parametrize(
    ("result", "unknown", "opens"),
    [
        (failed(Rule(External)), False, True),
        (failed(Rule(Transient)), False, True),
        (failed(UNKNOWN), False, False),
        (failed(UNKNOWN), True, True),
        (failed(UNKNOWN, names.TIMEOUT), False, True),
        (failed(Rule(Permanent)), True, False),
        (failed(Rule(Permanent), names.TIMEOUT), True, False),
        (failed(Rule(Drop)), True, False),
    ],
)
def test_what_counts_as_a_sign_of_an_outage(result: Failed, unknown: bool, opens: bool) -> None:
    consumer = Consumer(unknown=unknown)
    for _ in range(4):
        consumer.judge(result)
    assert (consumer.circuit.position == "open") is opens
