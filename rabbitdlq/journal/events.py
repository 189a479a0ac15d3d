"""Events of the journal: what failed, was parked, recovered, and what operators did."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from rabbitdlq import names
from rabbitdlq.dead_letter import AttemptRecord
from rabbitdlq.failure import Failure
from rabbitdlq.message import Message
from rabbitdlq.texts import printable, shorten

__all__ = [
    "Entry",
    "JournalEvent",
    "attempt_record",
    "dropped",
    "ended",
    "failed",
    "marker",
    "operated",
    "parked",
    "postponed",
    "recovered",
    "run_event",
    "started",
    "succeeded",
]

#: ids of one operation that its event names; the count says how many there were
MAX_IDS = 500


class JournalEvent(BaseModel):
    """One line of the journal. Fields that an event does not have are absent in its JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    event: str
    at: AwareDatetime
    queue: str
    message_id: str | None = None
    lap: int | None = None
    attempt: int | None = None
    max_attempts: int | None = None
    worker: str | None = None
    error_type: str | None = None
    error_message: str | None = None
    traceback: str | None = None
    fingerprint: str | None = None
    duration_ms: float | None = None
    reason: str | None = None
    park_id: str | None = None
    #: of a replayed message: the park id of the dead letter it was
    replay_id: str | None = None
    #: operator actions: who did it, from where, as which account, on how many and which
    who: str | None = None
    amqp_user: str | None = None
    count: int | None = None
    ids: tuple[str, ...] = ()
    #: of a run: its id, what it does to which letters, and how far it has come
    run: str | None = None
    operation: str | None = None
    selection: str | None = None
    #: exchange and routing key
    target: tuple[str, str] | None = None
    archive: str | None = None
    #: letters by their keys: planned, about to be sent, or (when a batch is settled) not done
    keys: tuple[str, ...] = ()
    batch: int | None = None
    #: how a run ended: done, stopped, aborted or failed
    outcome: str | None = None
    counts: dict[str, int] | None = None
    #: letters of the operation by the fingerprint of their error
    fingerprints: dict[str, int] | None = None
    marker: str | None = None
    #: of a handler's start and end: what the message is, since others may have its id
    digest: str | None = None
    #: of a handler's end: when it had begun
    started_at: AwareDatetime | None = None

    def as_json(self) -> dict[str, Any]:
        """As ``rabbitdlq journal --json`` shows it."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def encode(self) -> bytes:
        """The body of the event's message."""
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def decode_all(cls, body: bytes) -> "Iterator[JournalEvent]":
        """The events of one message, one a line; without what somebody else wrote into the stream."""
        for line in body.split(b"\n"):
            with contextlib.suppress(ValidationError):
                yield cls.model_validate_json(line)

    @property
    def record(self) -> AttemptRecord | None:
        """The failed attempt that this event tells of, if it does."""
        if self.event != names.FAILED or self.attempt is None:
            return None
        return AttemptRecord(
            attempt=self.attempt,
            at=self.at,
            error_type=self.error_type or "",
            error_message=self.error_message or "",
            worker=self.worker or "",
            duration_ms=self.duration_ms,
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """An event of a consumer, ready to be written: our own values need no validation, and there are three a failure."""

    event: str
    at: datetime
    queue: str
    message_id: str
    attempt: int
    body: bytes

    def encode(self) -> bytes:
        """The body of the event's message."""
        return self.body


def attempt_record(message: Message, failure: Failure, worker: str, at: datetime, duration_ms: float) -> AttemptRecord:
    """What the history tells of an attempt that failed just now."""
    return AttemptRecord(
        attempt=message.attempt,
        at=at,
        error_type=shorten(failure.type, 200),
        error_message=shorten(failure.message, 1_000),
        worker=worker,
        duration_ms=round(duration_ms, 3),
    )


def failed(message: Message, record: AttemptRecord, failure: Failure) -> Entry:
    """An attempt failed, whatever happens to the message next."""
    return _of_attempt(
        names.FAILED,
        message,
        record.worker,
        record.at,
        {
            "error_type": record.error_type,
            "error_message": record.error_message,
            "traceback": failure.traceback,
            "fingerprint": failure.fingerprint,
            "duration_ms": record.duration_ms,
        },
    )


def parked(message: Message, reason: str, failure: Failure, worker: str, park_id: str) -> Entry:
    """A consumer parked the message, and the broker confirmed it."""
    return _of_attempt(
        names.PARKED,
        message,
        worker,
        datetime.now(UTC),
        {
            "error_type": shorten(failure.type, 200),
            "fingerprint": failure.fingerprint,
            "reason": reason,
            "park_id": park_id,
        },
    )


def dropped(message: Message, failure: Failure, worker: str, duration_ms: float) -> Entry:
    """A handler said that nobody needs the message; it is gone after this."""
    return _of_attempt(
        names.DROPPED,
        message,
        worker,
        datetime.now(UTC),
        {
            "error_type": shorten(failure.type, 200),
            "reason": shorten(failure.message, 1_000),
            "duration_ms": round(duration_ms, 3),
        },
    )


def postponed(message: Message, failure: Failure, reason: str, worker: str) -> Entry:
    """The handler could not do it now, and that spent no attempt."""
    return _of_attempt(
        names.POSTPONED,
        message,
        worker,
        datetime.now(UTC),
        {
            "error_type": shorten(failure.type, 200),
            "error_message": shorten(failure.message, 1_000),
            "fingerprint": failure.fingerprint,
            "reason": reason,
        },
    )


def started(message: Message, digest: str, worker: str, at: datetime) -> Entry:
    """The handler of a message that a crash had brought back is about to begin."""
    return _of_attempt(names.STARTED, message, worker, at, {"digest": digest})


def ended(message: Message, digest: str, worker: str, started_at: datetime) -> Entry:
    """That handler has ended, however it did: it took no process with it."""
    told = {"digest": digest, "started_at": started_at}
    return _of_attempt(names.ENDED, message, worker, datetime.now(UTC), told)


def recovered(message: Message, worker: str, duration_ms: float) -> Entry:
    """A message succeeded after failures."""
    return _of_attempt(names.RECOVERED, message, worker, datetime.now(UTC), {"duration_ms": round(duration_ms, 3)})


def _of_attempt(event: str, message: Message, worker: str, at: datetime, more: dict[str, Any]) -> Entry:
    """As :class:`JournalEvent` has it: the same names, nothing that is None."""
    values = {
        "event": event,
        "at": at,
        "queue": message.queue,
        "message_id": message.id,
        "lap": message.lap,
        "attempt": message.attempt,
        "max_attempts": message.max_attempts,
        "worker": worker,
        **more,
    }
    if message.lap > 1 and (replay_id := message.properties.table.text(names.REPLAY_ID)) is not None:
        values["replay_id"] = replay_id
    return Entry(event, at, message.queue, message.id, message.attempt, to_json(values, exclude_none=True))


def operated(
    event: str, queue: str, *, who: str, amqp_user: str, ids: Sequence[str], count: int, **run: Any
) -> JournalEvent:
    """An operator replayed, dropped, moved, restored, popped or pushed dead letters; of a ``run`` all that is known."""
    return JournalEvent(
        event=event,
        at=datetime.now(UTC),
        queue=queue,
        who=who,
        amqp_user=amqp_user,
        count=count,
        ids=tuple(printable(each) for each in ids[:MAX_IDS]),
        **run,
    )


def run_event(event: str, queue: str, run: str, **more: Any) -> JournalEvent:
    """How far an operator's run has come."""
    return JournalEvent(event=event, at=datetime.now(UTC), queue=queue, run=run, **more)


def succeeded(message: Message, worker: str, duration_ms: float) -> Entry:
    """A replayed message succeeded at once; of others that is not written."""
    return _of_attempt(names.SUCCEEDED, message, worker, datetime.now(UTC), {"duration_ms": round(duration_ms, 3)})


def marker(queue: str, word: str) -> JournalEvent:
    """A reader's own mark: who has seen it has seen everything before it."""
    return JournalEvent(event=names.MARKER, at=datetime.now(UTC), queue=queue, marker=word)
