"""Several queues in one process: a consumer each, with a common limit and an order among them."""

import asyncio
from collections.abc import Sequence

import structlog

from rabbitdlq.consumer.consumer import Consumer
from rabbitdlq.consumer.slots import Order, Slots
from rabbitdlq.consumer.summary import ConsumerSummary
from rabbitdlq.consumer.supervisor import added_up
from rabbitdlq.errors import ConfigurationError, RabbitDLQError
from rabbitdlq.limits import check_kind

__all__ = ["ConsumerGroup"]

log = structlog.stdlib.get_logger(__name__)


class ConsumerGroup:
    """Runs several consumers, of one queue each, and shares ``slots`` handlers among them.

    Each consumer keeps its own concurrency. Where slots are scarce, the order decides who begins the next message:
    ``strict``, the waiting queue of the highest :attr:`Consumer.priority`; ``weighted``, all of them in the ratio of
    their priorities. In both, for each queue of a higher priority one slot is kept free of those below it: however
    slow their handlers are, they never hold all slots. Among equals the turns go round.

    ::

        critical = Consumer(payments, pay, url=url, concurrency=4, priority=10)
        bulk = Consumer(newsletters, send, url=url, concurrency=8)
        await ConsumerGroup([critical, bulk], slots=8).run()

    A message that was prefetched waits for its slot unacknowledged: a queue that gets none for the broker's 30
    minutes, as below a busy one in the strict order, has its messages delivered again.
    """

    def __init__(self, consumers: Sequence[Consumer], *, slots: int | None = None, priority: Order = "strict") -> None:
        """``slots``: handlers at a time, over all; the sum of the concurrencies unless given, and then nobody ever
        waits for another.

        Raises :class:`ConfigurationError` for what is no list of consumers, no consumers, two of one queue, fewer
        slots than are kept free, and for priorities without slots.
        """
        check_kind("consumers", consumers, Sequence, "a list of Consumers")
        for place, consumer in enumerate(consumers):
            check_kind(f"consumers[{place}]", consumer, Consumer, "a Consumer")
        if not consumers:
            raise ConfigurationError("consumers: there are none")
        names = [consumer.topology.name for consumer in consumers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"consumers: {name!r} has {names.count(name)}; raise its concurrency instead")
        total = sum(consumer.concurrency for consumer in consumers)
        priorities = [consumer.priority for consumer in consumers]
        shares = Slots(total if slots is None else slots, priority, priorities).shares
        if slots is None and (priority != "strict" or set(priorities) != {1}):
            raise ConfigurationError(
                "priority: without slots nobody ever waits for another, and there is nothing to decide; give slots"
            )
        self._consumers = list(consumers)
        if slots is not None and slots < total:
            for consumer, share in zip(consumers, shares, strict=True):
                consumer.take_slots_of(share)

    @property
    def queue(self) -> str:
        """The names of the queues."""
        return ", ".join(consumer.queue for consumer in self._consumers)

    @property
    def worker(self) -> str:
        """The names of the consumers in histories."""
        return ", ".join(consumer.worker for consumer in self._consumers)

    @property
    def consumers(self) -> Sequence[Consumer]:
        """The consumers, in the order given."""
        return tuple(self._consumers)

    @property
    def summary(self) -> ConsumerSummary:
        """How many deliveries of all queues ended how, so far."""
        return added_up(consumer.summary for consumer in self._consumers)

    def stop(self) -> None:
        """Stop all, as :meth:`Consumer.stop` does. A second call ends the grace."""
        for consumer in self._consumers:
            consumer.stop()

    async def run(self) -> ConsumerSummary:
        """Consume until :meth:`stop`, or until each has ended by itself as with ``drain``.

        What one consumer raises, when it starts or later, ends all: the others are stopped, with their grace time, and
        then it is raised.
        """
        running = {asyncio.create_task(consumer.run()): consumer for consumer in self._consumers}
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for task, consumer in running.items():
                if task.done() and (error := task.exception()) is not None:
                    log.error("consumer_failed", queue=consumer.queue, error=_told(error))
                    self.stop()
                    break
            await asyncio.wait(running)
            for task in running:
                task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return self.summary


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, RabbitDLQError) else f"{type(error).__name__}: {error}"
