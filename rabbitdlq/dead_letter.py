"""A dead letter: the original message with the story of its failures in flat headers.

This module reads; :mod:`rabbitdlq.parking` writes. The JSON form is the one every door shows.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from rabbitdlq import names
from rabbitdlq.deaths import Death, deaths_of, rejections
from rabbitdlq.failure import Failure
from rabbitdlq.message import Undecodable, created_at, decode_payload, derived_id, lap_of, told_lap
from rabbitdlq.texts import printable
from rabbitdlq.wire import Headers, Properties, decoded, remembered

__all__ = [
    "SHOWN_PROPERTIES",
    "AttemptRecord",
    "DeadLetter",
    "harmless",
    "harms",
    "iso",
    "jsonable",
    "moved_out",
    "read_original",
    "read_time",
]

#: a thousand years: no handler ran longer
_LONGEST_MS = 3.2e13
#: properties that are for people: in a letter's JSON, and for conditions
SHOWN_PROPERTIES = (
    "content_type",
    "content_encoding",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "app_id",
)
#: direct reply-to is bound to the channel of the requester: the broker refuses it on a republish
DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One failed attempt of the history."""

    attempt: int
    at: datetime
    error_type: str
    error_message: str
    worker: str
    duration_ms: float | None

    def as_json(self) -> dict[str, Any]:
        """As in ``error_history``."""
        return {
            "attempt": self.attempt,
            "at": self.at.isoformat(),
            "error_type": self.error_type,
            "error_message": self.error_message,
            "worker": self.worker,
            "duration_ms": self.duration_ms,
        }

    @classmethod
    def from_json(cls, value: Any) -> "AttemptRecord | None":
        """The record, or None where ``value`` is none."""
        if not isinstance(value, Mapping):
            return None
        attempt, at, duration = value.get("attempt"), read_time(value.get("at")), value.get("duration_ms")
        if type(attempt) is not int or at is None:
            return None
        return cls(
            attempt=attempt,
            at=at,
            error_type=_first_text(value.get("error_type")),
            error_message=_first_text(value.get("error_message")),
            worker=_first_text(value.get("worker")),
            duration_ms=float(duration) if isinstance(duration, int | float) and 0 <= duration < _LONGEST_MS else None,
        )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A parked message, as shown by every door: API, command line, JSON."""

    id: str
    body: bytes
    #: as the publisher set them, less what was moved to ``original``
    properties: Properties
    reason: str
    error: Failure | None
    attempts: int
    max_attempts: int | None
    history: tuple[AttemptRecord, ...]
    history_partial: bool
    #: the work queue it failed in
    queue: str
    #: as the first publisher set them
    exchange: str
    routing_key: str
    created_at: datetime | None
    first_failed_at: datetime | None
    moved_to_dlq_at: datetime | None
    lap: int
    #: the same on both copies where a crash parked a message twice; empty on those the broker parked bare
    park_id: str
    #: it may be a second copy: the message had been delivered before, or its park was repeated after a lost confirm
    repeated: bool
    id_derived: bool
    #: what was moved out of the message: expiration, user id, extra routing, x-death
    original: Mapping[str, Any]
    #: every header as it lies in the queue
    wire: Properties

    @property
    def bare(self) -> bool:
        """Whether the broker parked it, without our headers."""
        return not self.park_id

    @property
    def copy_key(self) -> tuple[str, int] | None:
        """Equal on the copies of one letter; None on bare ones. Only one that is ``repeated`` is taken for a copy.

        Two messages that a producer gave the same id and the same content are two: equal keys alone prove nothing.
        """
        return (self.park_id, hash(self.body)) if self.park_id else None

    @property
    def payload(self) -> Any:
        """The body decoded by its content type, or ``{"base64": …, "content_type": …}``."""
        try:
            value = decode_payload(self.body, self.properties)
        except Undecodable:
            value = self.body
        return self._base64() if isinstance(value, bytes) else value

    def _base64(self) -> dict[str, Any]:
        return {"base64": base64.b64encode(self.body).decode(), "content_type": self.properties.content_type}

    def as_json(self) -> dict[str, Any]:
        """The documented JSON form, for every JSON reader: "not a number" and half surrogate pairs are texts."""
        error = self.error
        try:
            payload = jsonable(self.payload)
        except RecursionError:  # nested so deeply that it can be read, but hardly be written
            payload = self._base64()
        return {
            "id": self.id,
            "payload": payload,
            "attempts": self.attempts,
            "max_attempts": self.max_attempts,
            "retry_count": max(0, self.attempts - 1),
            "max_retries": None if self.max_attempts is None else self.max_attempts - 1,
            "error_history": [record.as_json() for record in self.history],
            "history_partial": self.history_partial,
            "created_at": iso(self.created_at),
            "first_failed_at": iso(self.first_failed_at),
            "moved_to_dlq_at": iso(self.moved_to_dlq_at),
            "reason": self.reason,
            "error": error
            and {
                "type": error.type,
                "message": error.message,
                "traceback": error.traceback,
                "fingerprint": error.fingerprint,
            },
            "queue": self.queue,
            "exchange": self.exchange,
            "routing_key": self.routing_key,
            "headers": jsonable(dict(self.properties.table)),
            "properties": _plain_properties(self.properties),
            "original": jsonable(dict(self.original)),
            "lap": self.lap,
            "park_id": self.park_id or None,
            "id_derived": self.id_derived,
        }

    @classmethod
    def parse(cls, work_queue: str, body: bytes, wire: Properties) -> "DeadLetter":
        """A dead letter from the queue; foreign and broken headers read as absent, never as an error."""
        headers = wire.table
        deaths = deaths_of(headers)
        origin = _origin(work_queue, deaths)
        told_queue = headers.text(names.QUEUE)
        # parking takes x-death away: with both, others moved the letter back to work and there the broker parked it
        parked = names.PARK_ID in headers and not any(death.queue in (work_queue, told_queue) for death in deaths)
        # on what the broker parked, the header is whatever its publisher wrote
        queue = told_queue if parked and told_queue else (origin.queue if origin else work_queue)
        routing_key = _first_text(headers.text(names.ROUTING_KEY), origin.routing_key if origin else None)
        kept, _ = harmless(wire)
        history = _read_history(headers.text(names.HISTORY))
        attempts = headers.number(names.ATTEMPTS) if parked else _bare_attempts(queue, deaths, headers)
        return cls(
            id=printable(wire.message_id or derived_id(body, wire, routing_key)),
            body=body,
            properties=kept.but(headers=kept.table.without(lambda name: name in names.OURS)),
            reason=(headers.text(names.REASON) or "unknown") if parked else _bare_reason(queue, deaths),
            error=_read_failure(headers) if parked else None,
            attempts=attempts or 0,
            max_attempts=headers.number(names.MAX_ATTEMPTS) if parked else None,
            history=history if parked else (),
            history_partial=headers.get(names.HISTORY_PARTIAL) is True or not parked or len(history) < (attempts or 0),
            queue=printable(queue),
            exchange=_first_text(headers.text(names.EXCHANGE), origin.exchange if origin else None),
            routing_key=routing_key,
            created_at=created_at(wire),
            first_failed_at=read_time(headers.text(names.FIRST_FAILED_AT)) or _time(deaths, min),
            moved_to_dlq_at=read_time(headers.text(names.PARKED_AT)) if parked else _time(deaths, max),
            lap=told_lap(headers) if parked else lap_of(headers),
            park_id=(headers.text(names.PARK_ID) or "") if parked else "",
            repeated=parked and headers.get(names.REPEATED) is True,
            id_derived=headers.get(names.ID_DERIVED) is True or not wire.message_id,
            original=read_original(headers.text(names.ORIGINAL)),
            wire=wire,
        )


def harmless(properties: Properties) -> tuple[Properties, dict[str, Any]]:
    """The properties without what must not be published again, and what that was, as JSON has it."""
    kept, reply_to, moved = moved_out(properties)
    return properties.but(headers=kept, expiration=None, user_id=None, reply_to=reply_to), moved


def moved_out(properties: Properties) -> tuple[Headers, str | None, dict[str, Any]]:
    """The headers and the reply-to that may go on, and what may not."""
    kept, told = _split(properties.table.encode())
    moved = dict(told)
    for name in ("expiration", "user_id"):
        value = getattr(properties, name)
        if value is not None:
            moved[name] = printable(value)
    reply_to = properties.reply_to
    if reply_to and reply_to.startswith(DIRECT_REPLY_TO):
        moved["reply_to"], reply_to = printable(reply_to), None
    return kept, reply_to, moved


@remembered
def _split(table: bytes) -> tuple[Headers, Mapping[str, Any]]:
    """The headers that may go on, and the others as JSON has them."""
    headers = Headers.parse(table)
    return headers.without(harms), {
        name: jsonable(decoded(headers.raw(name) or b"")) for name in headers if harms(name)
    }


def harms(name: str) -> bool:
    """Whether a header of this name must not be published again: the broker's book-keeping, and extra routing."""
    return names.is_brokers(name) or name in names.ROUTING_HEADERS


