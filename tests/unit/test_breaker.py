"""The breaker's states, on a clock of the test's own."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitdlq import names
from rabbitdlq.consumer.attempt import Failed
from rabbitdlq.consumer.breaker import KEPT_IDS, Breaker, Change, Circuit
from rabbitdlq.consumer.classify import Kind, Rule
from rabbitdlq.consumer.outcome import Postponed, decide
from rabbitdlq.consumer.pausing import Pausing
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import ConfigurationError, Permanent, Transient
from rabbitdlq.failure import Failure
from rabbitdlq.message import message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties
from tests.unit.strategies import quick


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A circuit, and messages that fail and succeed one after the other."""

    def __init__(self, options: Breaker | None = None) -> None:
        self.clock = Clock()
        self.circuit = Circuit(options or Breaker(), self.clock, lambda: 1.0)
        self.number = 0

    def attempt(self, failed: bool, message: str | None = None) -> Change | None:
        self.number += 1
        token = object()
        assert not self.circuit.blocked
        self.circuit.begin(token)
        return self.circuit.ended(token, message or str(self.number), failed)

    def open(self) -> None:
        while self.circuit.position == "closed":
            self.attempt(failed=True)

    def probe(self, failed: bool) -> Change | None:
        self.clock.now += self.circuit.next_probe_in
        self.circuit.probe()
        assert self.circuit.position == "half-open"
        return self.attempt(failed)


def test_it_opens_when_half_of_the_attempts_failed_and_there_are_enough_of_them() -> None:
    bench = Bench()
    outcomes = [bench.attempt(failed) for failed in (True, True, False, False)]
    assert outcomes == [None] * 4
    assert bench.attempt(failed=True) == "opened"
    assert bench.circuit.blocked
    state = bench.circuit.state
    assert (state.position, state.attempts, state.failures, state.probes) == ("open", 5, 3, 0)
    assert state.next_probe_at is not None
    assert timedelta(seconds=4) < state.next_probe_at - datetime.now(UTC) < timedelta(seconds=6)


def test_few_failures_among_many_attempts_do_not_open_it() -> None:
    bench = Bench()
    for number in range(1_000):
        assert bench.attempt(failed=number % 3 == 0 and number > 0) is None


def test_what_is_older_than_the_window_does_not_count() -> None:
    bench = Bench()
    for _ in range(4):
        assert bench.attempt(failed=True) is None
    bench.clock.now += 301
    for _ in range(4):
        assert bench.attempt(failed=True) is None
    assert (bench.circuit.state.attempts, bench.circuit.state.failures) == (4, 4)
    bench.clock.now += 20
    assert bench.attempt(failed=True) == "opened"


def test_successes_leave_the_window_too() -> None:
    bench = Bench()
    for _ in range(1_000):
        bench.attempt(failed=False)
    bench.clock.now += 31
    assert [bench.attempt(failed=True) for _ in range(3)] == [None, None, "opened"]
    assert (bench.circuit.state.attempts, bench.circuit.state.failures) == (5, 3), "of the last five, three"


@pytest.mark.parametrize("takes", [8, 31, 60])
def test_failures_that_are_so_slow_that_a_window_has_few_open_it_too(takes: float) -> None:
    """With 8 s for each it never had the five of a window, and every message was parked."""
    bench = Bench()
    changes = []
    for _ in range(5):
        bench.clock.now += takes
        changes.append(bench.attempt(failed=True))
    assert changes == [None, None, None, None, "opened"]
    assert (bench.circuit.state.attempts, bench.circuit.state.failures) == (5, 5)


def test_those_that_are_older_than_ten_windows_do_not() -> None:
    bench = Bench()
    for _ in range(20):
        bench.clock.now += 76  # the fifth last is 304 s old
        assert bench.attempt(failed=True) is None
    assert (bench.circuit.state.attempts, bench.circuit.state.failures) == (4, 4)


