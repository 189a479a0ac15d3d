"""What bulk operations have to know of a letter: a few headers, not the whole story, which costs ten times as much."""

import hashlib
from dataclasses import dataclass
from datetime import datetime

from rabbitdlq import names
from rabbitdlq.dead_letter import DeadLetter, read_time
from rabbitdlq.message import told_lap
from rabbitdlq.texts import printable
from rabbitdlq.wire import Properties

__all__ = ["Traits", "key_of", "traits_of"]


@dataclass(frozen=True, slots=True)
class Traits:
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
    #: whether it is as a consumer parked it, in all that a replay looks at
    parked: bool


def traits_of(work_queue: str, body: bytes, wire: Properties) -> Traits:
    """The traits of a letter in the dead-letter queue of ``work_queue``; what :meth:`DeadLetter.parse` says of it."""
    headers = wire.table
    park_id = headers.text(names.PARK_ID)
    # with x-death it went on after it was parked, and which of the two counts is not to be seen at a glance
    if not park_id or "x-death" in headers or not wire.message_id:
        return _by_the_letter(DeadLetter.parse(work_queue, body, wire))
    return Traits(
        key=park_id,
        id=printable(wire.message_id),
        lap=told_lap(headers),
        repeated=headers.get(names.REPEATED) is True,
        reason=headers.text(names.REASON) or "unknown",
        fingerprint=headers.text(names.FINGERPRINT) or "",
        queue=printable(headers.text(names.QUEUE) or work_queue),
        parked_at=read_time(headers.text(names.PARKED_AT)),
        size=len(body),
        parked=names.EXCHANGE in headers and names.ROUTING_KEY in headers and names.FIRST_FAILED_AT in headers,
    )


def _by_the_letter(letter: DeadLetter) -> Traits:
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
        parked=False,
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