def jsonable(value: Any, levels: int = 200) -> Any:  # noqa: PLR0911 - one return a type
    """A header value as JSON has it: dates as ISO 8601, decimals as text, bytes as ``{"base64": …}``.

    Raises :class:`RecursionError` for what is nested deeper than ``levels``.
    """
    if levels < 0:
        raise RecursionError("nested too deeply")
    if value is None or type(value) in (int, bool):
        return value
    match value:
        case str():
            return printable(value)
        case datetime():
            return value.isoformat()
        case Decimal():
            return str(value)
        case bytes() | bytearray():
            return {"base64": base64.b64encode(value).decode()}
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {printable(str(name)): jsonable(item, levels - 1) for name, item in value.items()}
        case list() | tuple():
            return [jsonable(item, levels - 1) for item in value]
        case _:
            return value


def _plain_properties(properties: Properties) -> dict[str, Any]:
    values = {name: getattr(properties, name) for name in SHOWN_PROPERTIES}
    return {name: jsonable(value) for name, value in values.items() if value is not None}


def _origin(work_queue: str, deaths: Sequence[Death]) -> Death | None:
    """The death that tells the publisher's exchange and key: in the work queue, and not on a way back from a rung.

    Where there is none of the work queue, the oldest of another one; rungs and the dead-letter queue are no origin.
    """
    own = [death for death in deaths if death.queue == work_queue]
    first = [death for death in own if death.exchange != f"{work_queue}.return"]
    others = [death for death in deaths if not death.queue.startswith((f"{work_queue}.retry.", f"{work_queue}.dlq"))]
    return next((found[-1] for found in (first, own, others) if found), None)


