"""Writing dead letters and replays: what a message carries into the dead-letter queue, and what back out of it.

What would harm a parked or replayed copy (an expiration, another account's user id, extra routing, the broker's own
book-keeping) is moved out of the message into the header ``dlq-original``.
"""

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from pydantic_core import to_json

from rabbitdlq import names
from rabbitdlq.dead_letter import AttemptRecord, DeadLetter, harmless, iso, moved_out, read_original, read_time
from rabbitdlq.deaths import Death, deaths_of
from rabbitdlq.failure import Failure
from rabbitdlq.fields import encode_table, encode_value
from rabbitdlq.glance import rewritten
from rabbitdlq.message import Message, derived_id
from rabbitdlq.texts import printable, shorten
from rabbitdlq.wire import Properties

__all__ = [
    "Parking",
    "ladder_properties",
    "new_park_id",
    "park_properties",
    "quick_replay_properties",
    "replay_properties",
    "restored_properties",
]

#: all our headers together, far below the smallest usual frame of 128 KiB
OWN_HEADER_BYTES = 48_000
#: room that is left in the frame for what the broker adds later
FRAME_RESERVE = 4_096
#: all properties but the headers: eleven short strings of up to 255 bytes, and a few numbers
OTHER_PROPERTIES_BYTES = 2_900
#: a key of 255 bytes none of which is text is written with four for each
NAME_BYTES = 1_020
HISTORY_BYTES = 16_000
ORIGINAL_BYTES = 8_000
#: of a letter's own headers, what does not go back to work with it
_LEFT_BEHIND = frozenset(
    name.encode() for name in (names.OURS - names.KEPT_ON_REPLAY) | {names.LAP, names.REPLAY_ID} | names.DELIVERY_COUNTS
)
#: what the broker would refuse or act on in a letter that is put back
_NOT_AGAIN = names.ROUTING_HEADERS | {"expiration", "user_id", "reply_to"}


@dataclass(frozen=True, slots=True)
class Parking:
    """Why and by whom a message is parked."""

    reason: str
    failure: Failure
    history: Sequence[AttemptRecord]
    worker: str
    parked_at: datetime
    park_id: str
    #: attempts of this lap that the history does not tell of
    history_partial: bool = False
    #: the message may be parked already
    repeated: bool = False
    #: attempts that a failure like its last one has; as many as the ladder where nothing else is said
    max_attempts: int | None = None


def new_park_id(message: Message) -> str:
    """The same whenever the same attempt of the same message is parked; unique where the message has no own id.

    Two messages without ids may be equal to the last byte and still be two: they must never be taken for copies.
    """
    if message.id_derived:
        return uuid.uuid4().hex[:24]
    digest = hashlib.sha256()
    # a producer may use one id twice: what the message went through tells the two apart
    way = _way(deaths_of(message.properties.table))
    digest.update(
        f"{message.queue}\0{message.id}\0{message.lap}\0{message.attempt}\0{way}\0".encode("utf-8", "surrogateescape")
    )
    digest.update(message.properties.encode(headers=False))
    digest.update(message.body)
    return digest.hexdigest()[:24]


@lru_cache(maxsize=1_000)
def _way(deaths: tuple[Death, ...]) -> str:
    return "".join(f"{death.queue} {death.reason} {death.count} {death.time}\n" for death in deaths)


def park_properties(message: Message, parking: Parking, frame_max: int) -> Properties:
    """The properties of the dead letter: the original's, less what would harm, plus the story within a byte budget."""
    clean, reply_to, moved = moved_out(message.properties)
    kept = clean.without(names.OURS.__contains__)
    before = message.properties.table.text(names.ORIGINAL)
    original = moved if before is None else {**read_original(before), **moved}
    taken = len(kept.encode()) + OTHER_PROPERTIES_BYTES + FRAME_RESERVE
    budget = min(OWN_HEADER_BYTES, frame_max - taken)
    own = _own_headers(message, parking, original, budget)
    return message.properties.but(
        headers=kept.plus_raw(own),
        message_id=message.properties.message_id or message.id,
        expiration=None,
        user_id=None,
        reply_to=reply_to,
    )


