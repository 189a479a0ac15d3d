"""The handler's view of a delivery: payload, id, lap, and where it came from."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq import names
from rabbitdlq.deaths import Arrival
from rabbitdlq.message import (
    Undecodable,
    created_at,
    decode_payload,
    derived_id,
    lap_of,
    message_of,
    published_with,
    told_lap,
)
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties
from tests.unit.strategies import properties, quick, raw_tables

ORDERS = Topology("orders", ("5s", "30s"))


def payload(body: bytes, content_type: str | None = None, encoding: str | None = None) -> Any:
    return decode_payload(body, Properties(content_type=content_type, content_encoding=encoding))


class TestPayload:
    @pytest.mark.parametrize(
        ("body", "content_type", "value"),
        [
            (b'{"a": [1, null]}', None, {"a": [1, None]}),
            (b'{"a": 1}', "", {"a": 1}),
            (b'{"a": 1}', "application/json", {"a": 1}),
            (b'{"a": 1}', "Application/JSON; charset=utf-8", {"a": 1}),
            (b'{"a": 1}', "application/problem+json", {"a": 1}),
            (b'\xef\xbb\xbf{"a": 1}', "application/json", {"a": 1}),
            ('"größe"'.encode(), None, "größe"),
            (b'{"a": 1, "a": 2}', None, {"a": 2}),
            ("größe".encode(), "text/plain", "größe"),
            ("größe".encode("latin-1"), "text/plain; charset=ISO-8859-1", "größe"),
            ("größe".encode("utf-16"), 'text/plain; charset="utf-16"', "größe"),
            ("größe".encode("latin-1"), "text/plain; charset=klingon", "größe".encode("latin-1")),
            (b"x", "text/plain; charset=zip", b"x"),
            (b"", "text/plain", ""),
            (b"\xff\x00", "application/octet-stream", b"\xff\x00"),
            (b"", "image/png", b""),
        ],
    )
    def test_it_is_what_the_content_type_says(self, body: bytes, content_type: str | None, value: Any) -> None:
        assert payload(body, content_type) == value

    @pytest.mark.parametrize("encoding", ["gzip", "br", "x"])
    def test_a_packed_body_is_bytes(self, encoding: str) -> None:
        assert payload(b'{"a": 1}', "application/json", encoding) == b'{"a": 1}'

    @pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "identity", ""])
    def test_an_encoding_that_packs_nothing_is_none(self, encoding: str) -> None:
        assert payload(b'{"a": 1}', "application/json", encoding) == {"a": 1}

    @pytest.mark.parametrize(
        ("body", "content_type"),
        [
            (b'{"a":', None),
            (b"", None),
            (b"", "application/json"),
            (b"\xff\xfe", None),
            (b"\x00" * 3_000_000, None),
            (b"[" * 100_000, None),
            (b"9" * 5_000, None),
            (b"\xff", "text/plain"),
            (b"\xff", "text/plain; charset=ascii"),
        ],
        ids=["cut", "empty", "empty json", "FF FE", "3 MB of zeros", "deep", "long number", "text", "charset"],
    )
    def test_what_it_is_not_is_told(self, body: bytes, content_type: str | None) -> None:
        """C17: bodies that are not valid JSON went round thousands of times a second."""
        with pytest.raises(
            Undecodable, match=rf"^body of {len(body):,} bytes is not valid (application/json|text/plain): "
        ):
            payload(body, content_type)

    @given(body=st.binary(max_size=40), kind=st.none() | st.text(max_size=30), charset=st.text(max_size=8))
    @quick
    def test_any_body_of_any_type_is_read_or_told(self, body: bytes, kind: str | None, charset: str) -> None:
        for content_type in (kind, f"text/plain;charset={charset}"):
            try:
                payload(body, content_type)
            except Undecodable:
                continue


class TestDerivedId:
    BODY = b'{"order": 17}'

    def test_it_says_that_it_is_derived(self) -> None:
        assert derived_id(self.BODY, Properties(), "orders").startswith("derived-")

    @given(
        value=properties.map(lambda each: each.but(message_id=None)),
        theirs=raw_tables.map(Headers.parse),
        data=st.data(),
    )
    @quick
    def test_it_is_the_same_on_every_attempt_whatever_the_broker_does_to_the_headers(
        self, value: Properties, theirs: Headers, data: st.DataObject
    ) -> None:
        """C13: a message without id got another one on each trip, and its attempts were nobody's."""
        routed = theirs.plus({"CC": ["elsewhere"], "BCC": ["hidden"]})
        first = value.but(headers=routed, expiration="60000")

        # what dying does: the expiration goes, the headers are sorted, CC and BCC go or stay, book-keeping comes
        gone = data.draw(st.sampled_from([frozenset(), frozenset({"CC"}), names.ROUTING_HEADERS]))
        entries = sorted(routed.without(lambda name: name in gone).entries())
        later = value.but(
            expiration=None,
            headers=Headers.parse(b"".join(entries)).plus(
                {
                    "x-death": [{"queue": "orders", "count": data.draw(st.integers(1, 9))}],
                    "x-first-death-queue": "orders",
                    "x-last-death-reason": "rejected",
                    "x-delivery-count": 1,
                    "x-acquired-count": 2,
                }
            ),
        )

        assert derived_id(self.BODY, first, "orders") == derived_id(self.BODY, later, "orders")

    def test_it_is_the_same_where_the_first_death_brings_the_first_headers(self) -> None:
        """C18: a message without a header table."""
        bare = Properties(content_type="text/plain")
        later = bare.but(headers=Headers({"x-death": [], "x-first-death-queue": "orders"}))

        assert derived_id(self.BODY, bare, "orders") == derived_id(self.BODY, later, "orders")

    def test_it_is_the_same_after_parking_and_replay(self) -> None:
        bare = Properties(headers=Headers({"tenant": "acme"}))
        replayed = bare.but(headers=bare.table.plus({names.LAP: 2, names.REPLAY_ID: "x", names.ORIGINAL: "{}"}))

        assert derived_id(self.BODY, bare, "orders") == derived_id(self.BODY, replayed, "orders")

    @pytest.mark.parametrize(
        ("body", "value", "key"),
        [
            (b"{}", Properties(), "orders"),
            (BODY, Properties(), "mails"),
            (BODY, Properties(priority=1), "orders"),
            (BODY, Properties(headers=Headers({"tenant": "acme"})), "orders"),
            (BODY, Properties(headers=Headers({"dlq-my-own": "acme"})), "orders"),
            (BODY + b"orders", Properties(), ""),
        ],
    )
    def test_it_is_another_for_another_message(self, body: bytes, value: Properties, key: str) -> None:
        assert derived_id(body, value, key) != derived_id(self.BODY, Properties(), "orders")

    def test_a_message_without_id_gets_it_and_one_with_id_keeps_its_own(self) -> None:
        way = Arrival(0, 0, "", "orders")
        bare = message_of(ORDERS, self.BODY, Properties(), way, failures=0)
        own = message_of(ORDERS, self.BODY, Properties(message_id="17"), way, failures=0)
        odd = message_of(ORDERS, self.BODY, Properties(message_id="caf\udce9"), way, failures=0)

        assert bare.id == derived_id(self.BODY, Properties(), "orders")
        assert own.id == "17"
        assert odd.id == "caf\\xe9"
        assert bare.properties.message_id is None