def _bare_reason(queue: str, deaths: Sequence[Death]) -> str:
    death = next((death for death in deaths if death.queue == queue), None)
    return names.BROKER_REASONS.get(death.reason, printable(death.reason)) if death else "unknown"


def _bare_attempts(queue: str, deaths: Sequence[Death], headers: Headers) -> int:
    """The handler ran once before each wait in a rung, and once more where the last death is a rejection.

    Before a wait to which a publish led it had failed as often as a header tells.
    """
    waits = sum(
        death.count for death in deaths if death.reason == "expired" and death.queue.startswith(f"{queue}.retry.")
    )
    death = next((death for death in deaths if death.queue == queue), None)
    last = 1 if death and death.reason == "rejected" else 0
    nacked = rejections(deaths, queue)
    told = headers.number(names.FAILURES)
    if told is not None and told >= 0 and nacked < waits + last:
        return told + nacked
    return waits + last


def _read_failure(headers: Headers) -> Failure | None:
    kind = headers.text(names.ERROR_TYPE)
    if kind is None:
        return None
    return Failure(
        kind,
        headers.text(names.ERROR_MESSAGE) or "",
        headers.text(names.TRACEBACK),
        headers.text(names.FINGERPRINT) or "",
    )


def _read_history(text: str | None) -> tuple[AttemptRecord, ...]:
    try:
        values = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return ()
    if not isinstance(values, list):
        return ()
    return tuple(record for value in values if (record := AttemptRecord.from_json(value)))


def read_original(text: str | None) -> dict[str, Any]:
    """What the header ``dlq-original`` says was moved; nothing where it cannot be read."""
    try:
        value = jsonable(json.loads(text or "{}"), levels=100)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_time(text: object) -> datetime | None:
    """The time as UTC; None where it is none, or so far away that arithmetic with it would fail."""
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    if moment is None or not 1970 <= moment.year < 9999:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _time(deaths: Sequence[Death], pick: Any) -> datetime | None:
    times = [death.time for death in deaths if death.time is not None]
    return pick(times) if times else None


def _first_text(*texts: object) -> str:
    return printable(next((text for text in texts if isinstance(text, str)), ""))


def iso(moment: datetime | None) -> str | None:
    """ISO 8601 in UTC to the millisecond."""
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="milliseconds")
