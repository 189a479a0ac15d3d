"""Reading dead letters: parked by us, parked bare by the broker, moved about by others, or broken."""

import json
import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq import names
from rabbitdlq.dead_letter import AttemptRecord, DeadLetter, harmless, iso, jsonable, read_original, read_time
from rabbitdlq.message import derived_id
from rabbitdlq.wire import Headers, Properties
from tests.unit.strategies import header_values, json_values, properties, quick
from tests.unit.test_deaths import T1, T2, T3, death

#: parked by the broker: the third failure of a message found no consumer to park it
CLIMBED_OUT = [
    death("orders", "rejected", 3, exchange="shop", keys=["order.created"], time=T1),
    death("orders.retry.2.30s", "expired", exchange="orders.dead", time=T3),
    death("orders.retry.1.5s", "expired", exchange="orders.dead", time=T2),
]
#: two failures, and then the delivery limit
CRASHED = [
    death("orders", "delivery_limit", exchange="orders.return", keys=["retry.2"], time=T3),
    death("orders.retry.2.30s", "expired", exchange="orders.dead", time=T2),
    death("orders", "rejected", 2, exchange="shop", keys=["order.created"], time=T1),
    death("orders.retry.1.5s", "expired", exchange="orders.dead", time=T2),
]


def letter(body: bytes = b"{}", *, headers: dict[str, Any] | None = None, **values: Any) -> DeadLetter:
    return DeadLetter.parse("orders", body, Properties(headers=Headers(headers or {}), **values))


