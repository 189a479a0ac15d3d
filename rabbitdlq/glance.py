"""Encoded message properties, looked at and rewritten without being decoded.

Bulk operations see each letter once, want a few of its headers, and pass the others on as they came. Decoding them all
into :class:`~rabbitdlq.wire.Properties` first would cost several times what publishing the letter costs.
"""

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass

from rabbitdlq.fields import WireError, end_of_value

__all__ = ["Glance", "glance", "rewritten"]

_LONG = struct.Struct(">I")
_length = _LONG.unpack_from
_STRING = ord("S")
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _DELIVERY_MODE, _PRIORITY, _CORRELATION_ID = (
    1 << bit for bit in (15, 14, 13, 12, 11, 10)
)
_REPLY_TO, _EXPIRATION, _MESSAGE_ID, _USER_ID = (1 << bit for bit in (9, 8, 7, 4))


@dataclass(frozen=True, slots=True)
class Glance:
    """What was looked for."""

    #: as the bytes on the wire; None where there is none
    message_id: bytes | None
    #: the bytes of the values of headers that were wanted, type octet first; of a name that stands twice the first
    headers: dict[bytes, bytes]
    #: whether it has an expiration, a reply-to or a user id, or a header that was to be noted
    noted: bool


def glance(encoded: bytes, wanted: Collection[bytes], noted: Callable[[bytes], bool], first: Collection[int]) -> Glance:
    """A look at encoded properties; raises :class:`WireError` where they are broken.

    ``noted`` is asked of names only that begin with one of the bytes ``first``.
    """
    try:
        flags, at, end = _table(encoded)
        headers: dict[bytes, bytes] = {}
        has_noted = bool(flags & (_REPLY_TO | _EXPIRATION | _USER_ID))
        # written out twice: a generator would cost as much as the rest of it
        while at < end:
            start = at + 1
            at = start + encoded[at]
            name = encoded[start:at]
            stop = at + 5 + _length(encoded, at + 1)[0] if encoded[at] == _STRING else end_of_value(encoded, at)
            if stop > end:
                raise WireError("a value ends after the table that holds it")
            if name in wanted:
                headers.setdefault(name, encoded[at:stop])
            elif not name or (name[0] in first and noted(name)):
                has_noted = True
            at = stop
        return Glance(_message_id(encoded, flags, end), headers, has_noted)
    except (struct.error, IndexError) as error:
        raise WireError(f"broken message properties: {error}") from error


def rewritten(encoded: bytes, drop: Collection[bytes], add: bytes) -> bytes:
    """The same properties without the headers of these names, and with the encoded entries ``add`` at their end.

    Raises :class:`WireError` where they are broken.
    """
    kept: list[bytes] = []
    try:
        flags, begin, end = _table(encoded)
        at = begin
        while at < end:
            first = at
            at += 1 + encoded[at]
            stop = at + 5 + _length(encoded, at + 1)[0] if encoded[at] == _STRING else end_of_value(encoded, at)
            if stop > end:
                raise WireError("a value ends after the table that holds it")
            if encoded[first + 1 : at] not in drop:
                kept.append(encoded[first:stop])
            at = stop
    except (struct.error, IndexError) as error:
        raise WireError(f"broken message properties: {error}") from error
    kept.append(add)
    table = b"".join(kept)
    before = encoded[2 : begin - 4] if flags & _HEADERS else encoded[2:begin]
    return b"".join(((flags | _HEADERS).to_bytes(2, "big"), before, _LONG.pack(len(table)), table, encoded[end:]))


def _table(encoded: bytes) -> tuple[int, int, int]:
    """The flags, and where the entries of the header table begin and end."""
    flags, at = (encoded[0] << 8) | encoded[1], 2
    for bit in (_CONTENT_TYPE, _CONTENT_ENCODING):
        if flags & bit:
            at += 1 + encoded[at]
    if not flags & _HEADERS:
        return flags, at, at
    end = at + 4 + _length(encoded, at)[0]
    if end > len(encoded):
        raise WireError("the header table ends after the properties")
    return flags, at + 4, end


def _message_id(encoded: bytes, flags: int, at: int) -> bytes | None:
    if not flags & _MESSAGE_ID:
        return None
    at += bool(flags & _DELIVERY_MODE) + bool(flags & _PRIORITY)
    for bit in (_CORRELATION_ID, _REPLY_TO, _EXPIRATION):
        if flags & bit:
            at += 1 + encoded[at]
    stop = at + 1 + encoded[at]
    if stop > len(encoded):
        raise WireError("the message id ends after the properties")
    return encoded[at + 1 : stop]
