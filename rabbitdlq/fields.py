"""The values of an AMQP 0-9-1 table, from bytes and to bytes.

Field types are those RabbitMQ uses (https://www.rabbitmq.com/docs/amqp-0-9-1-errata#section_3).
"""

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rabbitdlq.texts import printable

__all__ = [
    "WireError",
    "decode_value",
    "encode_short",
    "encode_table",
    "encode_value",
    "end_of_value",
    "entries",
    "sized",
]


class WireError(ValueError):
    """A value that AMQP 0-9-1 cannot carry, or bytes that are not what they say they are."""


#: AMQP's type octets of numbers, and struct's letters for them
_NUMBERS = dict(zip("bBsuIilLfd", "bBhHiIqqfd", strict=True))
_FIXED = {kind.encode(): struct.Struct(f">{letter}") for kind, letter in _NUMBERS.items()}
#: bytes after the type octet
_SIZES = {kind: shape.size for kind, shape in _FIXED.items()} | {b"T": 8, b"D": 5, b"t": 1, b"V": 0, b"\x00": 0}
_LONG = struct.Struct(">I")
_LONGLONG = struct.Struct(">Q")
_SIGNED = struct.Struct(">i")
_STRING = ord("S")
#: a nested table deeper than this is not a header that anybody sets on purpose
_MAX_DEPTH = 64


def sized(data: bytes, at: int) -> tuple[bytes, int]:
    """The bytes of a value that begins with its length, and where it ends."""
    (size,) = _LONG.unpack_from(data, at)
    end = at + 4 + size
    if end > len(data):
        raise WireError(f"a value of {size} bytes ends after the table that holds it")
    return data[at + 4 : end], end


def end_of_value(data: bytes, at: int) -> int:
    """Where the value whose type octet is at ``at`` ends."""
    kind = data[at : at + 1]
    if kind in _SIZES:
        end = at + 1 + _SIZES[kind]
    elif kind in {b"S", b"x", b"A", b"F"}:
        end = at + 5 + _LONG.unpack_from(data, at + 1)[0]
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


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _decimal(data: bytes) -> Decimal:
    return Decimal(_SIGNED.unpack(data[1:])[0]).scaleb(-data[0])


#: values of a fixed size that are no numbers, after the type octet
_OTHERS: dict[bytes, Callable[[bytes], Any]] = {
    b"t": lambda data: data != b"\x00",
    b"T": lambda data: _timestamp(_LONGLONG.unpack(data)[0]),
    b"D": _decimal,
}


def decode_value(data: bytes, at: int, depth: int = 0) -> tuple[Any, int]:
    """The decoded value whose type octet is at ``at``, and where it ends."""
    kind = data[at : at + 1]
    at += 1
    if kind == b"S" or kind == b"x" or kind == b"F" or kind == b"A":  # noqa: PLR1714 - twice as fast as a set
        end = at + 4 + _LONG.unpack_from(data, at)[0]
        if end > len(data):
            raise WireError("a value ends after the table that holds it")
        at += 4
        if kind == b"S":
            return _text(data[at:end]), end
        if kind == b"x":
            return data[at:end], end
        if depth >= _MAX_DEPTH:
            raise WireError(f"tables nested deeper than {_MAX_DEPTH}")
        return (_table if kind == b"F" else _array)(data, at, end, depth + 1), end
    number = _FIXED.get(kind)
    if number is not None:
        return number.unpack_from(data, at)[0], at + number.size
    size = _SIZES.get(kind)
    if size is None:
        raise WireError(f"unknown field type {kind!r}")
    read = _OTHERS.get(kind)
    return None if read is None else read(data[at : at + size]), at + size


def _array(data: bytes, at: int, end: int, depth: int) -> list[Any]:
    values = []
    while at < end:
        value, at = decode_value(data, at, depth)
        values.append(value)
    _check_end(at, end)
    return values


def _table(data: bytes, at: int, end: int, depth: int) -> dict[str, Any]:
    values = {}
    while at < end:
        start = at + 1
        at = start + data[at]
        name = data[start:at].decode("utf-8", "surrogateescape")
        values[name], at = decode_value(data, at, depth)
    _check_end(at, end)
    return values


def _check_end(at: int, end: int) -> None:
    if at != end:
        raise WireError("a value ends after the table that holds it")


def entries(table: bytes) -> Iterator[tuple[str, bytes]]:
    """Each entry's name and the bytes of its value; raises :class:`WireError`, or what slicing raises, if broken."""
    at, size = 0, len(table)
    while at < size:
        start = at + 1
        at = start + table[at]
        name = table[start:at].decode("utf-8", "surrogateescape")
        if table[at] == _STRING:  # most are
            end = at + 5 + _LONG.unpack_from(table, at + 1)[0]
            if end > size:
                raise WireError("a value ends after the table that holds it")
        else:
            end = end_of_value(table, at)
        yield name, table[at:end]
        at = end


def encode_value(value: Any, depth: int = 0) -> bytes:  # noqa: PLR0911, PLR0912 - one return a type
    """The type octet and the bytes of one field value.

    ``str``→S, ``bool``→t, ``int``→l, ``float``→d, ``None``→V, aware ``datetime``→T (whole seconds), ``bytes``→x,
    ``Decimal``→D, ``list``/``tuple``→A, mapping→F. Raises :class:`WireError` for anything else and for numbers that
    do not fit.
    """
    if type(value) is str:  # most are, and the others have to be asked one after the other
        text = value.encode() if value.isascii() else _utf8(value)
        return b"S" + _LONG.pack(len(text)) + text
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
            table = encode_table((str(name), encode_value(item, depth + 1)) for name, item in value.items())
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


def encode_table(named: Iterable[tuple[str, bytes]]) -> bytes:
    """The bytes of a table from those of its values, without the length in front."""
    return b"".join([_header_name(name) + raw for name, raw in named])


@lru_cache(maxsize=4_000)
def _header_name(name: str) -> bytes:
    return encode_short(name, "a header's name")


def encode_short(text: str, what: str) -> bytes:
    """A short string; raises :class:`WireError`, naming ``what``, for more than 255 bytes."""
    data = text.encode() if text.isascii() else _utf8(text)
    if len(data) > 255:
        raise WireError(f"{what} is longer than 255 bytes: {printable(text)[:40]}…")
    return bytes([len(data)]) + data