def _own_headers(message: Message, parking: Parking, original: Mapping[str, Any], budget: int) -> dict[str, bytes]:
    failure, history = parking.failure, parking.history
    # a replayed message tells when it failed in its first lap: its age counts from there
    told = message.properties.table.text(names.FIRST_FAILED_AT)
    first_failed = None if told is None else read_time(told)
    values: dict[str, Any] = {
        names.REASON: parking.reason,
        names.ERROR_TYPE: shorten(failure.type, 200),
        names.ATTEMPTS: message.attempt,
        names.MAX_ATTEMPTS: parking.max_attempts or message.max_attempts,
        names.QUEUE: message.queue,
        names.EXCHANGE: shorten(message.exchange, NAME_BYTES),
        names.ROUTING_KEY: shorten(message.routing_key, NAME_BYTES),
        names.LAP: message.lap,
        names.PARK_ID: parking.park_id,
        names.PARKED_AT: iso(parking.parked_at),
        names.FIRST_FAILED_AT: iso(first_failed or (history[0].at if history else parking.parked_at)),
        names.FINGERPRINT: failure.fingerprint,
        names.WORKER: shorten(parking.worker, 200),
    }
    if message.id_derived:
        values[names.ID_DERIVED] = True
    if parking.repeated:
        values[names.REPEATED] = True
    if parking.history_partial:
        values[names.HISTORY_PARTIAL] = True
    own = {name: encode_value(value) for name, value in values.items()}
    # a length stands before each name
    left = budget - sum([len(name) + 1 + len(raw) for name, raw in own.items()])
    optional: tuple[tuple[str, int, Callable[[int], str]], ...] = (
        (names.ERROR_MESSAGE, 4_000, lambda limit: shorten(failure.message, limit)),
        (names.HISTORY, HISTORY_BYTES, lambda limit: _history_json(history, limit)),
        (names.ORIGINAL, ORIGINAL_BYTES, lambda limit: _original_json(original, limit)),
        (names.TRACEBACK, 12_000, lambda limit: _end_of(failure.traceback or "", limit)),
    )
    for name, wanted, text_within in optional:
        # a name, a type and a length stand before each text
        text = text_within(max(0, min(wanted, left - len(name) - 6)))
        if text:
            own[name] = encode_value(text)
            left -= len(name) + 1 + len(own[name])
    return own


def _end_of(text: str, limit: int) -> str:
    if len(text) <= limit and text.isascii():
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode()
    return "[cut]… " + data[-max(0, limit - 9) :].decode("utf-8", "ignore") if limit > 200 else ""


