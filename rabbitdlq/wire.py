"""AMQP 0-9-1 properties and headers, byte for byte: the only reader and writer of them in this package.

Client libraries decode a header table into Python values and encode it again when a message is republished; on that
way doubles become floats, 8-bit integers 64-bit ones, millisecond timestamps seconds, and odd bytes an exception. A
message that only passes through keeps the bytes of every entry here; values are decoded when somebody looks.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

from rabbitdlq.fields import WireError, decode_value, encode_short, encode_table, encode_value, entries, sized

__all__ = ["Headers", "Properties", "WireError", "decoded", "plain_properties", "remembered"]

T = TypeVar("T")

#: bytes of a value beyond which what was read from it is not remembered
_WORTH_KEEPING = 4_000
_LONG = struct.Struct(">I")
_LONGLONG = struct.Struct(">Q")
_OCTET = struct.Struct(">B")
_FLAGS = struct.Struct(">H")


def decoded(raw: bytes) -> Any:
    """The value of these bytes; None for broken ones, because looking must not fail on foreign headers."""
    try:
        return decode_value(raw, 0)[0]
    except (ValueError, struct.error, IndexError, RecursionError):
        return None


def remembered(read: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """``read``, with what it gave for the last thousand small values: they must not be changed.

    Messages that failed in one second have the same ``x-death``, byte for byte.
    """
    known = lru_cache(maxsize=1_000)(read)
    return lambda raw: known(raw) if len(raw) < _WORTH_KEEPING else read(raw)


class Headers(Mapping[str, Any]):
    """The header table of one message: a read-only mapping that keeps each entry's bytes.

    ``headers["key"]`` decodes; entries that nobody looks at are passed on as they came. A name that stands twice
    keeps both places on the wire; looking gives the first.
    """

    __slots__ = ("_encoded", "_first", "_raw")

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        """Encode ``values``; raises :class:`WireError` for a value or a name that AMQP cannot carry."""
        self._raw = tuple([(name, encode_value(value)) for name, value in values.items()]) if values else ()
        self._first: dict[str, bytes] | None = None
        #: the table's bytes, where they are known; made at once from values: a name that does not fit is told here
        self._encoded: bytes | None = encode_table(self._raw) if values else b""

    @classmethod
    def parse(cls, table: bytes) -> "Headers":
        """The table from its bytes (without the length in front); raises :class:`WireError` where it is broken."""
        headers = cls()
        headers._encoded = table
        try:
            headers._raw = tuple(entries(table))
        except (struct.error, IndexError) as error:
            raise WireError(f"broken header table: {error}") from error
        return headers

    def __getitem__(self, name: str) -> Any:
        """The decoded value; a broken one reads as None, because looking must not fail on foreign headers."""
        return decoded(self._by_name[name])

    def get(self, name: str, default: Any = None) -> Any:
        """The decoded value, or the default; most names that are asked for are not there, and that has to be cheap."""
        return self[name] if name in self._by_name else default

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def _by_name(self) -> dict[str, bytes]:
        """The first entry of each name; made at the first look, because most messages only pass through."""
        if self._first is None:
            self._first = {}
            for name, raw in self._raw:
                self._first.setdefault(name, raw)
        return self._first

    def __repr__(self) -> str:
        return f"Headers({dict(self)!r})"

    def raw(self, name: str) -> bytes | None:
        """The value's bytes, type octet first; None where there is none."""
        return self._by_name.get(name)

    def text(self, name: str) -> str | None:
        """The value if it is a string, else None."""
        value = self.get(name)
        return value if isinstance(value, str) else None

    def number(self, name: str) -> int | None:
        """The value if it is an integer, else None."""
        value = self.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def without(self, drop: Callable[[str], bool]) -> "Headers":
        """A copy without the entries whose name ``drop`` says yes to."""
        kept = tuple([entry for entry in self._raw if not drop(entry[0])])
        return self if len(kept) == len(self._raw) else Headers._of(kept)

    def plus(self, values: Mapping[str, Any]) -> "Headers":
        """A copy in which ``values`` replace the entries of the same names."""
        added = values if isinstance(values, Headers) else Headers(values)
        return Headers._of(self.without(lambda name: name in added)._raw + added._raw)

    def plus_raw(self, values: Mapping[str, bytes]) -> "Headers":
        """As :meth:`plus`, with the bytes of each value, type octet first."""
        return Headers._of(self.without(values.__contains__)._raw + tuple(values.items()))

    @classmethod
    def _of(cls, raw: tuple[tuple[str, bytes], ...]) -> "Headers":
        headers = cls()
        headers._raw, headers._encoded = raw, None
        return headers

    def entries(self) -> Iterator[bytes]:
        """Each entry's bytes, name and value."""
        return (encode_table([entry]) for entry in self._raw)

    def encode(self) -> bytes:
        """The table's bytes, without the length in front."""
        if self._encoded is None:
            self._encoded = encode_table(self._raw)
        return self._encoded