class TestBare:
    def test_one_that_climbed_past_the_last_rung_was_tried_three_times(self) -> None:
        found = letter(headers={"x-death": CLIMBED_OUT, "tenant": "acme"}, message_id="17")

        assert found.bare
        assert (found.reason, found.attempts, found.max_attempts) == ("exhausted", 3, None)
        assert (found.queue, found.exchange, found.routing_key) == ("orders", "shop", "order.created")
        assert (found.first_failed_at, found.moved_to_dlq_at) == (T1, T3)
        assert (found.error, found.history, found.history_partial) == (None, (), True)
        assert dict(found.properties.table) == {"tenant": "acme"}

    @pytest.mark.parametrize(("told", "attempts"), [(1, 2), (0, 1), (None, 2), (-1, 2), ("x", 2)])
    def test_one_that_a_publish_had_put_into_a_rung_was_tried_as_often_as_it_says(
        self, told: object, attempts: int
    ) -> None:
        """After one failure in the second rung, and rejected once more; a header that tells nonsense tells nothing."""
        deaths = [death("orders", "rejected"), death("orders.retry.2.30s", "expired")]
        headers = {"x-death": deaths} | ({} if told is None else {names.FAILURES: told})

        assert letter(headers=headers).attempts == attempts
        assert letter(headers={"x-death": CLIMBED_OUT, names.FAILURES: 7}).attempts == 3

    def test_one_that_crashed_after_failures_came_from_its_publisher_all_the_same(self) -> None:
        """The latest death tells of the way back from a rung, not of the publisher; a derived id covers the key."""
        found = letter(headers={"x-death": CRASHED})

        assert (found.reason, found.attempts) == ("delivery-limit", 2)
        assert (found.exchange, found.routing_key) == ("shop", "order.created")
        assert found.id == derived_id(b"{}", Properties(), "order.created")

    def test_one_that_crashed_in_an_earlier_life_came_from_its_publisher_too(self) -> None:
        """Below 4.0 the deaths of a message that somebody moved back are counted on."""
        crashed, _, rejected, _ = CRASHED
        found = letter(headers={"x-death": [rejected | {"count": 3}, crashed]})

        assert (found.exchange, found.routing_key) == ("shop", "order.created")

    @pytest.mark.parametrize(
        ("by_broker", "reason"),
        [
            ("rejected", "exhausted"),
            ("delivery_limit", "delivery-limit"),
            ("expired", "expired"),
            ("maxlen", "maxlen"),
            ("of boredom", "of boredom"),
        ],
    )
    def test_the_reason_is_the_brokers(self, by_broker: str, reason: str) -> None:
        assert letter(headers={"x-death": [death("orders", by_broker)]}).reason == reason

    def test_one_that_nobody_knows_anything_of_is_shown(self) -> None:
        found = letter(b"x")

        assert (found.reason, found.attempts, found.queue, found.lap) == ("unknown", 0, "orders", 1)
        assert found.first_failed_at is None
        assert found.copy_key is None

    @pytest.mark.parametrize("queue", ["mails", "orders.eu"])
    def test_one_of_another_queue_names_that_queue(self, queue: str) -> None:
        found = letter(headers={"x-death": [death(queue, "rejected", exchange="post", keys=["mail"])]})

        assert (found.queue, found.exchange, found.routing_key) == (queue, "post", "mail")

    def test_one_that_others_moved_back_and_the_broker_then_parked_does_not_tell_its_old_story(self) -> None:
        """The headers of the first parking travel along; the deaths after it say that they are stale."""
        parked = {
            names.PARK_ID: "p1",
            names.REASON: "permanent",
            names.ERROR_TYPE: "ValueError",
            names.ATTEMPTS: 1,
            names.LAP: 2,
            names.QUEUE: "orders",
            names.EXCHANGE: "shop",
            names.ROUTING_KEY: "order.created",
        }

        before = letter(headers=parked)
        after = letter(headers=parked | {"x-death": [death("orders", "delivery_limit", exchange="", keys=["orders"])]})

        assert (before.bare, before.reason, before.lap) == (False, "permanent", 2)
        assert (after.bare, after.reason, after.lap) == (True, "delivery-limit", 3)
        assert (after.error, after.park_id, after.copy_key) == (None, "", None)
        assert (after.exchange, after.routing_key) == ("shop", "order.created")

    @pytest.mark.parametrize("queue", ["orders.dlq", "orders.retry.1.5s", "mails"])
    def test_deaths_elsewhere_do_not_make_a_parked_letter_bare(self, queue: str) -> None:
        found = letter(headers={names.PARK_ID: "p1", names.QUEUE: "orders", "x-death": [death(queue, "expired")]})

        assert not found.bare

    @pytest.mark.parametrize("queue", ["orders.dlq", "orders.retry.1.5s"])
    def test_a_death_in_a_queue_of_ours_does_not_make_that_queue_the_one_to_replay_to(self, queue: str) -> None:
        assert letter(headers={"x-death": [death(queue, "expired")]}).queue == "orders"


class TestForeign:
    @given(
        body=st.binary(max_size=30),
        wire=properties,
        ours=st.dictionaries(
            st.sampled_from([*sorted(names.OURS), "x-death", "CC", "x-first-death-queue"]), header_values, max_size=8
        ),
        texts=st.dictionaries(
            st.sampled_from([names.HISTORY, names.ORIGINAL]),
            json_values.map(lambda value: json.dumps(value, default=str)) | st.text(max_size=20),
        ),
    )
    @quick
    def test_any_headers_under_our_names_can_be_read_and_shown(
        self, body: bytes, wire: Properties, ours: dict[str, Any], texts: dict[str, str]
    ) -> None:
        found = DeadLetter.parse("orders", body, wire.but(headers=wire.table.plus(ours).plus(texts)))

        shown = json.dumps(found.as_json(), ensure_ascii=False, allow_nan=False)
        shown.encode("utf-8")
        assert found.attempts is not None
        assert found.lap >= 1

    @pytest.mark.parametrize(
        "text",
        ["", "{", "5", "null", "[" * 100_000, "[5, null, {}]", '[{"attempt": 1e999, "at": "2024-01-01"}]'],
        ids=["empty", "cut", "number", "null", "deep", "odd", "infinite"],
    )
    def test_a_history_that_cannot_be_read_is_none(self, text: str) -> None:
        found = letter(headers={names.PARK_ID: "p", names.HISTORY: text, names.ORIGINAL: text, names.ATTEMPTS: 2})

        assert found.history == ()
        assert found.history_partial
        assert dict(found.original) == {}

    def test_a_history_that_lost_its_middle_says_that_it_is_partial(self) -> None:
        records = [AttemptRecord(attempt, T1, "E", "x", "w", 1.0).as_json() for attempt in (1, 7)]
        parked = {names.PARK_ID: "p", names.HISTORY: json.dumps(records)}

        assert letter(headers=parked | {names.ATTEMPTS: 7}).history_partial
        assert not letter(headers=parked | {names.ATTEMPTS: 2}).history_partial