def test_among_the_last_ones_a_message_counts_once_and_half_have_to_fail() -> None:
    bench = Bench()
    for number in range(20):
        bench.clock.now += 31
        assert bench.attempt(failed=True, message="poison") is None
        assert bench.circuit.state.failures == 1
        assert bench.circuit.state.attempts == 1 + min(4, number // 2)
        if number % 2:
            assert bench.attempt(failed=False) is None
    for _ in range(3):
        bench.clock.now += 31
        assert bench.attempt(failed=False) is None
        assert bench.attempt(failed=True, message="poison") is None


def test_what_failed_before_an_outage_is_not_counted_again_after_it() -> None:
    bench = Bench()
    bench.open()
    bench.probe(failed=False)
    assert bench.circuit.state.attempts == 0
    for _ in range(4):
        assert bench.attempt(failed=True) is None


def test_the_last_attempts_that_are_kept_are_bounded() -> None:
    bench = Bench(Breaker(min_attempts=50))
    for number in range(1_000):
        bench.attempt(failed=number % 3 == 0)
    last = bench.circuit._last
    assert len(last._ended) == 50
    assert last._failed == {failed for _, failed in last._ended if failed is not None}


def test_a_message_counts_once_in_a_window() -> None:
    bench = Bench()
    for _ in range(50):
        assert bench.attempt(failed=True, message="poison") is None
        bench.clock.now += 0.1
    assert (bench.circuit.state.attempts, bench.circuit.state.failures) == (1, 1)
    bench.clock.now += 31
    bench.attempt(failed=True, message="poison")
    assert bench.circuit.state.failures == 1


def test_the_memory_of_failed_messages_is_bounded() -> None:
    bench = Bench()
    for number in range(3 * KEPT_IDS):
        bench.attempt(failed=False)
        bench.attempt(failed=False)
        bench.attempt(failed=True)
        assert bench.circuit.position == "closed", number
    assert all(len(step.failed) <= KEPT_IDS for step in bench.circuit._steps)


def test_pauses_double_up_to_the_longest_and_a_success_closes_it() -> None:
    bench = Bench()
    bench.open()
    pauses = [bench.circuit.next_probe_in]
    for number in range(1, 9):
        assert bench.probe(failed=True) == "probe failed"
        assert bench.circuit.state.probes == number
        pauses.append(bench.circuit.next_probe_in)
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert bench.circuit.open_for == sum(pauses[:-1])
    assert bench.probe(failed=False) == "closed"
    assert not bench.circuit.blocked
    assert (bench.circuit.state.position, bench.circuit.state.attempts) == ("closed", 0)


def test_one_that_opens_again_at_once_goes_on_with_its_pauses_and_later_begins_anew() -> None:
    bench = Bench()
    bench.open()
    bench.probe(failed=False)
    bench.open()
    assert bench.circuit.next_probe_in == 10
    bench.probe(failed=False)
    bench.clock.now += 31
    bench.open()
    assert bench.circuit.next_probe_in == 5


def test_one_probe_at_a_time_and_no_other_attempt_says_anything() -> None:
    bench = Bench()
    circuit = bench.circuit
    early = [object(), object()]
    for token in early:
        circuit.begin(token)
    bench.open()
    assert circuit.ended(early[0], "early", failed=False) is None, "it had begun before the outage"
    bench.clock.now += 5
    circuit.probe()
    probe = object()
    assert not circuit.blocked
    circuit.begin(probe)
    assert circuit.blocked
    assert circuit.ended(early[1], "late", failed=True) is None
    assert not circuit.gone(early[1])
    assert circuit.position == "half-open"
    assert circuit.ended(probe, "probe", failed=False) == "closed"


def test_a_probe_that_came_to_nothing_makes_room_for_another() -> None:
    bench = Bench()
    bench.open()
    bench.clock.now += 5
    bench.circuit.probe()
    unreadable = object()
    bench.circuit.begin(unreadable)
    assert bench.circuit.gone(unreadable)
    assert not bench.circuit.blocked
    assert bench.attempt(failed=True) == "probe failed"


@pytest.mark.parametrize("jitter", [0.8, 1.2])
def test_a_pause_is_spread(jitter: float) -> None:
    clock = Clock()
    circuit = Circuit(Breaker(min_attempts=1), clock, lambda: jitter)
    circuit.ended(object(), "1", failed=True)
    assert circuit.next_probe_in == pytest.approx(5 * jitter)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window": timedelta()}, "window: 0 s is not above zero"),
        ({"first_pause": 5}, "first_pause: 5 is not a duration"),
        ({"first_pause": timedelta(minutes=6)}, "longest_pause: 300 s is below first_pause, 360 s"),
        ({"min_attempts": 0}, "min_attempts: 0 is no whole number above 0"),
        ({"min_attempts": True}, "min_attempts: True"),
        ({"share": 0}, "share: 0 is not above 0"),
        ({"share": 1.1}, "share: 1.1"),
        ({"share": float("nan")}, "share: nan"),
    ],
)
def test_options_that_make_no_sense_are_told(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^breaker: {reason}"):
        Breaker(**options)  # type: ignore[arg-type]


_STEPS = st.tuples(st.sampled_from(["fails", "succeeds", "repeats"]), st.floats(0, 40))


@settings(quick, max_examples=100)
@given(st.lists(_STEPS, max_size=80))
def test_it_is_open_only_after_enough_failed_within_a_window(steps: list[tuple[str, float]]) -> None:
    """Against a model that keeps every attempt; the window's steps make it at most a tenth shorter.

    Where there are fewer than five, the last five are asked, as far as they are not older than ten windows.
    """
    bench = Bench()
    seen: list[tuple[float, bool]] = []
    failed_ids: dict[str, float] = {}
    for what, waits in steps:
        bench.clock.now += waits
        now = bench.clock.now
        message = next(iter(failed_ids)) if what == "repeats" and failed_ids else str(len(seen))
        change = bench.attempt(what != "succeeds", message)
        seen.append((now, what != "succeeds"))
        if what != "succeeds":
            failed_ids.setdefault(message, now)
        lately = [failed for at, failed in seen if now - at <= 300]
        if change == "opened":
            assert len(lately) >= 5
            assert sum(lately) >= 3
            assert what != "succeeds"
            assert len(failed_ids) >= 3
        if "repeats" in [step for step, _ in steps]:
            if change == "opened":
                return
            continue
        windows = [[failed for at, failed in seen if now - at <= length / 4] for length in range(4 * 26, 4 * 30 + 1)]
        last = lately[-5:]
        if change == "opened":
            assert any(enough(each) for each in windows) or (len(windows[0]) < 5 and enough(last))
            return
        if what == "fails":
            assert not all(enough(each) for each in windows)
            assert not (len(windows[-1]) < 5 and enough(last))


def enough(attempts: list[bool]) -> bool:
    return len(attempts) >= 5 and sum(attempts) >= 0.5 * len(attempts)


@pytest.mark.parametrize(
    ("kind", "change", "name"), [(Transient, "probe failed", "postponed"), (Permanent, "closed", "parked")]
)
def test_what_was_raised_while_a_probe_cleaned_up_after_its_timeout_counts_as_what_it_is(
    kind: Kind, change: str, name: str
) -> None:
    """One that says that trying again is pointless is parked, late or not."""
    pausing = Pausing("orders", Breaker(), 10, lambda: None)
    pausing.govern(cast(Any, Stub()), cast(Any, Stub()))
    pausing.circuit = circuit = Circuit(Breaker(), Clock(), lambda: 1.0)
    circuit._open(0.0)
    circuit.probe()
    delivery = cast(Any, object())
    circuit.begin(delivery)
    late = Failed(Failure("E", "no"), Rule(kind), datetime.now(UTC), 5.0, reason=names.TIMEOUT)
    orders = Topology("orders", ["5s"])
    message = message_of(orders, b"{}", Properties(message_id="17"), Arrival(0, 0, "", "orders"), failures=0)
    outcome = pausing.judge(delivery, message, late, decide(orders, message, late))
    assert outcome.name == name
    assert circuit.position == ("open" if change == "probe failed" else "closed")


@pytest.mark.parametrize(
    ("ladder", "attempt", "asked", "rung"),
    [
        (["1s", "10s", "60s"], 1, None, 0),
        (["1s", "10s", "60s"], 1, 6, 1),
        (["1s", "10s", "60s"], 1, 0.5, 0),
        (["1s", "10s", "60s"], 1, 3600, 2),
        (["60s", "1s", "10s"], 2, 3600, 2),  # of those ahead, as for a retry
        (["1s", "60s", "10s"], 4, 6, 1),  # at the last attempt none is: the first of all that is slow enough
        (["1s", "60s", "10s"], 4, 3600, 1),
        (["1s", "60s", "10s"], 4, None, 0),
    ],
)
@pytest.mark.parametrize("position", ["opens it", "open"])
def test_a_message_that_is_postponed_waits_as_long_as_its_handler_asked_for(
    ladder: list[str], attempt: int, asked: float | None, rung: int, position: str
) -> None:
    """It went to the first rung whatever the provider had said, and was there again long before its time."""
    pausing = Pausing("orders", Breaker(min_attempts=1), 10, lambda: None)
    pausing.govern(cast(Any, Stub()), cast(Any, Stub()))
    orders = Topology("orders", ladder)
    if position == "open":
        pausing.circuit.ended(object(), "another", failed=True)
    elif attempt < orders.max_attempts:
        return  # the one that opens it is retried as ever
    way = Arrival(attempt - 1, attempt - 1, "", "orders")
    message = message_of(orders, b"{}", Properties(message_id="17"), way, failures=attempt - 1)
    delay = None if asked is None else timedelta(seconds=asked)
    busy = Failed(Failure("RetryAfter", "429"), Rule(Transient), datetime.now(UTC), 5.0, retry_after=delay)
    outcome = pausing.judge(cast(Any, object()), message, busy, decide(orders, message, busy))
    assert isinstance(outcome, Postponed)
    assert (outcome.rung or orders.rungs[0]) == orders.rungs[rung]


class Stub:
    """Workers and a gate that are told, and do nothing."""

    always_open = True
    gate = None
    on_probe_gone = None

    def begun(self) -> None:
        pass

    def nudge(self) -> None:
        pass