_NO_HEADERS = Headers()


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of one message, as on the wire. Texts may hold bytes that are not UTF-8, surrogate-escaped."""

    content_type: str | None = None
    content_encoding: str | None = None
    #: None means that there was no table at all, which is not the same as an empty one
    headers: Headers | None = None
    #: 1 transient, 2 persistent
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    #: milliseconds, as text
    expiration: str | None = None
    message_id: str | None = None
    #: seconds since 1970 by the standard, milliseconds by some clients: kept as it is
    timestamp: int | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None

    @property
    def table(self) -> Headers:
        """The headers, empty where there is no table."""
        return _NO_HEADERS if self.headers is None else self.headers

    @classmethod
    def parse(cls, data: bytes) -> "Properties":
        """From the content header frame's flags and values; raises :class:`WireError` where they are broken."""
        try:
            (flags,) = _FLAGS.unpack_from(data)
            at, values = 2, {}
            for name, read in _layout(flags):
                values[name], at = read(data, at)
        except (struct.error, IndexError) as error:
            raise WireError(f"broken message properties: {error}") from error
        return cls(**values)

    def encode(self, *, headers: bool = True) -> bytes:
        """The content header frame's flags and values; raises :class:`WireError` for what does not fit.

        Without ``headers``: as if there were no table.
        """
        flags, parts = 0, [b""]
        for bit, name, value in zip(_BITS, _NAMES, _values(self), strict=True):
            if value is not None and (headers or name != "headers"):
                flags |= bit
                parts.append(_encode_property(name, value))
        parts[0] = _FLAGS.pack(flags)
        return b"".join(parts)

    def but(self, **changes: Any) -> "Properties":
        """A copy with some properties changed."""
        values = list(_values(self))
        for name, value in changes.items():
            values[_PLACES[name]] = value
        return Properties(*values)


def plain_properties(content_type: str, message_id: str, timestamp: int) -> bytes:
    """The bytes of persistent properties with these three and nothing else, which most messages have.

    Raises :class:`WireError` as :meth:`Properties.encode` does.
    """
    for name, value in (("content_type", content_type), ("message_id", message_id)):
        if not isinstance(value, str):
            raise WireError(f"{name}: {value!r} is no text")
    if not 0 <= timestamp < 1 << 64:
        raise WireError(f"timestamp: {timestamp} does not fit")
    return _plain_start(content_type) + encode_short(message_id, "message_id") + _LONGLONG.pack(timestamp)


@lru_cache(maxsize=100)
def _plain_start(content_type: str) -> bytes:
    whole = Properties(content_type=content_type, delivery_mode=2, message_id="", timestamp=0).encode()
    return whole[: -_LONGLONG.size - 1]


_PROPERTY_BITS = [(1 << (15 - place), field.name) for place, field in enumerate(fields(Properties))]


_BITS, _NAMES = zip(*_PROPERTY_BITS, strict=True)
_PLACES = {name: place for place, name in enumerate(_NAMES)}
_values = attrgetter(*_NAMES)


@lru_cache(maxsize=1_000)
def _layout(flags: int) -> tuple[tuple[str, Callable[[bytes, int], tuple[Any, int]]], ...]:
    """What follows these flags, and how it is read; publishers have few ways of setting properties."""
    return tuple((name, _READ.get(name, _read_short)) for bit, name in _PROPERTY_BITS if flags & bit)


def _read_short(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    if end > len(data):
        raise WireError("a short string ends after the frame")
    return data[at + 1 : end].decode("utf-8", "surrogateescape"), end


def _reader(shape: struct.Struct) -> Callable[[bytes, int], tuple[Any, int]]:
    return lambda data, at: (shape.unpack_from(data, at)[0], at + shape.size)


def _read_table(data: bytes, at: int) -> tuple[Headers, int]:
    table, end = sized(data, at)
    return _parse_headers(table), end


#: what a publisher sets, and what the broker adds in one second, is often the same, byte for byte
_parse_headers = remembered(Headers.parse)


_READ: dict[str, Callable[[bytes, int], tuple[Any, int]]] = {
    "headers": _read_table,
    "delivery_mode": _reader(_OCTET),
    "priority": _reader(_OCTET),
    "timestamp": _reader(_LONGLONG),
}


def _encode_property(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return encode_short(value, name)
    if isinstance(value, Headers):
        table = value.encode()
        return _LONG.pack(len(table)) + table
    try:
        return (_LONGLONG if name == "timestamp" else _OCTET).pack(value)
    except struct.error as error:
        raise WireError(f"{name}: {value!r} does not fit: {error}") from error