class TestRecord:
    def test_it_comes_back_from_json(self) -> None:
        record = AttemptRecord(2, T1, "ValueError", "größe", "host:1", 12.5)

        assert AttemptRecord.from_json(json.loads(json.dumps(record.as_json()))) == record

    @pytest.mark.parametrize(
        "value",
        [
            None,
            [],
            {},
            {"attempt": 1},
            {"attempt": 1, "at": "yesterday"},
            {"attempt": 1, "at": "0001-01-01T00:00:00+23:59"},
            {"attempt": math.inf, "at": "2024-01-01T00:00:00Z"},
            {"attempt": "one", "at": "2024-01-01T00:00:00Z"},
        ],
    )
    def test_what_is_none_is_none(self, value: Any) -> None:
        assert AttemptRecord.from_json(value) is None

    @pytest.mark.parametrize("duration", [None, "5", math.nan, math.inf, -1, 10**400, True])
    def test_a_duration_that_cannot_be_is_unknown(self, duration: Any) -> None:
        record = AttemptRecord.from_json({"attempt": 1, "at": "2024-01-01T00:00:00", "duration_ms": duration})

        assert record is not None
        assert record.duration_ms in (None, 1.0)
        assert record.at == datetime(2024, 1, 1, tzinfo=UTC)

    @given(value=json_values)
    @quick
    def test_any_json_is_a_record_or_none(self, value: Any) -> None:
        AttemptRecord.from_json(value)
        AttemptRecord.from_json({"attempt": 1, "at": "2024-01-01T00:00:00Z", "error_type": value, "worker": value})


class TestHarmless:
    def test_what_would_harm_a_copy_is_moved_and_the_rest_stays(self) -> None:
        """C2, C31: a foreign user id closed the channel; an expiration let the copy vanish."""
        value = Properties(
            user_id="alice",
            expiration="1000",
            reply_to="amq.rabbitmq.reply-to.g1h2",
            correlation_id="c",
            headers=Headers(
                {
                    "tenant": "acme",
                    "CC": ["x"],
                    "BCC": ["y"],
                    "x-death": CLIMBED_OUT,
                    "x-first-death-queue": "orders",
                    "x-last-death-reason": "rejected",
                    "x-delivery-count": 3,
                    "x-acquired-count": 4,
                    "x-deathly": "is nobody's book-keeping",
                }
            ),
        )

        clean, moved = harmless(value)

        assert clean.encode() == (
            Properties(
                correlation_id="c", headers=Headers({"tenant": "acme", "x-deathly": "is nobody's book-keeping"})
            ).encode()
        )
        assert set(moved) == {
            "CC",
            "BCC",
            "x-death",
            "x-first-death-queue",
            "x-last-death-reason",
            "x-delivery-count",
            "x-acquired-count",
            "user_id",
            "expiration",
            "reply_to",
        }
        assert moved["expiration"] == "1000"

    @given(value=properties)
    @quick
    def test_nothing_else_changes(self, value: Properties) -> None:
        clean, moved = harmless(value)

        kept = value.table.without(lambda name: name in moved)
        restored = clean.but(user_id=value.user_id, expiration=value.expiration)
        assert restored.encode() == value.but(headers=kept, reply_to=clean.reply_to).encode()
        assert harmless(clean) == (clean, {})

    def test_an_ordinary_reply_queue_stays(self) -> None:
        clean, moved = harmless(Properties(reply_to="answers"))

        assert (clean.reply_to, moved) == ("answers", {})


