"""AMQP 0-9-1 properties and headers, byte for byte: the only reader and writer of them in this package.

Client libraries decode a header table into Python values and encode it again when a message is republished; on that
way doubles become floats, 8-bit integers 64-bit ones, millisecond timestamps seconds, and odd bytes an exception. A
message that only passes through keeps the bytes of every entry here; values are decoded when somebody looks.
Field types are those RabbitMQ uses (https://www.rabbitmq.com/docs/amqp-0-9-1-errata#section_3).
"""

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

__all__ = ["Headers", "Properties", "WireError", "encode_value", "printable", "shorten"]


class WireError(ValueError):
    """A value that AMQP 0-9-1 cannot carry, or bytes that are not what they say they are."""


def printable(text: str) -> str:
    r"""The text with bytes that were not UTF-8 written as ``\xff``, safe for logs, JSON and terminals."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half a surrogate pair, as JSON can write one: not a byte of anybody's
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shorten(text: str, limit: int, mark: str = " …[cut]") -> str:
    """The text in at most ``limit`` bytes of UTF-8, cut between two characters and marked as cut.

    >>> shorten("Größe", 100)
    'Größe'
    >>> shorten("ä" * 100, 20)
    'äääää …[cut]'
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode("utf-8")
    tail = mark.encode()
    if limit < len(tail):
        return data[: max(limit, 0)].decode("utf-8", "ignore")
    return data[: limit - len(tail)].decode("utf-8", "ignore") + mark


#: AMQP's type octets of numbers, and struct's letters for them
_NUMBERS = dict(zip("bBsuIilLfd", "bBhHiIqqfd", strict=True))
_FIXED = {kind.encode(): struct.Struct(f">{letter}") for kind, letter in _NUMBERS.items()}
#: bytes after the type octet
_SIZES = {kind: shape.size for kind, shape in _FIXED.items()} | {b"T": 8, b"D": 5, b"t": 1, b"V": 0, b"\x00": 0}
_LONG = struct.Struct(">I")
_LONGLONG = struct.Struct(">Q")
_SIGNED = struct.Struct(">i")
_OCTET = struct.Struct(">B")
#: a nested table deeper than this is not a header that anybody sets on purpose
_MAX_DEPTH = 64


def _sized(data: bytes, at: int) -> tuple[bytes, int]:
    (size,) = _LONG.unpack_from(data, at)
    end = at + 4 + size
    if end > len(data):
        raise WireError(f"a value of {size} bytes ends after the table that holds it")
    return data[at + 4 : end], end


def _end_of_value(data: bytes, at: int) -> int:
    """Where the value whose type octet is at ``at`` ends."""
    kind = data[at : at + 1]
    if kind in _SIZES:
        end = at + 1 + _SIZES[kind]
    elif kind in {b"S", b"x", b"A", b"F"}:
        _, end = _sized(data, at + 1)
    else:
        raise WireError(f"unknown field type {kind!r}")
    if end > len(data):
        raise WireError("a value ends after the table that holds it")
    return end


