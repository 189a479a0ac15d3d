"""A consumer's speed limit, on a clock of the test's own."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitdlq.consumer.rate import LONGEST_WAIT, Pacer, checked_rate, prefetch_for
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.rates import Rate
from tests.unit.strategies import quick


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_they_begin_evenly() -> None:
    clock = Clock()
    pacer = Pacer(Rate.parse("100/m"), clock)
    began = []
    for _ in range(50):
        clock.now += pacer.wait
        pacer.begin()
        began.append(clock.now)
    assert [round(b - a, 6) for a, b in pairwise(began)] == [0.6] * 49


@pytest.mark.parametrize(
    ("text", "burst", "wait"),
    [("20/s", 11, 0.05), ("2/s", 3, 0.5), ("6/m", 1, 10.0)],
)
def test_after_an_idle_time_the_next_of_one_second_are_begun_at_once_or_ten_more_at_most(
    text: str, burst: int, wait: float
) -> None:
    clock = Clock()
    pacer = Pacer(Rate.parse(text), clock)
    clock.now += 60
    begun = 0
    while not pacer.wait:
        pacer.begin()
        begun += 1
    assert begun == burst
    assert pacer.wait == pytest.approx(wait)


@settings(quick, max_examples=100)
@given(st.lists(st.floats(0, 5), max_size=200), st.sampled_from(["1/s", "5/s", "100/m", "200/s", "1000/h"]))
def test_never_more_than_the_rate_and_a_small_burst_in_any_time(waits: list[float], text: str) -> None:
    clock, rate = Clock(), Rate.parse(text)
    pacer, began = Pacer(rate, clock), []
    for each in waits:
        clock.now += each
        while not pacer.wait:
            pacer.begin()
            began.append(clock.now)
    for first in range(0, len(began), 7):
        for last in range(first, len(began)):
            assert last - first <= (began[last] - began[first]) * rate.per_second + 11 + 1e-6


@pytest.mark.parametrize(
    ("text", "per_second", "shown"),
    [
        ("100/m", 100 / 60, "100/m"),
        ("5/s", 5, "5/s"),
        ("1000/h", 1000 / 3600, "1000/h"),
        ("60/m", 1, "1/s"),
        ("6.5/h", 6.5 / 3600, "6.5/h"),
    ],
)
def test_a_rate_is_read_and_shown(text: str, per_second: float, shown: str) -> None:
    rate = Rate.parse(text)
    assert rate.per_second == pytest.approx(per_second)
    assert str(rate) == shown
    assert checked_rate(text) == checked_rate(rate) == rate


def test_no_rate_is_none() -> None:
    assert checked_rate(None) is None
    values: tuple[Any, ...] = (0, -1, float("inf"), float("nan"), "100/m", None)
    for value in values:
        with pytest.raises(ValueError, match="is no rate above zero"):
            Rate(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("fast", "^rate: 'fast' is no rate above zero; write 50/s"), ("5/h", "^rate: 5/h is too slow.*at least 6/h")],
)
def test_what_is_no_rate_or_too_slow_is_told(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        checked_rate(text)


@settings(quick, max_examples=100)
@given(st.integers(1, 500), st.floats(1 / 600, 10_000))
def test_what_is_prefetched_does_not_wait_long(concurrency: int, per_second: float) -> None:
    prefetch = prefetch_for(Rate(per_second), concurrency)
    assert 1 <= prefetch <= 2 * concurrency
    assert prefetch / per_second <= max(LONGEST_WAIT.total_seconds(), 1 / per_second) + 1e-6


def test_without_a_rate_it_is_twice_the_concurrency() -> None:
    assert prefetch_for(None, 7) == 14
    assert Rate.parse("2/s").interval == timedelta(seconds=0.5)
