"""Durations as people write them."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq.durations import MAX_MILLISECONDS, format_duration, milliseconds, parse_duration
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.limits import exponential
from tests.unit.strategies import quick

LONGEST = timedelta(milliseconds=MAX_MILLISECONDS)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("5s", timedelta(seconds=5)),
        (" 5 s ", timedelta(seconds=5)),
        ("1.5s", timedelta(seconds=1.5)),
        ("1.001s", timedelta(milliseconds=1001)),
        ("2m", timedelta(minutes=2)),
        ("1h", timedelta(hours=1)),
        ("7d", timedelta(days=7)),
        ("0s", timedelta()),
    ],
)
def test_a_number_and_a_unit_is_a_duration(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "is not a duration"),
        ("5", "is not a duration"),
        ("s", "is not a duration"),
        ("5 sec", "is not a duration"),
        ("5s 3s", "is not a duration"),
        ("1e3s", "is not a duration"),
        (".5s", "is not a duration"),
        ("\u0665s", "is not a duration"),  # a five, but not ours
        (5, "is not a duration"),
        (None, "is not a duration"),
        ("-5s", "is negative"),
        ("99999999999999d", "longer than any clock"),
        ("9" * 400 + "s", "longer than any clock"),
    ],
)
def test_everything_else_is_none_and_the_reason_says_why(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_duration(value)


@given(count=st.integers(0, MAX_MILLISECONDS))
@quick
def test_what_is_written_is_read_back_exactly(count: int) -> None:
    duration = timedelta(milliseconds=count)

    assert parse_duration(format_duration(duration)) == duration
    assert milliseconds(duration) == count


def test_a_fraction_of_a_millisecond_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of milliseconds"):
        milliseconds(timedelta(microseconds=1500))


class TestExponential:
    def test_delays_grow_by_the_factor_up_to_the_longest(self) -> None:
        assert [delay.total_seconds() for delay in exponential("1s", 5, longest="5s")] == [1, 2, 4, 5, 5]
        assert exponential(timedelta(seconds=3), 2, factor=1) == (timedelta(seconds=3),) * 2

    @given(
        first=st.integers(1, 10**6),
        rungs=st.integers(1, 32),
        factor=st.floats(1, 1e6),
        longest=st.none() | st.integers(1, 2 * MAX_MILLISECONDS),
    )
    @quick
    def test_every_ladder_is_one_that_a_broker_can_hold(
        self, first: int, rungs: int, factor: float, longest: int | None
    ) -> None:
        cap = None if longest is None else timedelta(milliseconds=longest)
        delays = exponential(timedelta(milliseconds=first), rungs, factor=factor, longest=cap)

        assert len(delays) == rungs
        assert list(delays) == sorted(delays)
        assert all(timedelta() < delay <= min(cap or LONGEST, LONGEST) for delay in delays)
        assert all(milliseconds(delay) for delay in delays)

    def test_a_ladder_without_an_end_stops_growing_at_what_the_broker_can_keep(self) -> None:
        assert exponential("1d", 32)[-1] == LONGEST
        assert exponential("1d", 32, factor=1e300)[-1] == LONGEST

    @pytest.mark.parametrize(
        ("arguments", "options", "reason"),
        [
            (("5s", 3), {"factor": 0.5}, "below 1 the delays would shrink"),
            (("5s", 3), {"factor": float("nan")}, "factor is nan"),
            (("5s", 3), {"factor": float("inf")}, "factor is inf"),
            (("5s", 0), {}, "0 rungs; a ladder has 1 to 32"),
            (("5s", 33), {}, "33 rungs"),
            (("soon", 3), {}, "'soon' is not a duration"),
            (("-5s", 3), {}, "'-5s' is negative"),
            (("0s", 3), {}, "0:00:00 is not above zero"),
            (("5s", 3), {"longest": "0s"}, "0:00:00 is not above zero"),
            (("5s", 3), {"longest": "never"}, "'never' is not a duration"),
        ],
    )
    def test_what_makes_no_ladder_is_refused(self, arguments: Any, options: Any, reason: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^exponential: .*{reason}"):
            exponential(*arguments, **options)