def _timestamp(seconds: int) -> datetime | int:
    """Seconds as a date; what cannot be a date (milliseconds of some clients among them) stays a number."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return seconds


def _decode(raw: bytes, depth: int = 0) -> Any:  # noqa: PLR0911 - one return a type
    kind, data = raw[:1], raw[1:]
    if depth > _MAX_DEPTH:
        raise WireError(f"tables nested deeper than {_MAX_DEPTH}")
    fixed = _FIXED.get(kind)
    if fixed:
        return fixed.unpack(data)[0]
    match kind:
        case b"S":
            text = data[4:]
            try:
                return text.decode("utf-8")
            except UnicodeDecodeError:
                return text
        case b"x":
            return data[4:]
        case b"t":
            return data != b"\x00"
        case b"T":
            return _timestamp(_LONGLONG.unpack(data)[0])
        case b"D":
            return Decimal(_SIGNED.unpack(data[1:])[0]).scaleb(-data[0])
        case b"A":
            return _decode_array(data[4:], depth + 1)
        case b"F":
            return {name: _decode(value, depth + 1) for name, value in _entries(data[4:])}
        case _:
            return None


def _decode_array(data: bytes, depth: int) -> list[Any]:
    values, at = [], 0
    while at < len(data):
        end = _end_of_value(data, at)
        values.append(_decode(data[at:end], depth))
        at = end
    return values


def _entries(table: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at < len(table):
        start = at + 1
        at = start + table[at]
        name = table[start:at].decode("utf-8", "surrogateescape")
        end = _end_of_value(table, at)
        yield name, table[at:end]
        at = end


def encode_value(value: Any, depth: int = 0) -> bytes:  # noqa: PLR0911, PLR0912 - one return a type
    """The type octet and the bytes of one field value.

    ``str``→S, ``bool``→t, ``int``→l, ``float``→d, ``None``→V, aware ``datetime``→T (whole seconds), ``bytes``→x,
    ``Decimal``→D, ``list``/``tuple``→A, mapping→F. Raises :class:`WireError` for anything else and for numbers that
    do not fit.
    """
    if depth > _MAX_DEPTH:
        raise WireError(f"tables nested deeper than {_MAX_DEPTH}")
    match value:
        case None:
            return b"V"
        case bool():
            return b"t\x01" if value else b"t\x00"
        case str():
            text = _utf8(value)
            return b"S" + _LONG.pack(len(text)) + text
        case int():
            if not -(2**63) <= value < 2**63:
                raise WireError(f"an integer of {value.bit_length()} bits does not fit into 64")
            return b"l" + _FIXED[b"l"].pack(value)
        case float():
            if not math.isfinite(value):  # RabbitMQ ends the connection over it, with all that is in flight
                raise WireError(f"a header cannot carry {value}")
            return b"d" + _FIXED[b"d"].pack(value)
        case bytes() | bytearray():
            return b"x" + _LONG.pack(len(value)) + bytes(value)
        case datetime():
            if value.tzinfo is None or value.timestamp() < 0:
                raise WireError(f"a header cannot carry the date {value}: it has no time zone, or is before 1970")
            return b"T" + _LONGLONG.pack(int(value.timestamp()))
        case Decimal():
            return _encode_decimal(value)
        case list() | tuple():
            items = b"".join(encode_value(item, depth + 1) for item in value)
            return b"A" + _LONG.pack(len(items)) + items
        case Mapping():
            table = _encode_table((str(name), encode_value(item, depth + 1)) for name, item in value.items())
            return b"F" + _LONG.pack(len(table)) + table
        case _:
            raise WireError(f"a header cannot carry {type(value).__name__}")


def _encode_decimal(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    # looked at before it is made: 1E+999999999 would be a number of a billion digits
    if not isinstance(exponent, int) or not -255 <= exponent <= 9 or len(digits) > 10:
        raise WireError(f"a header cannot carry the decimal {value}")
    scale = max(0, -exponent)
    number = int(Decimal((sign, digits, exponent + scale)))
    if not -(2**31) <= number < 2**31:
        raise WireError(f"the decimal {value} does not fit into 32 bits")
    return b"D" + bytes([scale]) + _SIGNED.pack(number)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise WireError(f"{text[:40]!r} has half a surrogate pair in it") from error


def _encode_table(entries: Iterable[tuple[str, bytes]]) -> bytes:
    return b"".join(_encode_short(name, "a header's name") + raw for name, raw in entries)


def _encode_short(text: str, what: str) -> bytes:
    data = _utf8(text)
    if len(data) > 255:
        raise WireError(f"{what} is longer than 255 bytes: {printable(text)[:40]}…")
    return bytes([len(data)]) + data


class Headers(Mapping[str, Any]):
    """The header table of one message: a read-only mapping that keeps each entry's bytes.

    ``headers["key"]`` decodes; entries that nobody looks at are passed on as they came. A name that stands twice
    keeps both places on the wire; looking gives the first.
    """

    __slots__ = ("_first", "_raw")

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        """Encode ``values``; raises :class:`WireError` for a value or a name that AMQP cannot carry."""
        self._raw = tuple((name, encode_value(value)) for name, value in (values or {}).items())
        self._first: dict[str, bytes] | None = None
        self.encode()  # a name that does not fit is told here

    @classmethod
    def parse(cls, table: bytes) -> "Headers":
        """The table from its bytes (without the length in front); raises :class:`WireError` where it is broken."""
        headers = cls()
        try:
            headers._raw = tuple(_entries(table))
        except (struct.error, IndexError) as error:
            raise WireError(f"broken header table: {error}") from error
        return headers

    def __getitem__(self, name: str) -> Any:
        """The decoded value; a broken one reads as None, because looking must not fail on foreign headers."""
        raw = self._by_name[name]
        try:
            return _decode(raw)
        except (ValueError, struct.error, IndexError, RecursionError):
            return None

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
        headers = Headers()
        headers._raw = tuple(entry for entry in self._raw if not drop(entry[0]))
        return headers

    def plus(self, values: Mapping[str, Any]) -> "Headers":
        """A copy in which ``values`` replace the entries of the same names."""
        headers = self.without(lambda name: name in values)
        headers._raw += Headers(values)._raw
        return headers

    def entries(self) -> Iterator[bytes]:
        """Each entry's bytes, name and value."""
        return (_encode_table([entry]) for entry in self._raw)

    def encode(self) -> bytes:
        """The table's bytes, without the length in front."""
        return _encode_table(self._raw)


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
            (flags,) = struct.unpack_from(">H", data)
            at, values = 2, {}
            for bit, name in _PROPERTY_BITS:
                if flags & bit:
                    values[name], at = _READ.get(name, _read_short)(data, at)
        except (struct.error, IndexError) as error:
            raise WireError(f"broken message properties: {error}") from error
        return cls(**values)

    def encode(self) -> bytes:
        """The content header frame's flags and values; raises :class:`WireError` for what does not fit."""
        flags, parts = 0, []
        for bit, name in _PROPERTY_BITS:
            value = getattr(self, name)
            if value is not None:
                flags |= bit
                parts.append(_encode_property(name, value))
        return struct.pack(">H", flags) + b"".join(parts)

    def but(self, **changes: Any) -> "Properties":
        """A copy with some properties changed."""
        return replace(self, **changes)


_PROPERTY_BITS = [(1 << (15 - place), field.name) for place, field in enumerate(fields(Properties))]


def _read_short(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    if end > len(data):
        raise WireError("a short string ends after the frame")
    return data[at + 1 : end].decode("utf-8", "surrogateescape"), end


def _reader(shape: struct.Struct) -> Callable[[bytes, int], tuple[Any, int]]:
    return lambda data, at: (shape.unpack_from(data, at)[0], at + shape.size)


def _read_table(data: bytes, at: int) -> tuple[Headers, int]:
    table, end = _sized(data, at)
    return Headers.parse(table), end


_READ: dict[str, Callable[[bytes, int], tuple[Any, int]]] = {
    "headers": _read_table,
    "delivery_mode": _reader(_OCTET),
    "priority": _reader(_OCTET),
    "timestamp": _reader(_LONGLONG),
}


def _encode_property(name: str, value: Any) -> bytes:
    if isinstance(value, Headers):
        table = value.encode()
        return _LONG.pack(len(table)) + table
    if isinstance(value, str):
        return _encode_short(value, name)
    try:
        return (_LONGLONG if name == "timestamp" else _OCTET).pack(value)
    except struct.error as error:
        raise WireError(f"{name}: {value!r} does not fit: {error}") from error