def _history_json(history: Sequence[AttemptRecord], limit: int) -> str:
    """As JSON within ``limit`` bytes: long texts shrink first, then the middle goes; first and last stay longest."""
    records = [record.as_json() for record in history]
    if all(len(record.error_message) <= 1_000 and record.error_message.isascii() for record in history):
        with contextlib.suppress(ValueError):  # texts that are no UTF-8, from a journal that others wrote
            encoded = to_json(records)
            if len(encoded) <= limit:
                return encoded.decode()
    for longest in (1_000, 300, 80):
        for record in records:
            record["error_message"] = shorten(record["error_message"], longest)
            record["error_type"], record["worker"] = printable(record["error_type"]), printable(record["worker"])
        encoded = to_json(records)
        if len(encoded) <= limit:
            return encoded.decode()
    while len(records) > 1:
        del records[len(records) // 2]
        encoded = to_json(records)
        if len(encoded) <= limit:
            return encoded.decode()
    return ""


def _original_json(original: Mapping[str, Any], limit: int) -> str:
    """What was moved, as JSON; what does not fit is left out, the largest first."""
    values = {printable(name): value for name, value in original.items()}
    if not values:
        return ""
    encoded = to_json(values)
    if len(encoded) <= limit:
        return encoded.decode()
    # what an entry takes, with the colon and the comma after them
    sizes = {name: len(to_json({name: value})) for name, value in values.items()}
    total = sum(sizes.values())
    for name in sorted(values, key=sizes.__getitem__, reverse=True):
        if total <= limit:
            break
        del values[name]
        total -= sizes[name]
    return to_json(values).decode() if values else ""


def replay_properties(letter: DeadLetter) -> Properties:
    """The properties with which a dead letter goes back: the publisher's, and the number of its next lap.

    The expiration stays behind: the message would vanish again. A copy sent twice by a crash carries the same
    ``dlq-replay-id``.
    """
    clean, moved = harmless(letter.wire)
    own: dict[str, Any] = {
        names.LAP: letter.lap + 1,
        names.EXCHANGE: letter.exchange,
        names.ROUTING_KEY: letter.routing_key,
        names.REPLAY_ID: letter.park_id or derived_id(letter.body, letter.wire, letter.routing_key),
    }
    if letter.first_failed_at is not None:
        own[names.FIRST_FAILED_AT] = iso(letter.first_failed_at)
    # how often it was looked at says nothing of the message
    original = {**letter.original, **{name: moved[name] for name in moved if name not in names.DELIVERY_COUNTS}}
    return _back_to_work(clean, own, original, letter.id, derived=letter.id_derived)


def ladder_properties(message: Message, failures: int, *, suspect: str | None = None) -> Properties:
    """The properties with which a message is put into a rung by a publish: its own, and how often it has failed.

    What would harm it there, an expiration before all, is moved as it is for a dead letter. ``suspect``: what the
    broker forgets of crashes that brought it back.
    """
    clean, moved = harmless(message.properties)
    own: dict[str, Any] = {
        names.FAILURES: failures,
        names.LAP: message.lap,
        names.EXCHANGE: shorten(message.exchange, NAME_BYTES),
        names.ROUTING_KEY: shorten(message.routing_key, NAME_BYTES),
    }
    if suspect is not None:
        own[names.SUSPECT] = suspect
    before = message.properties.table.text(names.ORIGINAL)
    kept = {name: value for name, value in moved.items() if not names.is_brokers(name)}
    return _back_to_work(clean, own, {**read_original(before), **kept}, message.id, derived=message.id_derived)


def _back_to_work(
    clean: Properties, own: dict[str, Any], original: Mapping[str, Any], id: str, *, derived: bool
) -> Properties:
    """For a publish to where a handler sees it: these headers of ours, the publisher's id or else ``id``."""
    headers = clean.table.without(lambda name: name in names.OURS and name not in names.KEPT_ON_REPLAY)
    text = _original_json(original, ORIGINAL_BYTES)
    if text:
        own[names.ORIGINAL] = text
    if derived:
        own[names.ID_DERIVED] = True
    return clean.but(headers=headers.plus(own), message_id=clean.message_id or id)


def quick_replay_properties(encoded: bytes, lap: int, park_id: str) -> bytes:
    """What :func:`replay_properties` gives for a letter that a consumer parked and in which nothing has to be moved.

    From bytes to bytes, for a tenth of the price: what stays is not even looked at.
    """
    own = encode_table([(names.LAP, encode_value(lap + 1)), (names.REPLAY_ID, encode_value(park_id))])
    return rewritten(encoded, _LEFT_BEHIND, own)


def restored_properties(wire: Properties, id: str) -> Properties:
    """The properties with which a letter is put back into the dead-letter queue: those it lay there with, to the byte.

    ``x-death`` stays, since on a bare letter it is the whole story. What the broker would refuse or act on (another
    account's user id, an expiration, extra routing, direct reply-to) goes to ``dlq-original``; the queue's own counts
    of deliveries begin anew. A letter without a message id gets ``id``, which says that it is derived.
    """
    clean, moved = harmless(wire)
    refused = {name: value for name, value in moved.items() if name in _NOT_AGAIN}
    headers = wire.table.without(lambda name: name in names.ROUTING_HEADERS or name in names.DELIVERY_COUNTS)
    own: dict[str, Any] = {}
    text = _original_json({**read_original(headers.text(names.ORIGINAL)), **refused}, ORIGINAL_BYTES) if refused else ""
    if text:
        own[names.ORIGINAL] = text
    if not wire.message_id:
        own[names.ID_DERIVED] = True
    if own:
        headers = headers.plus(own)
    return clean.but(
        # a message without a table gets none, which is not the same as an empty one
        headers=None if wire.headers is None and not own else headers,
        message_id=wire.message_id or id,
    )
