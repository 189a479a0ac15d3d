"""Pausing a consumer while what its handlers need is out of order: the breaker's verdicts, put into practice."""

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta

import structlog

from rabbitdlq import names
from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.attempt import Completed, Failed, Result
from rabbitdlq.consumer.breaker import Breaker, Circuit
from rabbitdlq.consumer.gate import Gate
from rabbitdlq.consumer.outcome import Outcome, Park, Postponed, Retry
from rabbitdlq.consumer.session import Session
from rabbitdlq.consumer.workers import Workers
from rabbitdlq.errors import BrokerError, External, Transient
from rabbitdlq.failure import Failure
from rabbitdlq.message import Message
from rabbitdlq.texts import shorten
from rabbitdlq.topology import Rung

__all__ = ["Pausing"]

log = structlog.stdlib.get_logger(__name__)

#: what was prefetched and not begun is kept for so long, and is what the probes take first: given back, it would go
#: from one paused consumer to the next, and below 4.3 each return adds to the count that has a limit; kept for more
#: than the broker's 30 minutes, it would be taken away together with the channel
KEPT_FOR = timedelta(minutes=10)
WHY = "breaker"


class Pausing:
    """Stops consuming when the breaker opens, lets probes through, and goes on when one comes back."""

    def __init__(self, queue: str, options: Breaker, prefetch: int, give_back: Callable[[], None]) -> None:
        """``give_back`` releases what nobody has begun."""
        self.circuit = Circuit(options)
        self._queue = queue
        self._unknown = options.unknown
        self._prefetch = prefetch
        self._give_back = give_back
        self._changed = asyncio.Event()
        self._kept = False
        self._workers: Workers
        self._gate: Gate

    def govern(self, workers: Workers, gate: Gate) -> None:
        """These are let in, or not."""
        self._workers, self._gate = workers, gate
        gate.on_probe_gone = self._wake

    @property
    def prefetch(self) -> int:
        """What a new session is to begin with: nothing while it is paused."""
        return self._prefetch if self.circuit.position == "closed" else 0

    def judge(self, delivery: Delivery, message: Message, result: Result, outcome: Outcome) -> Outcome:
        """The outcome, which spends no attempt where an outage was the cause."""
        match result:
            case Completed():
                failed = False
            case Failed():
                failed = self._counts(result)
            case _:
                return outcome
        closed = self.circuit.position == "closed"
        change = self.circuit.ended(delivery, message.id, failed)
        match change:
            case "opened":
                self._pause(result)
            case "probe failed":
                self._tell("breaker_probe_failed", result)
            case "closed":
                self._resume()
        if change is not None:
            self._wake()
        if isinstance(result, Failed) and failed and (not closed or (change == "opened" and isinstance(outcome, Park))):
            return Postponed(WHY, result.duration_ms, result.failure, _asked(outcome))
        return outcome

    def _counts(self, failed: Failed) -> bool:
        if failed.rule.kind not in (Transient, External):
            return False  # also one that raised while it cleaned up after its timeout
        return failed.reason == names.TIMEOUT or self._unknown or failed.rule.known

    def _pause(self, result: Result) -> None:
        self._kept = True
        self._workers.gate = self._gate
        self._gate.begun()
        self._tell("breaker_opened", result)

    def _resume(self) -> None:
        if self._gate.always_open:
            self._workers.gate = None
        self._workers.nudge()
        log.warning(
            "breaker_closed",
            queue=self._queue,
            open_for_s=round(self.circuit.open_for, 1),
            failed_probes=self.circuit.failed_probes,
        )

    def _tell(self, event: str, result: Result) -> None:
        failure: Failure | None = result.failure if isinstance(result, Failed) else None
        state = self.circuit.state
        log.warning(
            event,
            queue=self._queue,
            attempts=state.attempts,
            failures=state.failures,
            pause_s=round(self.circuit.next_probe_in, 1),
            error_type=None if failure is None else failure.type,
            error=None if failure is None else shorten(failure.message, 300),
        )

    def _wake(self) -> None:
        self._changed.set()
        self._workers.nudge()

    async def follow(self, session: Session) -> None:
        """Keep the session as the breaker says; ends with it."""
        try:
            while True:
                self._changed.clear()
                match self.circuit.position:
                    case "closed":
                        await session.take(self._prefetch)
                    case "open":
                        await session.stop_taking()
                        await self._until_probe()
                        continue
                    case "half-open":
                        self._workers.nudge()
                        if not self._workers.waiting:
                            await session.take(1)
                await self._changed.wait()
        except BrokerError as error:
            session.end(f"the breaker cannot go on: {error}")

    async def _until_probe(self) -> None:
        while (left := self.circuit.next_probe_in) and self.circuit.position == "open":
            kept = KEPT_FOR.total_seconds() - self.circuit.open_for
            if self._kept and kept <= 0:
                self._kept = False
                self._give_back()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, kept) if self._kept else left):
                    await self._changed.wait()
                    return
        self.circuit.probe()
        log.info("breaker_probing", queue=self._queue, open_for_s=round(self.circuit.open_for, 1))


def _asked(outcome: Outcome) -> Rung | None:
    """Where it waits as long as the handler asked for; None where that said nothing."""
    if isinstance(outcome, Retry):
        return None if outcome.asked is None else outcome.rung
    return outcome.rung if isinstance(outcome, Park) else None
