"""What bulk operations have to know of a letter: a few headers, not the whole story, which costs ten times as much."""

import hashlib
from datetime import datetime
from typing import NamedTuple

from rabbitdlq import names
from rabbitdlq.dead_letter import DeadLetter, harms, read_time
from rabbitdlq.glance import glance
from rabbitdlq.message import MAX_LAP
from rabbitdlq.texts import printable
from rabbitdlq.wire import Properties, WireError, decoded, remembered

__all__ = ["Traits", "key_of", "traits_of"]

_PARK_ID, _LAP, _REPEATED, _REASON, _FINGERPRINT, _QUEUE, _PARKED_AT = (
    name.encode()
    for name in (
        names.PARK_ID,
        names.LAP,
        names.REPEATED,
        names.REASON,
        names.FINGERPRINT,
        names.QUEUE,
        names.PARKED_AT,
    )
)
#: what the first publisher set, as a consumer notes it when it parks a message
_NOTED_BY_PARKING = frozenset(name.encode() for name in (names.EXCHANGE, names.ROUTING_KEY, names.FIRST_FAILED_AT))
_WANTED = frozenset({_PARK_ID, _LAP, _REPEATED, _REASON, _FINGERPRINT, _QUEUE, _PARKED_AT, *_NOTED_BY_PARKING})
_COUNTS = frozenset(name.encode() for name in names.DELIVERY_COUNTS)
#: with which the names of all headers that harm begin
_FIRST = frozenset(b"xCB")
_STRING = ord("S")


class Traits(NamedTuple):
    """One letter, as runs and plans know it."""

    #: the park id, or a digest of what the broker parked: the same at every reading
    key: str
    #: the message id
    id: str
    lap: int
    #: it may be a second copy of the letter with the same key
    repeated: bool
    reason: str
    fingerprint: str
    #: the work queue it failed in
    queue: str
    parked_at: datetime | None
    #: bytes of the body
    size: int
    #: whether it can go back to work without any of its properties being read
    plain: bool
    #: False where the properties are broken: sending it again would lose them
    readable: bool = True


def traits_of(work_queue: str, body: bytes, encoded: bytes) -> Traits:
    """The traits of a letter in the dead-letter queue of ``work_queue``; what :meth:`DeadLetter.parse` says of it."""
    try:
        seen = glance(encoded, _WANTED, _is_noted, _FIRST)
    except WireError:
        return _by_the_letter(DeadLetter.parse(work_queue, body, Properties()), readable=False)
    headers = seen.headers
    park_id = _text(headers.get(_PARK_ID))
    # with x-death it went on after it was parked, and which of the two counts is not to be seen at a glance
    if not park_id or seen.noted or not seen.message_id:
        return _by_the_letter(DeadLetter.parse(work_queue, body, Properties.parse(encoded)))
    return Traits(
        key=park_id,
        id=printable(seen.message_id.decode("utf-8", "surrogateescape")),
        lap=_lap(headers[_LAP]) if _LAP in headers else 1,
        repeated=headers.get(_REPEATED) == b"t\x01",
        reason=_text(headers.get(_REASON)) or "unknown",
        fingerprint=_text(headers.get(_FINGERPRINT)),
        queue=printable(_text(headers.get(_QUEUE)) or work_queue),
        parked_at=read_time(_text(headers.get(_PARKED_AT))),
        size=len(body),
        plain=headers.keys() >= _NOTED_BY_PARKING,
    )


def _is_noted(name: bytes) -> bool:
    # a letter that was looked at before has a count of its deliveries
    return name not in _COUNTS and harms(name.decode("utf-8", "surrogateescape"))


def _text(raw: bytes | None) -> str:
    """The text of a value's bytes; "" where it is none."""
    if raw is None or raw[0] != _STRING:
        return ""
    try:
        return raw[5:].decode()  # behind the type and the length
    except UnicodeDecodeError:
        return ""


@remembered
def _lap(raw: bytes) -> int:
    lap = decoded(raw)
    return lap if type(lap) is int and 1 <= lap <= MAX_LAP else 1


def _by_the_letter(letter: DeadLetter, *, readable: bool = True) -> Traits:
    return Traits(
        key=key_of(letter),
        id=letter.id,
        lap=letter.lap,
        repeated=letter.repeated,
        reason=letter.reason,
        fingerprint=letter.error.fingerprint if letter.error else "",
        queue=letter.queue,
        parked_at=letter.moved_to_dlq_at,
        size=len(letter.body),
        plain=False,
        readable=readable,
    )


def key_of(letter: DeadLetter) -> str:
    """The park id, or for a letter that the broker parked a digest of it without the queue's counts of deliveries."""
    if letter.park_id:
        return letter.park_id
    digest = hashlib.sha256()
    digest.update(letter.wire.encode(headers=False))
    for entry in sorted(letter.wire.table.without(names.DELIVERY_COUNTS.__contains__).entries()):
        digest.update(len(entry).to_bytes(8, "big") + entry)
    digest.update(letter.body)
    return f"bare-{digest.hexdigest()[:24]}"