class TestJson:
    def test_every_type_of_a_header_has_a_form(self) -> None:
        value = {
            "date": datetime(2024, 1, 1, tzinfo=UTC),
            "decimal": Decimal("1.20"),
            "bytes": b"\x00\xff",
            "odd\udcff": "caf\udce9",
            "half": "\ud83d",
            "nan": math.nan,
            "list": [1, 0.5, None, True, (2,)],
        }

        assert jsonable(value) == {
            "date": "2024-01-01T00:00:00+00:00",
            "decimal": "1.20",
            "bytes": {"base64": "AP8="},
            "odd\\xff": "caf\\xe9",
            "half": "\\ud83d",
            "nan": "nan",
            "list": [1, 0.5, None, True, [2]],
        }

    @given(value=header_values)
    @quick
    def test_any_header_can_be_written_as_strict_json(self, value: Any) -> None:
        json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False).encode("utf-8")

    @pytest.mark.parametrize(
        ("body", "content_type", "payload"),
        [
            (b'{"order": 17}', "application/json", {"order": 17}),
            (b'{"order"', None, {"base64": "eyJvcmRlciI=", "content_type": None}),
            (b"", None, {"base64": "", "content_type": None}),
            (b"\xff", "image/png", {"base64": "/w==", "content_type": "image/png"}),
            ("größe".encode(), "text/plain", "größe"),
            (b"[NaN, -Infinity]", None, ["nan", "-inf"]),
            (b'"\\ud83d"', None, "\\ud83d"),
            (b"[" * 600 + b"]" * 600, None, None),
        ],
        ids=["json", "cut", "empty", "bytes", "text", "not a number", "half a pair", "deep"],
    )
    def test_a_payload_is_shown_so_that_every_json_reader_takes_it(
        self, body: bytes, content_type: str | None, payload: Any
    ) -> None:
        """C26, C48: empty bodies, bytes and odd texts broke what showed them."""
        found = letter(body, content_type=content_type)
        shown = found.as_json()["payload"]

        json.dumps(shown, ensure_ascii=False, allow_nan=False).encode("utf-8")
        assert found.body == body
        assert shown == payload or (payload is None and shown["base64"])

    def test_counts_speak_of_retries_too(self) -> None:
        shown = letter(headers={names.PARK_ID: "p", names.ATTEMPTS: 3, names.MAX_ATTEMPTS: 3}).as_json()

        assert [shown[key] for key in ("attempts", "max_attempts", "retry_count", "max_retries")] == [3, 3, 2, 2]

    def test_an_original_nested_without_end_is_left_unread(self) -> None:
        assert read_original('{"a": ' * 500 + "1" + "}" * 500) == {}
        assert read_original('{"expiration": "1000"}') == {"expiration": "1000"}

    @pytest.mark.parametrize(
        ("text", "moment"),
        [
            ("2024-01-01T12:00:00.5+02:00", datetime(2024, 1, 1, 10, 0, 0, 500000, tzinfo=UTC)),
            ("2024-01-01T12:00:00", datetime(2024, 1, 1, 12, tzinfo=UTC)),
            ("2024-13-01", None),
            ("9999-12-31T23:59:59-23:59", None),
            (5, None),
            (None, None),
        ],
    )
    def test_times_are_utc_or_none(self, text: object, moment: datetime | None) -> None:
        found = read_time(text)

        assert found == moment
        assert found is None or found.utcoffset() == timedelta()

    def test_times_are_written_in_utc_to_the_millisecond(self) -> None:
        assert iso(None) is None
        assert iso(datetime(2024, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)) == "2024-01-01T12:00:00.123+00:00"
