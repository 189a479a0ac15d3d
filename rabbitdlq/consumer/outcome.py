"""What becomes of a delivery: the decision, without any I/O."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_never

from rabbitdlq import names
from rabbitdlq.consumer.attempt import Completed, Failed, Interrupted, Result
from rabbitdlq.consumer.payload import InvalidPayload
from rabbitdlq.errors import Drop, Permanent
from rabbitdlq.failure import Failure
from rabbitdlq.message import Message, Undecodable
from rabbitdlq.topology import Rung, Topology

__all__ = ["Dropped", "Outcome", "Park", "Released", "Retry", "Succeeded", "decide", "unreadable"]


@dataclass(frozen=True, slots=True)
class Succeeded:
    """Acknowledge."""

    duration_ms: float
    name = "succeeded"


@dataclass(frozen=True, slots=True)
class Retry:
    """Onto the ladder: the broker brings it back after the rung's delay."""

    failure: Failure
    at: datetime
    rung: Rung
    duration_ms: float
    name = "retry"


@dataclass(frozen=True, slots=True)
class Park:
    """Into the dead-letter queue."""

    failure: Failure
    at: datetime
    reason: str
    duration_ms: float
    name = "parked"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Acknowledge, and say in the journal why: the handler said that nobody needs it."""

    failure: Failure
    duration_ms: float
    name = "dropped"


@dataclass(frozen=True, slots=True)
class Released:
    """Back into the work queue, with no attempt spent."""

    duration_ms: float
    name = "released"


Outcome = Succeeded | Retry | Park | Dropped | Released


def decide(topology: Topology, message: Message, result: Result) -> Outcome:
    """The outcome of one run of the handler."""
    match result:
        case Completed(duration_ms):
            return Succeeded(duration_ms)
        case Interrupted(duration_ms):
            return Released(duration_ms)
        case Failed(failure, rule, at, duration_ms, timed_out):
            if rule.kind is Drop:
                return Dropped(failure, duration_ms)
            if rule.kind is Permanent:
                return Park(failure, at, names.PERMANENT, duration_ms)
            if message.attempt >= min(topology.max_attempts, rule.max_attempts or topology.max_attempts):
                return Park(failure, at, names.TIMEOUT if timed_out else names.EXHAUSTED, duration_ms)
            return Retry(failure, at, topology.rungs[message.attempt - 1], duration_ms)
        case _:
            assert_never(result)


def unreadable(error: Undecodable | InvalidPayload) -> Park:
    """A body that is not what it says, or not what the handler takes, will not be so the next time either."""
    reason = names.INVALID if isinstance(error, InvalidPayload) else names.UNDECODABLE
    return Park(Failure.of(error), datetime.now(UTC), reason, 0.0)
