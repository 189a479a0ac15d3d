"""The signs of life of a consumer, as they are gathered; whoever asks, from whichever thread, is told by them."""

import time
from dataclasses import astuple
from datetime import UTC, datetime, timedelta

from rabbitdlq.broker import Blocked, PublishLink
from rabbitdlq.consumer.breaker import BreakerState
from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.consumer.health import Phase, Vitals
from rabbitdlq.consumer.processor import Processor
from rabbitdlq.consumer.pulse import BLOCKED_SECONDS
from rabbitdlq.consumer.suspects import Suspects
from rabbitdlq.consumer.workers import Workers
from rabbitdlq.journal import JournalWriter

__all__ = ["Signs"]


class Signs:
    """What :class:`Vitals` are read from. Nothing here is done for a message: it looks, about once a second."""

    def __init__(
        self,
        processor: Processor,
        workers: Workers,
        suspects: Suspects,
        writer: JournalWriter,
        parking: PublishLink,
        journaling: PublishLink,
        timeouts: Timeouts,
    ) -> None:
        self.writer = writer
        self.counts = processor.counts
        #: sessions that were opened after the first
        self.reconnects = 0
        #: everything is done, and the consumer was to do no more
        self.drained = False
        self._processor = processor
        self._workers = workers
        self._suspects = suspects
        self._parking = parking
        self._journaling = journaling
        self._timeouts = timeouts
        self._phase: Phase = "starting"
        self._since = datetime.now(UTC)
        self._reason = ""
        self._opened = 0
        self._beat: float | None = None
        self._breaker: BreakerState | None = None
        self._settled = self._left = 0
        self._last_settled_at: datetime | None = None
        self._last_left_at: datetime | None = None

    def enter(self, phase: Phase, reason: str = "") -> None:
        """The consumer is in this phase from now on; a reason that is not new changes nothing of since when."""
        if phase == "consuming":
            self._opened += 1
            self.reconnects = self._opened - 1
        if phase != self._phase:
            self._phase, self._since = phase, datetime.now(UTC)
        self._reason = reason

    def stop(self) -> None:
        """The consumer is to end, if it has not done so."""
        if self._phase != "ended":
            self.enter("stopping")

    def beat(self, breaker: BreakerState | None) -> None:
        """The event loop is alive, and so stands the breaker; called from it, again and again."""
        self._beat = time.monotonic()
        self._breaker = breaker  # whose state must not be asked for from another thread
        self._look()

    def _look(self) -> None:
        summary, now = self._processor.summary, datetime.now(UTC)
        settled = sum(astuple(summary)) - summary.too_late
        if settled != self._settled:
            self._settled, self._last_settled_at = settled, now
        if summary.left_to_broker != self._left:
            self._left, self._last_left_at = summary.left_to_broker, now

    def vitals(self) -> Vitals:
        """What is known now, for any thread; ``last_settled_at`` and ``breaker`` are up to a second old."""
        silence = 0.0 if self._beat is None or self._phase == "ended" else time.monotonic() - self._beat
        soft = self._timeouts.soft.total_seconds()
        return Vitals(
            phase=self._phase,
            phase_since=self._since,
            reason=self._reason,
            drained=self.drained,
            journal_failing=self.writer.failing,
            journal_lost=self.writer.lost,
            parking_blocked=_told(self._parking.blocked or self._journaling.blocked),
            blockings=self._parking.blockings,
            kept=self._processor.kept,
            held_up=self._processor.held_up,
            parks_failed=self._processor.summary.left_to_broker,
            last_park_failed_at=self._last_left_at,
            breaker=self._breaker,
            silence=timedelta(seconds=silence),
            silence_limit=timedelta(seconds=self._timeouts.look_every + BLOCKED_SECONDS),
            overdue=self._processor.running_for(soft),
            abandoned=self._processor.abandoned,
            in_flight=self._workers.busy,
            waiting=self._workers.waiting + self._suspects.held,
            last_settled_at=self._last_settled_at,
            reconnects=self.reconnects,
        )


def _told(blocked: Blocked | None) -> tuple[datetime, str] | None:
    return None if blocked is None else (blocked.since, blocked.reason)
