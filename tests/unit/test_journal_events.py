"""Events of the journal: what is written is read, and what others write there is no trouble."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq import names
from rabbitdlq.deaths import Arrival
from rabbitdlq.failure import Failure
from rabbitdlq.journal import Entry, JournalEvent, attempt_record, failed, marker, operated, parked, recovered
from rabbitdlq.message import Message, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties
from tests.unit.strategies import json_values, quick

NOW = datetime(2024, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
FAILURE = Failure("ValueError", "no order 17", "Traceback: no", "0123456789abcdef")


def message() -> Message:
    value = Properties(message_id="17", headers=Headers({names.LAP: 2}))
    return message_of(Topology("orders", ["5s"]), b"{}", value, Arrival(1, 1, "shop", "k"), failures=1)


def failed_with(failure: Failure) -> Entry:
    return failed(message(), attempt_record(message(), failure, "host:1", NOW, 12.3456), failure)


def read(entry: Entry) -> JournalEvent:
    (event,) = JournalEvent.decode_all(entry.encode())
    return event


ENTRIES = {
    "failed": failed_with(FAILURE),
    "parked": parked(message(), names.EXHAUSTED, FAILURE, "host:1", "p1"),
    "recovered": recovered(message(), "host:1", 5.0),
}
EVENTS = {name: read(entry) for name, entry in ENTRIES.items()} | {
    "replayed": operated(names.REPLAYED, "orders", who="anna@host", amqp_user="ops", ids=["17", "18"], count=2),
    "marker": marker("orders", "word"),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_an_event_comes_back_as_it_was_written(event: JournalEvent) -> None:
    assert list(JournalEvent.decode_all(event.encode())) == [event]


@pytest.mark.parametrize("name", ENTRIES)
def test_what_a_consumer_writes_is_the_event_and_nothing_else(name: str) -> None:
    entry, event = ENTRIES[name], EVENTS[name]

    assert json.loads(entry.encode()) == event.as_json()
    assert (event.event, event.at, event.queue, event.message_id, event.attempt) == (
        name,
        entry.at,
        "orders",
        entry.message_id,
        entry.attempt,
    )


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_what_an_event_does_not_have_is_absent_in_its_json(event: JournalEvent) -> None:
    shown = event.as_json()

    assert None not in shown.values()
    assert shown == json.loads(event.encode())


def test_a_failed_attempt_is_told_whole() -> None:
    assert EVENTS["failed"].as_json() == {
        "event": "failed",
        "at": "2024-01-01T12:00:00.123456Z",
        "queue": "orders",
        "message_id": "17",
        "lap": 2,
        "attempt": 2,
        "max_attempts": 2,
        "worker": "host:1",
        "error_type": "ValueError",
        "error_message": "no order 17",
        "traceback": "Traceback: no",
        "fingerprint": "0123456789abcdef",
        "duration_ms": 12.346,
    }


def test_only_a_failed_attempt_has_a_record() -> None:
    record = JournalEvent.model_validate(EVENTS["failed"]).record

    assert record is not None
    assert (record.attempt, record.at, record.error_type, record.worker) == (2, NOW, "ValueError", "host:1")
    assert [name for name, event in EVENTS.items() if event.record] == ["failed"]
    assert JournalEvent(event=names.FAILED, at=NOW, queue="orders").record is None


def test_a_text_without_end_is_cut_for_the_journal() -> None:
    event = read(failed_with(Failure("E" * 5_000, "ä" * 50_000, None, "f")))

    assert event.error_message is not None
    assert len(event.error_message.encode()) <= 1_000
    assert len(event.encode()) < 2_000


def test_ids_of_an_operation_on_very_many_are_cut_and_counted() -> None:
    event = operated(names.REPLAYED, "orders", who="w", amqp_user="u", ids=[str(n) for n in range(9_000)], count=9_000)

    assert (len(event.ids), event.count) == (500, 9_000)


def test_an_id_that_is_not_utf8_can_be_written() -> None:
    event = operated(names.DROPPED, "orders", who="w", amqp_user="u", ids=["caf\udce9"], count=1)

    assert list(JournalEvent.decode_all(event.encode())) == [event]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"event": "failed", "queue": "orders"}',
        b'{"event": "failed", "queue": "orders", "at": "yesterday"}',
        # compared with one that has a zone it would be an error, in the middle of settling somebody else's message
        b'{"event": "failed", "queue": "orders", "at": "2024-01-01T00:00:00"}',
    ],
)
def test_what_others_write_into_the_stream_is_no_event(body: bytes) -> None:
    assert not list(JournalEvent.decode_all(body))


@given(value=json_values, extra=st.dictionaries(st.sampled_from(sorted(JournalEvent.model_fields)), json_values))
@quick
def test_any_json_is_an_event_or_none(value: Any, extra: dict[str, Any]) -> None:
    for each in (value, EVENTS["failed"].as_json() | extra):
        event = next(JournalEvent.decode_all(json.dumps(each).encode()), None)
        if event is not None:
            assert event.at.tzinfo is not None
            assert list(JournalEvent.decode_all(event.encode()))


def test_fields_of_a_later_version_are_passed_over() -> None:
    later = EVENTS["failed"].as_json() | {"colour": "red"}

    assert list(JournalEvent.decode_all(json.dumps(later).encode())) == [EVENTS["failed"]]
