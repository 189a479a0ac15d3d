"""Writing dead letters and replays: the whole message, the whole story, and never more than a frame holds."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitdlq import names
from rabbitdlq.dead_letter import AttemptRecord, DeadLetter, harmless, harms
from rabbitdlq.deaths import Arrival, arrival, deaths_of
from rabbitdlq.failure import Failure
from rabbitdlq.message import Message, lap_of, message_of
from rabbitdlq.parking import (
    FRAME_RESERVE,
    OWN_HEADER_BYTES,
    Parking,
    ladder_properties,
    new_park_id,
    park_properties,
    replay_properties,
)
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties
from tests.unit.strategies import properties, quick, raw_tables
from tests.unit.test_deaths import AFTER_TWO_FAILURES

ORDERS = Topology("orders", ("5s", "30s"))
FRAME = 131_072
NOW = datetime(2024, 1, 1, 12, tzinfo=UTC)


def record(attempt: int, text: str = "no", **more: Any) -> AttemptRecord:
    return AttemptRecord(attempt, NOW + timedelta(seconds=attempt), more.pop("kind", "E"), text, "host:1", 1.5)


def message(value: Properties, body: bytes = b"{}", *, failures: int = 2, way: Arrival | None = None) -> Message:
    return message_of(ORDERS, body, value, way or Arrival(failures, failures, "shop", "order.created"), failures)


def parking(**values: Any) -> Parking:
    defaults: dict[str, Any] = {
        "reason": names.EXHAUSTED,
        "failure": Failure("ValueError", "no", "Traceback: no", "0123456789abcdef"),
        "history": [record(1), record(2), record(3)],
        "worker": "host:1",
        "parked_at": NOW + timedelta(minutes=1),
        "park_id": "p1",
    }
    return Parking(**defaults | values)


def parked(value: Properties, story: Parking | None = None, body: bytes = b"{}", **more: Any) -> DeadLetter:
    """The dead letter as it is read from the queue."""
    wire = park_properties(message(value, body, **more), story or parking(), FRAME)
    return DeadLetter.parse("orders", body, Properties.parse(wire.encode()))


class TestPark:
    def test_the_letter_tells_the_whole_story(self) -> None:
        value = Properties(message_id="17", timestamp=1_700_000_000, headers=Headers({"tenant": "acme"}))

        letter = parked(value)

        assert (letter.id, letter.id_derived, letter.park_id) == ("17", False, "p1")
        assert (letter.reason, letter.attempts, letter.max_attempts, letter.lap) == ("exhausted", 3, 3, 1)
        assert (letter.queue, letter.exchange, letter.routing_key) == ("orders", "shop", "order.created")
        assert letter.error == Failure("ValueError", "no", "Traceback: no", "0123456789abcdef")
        assert letter.history == (record(1), record(2), record(3))
        assert letter.history_partial is False
        assert letter.first_failed_at == record(1).at
        assert letter.moved_to_dlq_at == NOW + timedelta(minutes=1)
        assert dict(letter.properties.table) == {"tenant": "acme"}

    def test_a_failure_of_a_class_with_fewer_attempts_tells_how_many_it_had(self) -> None:
        letter = parked(
            Properties(message_id="17"), parking(max_attempts=2, history=[record(1), record(2)]), failures=1
        )

        assert (letter.attempts, letter.max_attempts) == (2, 2)

    @given(value=properties, body=st.binary(max_size=50))
    @quick
    def test_body_and_properties_come_back_byte_for_byte_all_but_the_moved_ones(
        self, value: Properties, body: bytes
    ) -> None:
        """C26, C33: copies lost their types, their priority, their persistence."""
        theirs = value.but(headers=value.table.without(lambda name: name in names.OURS))

        letter = parked(theirs, body=body)

        expected, _ = harmless(theirs)
        assert letter.body == body
        assert letter.properties.encode() == expected.but(message_id=value.message_id or letter.id).encode()

    def test_what_would_harm_is_kept_to_be_looked_at(self) -> None:
        """C2, C31: user id and expiration must not be on the copy, and must not be forgotten."""
        value = Properties(
            message_id="17",
            user_id="alice",
            expiration="1000",
            headers=Headers({"CC": ["other"], "x-death": AFTER_TWO_FAILURES}),
        )

        letter = parked(value)

        assert (letter.wire.user_id, letter.wire.expiration) == (None, None)
        assert not {"CC", "x-death"} & set(letter.wire.table)
        assert letter.original["user_id"] == "alice"
        assert letter.original["expiration"] == "1000"
        assert letter.original["CC"] == ["other"]
        assert [death["queue"] for death in letter.original["x-death"]] == [
            death["queue"] for death in AFTER_TWO_FAILURES
        ]

    def test_what_was_moved_in_an_earlier_lap_is_still_there(self) -> None:
        value = Properties(message_id="17", expiration="5", headers=Headers({names.ORIGINAL: '{"user_id": "alice"}'}))

        assert parked(value).original == {"user_id": "alice", "expiration": "5"}

    def test_a_message_without_id_gets_one_and_says_so(self) -> None:
        """C13: the absence must not be disguised."""
        letter = parked(Properties())
        again = parked(Properties(message_id=letter.id, headers=Headers({names.ID_DERIVED: True})))

        assert letter.id.startswith("derived-")
        assert letter.id_derived
        assert again.id_derived

    def test_its_age_counts_from_the_first_failure_of_the_first_lap(self) -> None:
        """C31: age shown from the first death."""
        long_ago = "2020-01-01T00:00:00.000+00:00"
        letter = parked(Properties(message_id="17", headers=Headers({names.FIRST_FAILED_AT: long_ago, names.LAP: 2})))
        broken = parked(Properties(message_id="17", headers=Headers({names.FIRST_FAILED_AT: "long ago"})))

        assert letter.first_failed_at == datetime(2020, 1, 1, tzinfo=UTC)
        assert broken.first_failed_at == record(1).at

    def test_a_history_with_a_gap_says_so(self) -> None:
        assert parked(Properties(message_id="1"), parking(history=[record(3)], history_partial=True)).history_partial
        assert parked(Properties(message_id="1"), parking(history=[record(3)])).history_partial

    @given(value=properties, foreign=st.dictionaries(st.sampled_from(sorted(names.OURS)), st.text(max_size=20)))
    @quick
    def test_headers_of_ours_that_somebody_else_wrote_are_replaced(
        self, value: Properties, foreign: dict[str, str]
    ) -> None:
        wire = park_properties(message(value.but(headers=value.table.plus(foreign))), parking(), FRAME)

        names_there = [name for name in _names(wire.table) if name in names.OURS]
        assert len(names_there) == len(set(names_there))
        assert wire.table[names.REASON] == "exhausted"
        assert wire.table[names.PARK_ID] == "p1"


class TestBudget:
    texts = st.builds(
        lambda piece, length: piece * length,
        st.sampled_from(["x", "ä", "€", "😀", '"', "\\", "\n"]),
        st.integers(0, 90_000),
    )

    @given(
        error=texts,
        trace=texts,
        kind=texts,
        worker=texts,
        attempts=st.integers(0, 40),
        header=texts,
        moved=texts,
        frame=st.sampled_from([8_192, 16_384, FRAME]),
    )
    @settings(quick, max_examples=20)
    def test_no_story_is_longer_than_the_frame_allows(
        self,
        error: str,
        trace: str,
        kind: str,
        worker: str,
        attempts: int,
        header: str,
        moved: str,
        frame: int,
    ) -> None:
        """C5: 130 to 300 kB of error text, multi-byte too, and 120 kB of headers that were there before."""
        theirs = Headers({"big": _within(header, frame - FRAME_RESERVE - 200), "CC": [_within(moved, 40_000)]})
        value = Properties(message_id="17", headers=theirs)
        history = [record(attempt, error, kind=kind) for attempt in range(1, attempts + 1)]
        story = parking(failure=Failure(kind, error, trace, "f"), history=history, worker=worker)

        wire = park_properties(message(value), story, frame)

        base = harmless(value)[0].encode()
        own = len(wire.encode()) - len(base)
        assert len(wire.encode()) <= frame - 20  # the frame's own header and end, and that of the content
        assert own <= max(OWN_HEADER_BYTES, FRAME_RESERVE)
        letter = DeadLetter.parse("orders", b"{}", Properties.parse(wire.encode()))
        assert (letter.reason, letter.attempts, letter.park_id) == ("exhausted", 3, "p1")
        json.loads(letter.wire.table.text(names.HISTORY) or "[]")
        json.loads(letter.wire.table.text(names.ORIGINAL) or "{}")

    def test_keys_without_end_in_foreign_headers_are_cut(self) -> None:
        foreign = Headers({names.EXCHANGE: "x" * 50_000, names.ROUTING_KEY: "y" * 50_000})

        wire = park_properties(message(Properties(message_id="17", headers=foreign)), parking(), FRAME)

        assert len(wire.encode()) < 10_000

    @given(count=st.integers(1, 60), text=st.text(min_size=1, max_size=2_000))
    @quick
    def test_a_history_keeps_its_first_and_last_attempts_and_stays_json(self, count: int, text: str) -> None:
        history = [record(attempt, text) for attempt in range(1, count + 1)]

        letter = parked(Properties(message_id="17"), parking(history=history), failures=count - 1)

        kept = [each.attempt for each in letter.history]
        assert kept == sorted(set(kept))
        assert (kept[0], kept[-1]) == (1, count)
        assert letter.history_partial == (len(kept) < count)

    def test_a_history_of_short_texts_is_whole(self) -> None:
        history = [record(attempt, "no order 17") for attempt in range(1, 34)]

        letter = parked(Properties(message_id="17"), parking(history=history), failures=32)

        assert [each.attempt for each in letter.history] == list(range(1, 34))
        assert {each.error_message for each in letter.history} == {"no order 17"}

    def test_a_message_with_thousands_of_book_keeping_headers_is_parked_in_one_pass(self) -> None:
        """What does not fit is left out, the largest first; sorting once, not once for each."""
        many = {f"x-last-death-{number}": "x" * (number % 7) for number in range(4_000)} | {"x-death": ["y" * 9_000]}

        letter = parked(Properties(message_id="17", user_id="alice", headers=Headers(many)))

        assert letter.original["user_id"] == "alice"
        assert "x-death" not in letter.original
        assert 100 < len(letter.original) < 4_000

    def test_a_name_that_is_not_utf8_does_not_break_what_was_moved(self) -> None:
        odd = Headers({"x-first-death-\udcff": "x", "CC": ["y"]})

        assert parked(Properties(message_id="17", headers=odd)).original == {"x-first-death-\\xff": "x", "CC": ["y"]}


class TestParkId:
    VALUE = Properties(message_id="17", headers=Headers({"x-death": AFTER_TWO_FAILURES}))

    def at_third_attempt(self, value: Properties, body: bytes = b"{}") -> Message:
        way = arrival(ORDERS, "orders.return", "retry.2", deaths_of(value.table))
        return message(value, body, way=way)

    def test_it_is_the_same_on_both_copies_that_a_crash_parks(self) -> None:
        first = new_park_id(self.at_third_attempt(self.VALUE))

        assert new_park_id(self.at_third_attempt(Properties.parse(self.VALUE.encode()))) == first

    def test_it_is_another_for_another_body_attempt_lap_or_way(self) -> None:
        other_deaths = [death | {"count": 7} for death in AFTER_TWO_FAILURES]
        base = self.at_third_attempt(self.VALUE)

        ids = {
            new_park_id(each)
            for each in (
                base,
                self.at_third_attempt(self.VALUE, b"[]"),
                replace(base, attempt=2),
                replace(base, lap=2),
                replace(base, queue="mails"),
                self.at_third_attempt(self.VALUE.but(headers=Headers({"x-death": other_deaths}))),
            )
        }

        assert len(ids) == 6

    def test_two_messages_without_ids_are_never_taken_for_one(self) -> None:
        """C13: no dedupe on ids that nobody set."""
        for value in (Properties(), Properties(message_id="derived-1", headers=Headers({names.ID_DERIVED: True}))):
            assert new_park_id(message(value)) != new_park_id(message(value))


class TestReplay:
    def test_it_is_the_publishers_message_and_the_next_lap(self) -> None:
        """C6, C31: no count, no expiration, nothing that makes it dead at once."""
        value = Properties(
            message_id="17",
            user_id="alice",
            expiration="1000",
            reply_to="amq.rabbitmq.reply-to.g1",
            delivery_mode=2,
            priority=5,
            headers=Headers({"tenant": "acme", "CC": ["x"], "BCC": ["y"], "x-death": AFTER_TWO_FAILURES}),
        )
        letter = parked(value)

        wire = replay_properties(letter)

        assert (wire.message_id, wire.delivery_mode, wire.priority) == ("17", 2, 5)
        assert (wire.user_id, wire.expiration, wire.reply_to) == (None, None, None)
        assert dict(wire.table) == {
            "tenant": "acme",
            names.LAP: 2,
            names.EXCHANGE: "shop",
            names.ROUTING_KEY: "order.created",
            names.REPLAY_ID: "p1",
            names.FIRST_FAILED_AT: "2024-01-01T12:00:01.000+00:00",
            names.ORIGINAL: letter.wire.table[names.ORIGINAL],
        }

    @given(
        value=properties,
        ours=st.dictionaries(st.sampled_from(sorted(names.OURS)), st.text(max_size=9) | st.integers(0, 9)),
    )
    @quick
    def test_whatever_lies_in_the_queue_nothing_goes_back_that_would_harm(
        self, value: Properties, ours: dict[str, Any]
    ) -> None:
        harm = {"CC": ["a"], "BCC": ["b"], "x-death": AFTER_TWO_FAILURES, "x-first-death-queue": "orders"}
        lying = value.but(headers=value.table.plus(ours | harm), expiration="1", user_id="u")
        letter = DeadLetter.parse("orders", b"{}", lying)

        wire = replay_properties(letter)

        assert not set(harm) & set(wire.table)
        assert set(wire.table) & names.OURS <= names.KEPT_ON_REPLAY
        assert (wire.expiration, wire.user_id) == (None, None)
        assert wire.table[names.LAP] == letter.lap + 1
        assert wire.message_id

    @given(table=raw_tables)
    @quick
    def test_headers_of_the_publisher_go_back_byte_for_byte(self, table: bytes) -> None:
        theirs = Headers.parse(table).without(lambda name: name in names.OURS)
        letter = parked(Properties(message_id="17", headers=theirs))

        expected = harmless(Properties(headers=theirs))[0].table.encode()
        assert replay_properties(letter).table.encode().startswith(expected)

    def test_a_bare_letter_goes_back_with_what_the_broker_remembered_of_it(self) -> None:
        bare = Properties(headers=Headers({"tenant": "acme", "x-death": AFTER_TWO_FAILURES}))
        letter = DeadLetter.parse("orders", b"{}", bare)

        wire = replay_properties(letter)

        assert wire.message_id == letter.id
        assert wire.table[names.ID_DERIVED] is True
        assert (wire.table[names.EXCHANGE], wire.table[names.ROUTING_KEY]) == ("shop", "order.created")
        assert wire.table[names.LAP] == 2
        assert wire.table[names.REPLAY_ID] == replay_properties(letter).table[names.REPLAY_ID]
        assert "x-death" in json.loads(str(wire.table[names.ORIGINAL]))

    def test_a_lap_beyond_counting_begins_anew(self) -> None:
        letter = DeadLetter.parse("orders", b"{}", Properties(headers=Headers({names.LAP: 2**63 - 1})))

        assert replay_properties(letter).table[names.LAP] == 2

    def test_lap_after_lap_the_message_stays_what_it_was(self) -> None:
        value = Properties(message_id="17", expiration="9", headers=Headers({"tenant": "acme"}))
        letter = parked(value)
        for lap in range(2, 6):
            back = replay_properties(letter)
            letter = parked(back)
            assert letter.lap == lap

        assert letter.properties.encode() == value.but(expiration=None).encode()
        assert letter.original == {"expiration": "9"}
        assert len(letter.wire.encode()) < 1_500


def _names(headers: Headers) -> list[str]:
    return [raw[1 : 1 + raw[0]].decode("utf-8", "surrogateescape") for raw in headers.entries()]


def _within(text: str, size: int) -> str:
    return text.encode()[: max(0, size)].decode("utf-8", "ignore")


class TestLadder:
    """What a message carries into a rung when it is published there."""

    @given(value=properties)
    @quick
    def test_its_own_go_with_it_and_nothing_that_harms_there(self, value: Properties) -> None:
        there = ladder_properties(message(value), 2)

        assert Properties.parse(there.encode()) == there
        assert there.table.number(names.FAILURES) == 2
        assert (there.expiration, there.user_id) == (None, None)
        assert not any(names.is_brokers(name) or name in names.ROUTING_HEADERS for name in there.table)
        own = value.table.without(lambda name: harms(name) or name in names.OURS)
        assert there.table.without(names.OURS.__contains__).encode() == own.encode()

    def test_the_next_attempt_sees_the_same_message(self) -> None:
        value = Properties(expiration="1000", headers=Headers({"tenant": "acme", names.LAP: 3, names.REPLAY_ID: "r"}))
        before = message(value, failures=0)

        again = message_of(
            ORDERS, before.body, ladder_properties(before, 1), Arrival(2, 1, "orders.return", "orders.retry.2"), 1
        )

        assert (again.id, again.lap, again.exchange, again.routing_key) == (before.id, 3, "shop", "order.created")
        assert again.headers["tenant"] == "acme"
        assert again.headers[names.REPLAY_ID] == "r"

    def test_the_letter_that_it_becomes_tells_what_was_moved_and_not_how_it_went(self) -> None:
        first = message(Properties(message_id="17", expiration="1000"), failures=0)
        letter = parked(ladder_properties(first, 1))

        assert letter.original == {"expiration": "1000"}
        assert names.FAILURES not in letter.wire.table
        assert names.FAILURES not in replay_properties(letter).table

    def test_a_letter_that_others_moved_back_keeps_its_lap(self) -> None:
        """By its park id it is in its next lap: the message in the rung has none any more."""
        moved = message(Properties(message_id="17", headers=Headers({names.LAP: 1, names.PARK_ID: "p"})), failures=0)
        assert moved.lap == 2

        assert lap_of(ladder_properties(moved, 1).table) == 2
