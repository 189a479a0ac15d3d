"""The header codec: what passes through keeps its bytes, what is written comes back, what is broken is told."""

import math
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq.fields import encode_value
from rabbitdlq.texts import printable, shorten
from rabbitdlq.wire import Headers, Properties, WireError, plain_properties
from tests.unit.strategies import (
    decimals,
    entry,
    header_values,
    properties,
    quick,
    raw_tables,
    short_texts,
    sized,
)


def same(left: Any, right: Any) -> bool:
    """Equal in value and type, deep down; ``1 == True == 1.0`` is not enough here."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    if isinstance(left, Decimal) and isinstance(right, Decimal):
        # a decimal number has no sign beside its digits on the wire: minus nought is nought
        return left == right and left.as_tuple()[1:] == right.as_tuple()[1:]
    return type(left) is type(right) and bool(left == right)


def read(value: bytes) -> Any:
    """The value behind a field's bytes."""
    return Headers.parse(entry(b"name", value))["name"]


class TestValues:
    @given(value=header_values)
    @quick
    def test_a_value_of_any_depth_comes_back_as_it_was_and_is_written_the_same_again(self, value: Any) -> None:
        written = encode_value(value)

        assert same(read(written), value)
        assert encode_value(read(written)) == written

    @given(values=st.dictionaries(short_texts, header_values, max_size=5))
    @quick
    def test_a_table_comes_back_with_its_names_in_their_order(self, values: dict[str, Any]) -> None:
        headers = Headers.parse(Headers(values).encode())

        assert list(headers) == list(values)
        assert same(dict(headers), values)
        assert len(headers) == len(values)

    @pytest.mark.parametrize(
        ("raw", "value"),
        [
            (b"t\x00", False),
            (b"t\x02", True),
            (b"b\xff", -1),
            (b"B\xff", 255),
            (b"s\xff\xfe", -2),
            (b"u\xff\xfe", 65534),
            (b"I\xff\xff\xff\xff", -1),
            (b"i\xff\xff\xff\xff", 4294967295),
            (b"l" + b"\xff" * 8, -1),
            (b"L" + b"\xff" * 8, -1),
            (b"f" + struct.pack(">f", 0.5), 0.5),
            (b"d" + struct.pack(">d", 0.1), 0.1),
            (b"D\x02\x00\x00\x00\x7b", Decimal("1.23")),
            (b"S" + sized("größe".encode()), "größe"),
            (b"S" + sized(b"\xff\xfe"), b"\xff\xfe"),
            (b"x" + sized(b"\x00\xff"), b"\x00\xff"),
            (b"T" + struct.pack(">Q", 1_700_000_000), datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
            (b"T" + struct.pack(">Q", 2**63), 2**63),
            (b"V", None),
            (b"\x00", None),
            (b"A" + sized(b"Vt\x01"), [None, True]),
            (b"F" + sized(entry(b"k", b"V")), {"k": None}),
        ],
    )
    def test_every_type_of_rabbitmq_is_read(self, raw: bytes, value: Any) -> None:
        assert same(read(raw), value)

    @pytest.mark.parametrize("value", [0.1, 1e300, -0.0, 5e-324])
    def test_a_double_stays_a_double(self, value: float) -> None:
        """C27: doubles written as floats came back as other numbers."""
        assert encode_value(value) == b"d" + struct.pack(">d", value)
        assert same(read(encode_value(value)), value)

    def test_nested_tables_with_arrays_nulls_decimals_dates_and_bytes_keep_their_types(self) -> None:
        """C28: nested headers came back flattened or as texts."""
        value = {
            "a": [{"b": None}, 1, True],
            "d": Decimal("1.23"),
            "t": datetime(2024, 1, 2, tzinfo=UTC),
            "x": b"\x00\xff",
        }

        assert same(dict(Headers.parse(Headers(value).encode())), value)

    @pytest.mark.parametrize(
        "value",
        [
            pytest.param(math.nan, id="nan: RabbitMQ closes the connection over it"),
            pytest.param(math.inf, id="inf: the same"),
            pytest.param(2**63, id="65 bits"),
            pytest.param(10**5000, id="too long even for its own text"),
            pytest.param(datetime(2024, 1, 1), id="no time zone"),
            pytest.param(datetime(1969, 12, 31, tzinfo=UTC), id="before 1970"),
            pytest.param(date(2024, 1, 1), id="a date without time"),
            pytest.param(timedelta(1), id="a duration"),
            pytest.param({1, 2}, id="a set"),
            pytest.param(object(), id="an object"),
            pytest.param("half \ud800 pair", id="half a surrogate pair"),
            pytest.param(["deep", {"half": "\udbff"}], id="half a surrogate pair, deep down"),
            pytest.param({"x" * 256: 1}, id="name of a nested entry too long"),
            pytest.param(Decimal("NaN"), id="decimal nan"),
            pytest.param(Decimal("Infinity"), id="decimal infinity"),
            pytest.param(Decimal(2**31), id="decimal over 32 bits"),
            pytest.param(Decimal("1E-256"), id="decimal scale over a byte"),
            pytest.param(Decimal("1E+999999999"), id="decimal of a billion digits"),
            pytest.param(Decimal("1E-999999999"), id="decimal far below one"),
        ],
    )
    def test_what_amqp_cannot_carry_is_refused_when_it_is_given(self, value: Any) -> None:
        with pytest.raises(WireError):
            Headers({"name": value})

    def test_a_list_that_holds_itself_is_refused(self) -> None:
        endless: list[Any] = []
        endless.append(endless)

        with pytest.raises(WireError, match="nested deeper"):
            encode_value(endless)

    @given(value=decimals)
    @quick
    def test_a_decimal_keeps_its_scale(self, value: Decimal) -> None:
        assert read(encode_value(value)).as_tuple().exponent == value.as_tuple().exponent


class TestHeaders:
    def test_a_name_that_is_too_long_is_refused_when_it_is_given(self) -> None:
        with pytest.raises(WireError, match="a header's name is longer than 255 bytes"):
            Headers({"ä" * 128: 1})
        with pytest.raises(WireError):
            Headers().plus({"ä" * 128: 1})
        assert Headers({"ä" * 127: 1})

    def test_a_name_that_stands_twice_keeps_both_places_and_shows_the_first(self) -> None:
        table = entry(b"twice", b"B\x01") + entry(b"other", b"V") + entry(b"twice", b"B\x02")
        headers = Headers.parse(table)

        assert dict(headers) == {"twice": 1, "other": None}
        assert len(headers) == 2
        assert headers.encode() == table

    def test_a_broken_value_reads_as_none_and_keeps_its_bytes(self) -> None:
        table = entry(b"broken", b"A" + sized(b"Z")) + entry(b"nested", b"F" + sized(b"\x05ab"))
        headers = Headers.parse(table)

        assert dict(headers) == {"broken": None, "nested": None}
        assert headers.encode() == table

    def test_tables_nested_deeper_than_anybody_means_read_as_none(self) -> None:
        raw = b"V"
        for _ in range(2_000):
            raw = b"A" + sized(raw)

        assert read(raw) is None

    def test_text_and_number_give_none_for_other_types(self) -> None:
        headers = Headers({"text": "5", "number": 5, "truth": True, "bytes": b"5"})

        assert [headers.text(name) for name in (*headers, "missing")] == ["5", None, None, None, None]
        assert [headers.number(name) for name in (*headers, "missing")] == [None, 5, None, None, None]

    @given(table=raw_tables, more=st.dictionaries(st.sampled_from(["new", "x-death"]), header_values))
    @quick
    def test_entries_that_are_not_touched_keep_their_bytes_through_without_and_plus(
        self, table: bytes, more: dict[str, Any]
    ) -> None:
        headers = Headers.parse(table)
        entries = list(headers.entries())
        dropped = next(iter(headers), None)

        without = headers.without(lambda name: name == dropped)
        plus = headers.plus(more)

        assert b"".join(entries) == table
        assert list(without.entries()) == [
            raw for raw, name in zip(entries, names_of(entries), strict=True) if name != dropped
        ]
        assert plus.encode() == headers.without(lambda name: name in more).encode() + Headers(more).encode()


def names_of(entries: list[bytes]) -> list[str]:
    return [raw[1 : 1 + raw[0]].decode("utf-8", "surrogateescape") for raw in entries]


class TestProperties:
    @given(value=properties)
    @quick
    def test_properties_of_foreign_clients_are_written_byte_for_byte_as_they_came(self, value: Properties) -> None:
        written = value.encode()

        assert Properties.parse(written).encode() == written

    @given(table=raw_tables)
    @quick
    def test_a_table_with_every_amqp_type_keeps_its_bytes(self, table: bytes) -> None:
        wire = struct.pack(">H", 1 << 13) + sized(table)
        parsed = Properties.parse(wire)

        dict(parsed.table)  # looking changes nothing
        assert parsed.encode() == wire

    @given(data=st.binary(max_size=300))
    @quick
    def test_arbitrary_bytes_are_read_or_told_to_be_broken(self, data: bytes) -> None:
        for parse in (Properties.parse, Headers.parse):
            try:
                parsed = parse(data)
            except WireError:
                continue
            repr(parsed)
            parsed.encode()

    @given(value=properties, at=st.integers(0, 400), byte=st.integers(0, 255), end=st.integers(0, 400))
    @quick
    def test_properties_with_a_byte_changed_or_the_end_missing_are_read_or_told_to_be_broken(
        self, value: Properties, at: int, byte: int, end: int
    ) -> None:
        data = bytearray(value.encode())
        data[at % len(data)] = byte
        for broken in (bytes(data), bytes(data[:end])):
            try:
                parsed = Properties.parse(broken)
            except WireError:
                continue
            repr(dict(parsed.table))
            parsed.encode()

    def test_no_table_and_an_empty_table_are_two_things(self) -> None:
        """C18: messages without a header table broke the way of failure."""
        without, empty = Properties(message_id="1"), Properties(message_id="1", headers=Headers())

        assert without.encode() != empty.encode()
        assert Properties.parse(without.encode()).headers is None
        assert Properties.parse(empty.encode()).headers is not None
        assert dict(without.table) == {}

    @pytest.mark.parametrize(
        "values",
        [
            {"delivery_mode": 256},
            {"priority": -1},
            {"timestamp": -1},
            {"timestamp": 2**64},
            {"message_id": "ä" * 128},
            {"type": "half \udbff pair"},
        ],
        ids=str,
    )
    def test_what_does_not_fit_is_refused(self, values: dict[str, Any]) -> None:
        with pytest.raises(WireError):
            Properties(**values).encode()

    def test_priority_and_delivery_mode_are_kept(self) -> None:
        """C33, C55: a copy was transient where the original was persistent, and lost its priority."""
        parsed = Properties.parse(Properties(delivery_mode=2, priority=5).encode())

        assert (parsed.delivery_mode, parsed.priority) == (2, 5)


class TestTexts:
    @given(text=st.text() | st.text(alphabet="aä€😀\ud800\udcff"), limit=st.integers(-3, 60), mark=st.text(max_size=4))
    @quick
    def test_a_shortened_text_is_never_over_its_limit_in_bytes(self, text: str, limit: int, mark: str) -> None:
        cut = shorten(text, limit, mark)

        assert len(cut.encode()) <= max(limit, 0)

    @given(text=st.text(min_size=30))
    @quick
    def test_a_shortened_text_is_the_beginning_and_the_mark(self, text: str) -> None:
        cut = shorten(text, 29, "~~")

        assert cut.endswith("~~")
        assert text.startswith(cut[:-2])
        assert shorten(text, len(text.encode())) == text

    def test_where_not_even_the_mark_fits_there_is_a_beginning(self) -> None:
        assert shorten("größer als das", 5) == "grö"  # the ß would end at the sixth byte
        assert shorten("größer als das", 0) == ""

    @given(text=st.text(alphabet=st.characters()) | st.text(alphabet="a\udcff\ud800"))
    @quick
    def test_a_printable_text_is_valid_utf8_whatever_it_was(self, text: str) -> None:
        printable(text).encode("utf-8")

    def test_bytes_that_were_no_text_are_written_out(self) -> None:
        assert printable(b"caf\xe9 \xff".decode("utf-8", "surrogateescape")) == "caf\\xe9 \\xff"
        assert printable("größe \U0001f600") == "größe \U0001f600"
        assert printable("half \ud83d") == "half \\ud83d"


@given(st.text(max_size=40), st.text(min_size=1, max_size=40), st.integers(0, 2**64 - 1))
@quick
def test_the_short_way_to_plain_properties_gives_the_same_bytes(kind: str, message_id: str, timestamp: int) -> None:
    whole = Properties(content_type=kind, delivery_mode=2, message_id=message_id, timestamp=timestamp)

    assert plain_properties(kind, message_id, timestamp) == whole.encode()


@pytest.mark.parametrize(
    "wrong", [("x" * 256, "1", 0), ("x", "1" * 256, 0), ("x", "1", -1), ("x", "1", 2**64)], ids=["type", "id", "-", "+"]
)
def test_the_short_way_refuses_what_does_not_fit(wrong: tuple[str, str, int]) -> None:
    with pytest.raises(WireError):
        plain_properties(*wrong)