class TestTimesAndLaps:
    @pytest.mark.parametrize(
        ("timestamp", "date"),
        [
            (None, None),
            (0, datetime(1970, 1, 1, tzinfo=UTC)),
            (1_700_000_000, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
            (1_700_000_000_123, datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=UTC)),
            (2**63, None),
            (2**64 - 1, None),
        ],
    )
    def test_a_timestamp_is_seconds_or_where_it_can_only_be_milliseconds(
        self, timestamp: int | None, date: datetime | None
    ) -> None:
        assert created_at(Properties(timestamp=timestamp)) == date

    @pytest.mark.parametrize(
        ("headers", "told", "lap"),
        [
            ({}, 1, 1),
            ({names.LAP: 3}, 3, 3),
            ({names.LAP: 3, names.PARK_ID: "x"}, 3, 4),
            ({names.PARK_ID: "x"}, 1, 2),
            ({names.LAP: 0}, 1, 1),
            ({names.LAP: -3}, 1, 1),
            ({names.LAP: "3"}, 1, 1),
            ({names.LAP: True}, 1, 1),
            ({names.LAP: Decimal(3)}, 1, 1),
            ({names.LAP: 2**63 - 1}, 1, 1),
        ],
    )
    def test_the_lap_is_as_told_and_one_more_for_a_dead_letter_that_others_moved_back(
        self, headers: dict[str, Any], told: int, lap: int
    ) -> None:
        assert told_lap(Headers(headers)) == told
        assert lap_of(Headers(headers)) == lap

    def test_exchange_and_key_are_the_first_publishers_also_after_a_replay(self) -> None:
        way = Arrival(0, 0, "", "orders")

        assert published_with(Headers(), way) == ("", "orders")
        assert published_with(Headers({names.EXCHANGE: "shop", names.ROUTING_KEY: "order.created"}), way) == (
            "shop",
            "order.created",
        )
        assert published_with(Headers({names.EXCHANGE: "shop"}), way) == ("", "orders")
        assert published_with(Headers({names.EXCHANGE: 5, names.ROUTING_KEY: None}), way) == ("", "orders")

    def test_the_message_tells_what_its_handler_needs(self) -> None:
        way = Arrival(1, 1, "shop", "order.created")
        value = Properties(
            message_id="17", content_type="text/plain", timestamp=1_700_000_000, headers=Headers({"tenant": "acme"})
        )

        message = message_of(ORDERS, b"x", value, way, failures=1)

        assert (message.id, message.attempt, message.max_attempts, message.lap) == ("17", 2, 3, 1)
        assert (message.queue, message.exchange, message.routing_key) == ("orders", "shop", "order.created")
        assert (message.content_type, message.body, message.payload) == ("text/plain", b"x", None)
        assert message.created_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
        assert dict(message.headers) == {"tenant": "acme"}
