"""The look at the clock, about once a second: handlers that take too long, signs of life, and when to give up."""

import asyncio
from collections.abc import Callable

import structlog

from rabbitdlq.consumer.breaker import BreakerState
from rabbitdlq.consumer.company import Company
from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.consumer.processor import Processor
from rabbitdlq.consumer.pulse import Pulse
from rabbitdlq.consumer.signs import Signs
from rabbitdlq.errors import HandlersAbandoned

__all__ = ["Watch"]

log = structlog.stdlib.get_logger(__name__)


class Watch:
    """Looks after one consumer while it runs."""

    def __init__(
        self,
        queue: str,
        processor: Processor,
        signs: Signs,
        timeouts: Timeouts,
        abandoned_limit: int,
        breaker_state: Callable[[], BreakerState | None],
        heartbeat: float,
    ) -> None:
        """``abandoned_limit``: of handlers that did not end when they had to, the process bears so many; ``heartbeat``
        of the connection, in seconds."""
        self._heartbeat = heartbeat
        self._queue = queue
        self._processor = processor
        self._signs = signs
        self._every = timeouts.look_every
        self._abandoned_limit = abandoned_limit
        self._breaker_state = breaker_state
        #: why the process is better started anew
        self.stuck: HandlersAbandoned | None = None

    async def run(self, stop: Callable[[], None]) -> None:
        """Look until cancelled; ``stop`` is called when the process has had enough."""
        pulse = Pulse(self._queue, self._every, self._heartbeat)
        self._processor.join(Company.of_this_loop())
        self._processor.stood_still_at = lambda: pulse.stood_still_at
        pulse.start()
        try:
            while True:
                await asyncio.sleep(self._every)
                pulse.beat()
                try:
                    self._signs.beat(self._breaker_state())
                    self._processor.look_at_the_clock()
                except Exception:  # without the clock no handler has a limit
                    log.exception("clock_failed", queue=self._queue)
                self._count_abandoned(stop)
        finally:
            pulse.stop()

    def _count_abandoned(self, stop: Callable[[], None]) -> None:
        abandoned = self._processor.abandoned
        if abandoned <= self._abandoned_limit or self.stuck is not None:
            return
        self.stuck = HandlersAbandoned(
            f"{self._queue}: {abandoned} handlers went on past their hard timeout and were left to "
            f"themselves, more than the {self._abandoned_limit} that this process bears; start it anew, and "
            'give calls inside the handler timeouts of their own, or use isolation "process", which kills them'
        )
        log.critical("too_many_abandoned", queue=self._queue, count=abandoned, error=str(self.stuck))
        stop()
