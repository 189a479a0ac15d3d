"""How long the broker waits for a message to be settled: handlers have to end before it takes the message away."""

from dataclasses import dataclass
from datetime import timedelta

import structlog

from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.errors import RabbitDLQError
from rabbitdlq.management import ManagementApi

__all__ = ["BROKERS_TIMEOUT", "Held", "warn_of_timeouts"]

log = structlog.stdlib.get_logger(__name__)

#: after which the broker closes the channel over a delivery that it has not heard of, unless it is set to another
#: (https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout)
BROKERS_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Held:
    """How long a delivery may be held: the broker counts from the delivery, and the handler may begin later."""

    timeouts: Timeouts
    prefetch: int
    concurrency: int
    #: handlers end at the soft timeout; plain functions, which cannot be cancelled, only at the hard one
    cancellable: bool

    @property
    def longest(self) -> float:
        """Seconds, if all those before it take their time, and it, too."""
        rounds_before = -(-self.prefetch // self.concurrency) - 1
        each = self.timeouts.soft if self.cancellable else self.timeouts.hard
        return rounds_before * each.total_seconds() + self.timeouts.hard.total_seconds()


async def warn_of_timeouts(queue: str, vhost: str, held: Held, management_url: str | None) -> None:
    """Log a warning where a message may be held longer than the broker waits. Never raises.

    The queue's own limit, by argument or policy (from RabbitMQ 3.12 on), only the management API tells; the node's
    setting nobody tells, so that its default is taken.
    """
    told, source = None, "RabbitMQ's default"
    if management_url is not None:
        try:
            async with ManagementApi(management_url) as api:
                state = await api.queue(vhost, queue)
            told = None if state is None else state.limit("consumer-timeout")
        except RabbitDLQError as error:
            log.info("brokers_timeout_unknown", queue=queue, error=str(error))
    limit = BROKERS_TIMEOUT.total_seconds()
    if told is not None:
        limit, source = told / 1000, "the queue's argument or policy"
    hard = held.timeouts.hard.total_seconds()
    if hard >= limit or held.longest > limit:
        log.warning(
            "timeout_above_brokers",
            queue=queue,
            prefetch=held.prefetch,
            concurrency=held.concurrency,
            soft_timeout_s=held.timeouts.soft.total_seconds(),
            hard_timeout_s=hard,
            held_s=held.longest,
            broker_s=limit,
            source=source,
            consequence="the broker counts from the delivery, also while a prefetched message waits for a handler: it "
            "takes messages away from handlers that are still at work, and delivers them again; give a smaller "
            "prefetch, shorter timeouts, or the queue a higher consumer-timeout",
        )
