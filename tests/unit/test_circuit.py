"""The edges of the breaker's states."""

from rabbitdlq.consumer.breaker import Breaker
from tests.unit.test_breaker import Bench


def test_exactly_half_of_the_attempts_is_enough_to_open_it() -> None:
    bench = Bench(Breaker(min_attempts=4))
    assert [bench.attempt(failed) for failed in (False, False, True, True)] == [None, None, None, "opened"]


def test_while_it_is_closed_there_is_nothing_to_probe() -> None:
    bench = Bench()
    bench.circuit.probe()
    assert bench.circuit.position == "closed"


def test_what_its_state_tells_has_not_left_the_window() -> None:
    bench = Bench()
    bench.attempt(failed=True)
    assert bench.circuit.state.attempts == 1
    bench.clock.now += 31
    assert bench.circuit.state.attempts == 0


def test_the_failed_probes_of_an_earlier_outage_are_not_told_of_this_one() -> None:
    bench = Bench()
    bench.open()
    bench.probe(failed=True)
    bench.probe(failed=False)
    bench.open()
    assert (bench.circuit.state.position, bench.circuit.state.probes) == ("open", 0)
