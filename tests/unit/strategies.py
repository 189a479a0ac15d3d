"""What hypothesis makes up for the unit tests: header tables of every AMQP type, properties, JSON values."""

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from rabbitdlq.wire import Headers, Properties

#: few examples, no stop-watch: the machine may be shared
quick = settings(max_examples=40, deadline=None)

#: texts that fit into a short string, whatever their characters take
short_texts = st.text(max_size=60)
short_bytes = st.binary(max_size=60)
dates = st.datetimes(datetime(1970, 1, 2), datetime(9990, 1, 1)).map(
    lambda date: date.replace(microsecond=0, tzinfo=UTC)
)
decimals = st.builds(
    lambda number, scale: Decimal(number).scaleb(-scale), st.integers(-(2**31), 2**31 - 1), st.integers(0, 255)
)

#: every value that can be written into a header, and comes back as it was
header_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary().filter(lambda data: data != b"")
    | dates
    | decimals,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(short_texts, inner, max_size=4),
    max_leaves=8,
)

#: what a JSON document can hold
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


def sized(data: bytes) -> bytes:
    """The bytes with their length in front, as long strings, tables and arrays have it."""
    return struct.pack(">I", len(data)) + data


def entry(name: bytes, value: bytes) -> bytes:
    """One entry of a table."""
    return bytes([len(name)]) + name + value


def _fixed(kind: bytes, size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size).map(lambda data: kind + data)


_SIZES = {
    "t": 1,
    "b": 1,
    "B": 1,
    "s": 2,
    "u": 2,
    "I": 4,
    "i": 4,
    "l": 8,
    "L": 8,
    "f": 4,
    "d": 8,
    "D": 5,
    "T": 8,
    "V": 0,
}
_raw_leaves: st.SearchStrategy[bytes] = st.one_of(
    *(_fixed(kind.encode(), size) for kind, size in _SIZES.items()),
    *(st.binary(max_size=20).map(lambda data, kind=kind: kind.encode() + sized(data)) for kind in "Sx"),  # type: ignore[misc]
)


def _raw_tables(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(st.builds(entry, short_bytes, values), max_size=5).map(b"".join)


#: the bytes of a field value of any AMQP type, with bytes in it that no encoder of ours would write
raw_values: st.SearchStrategy[bytes] = st.recursive(
    _raw_leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: b"A" + sized(b"".join(items))),
        _raw_tables(inner).map(lambda table: b"F" + sized(table)),
    ),
    max_leaves=6,
)
#: the bytes of a header table, names may be doubled and not UTF-8
raw_tables = _raw_tables(raw_values)

_raw_shorts = st.binary(max_size=40).map(lambda data: data.decode("utf-8", "surrogateescape"))
_maybe_short = st.none() | _raw_shorts
#: message properties as foreign clients set them
properties = st.builds(
    Properties,
    content_type=_maybe_short,
    content_encoding=_maybe_short,
    headers=st.none() | raw_tables.map(Headers.parse),
    delivery_mode=st.none() | st.integers(0, 255),
    priority=st.none() | st.integers(0, 255),
    correlation_id=_maybe_short,
    reply_to=_maybe_short,
    expiration=_maybe_short,
    message_id=_maybe_short,
    timestamp=st.none() | st.integers(0, 2**64 - 1),
    type=_maybe_short,
    user_id=_maybe_short,
    app_id=_maybe_short,
    cluster_id=_maybe_short,
)
