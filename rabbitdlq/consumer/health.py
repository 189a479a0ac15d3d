"""How a consumer is: what an on-call engineer asks first, and what a probe may act on. Decided without any I/O."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from rabbitdlq.consumer.breaker import BreakerState
from rabbitdlq.dead_letter import iso

__all__ = ["Check", "Health", "Phase", "Status", "Vitals", "health_of", "worst"]

Status = Literal["ok", "degraded", "down"]
Phase = Literal["starting", "consuming", "lost", "stopping", "ended"]

_RANKS: tuple[Status, ...] = ("ok", "degraded", "down")
_PHASES: dict[Phase, str] = {
    "starting": "not consuming yet",
    "consuming": "consuming",
    "lost": "not consuming, trying to come back",
    "stopping": "stopping: no more messages are taken",
    "ended": "ended",
}
#: an event loop that stood still for so long will not come back by itself: the broker gave the connection up before
LIVE_AFTER = timedelta(seconds=30)
#: a park that failed is told of for so long
TOLD_FOR = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Vitals:
    """What is known of a consumer at one moment."""

    phase: Phase
    phase_since: datetime
    #: why the last session ended
    reason: str = ""
    #: everything is done, and it was to do no more
    drained: bool = False
    #: since when journal events are not written, and why
    journal_failing: tuple[datetime, str] | None = None
    journal_lost: int = 0
    #: since when an alarm of the broker keeps messages from being parked, and its words
    parking_blocked: tuple[datetime, str] | None = None
    #: how often one began to
    blockings: int = 0
    #: messages that wait unacknowledged until a rung of the ladder can be reached
    kept: int = 0
    #: nothing begins, because one message has to run alone
    held_up: bool = False
    parks_failed: int = 0
    last_park_failed_at: datetime | None = None
    breaker: BreakerState | None = None
    #: since the event loop was last seen alive, and from when on that is too long
    silence: timedelta = timedelta()
    silence_limit: timedelta = timedelta(seconds=3)
    #: handlers at work that have run into their soft timeout
    overdue: int = 0
    #: handlers that do not end although nobody waits for them any longer
    abandoned: int = 0
    in_flight: int = 0
    waiting: int = 0
    last_settled_at: datetime | None = None
    reconnects: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that may be well or not."""

    name: str
    status: Status
    text: str
    #: None where it has always been so, or nobody knows
    since: datetime | None = None

    def as_json(self) -> dict[str, Any]:
        """For the status server."""
        return {"name": self.name, "status": self.status, "text": self.text, "since": iso(self.since)}


@dataclass(frozen=True, slots=True)
class Health:
    """How one consumer is: ``ok``, ``degraded`` (it works, and somebody should look) or ``down`` (it takes nothing)."""

    queue: str
    worker: str
    status: Status
    #: False where only a new process can help
    live: bool
    checks: tuple[Check, ...]
    in_flight: int
    waiting: int
    last_settled_at: datetime | None

    def check(self, name: str) -> Check:
        """The check of that name; raises :class:`KeyError` where there is none."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def as_json(self) -> dict[str, Any]:
        """For the status server; times are ISO 8601, in UTC."""
        return {
            "queue": self.queue,
            "worker": self.worker,
            "status": self.status,
            "live": self.live,
            "in_flight": self.in_flight,
            "waiting": self.waiting,
            "last_settled_at": iso(self.last_settled_at),
            "checks": [check.as_json() for check in self.checks],
        }


def worst(statuses: "list[Status]") -> Status:
    """The worst of them; of none, ``ok``.

    >>> worst(["ok", "down", "degraded"])
    'down'
    """
    return max(statuses, key=_RANKS.index, default="ok")


def health_of(
    vitals: Vitals, *, queue: str, worker: str, now: datetime | None = None, live_after: timedelta = LIVE_AFTER
) -> Health:
    """What the vitals mean. ``live_after``: how long the event loop may stand still before only a restart helps."""
    now = now or datetime.now(UTC)
    checks = (
        _consuming(vitals),
        _event_loop(vitals, now),
        _journal(vitals),
        _parking(vitals, now),
        _breaker(vitals.breaker),
        _handlers(vitals),
    )
    return Health(
        queue,
        worker,
        worst([check.status for check in checks]),
        (vitals.phase != "ended" or vitals.drained) and vitals.silence < live_after,
        checks,
        vitals.in_flight,
        vitals.waiting,
        vitals.last_settled_at,
    )


def _consuming(vitals: Vitals) -> Check:
    if vitals.drained:  # others in its process may be at work, and need no new process because it was quick
        return Check("consuming", "ok", "drained: everything is done", vitals.phase_since)
    why = f": {vitals.reason}" if vitals.reason and vitals.phase in {"starting", "lost", "ended"} else ""
    status: Status = "ok" if vitals.phase == "consuming" else "down"
    return Check("consuming", status, _PHASES[vitals.phase] + why, vitals.phase_since)


def _event_loop(vitals: Vitals, now: datetime) -> Check:
    if vitals.silence < vitals.silence_limit or vitals.phase == "ended":
        return Check("event_loop", "ok", "alive")
    seconds = vitals.silence.total_seconds()
    return Check("event_loop", "down", f"blocked for {seconds:.0f} s by a handler", now - vitals.silence)


def _journal(vitals: Vitals) -> Check:
    lost = f"; {vitals.journal_lost:,} events lost so far" if vitals.journal_lost else ""
    if vitals.journal_failing is None:
        return Check("journal", "ok", f"written{lost}")
    since, why = vitals.journal_failing
    return Check("journal", "degraded", f"not written: {why}{lost}", since)


def _parking(vitals: Vitals, now: datetime) -> Check:
    failed = f"{vitals.parks_failed:,} messages left to the broker so far"
    kept = f"{vitals.kept:,} messages wait for a rung that cannot be reached"
    if vitals.parking_blocked is not None:
        since, why = vitals.parking_blocked
        text = f"blocked by the broker: {why}; the broker parks messages bare"
        text += (f", {failed}" if vitals.parks_failed else "") + (f"; {kept}" if vitals.kept else "")
        return Check("parking", "degraded", text, since)
    if vitals.kept:
        return Check("parking", "degraded", kept)
    at = vitals.last_park_failed_at
    if at is not None and now - at < TOLD_FOR:
        return Check("parking", "degraded", f"failed: {failed}", at)
    return Check("parking", "ok", failed if vitals.parks_failed else "possible")


def _breaker(breaker: BreakerState | None) -> Check:
    if breaker is None:
        return Check("breaker", "ok", "none")
    if breaker.position == "closed":
        return Check("breaker", "ok", "closed", breaker.since)
    probe = "" if breaker.next_probe_at is None else f", tries again at {iso(breaker.next_probe_at)}"
    return Check("breaker", "degraded", f"{breaker.position}: too many handlers failed{probe}", breaker.since)


def _handlers(vitals: Vitals) -> Check:
    words = []
    if vitals.overdue:
        words.append(f"{vitals.overdue:,} beyond their soft timeout")
    if vitals.abandoned:
        words.append(f"{vitals.abandoned:,} abandoned and still at work")
    if vitals.held_up:
        words.append("nothing begins until one that crashes brought back again and again has run alone")
    return Check("handlers", "degraded" if words else "ok", ", ".join(words) or f"{vitals.in_flight:,} at work")
