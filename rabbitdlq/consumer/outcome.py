"""What becomes of a delivery: the decision, without any I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import assert_never

from rabbitdlq import names
from rabbitdlq.consumer.attempt import Completed, Failed, Interrupted, Result
from rabbitdlq.consumer.payload import InvalidPayload
from rabbitdlq.errors import Drop, Permanent
from rabbitdlq.failure import Failure
from rabbitdlq.message import Message, Undecodable
from rabbitdlq.topology import Rung, Topology

__all__ = [
    "Dropped",
    "Outcome",
    "Park",
    "Postponed",
    "Released",
    "Retry",
    "Skipped",
    "Succeeded",
    "decide",
    "unreadable",
]


#: why a message is postponed whose handler could not be begun
NOT_BEGUN = "the handler could not be begun"


@dataclass(frozen=True, slots=True)
class Succeeded:
    """Acknowledge."""

    duration_ms: float
    name = "succeeded"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Acknowledge: its work was done before, and the handler did not run."""

    duration_ms: float
    name = "skipped"


@dataclass(frozen=True, slots=True)
class Retry:
    """Onto the ladder: the broker brings it back after the rung's delay."""

    failure: Failure
    at: datetime
    rung: Rung
    duration_ms: float
    #: the handler said how long to wait: it need not be the rung that comes next
    asked: timedelta | None = None
    name = "retry"


@dataclass(frozen=True, slots=True)
class Park:
    """Into the dead-letter queue."""

    failure: Failure
    at: datetime
    reason: str
    duration_ms: float
    #: attempts that failures of its class have, where those are fewer than the ladder's
    max_attempts: int | None = None
    #: where it has the wait that the handler asked for, if it is postponed after all
    rung: Rung | None = field(default=None, compare=False)
    name = "parked"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Acknowledge, and say in the journal why: the handler said that nobody needs it."""

    failure: Failure
    duration_ms: float
    name = "dropped"


@dataclass(frozen=True, slots=True)
class Postponed:
    """Into a rung, with no attempt spent: it could not be done now, and that is not its fault."""

    why: str
    duration_ms: float
    #: what the handler met, if it ran
    failure: Failure | None = None
    #: the one that waits as long as the handler asked for; the first one where it said nothing
    rung: Rung | None = None
    name = "postponed"


@dataclass(frozen=True, slots=True)
class Released:
    """Back into the work queue, with no attempt spent."""

    duration_ms: float
    name = "released"


Outcome = Succeeded | Skipped | Retry | Park | Dropped | Postponed | Released


def decide(topology: Topology, message: Message, result: Result) -> Outcome:
    """The outcome of one run of the handler."""
    match result:
        case Completed(duration_ms):
            return Succeeded(duration_ms)
        case Interrupted(duration_ms):
            return Released(duration_ms)
        case Failed():
            return _failed(topology, message, result)
        case _:
            assert_never(result)


def _failed(topology: Topology, message: Message, failed: Failed) -> Outcome:
    failure, rule, at, duration_ms = failed.failure, failed.rule, failed.at, failed.duration_ms
    if not failed.begun:
        return Postponed(NOT_BEGUN, duration_ms, failure)
    if rule.kind is Drop:
        return Dropped(failure, duration_ms)
    if rule.kind is Permanent:
        return Park(failure, at, names.PERMANENT, duration_ms)
    fewer = rule.max_attempts if (rule.max_attempts or topology.max_attempts) < topology.max_attempts else None
    asked = failed.retry_after
    # at its last attempt there is none ahead: postponed, it may wait in any
    slow = None if asked is None else _slow_enough(topology.rungs[message.attempt - 1 :] or topology.rungs, asked)
    if message.attempt >= (fewer or topology.max_attempts):
        return Park(failure, at, failed.reason or names.EXHAUSTED, duration_ms, fewer, slow)
    return Retry(failure, at, slow or topology.rungs[message.attempt - 1], duration_ms, asked)


def _slow_enough(ahead: Sequence[Rung], delay: timedelta) -> Rung:
    """The first rung that waits so long; the slowest where none does."""
    return next((rung for rung in ahead if rung.delay >= delay), max(ahead, key=lambda rung: rung.delay))


def unreadable(error: Undecodable | InvalidPayload) -> Park:
    """A body that is not what it says, or not what the handler takes, will not be so the next time either."""
    reason = names.INVALID if isinstance(error, InvalidPayload) else names.UNDECODABLE
    return Park(Failure.of(error), datetime.now(UTC), reason, 0.0)
