"""The edges of the breaker's states, and what of errors that nobody named it counts."""

import socket
from typing import Any

import pytest

from rabbitdlq.consumer.breaker import Breaker
from rabbitdlq.consumer.classify import Classifier, Rule
from rabbitdlq.errors import Drop, Permanent, Transient
from tests.unit.test_breaker import Bench
from tests.unit.test_classify import group


def test_exactly_half_of_the_attempts_is_enough_to_open_it() -> None:
    bench = Bench(Breaker(min_attempts=4))
    assert [bench.attempt(failed) for failed in (False, False, True, True)] == [None, None, None, "opened"]


def test_while_it_is_closed_there_is_nothing_to_probe() -> None:
    bench = Bench()
    bench.circuit.probe()
    assert bench.circuit.position == "closed"


def test_what_its_state_tells_is_what_it_would_judge_by() -> None:
    bench = Bench()
    for _ in range(7):
        bench.attempt(failed=False)
    assert bench.circuit.state.attempts == 7
    bench.clock.now += 31
    assert bench.circuit.state.attempts == 5, "the last ones"
    bench.clock.now += 270
    assert bench.circuit.state.attempts == 0


def test_the_failed_probes_of_an_earlier_outage_are_not_told_of_this_one() -> None:
    bench = Bench()
    bench.open()
    bench.probe(failed=True)
    bench.probe(failed=False)
    bench.open()
    assert (bench.circuit.state.position, bench.circuit.state.probes) == ("open", 0)


class Driver(Exception):
    """What a library raises of its own."""


def caused(error: BaseException, by: BaseException) -> BaseException:
    error.__cause__ = by
    return error


def during(error: BaseException, other: BaseException, *, hidden: bool = False) -> BaseException:
    error.__context__, error.__suppress_context__ = other, hidden
    return error


def circle() -> BaseException:
    first, second = Driver("1"), Driver("2")
    first.__cause__, second.__cause__ = second, first
    return first


def long_chain(length: int) -> BaseException:
    error: BaseException = ConnectionError("at its end")
    for _ in range(length):
        error = caused(Driver("x"), error)
    return error


class TestOutages:
    """Of whoever knew of no rules the breaker did not open while everything was down."""

    @pytest.mark.parametrize(
        "error",
        [
            ConnectionRefusedError(111, "nobody listens"),
            TimeoutError(),
            socket.gaierror(-2, "Name or service not known"),
            type("Own", (ConnectionError,), {})(),
            caused(Driver("no answer"), TimeoutError()),
            during(Driver("no answer"), caused(Driver("x"), ConnectionResetError("by peer"))),
            caused(Driver("all failed"), group(OSError("x"), ConnectionRefusedError("y"))),
            group(KeyError("x"), ConnectionError("y")),
            group(caused(Driver("x"), TimeoutError())),  # type: ignore[arg-type]
            during(group(KeyError("x")), ConnectionError("y")),
            during(Driver(caused(OSError("x"), ConnectionError("y"))), KeyError("z"), hidden=True),  # as httpx has it
            long_chain(50),
        ],
        ids=repr,
    )
    def test_what_nobody_named_is_a_sign_of_one_where_a_connection_failed_or_no_answer_came(
        self, error: BaseException
    ) -> None:
        found = Classifier().rule_of(error)

        assert (found, found.known) == (Rule(Transient), True)

    @pytest.mark.parametrize(
        "error",
        [
            KeyError("x"),
            OSError(28, "No space left on device"),
            caused(Driver("x"), KeyError("y")),
            during(KeyError("y"), ConnectionError("x"), hidden=True),
            circle(),
            long_chain(1_000),
            type("Odd", (Exception,), {"args": None})(),
            group(KeyError("x"), ValueError("y")),
        ],
        ids=repr,
    )
    def test_a_bug_is_none(self, error: BaseException) -> None:
        assert not Classifier().rule_of(error).known

    @pytest.mark.parametrize("kind", [Permanent, Drop])
    def test_what_somebody_calls_pointless_is_none_and_neither_is_what_it_causes(self, kind: Any) -> None:
        classifier = Classifier({ConnectionError: kind, Driver: kind})

        assert classifier.rule_of(ConnectionResetError("x")) == Rule(kind)
        assert not classifier.rule_of(caused(ValueError("x"), ConnectionResetError("y"))).known
        assert not classifier.rule_of(caused(ValueError("x"), caused(Driver("y"), TimeoutError()))).known
        assert classifier.rule_of(caused(ValueError("x"), TimeoutError())).known

    def test_it_is_asked_each_time_and_not_of_the_class(self) -> None:
        classifier = Classifier()

        assert not classifier.rule_of(Driver("x")).known
        assert classifier.rule_of(caused(Driver("x"), TimeoutError())).known
        assert not classifier.rule_of(Driver("x")).known
