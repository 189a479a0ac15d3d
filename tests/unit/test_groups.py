"""Dead letters counted by what they have in common."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rabbitdlq import ConfigurationError, DeadLetter, Group
from rabbitdlq.dead_letters.groups import KEYS, Grouping
from rabbitdlq.failure import Failure
from tests.unit.test_dead_letter import CRASHED
from tests.unit.test_selection import BARE, NOON, UNKNOWN, letter

HOUR = timedelta(hours=1)
LATE = Failure("TimeoutError", "after 30 s", None, "0123456789abcdef")


def grouped(*letters: DeadLetter, by: str = "fingerprint", **options: Any) -> list[Group]:
    grouping = Grouping(by)
    for each in letters:
        grouping.add(each)
    return grouping.groups(**options)


class TestCounting:
    def test_one_bug_is_one_group_and_the_largest_comes_first(self) -> None:
        late, *keys = grouped(
            letter(id="a", moved_to_dlq_at=NOON),
            letter(id="b", error=LATE, moved_to_dlq_at=NOON + HOUR),
            letter(id="c", error=replace(LATE, message="after 31 s"), moved_to_dlq_at=NOON - HOUR),
            letter(id="d", error=LATE, moved_to_dlq_at=None, lap=3),
        )

        assert late == Group(
            key="0123456789abcdef",
            signature="TimeoutError: after 30 s",
            count=3,
            share=0.75,
            first_parked=NOON - HOUR,
            last_parked=NOON + HOUR,
            last_replayed=None,
            example_id="b",
            came_back=1,
            max_lap=3,
            state=None,
        )
        assert [(group.key, group.signature, group.count) for group in keys] == [
            ("ab12cd34ef567890", "KeyError: 'customer'", 1)
        ]

    def test_letters_without_an_error_are_a_group_of_their_own(self) -> None:
        found = grouped(BARE, UNKNOWN, letter())

        assert [(group.key, group.signature, group.count) for group in found] == [
            ("", "(no error recorded)", 2),
            ("ab12cd34ef567890", "KeyError: 'customer'", 1),
        ]
        assert found[0].example_id == BARE.id
        assert grouped(UNKNOWN)[0].first_parked is None

    @pytest.mark.parametrize(
        ("by", "keys"),
        [
            ("fingerprint", {"ab12cd34ef567890", "0123456789abcdef", ""}),
            ("error", {"KeyError: 'customer'", "TimeoutError: after 30 s", ""}),
            ("type", {"KeyError", "TimeoutError", ""}),
            ("reason", {"exhausted", "timeout", "delivery-limit"}),
            ("routing-key", {"order.created", "order.paid"}),
            ("worker", {"w1", "w2", ""}),
        ],
    )
    def test_they_can_be_grouped_by_other_things(self, by: str, keys: set[str]) -> None:
        ours, theirs = letter(), letter(error=LATE, reason="timeout", routing_key="order.paid")
        letters = [
            replace(each, wire=each.wire.but(headers=each.wire.table.plus({"dlq-worker": worker})))
            for each, worker in ((ours, "w1"), (theirs, "w2"))
        ]

        found = grouped(*letters, BARE, by=by)

        assert {group.key for group in found} == keys
        assert sum(group.count for group in found) == 3
        assert sum(group.share for group in found) == pytest.approx(1)
        assert all(group.signature for group in found)

    def test_what_it_cannot_be_grouped_by_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="'colour'; by fingerprint, error, type"):
            Grouping("colour")
        assert set(KEYS) == {"fingerprint", "error", "type", "reason", "routing-key", "worker"}

    def test_no_letters_are_no_groups(self) -> None:
        assert grouped() == []

    def test_groups_of_one_size_come_in_the_same_order_each_time(self) -> None:
        letters = [letter(), letter(error=LATE)]

        assert grouped(*letters) == grouped(*reversed(letters))

    def test_a_groups_memory_does_not_grow_with_its_letters_or_their_texts(self) -> None:
        grouping = Grouping("error")
        for number in range(1_000):
            grouping.add(letter(error=Failure("E", "x" * 4_000, None, "ab12cd"), id=f"m{number}"))

        (found,) = grouping.groups()
        assert (found.count, len(found.key)) == (1_000, 500)
        (by_bug,) = grouped(letter(error=Failure("E", "x" * 4_000, None, "ab12cd")))
        assert len(by_bug.signature) == 200

    def test_as_json_times_are_texts(self) -> None:
        (found,) = grouped(letter(), since=NOON)

        assert found.as_json() == {
            "key": "ab12cd34ef567890",
            "signature": "KeyError: 'customer'",
            "count": 1,
            "share": 1.0,
            "first_parked": "2026-03-01T12:00:00.000+00:00",
            "last_parked": "2026-03-01T12:00:00.000+00:00",
            "last_replayed": None,
            "example_id": "m1",
            "came_back": 0,
            "max_lap": 1,
            "state": "new",
        }


def state(*letters: DeadLetter, replayed: datetime | None = None) -> str | None:
    """How the one group of these letters stands since noon."""
    known = {} if replayed is None else {"ab12cd34ef567890": replayed, "other": NOON}
    (found,) = grouped(*letters, since=NOON, last_replayed=known)
    assert found.last_replayed == replayed
    return found.state


def at(moment: datetime | None, **changes: Any) -> DeadLetter:
    return letter(moved_to_dlq_at=moment, **changes)


class TestState:
    def test_new_is_what_was_not_there_before(self) -> None:
        assert state(at(NOON), at(NOON + HOUR)) == "new"

    def test_growing_is_what_was_there_and_goes_on(self) -> None:
        assert state(at(NOON - HOUR), at(NOON)) == "growing"

    def test_quiet_is_what_was_there_and_does_not(self) -> None:
        assert state(at(NOON - HOUR), at(NOON - timedelta(microseconds=1))) == "quiet"
        assert state(at(NOON - HOUR, lap=2), replayed=NOON - 2 * HOUR) == "quiet"

    def test_regressed_is_what_was_sent_back_and_failed_again_since(self) -> None:
        assert state(at(NOON, lap=2)) == "regressed"
        assert state(at(NOON - HOUR), at(NOON + HOUR, lap=2)) == "regressed"

    def test_regressed_is_also_what_came_anew_after_its_letters_were_sent_back(self) -> None:
        """The bug was taken for mended, and those that were sent back are not in this queue any more."""
        assert state(at(NOON + HOUR), replayed=NOON - HOUR) == "regressed"
        assert state(at(NOON + HOUR), replayed=NOON + HOUR / 2) == "regressed"
        # some of its letters were not sent back
        assert state(at(NOON - 2 * HOUR), at(NOON + HOUR), replayed=NOON - HOUR) == "regressed"

    def test_one_that_came_before_the_replay_is_no_regression(self) -> None:
        assert state(at(NOON + HOUR), replayed=NOON + 2 * HOUR) == "new"
        assert state(at(NOON - HOUR), at(NOON + HOUR), replayed=NOON + 2 * HOUR) == "growing"

    def test_one_that_came_back_earlier_is_no_regression_since_then(self) -> None:
        assert state(at(NOON - HOUR, lap=2), at(NOON + HOUR)) == "growing"

    def test_where_no_time_is_known_it_is_quiet(self) -> None:
        assert state(at(None), at(None, lap=2)) == "quiet"

    def test_without_a_time_to_compare_with_there_is_no_state(self) -> None:
        assert grouped(letter())[0].state is None

    def test_bare_letters_have_one_too(self) -> None:
        assert CRASHED
        (found,) = grouped(BARE, since=datetime(2000, 1, 1, tzinfo=UTC))
        assert found.state == "new"
