"""The index of failed attempts: complete, in order, bounded."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq import names
from rabbitdlq.journal import HistoryIndex, JournalEvent
from rabbitdlq.journal.index import MOST_STARTS, RECORDS_PER_MESSAGE
from tests.unit.strategies import quick

START = datetime(2024, 1, 1, tzinfo=UTC)


def event(
    id: str = "17",
    attempt: int | None = 1,
    *,
    lap: int | None = 1,
    second: float = 0,
    name: str = names.FAILED,
    **more: Any,
) -> JournalEvent:
    at = START + timedelta(seconds=second)
    more.setdefault("worker", "host:1")
    return JournalEvent(event=name, at=at, queue="orders", message_id=id, lap=lap, attempt=attempt, **more)


def filled(*events: JournalEvent, max_bytes: int = 64_000_000) -> HistoryIndex:
    index = HistoryIndex(max_bytes)
    for each in events:
        index.add(each)
    return index


def attempts(index: HistoryIndex, *, lap: int = 1, failures: int = 9) -> list[int]:
    return [record.attempt for record in index.history("17", lap, failures)]


def test_attempts_of_any_process_are_told_in_their_order() -> None:
    """C35: the count lived in the memory of one process."""
    index = filled(event(attempt=2, second=5, worker="b:2"), event(attempt=1, worker="a:1"), event("18"))

    assert [(record.attempt, record.worker) for record in index.history("17", 1, 2)] == [(1, "a:1"), (2, "b:2")]
    assert index.last_attempt("17", 1) == 2


def test_only_attempts_of_this_lap_up_to_the_number_of_failures_are_told() -> None:
    index = filled(
        *(event(attempt=number, second=number) for number in (0, 1, 2, 3)), event(attempt=1, lap=2, second=60)
    )

    assert attempts(index, failures=2) == [1, 2]
    assert attempts(index, lap=2) == [1]
    assert attempts(index, lap=3) == []
    assert index.last_attempt("17", 2) == 1
    assert index.last_attempt("17", 3) == 0
    assert index.history("nobody", 1, 9) == []


def test_an_event_that_is_seen_twice_is_one() -> None:
    """A worker adds its own attempt, and then reads it in the journal."""
    index = filled(event(), event(), event(second=1))
    size = index.size

    index.add(event())

    assert attempts(index) == [1]
    assert index.size == size


@pytest.mark.parametrize("name", [names.PARKED, names.RECOVERED])
def test_a_message_whose_story_is_told_is_forgotten(name: str) -> None:
    index = filled(event(), event("18"), event(name=name))

    assert attempts(index) == []
    assert len(index) == 1


@pytest.mark.parametrize("name", [names.REPLAYED, names.MARKER, names.PURGED, "unheard-of"])
def test_other_events_change_nothing(name: str) -> None:
    index = filled(event(), event(name=name))

    assert attempts(index) == [1]


def test_an_event_without_id_or_attempt_is_nobodys() -> None:
    index = filled(event(attempt=None), JournalEvent(event=names.FAILED, at=START, queue="orders", attempt=1))

    assert len(index) == 0


def test_of_an_attempt_that_was_made_in_two_rounds_the_later_counts_whatever_the_order_of_reading() -> None:
    """Others moved the message back: its lap keeps its number. What is read back later may be older."""
    old = [event(attempt=number, second=number) for number in (1, 2, 3)]
    new = event(attempt=1, second=100, worker="b:2")

    for order in ([*old, new], [new, *old]):
        index = filled(*order)
        history = index.history("17", 1, 3)
        # attempts 2 and 3 of the earlier round are older than attempt 1 of this one
        assert [(record.attempt, record.worker) for record in history] == [(1, "b:2")]
        assert index.last_attempt("17", 1) == 1


def test_an_attempt_of_another_lap_or_a_later_one_is_not_told_as_one_of_these() -> None:
    """As many as there were failures are not yet those failures."""
    assert attempts(filled(event(attempt=1, lap=1)), lap=2, failures=1) == []
    assert attempts(filled(event(attempt=2)), failures=1) == []
    assert attempts(filled(event(attempt=1, second=9), event(attempt=2, second=1)), failures=2) == [1]


def test_one_attempt_told_of_twice_in_a_round_is_mixed_and_a_round_after_it_is_not() -> None:
    once = [event(second=0), event(attempt=2, second=1)]

    assert not filled(*once).mixed("17", 1, 2)
    assert filled(*once, event(attempt=2, second=2, worker="b")).mixed("17", 1, 2)
    assert not filled(*once, event(second=50), event(attempt=2, second=51)).mixed("17", 1, 2)


def test_what_failed_after_a_time_is_known_of() -> None:
    index = filled(event("1", second=1), event("2", second=9), event("3", second=2))

    assert index.has_since(START + timedelta(seconds=8))
    assert not index.has_since(START + timedelta(seconds=9))


def test_later_laps_and_later_failures_are_not_forgotten_with_the_others() -> None:
    """A message that is replayed at once may have failed again before the word of its parking is read."""
    laps = filled(event(lap=1, second=1), event(lap=2, second=2))
    laps.forget("17", 1, START + timedelta(seconds=60))
    assert (attempts(laps, lap=1), attempts(laps, lap=2)) == ([], [1])

    times = filled(event(second=1), event(attempt=2, second=20))
    times.forget("17", 1, START + timedelta(seconds=10))
    assert attempts(times) == [2]


def test_clocks_that_differ_a_little_do_not_tear_a_history() -> None:
    index = filled(event(attempt=1, second=3, worker="a"), event(attempt=2, second=0.5, worker="b"))

    assert attempts(index) == [1, 2]


def test_when_it_is_full_the_longest_untouched_message_goes() -> None:
    one = filled(event("1")).size
    index = filled(event("1"), event("2"), event("1", 2, second=1), event("3"), max_bytes=3 * one)

    assert index.history("2", 1, 9) == []
    assert len(index.history("1", 1, 9)) == 2
    assert len(index.history("3", 1, 9)) == 1


def test_an_id_that_a_producer_gives_to_every_message_does_not_fill_it() -> None:
    index = filled(*(event(attempt=1, second=number) for number in range(3 * RECORDS_PER_MESSAGE)))

    assert index.size <= RECORDS_PER_MESSAGE * filled(event()).size
    assert index.history("17", 1, 1)[0].at == START + timedelta(seconds=3 * RECORDS_PER_MESSAGE - 1)


@given(
    events=st.lists(
        st.builds(
            event,
            st.sampled_from(["1", "2", "3", "4"]),
            st.integers(1, 4),
            lap=st.none() | st.integers(1, 2),
            second=st.integers(0, 50),
            name=st.sampled_from([names.FAILED] * 6 + [names.PARKED, names.RECOVERED]),
            error_message=st.none() | st.text(max_size=500),
        ),
        max_size=60,
    ),
    max_bytes=st.sampled_from([0, 500, 2_000, 10_000]),
)
@quick
def test_whatever_comes_its_size_is_bounded_and_counted_right(events: list[JournalEvent], max_bytes: int) -> None:
    index = filled(*events, max_bytes=max_bytes)

    assert index.size <= max_bytes
    for id in ("1", "2", "3", "4"):
        for lap in (1, 2):
            history = index.history(id, lap, 4)
            assert [record.attempt for record in history] == sorted({record.attempt for record in history})
        index.forget(id, 2, datetime.max.replace(tzinfo=UTC))
    assert (index.size, len(index)) == (0, 0)


KEY = ("17", 1, 1, "")


class TestStarts:
    """Handlers that began and of whose end nobody told."""

    def test_what_began_and_did_not_end_is_counted_by_attempt_and_by_what_the_message_is(self) -> None:
        index = filled(
            event(name=names.STARTED, worker="a:1", digest="d"),
            event(name=names.STARTED, worker="b:1", second=5, digest="d"),
            event(name=names.STARTED, worker="c:1", second=6, attempt=2, digest="d"),
            event(name=names.STARTED, worker="c:1", second=6, lap=2, digest="d"),
            event("18", name=names.STARTED, worker="c:1", second=7, digest="d"),
            event(name=names.STARTED, worker="c:1", second=8, digest="another message with this id"),
        )

        assert index.starts(("17", 1, 1, "d")) == [START, START + timedelta(seconds=5)]
        assert len(index.starts(("17", 1, 2, "d"))) == len(index.starts(("17", 2, 1, "d"))) == 1
        assert index.starts(("19", 1, 1, "d")) == []

    def test_an_end_is_the_end_of_what_its_worker_began_then_and_of_nothing_else(self) -> None:
        """A process that is started anew may have the name of the one that died."""
        index = filled(
            event(name=names.STARTED, worker="a:1"),
            event(name=names.STARTED, worker="b:1", second=1),
            event(name=names.STARTED, worker="b:1", second=3),
            event(name=names.ENDED, worker="b:1", second=4, started_at=START + timedelta(seconds=3)),
        )

        assert index.starts(KEY) == [START, START + timedelta(seconds=1)]
        index.add(event(name=names.ENDED, worker="b:1", second=5, started_at=START + timedelta(seconds=1)))
        index.add(event(name=names.ENDED, worker="a:1", second=5, started_at=START))
        assert index.starts(KEY) == []

    def test_the_journal_may_be_read_again(self) -> None:
        story = [
            event(name=names.STARTED, worker="a:1"),
            event(name=names.STARTED, worker="b:1", second=1),
            event(name=names.ENDED, worker="b:1", second=2, started_at=START + timedelta(seconds=1)),
        ]
        index = filled(*story, *story)

        assert index.starts(KEY) == [START]

    def test_it_is_bounded(self) -> None:
        index = filled(*(event(str(n), name=names.STARTED) for n in range(MOST_STARTS + 1)))

        assert index.starts(("0", 1, 1, "")) == []
        assert index.starts(("1", 1, 1, "")) == [START]
