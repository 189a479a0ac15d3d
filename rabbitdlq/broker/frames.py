"""The few AMQP 0-9-1 frames that the hot path reads and writes itself (https://www.rabbitmq.com/amqp-0-9-1-reference).

Pure functions on bytes. Everything else on the wire is the client library's.
"""

import struct
from typing import Literal, NamedTuple

__all__ = [
    "BASIC_ACK",
    "BASIC_NACK",
    "BODY",
    "CHANNEL_CLOSE",
    "CONNECTION_BLOCKED",
    "CONNECTION_UNBLOCKED",
    "DELIVER",
    "FRAME",
    "GET_OK",
    "HEADER",
    "METHOD",
    "RETURN",
    "Deliver",
    "How",
    "content_frames",
    "content_header",
    "parse_confirm",
    "parse_deliver",
    "parse_return",
    "publish_method",
    "settle_frame",
    "text_of",
]

#: what is done with a delivery: acknowledged, out through the dead-letter exchange, or back into its queue
How = Literal["ack", "dead", "back"]

#: kind, channel, size; the payload and one end octet follow
FRAME = struct.Struct(">BHI")
METHOD, HEADER, BODY = 1, 2, 3
RETURN, DELIVER, GET_OK, BASIC_ACK, BASIC_NACK = (struct.pack(">HH", 60, method) for method in (50, 60, 71, 80, 120))
CHANNEL_CLOSE = struct.pack(">HH", 20, 40)
CONNECTION_BLOCKED, CONNECTION_UNBLOCKED = (struct.pack(">HH", 10, method) for method in (60, 61))
_PUBLISH = struct.pack(">HHH", 60, 40, 0)
_END = b"\xce"
_HEADER_START = struct.Struct(">BHIHHQ")
_SETTLE = struct.Struct(">BHI4sQBB")
_TAG_AND_FLAG = struct.Struct(">QB")


def text_of(raw: bytes) -> str:
    r"""A short string as text; bytes that are not UTF-8 are written as ``\xff``."""
    return raw.decode("utf-8", "backslashreplace")


class Deliver(NamedTuple):
    """What a delivery's method frame says."""

    tag: int
    redelivered: bool
    exchange: bytes
    routing_key: bytes


def parse_deliver(payload: bytes) -> Deliver:
    """From the payload of a ``basic.deliver``."""
    at = 5 + payload[4]
    tag, redelivered = _TAG_AND_FLAG.unpack_from(payload, at)
    at += 10
    middle = at + payload[at - 1]
    return Deliver(tag, bool(redelivered & 1), payload[at:middle], payload[middle + 1 :])


def parse_return(payload: bytes) -> tuple[int, str]:
    """Reply code and text from the payload of a ``basic.return``."""
    (code,) = struct.unpack_from(">H", payload, 4)
    return code, text_of(payload[7 : 7 + payload[6]])


def parse_confirm(payload: bytes) -> tuple[int, bool]:
    """Delivery tag, and whether it speaks for all before it too, from a ``basic.ack`` or ``basic.nack``."""
    tag, flags = _TAG_AND_FLAG.unpack_from(payload, 4)
    return tag, bool(flags & 1)


def content_header(payload: bytes) -> tuple[int, bytes]:
    """Body size and encoded properties from the payload of a content header."""
    (size,) = struct.unpack_from(">Q", payload, 4)
    return size, payload[12:]


def publish_method(channel: int, exchange: bytes, routing_key: bytes, mandatory: bool) -> bytes:
    """The whole ``basic.publish`` frame; the same for every message on the same way, so worth keeping."""
    payload = b"".join(
        (_PUBLISH, bytes((len(exchange),)), exchange, bytes((len(routing_key),)), routing_key, bytes((mandatory,)))
    )
    return FRAME.pack(METHOD, channel, len(payload)) + payload + _END


def content_frames(channel: int, properties: bytes, body: bytes, frame_max: int) -> list[bytes]:
    """The content header's frame and those of the body, in pieces to be joined."""
    size = len(body)
    pieces = [_HEADER_START.pack(HEADER, channel, 12 + len(properties), 60, 0, size), properties, _END]
    room = frame_max - FRAME.size - 1
    if size <= room:
        if size:
            pieces += (FRAME.pack(BODY, channel, size), body, _END)
        return pieces
    for at in range(0, size, room):
        part = body[at : at + room]
        pieces += (FRAME.pack(BODY, channel, len(part)), part, _END)
    return pieces


def settle_frame(channel: int, how: How, tag: int, multiple: bool) -> bytes:
    """The frame that settles this delivery; with ``multiple`` all before it that are not settled yet, too."""
    if how == "ack":
        return _SETTLE.pack(METHOD, channel, 13, BASIC_ACK, tag, multiple, 0xCE)
    # nack, not reject: on 4.3 a reject adds to the delivery count that travels with the message
    return _SETTLE.pack(METHOD, channel, 13, BASIC_NACK, tag, multiple | (how == "back") << 1, 0xCE)
