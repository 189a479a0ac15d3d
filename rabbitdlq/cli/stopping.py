"""What is told when a consumer is asked to stop: who presses Ctrl-C wants to know what is being waited for."""

from collections.abc import Sequence
from datetime import timedelta

import structlog

from rabbitdlq.consumer import Consumer, ConsumerSummary
from rabbitdlq.consumer.supervised import Supervisable

__all__ = ["StopAnnounced"]

log = structlog.stdlib.get_logger(__name__)


class StopAnnounced:
    """A consumer or a group of them, as it is; but the first :meth:`stop` logs which handlers are waited for."""

    def __init__(
        self, running: Supervisable, consumers: Sequence[Consumer], grace: timedelta, *, supervised: bool
    ) -> None:
        """``consumers`` are those that run in it; ``grace`` is how long they wait for their handlers."""
        self._running = running
        self._consumers = consumers
        self._grace = grace
        self._supervised = supervised
        self._stopping = False

    @property
    def queue(self) -> str:
        """What it consumes."""
        return self._running.queue

    @property
    def worker(self) -> str:
        """Its name."""
        return self._running.worker

    @property
    def summary(self) -> ConsumerSummary:
        """Its numbers so far."""
        return self._running.summary

    async def run(self) -> ConsumerSummary:
        """Run it to its end."""
        return await self._running.run()

    def stop(self) -> None:
        """Ask it to stop, or not to wait any longer."""
        handlers = sum(consumer.health().in_flight for consumer in self._consumers)
        if handlers and not self._stopping:
            log.info(
                "stopping",
                queue=self.queue,
                worker=self.worker,
                handlers=handlers,
                grace_s=self._grace.total_seconds(),
                hint=f"a second signal{' to the supervisor' if self._supervised else ''} ends the grace time",
            )
        self._stopping = True
        self._running.stop()
