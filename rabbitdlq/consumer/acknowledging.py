"""How long the broker waits for a message to be settled: handlers have to end before it takes the message away."""

from datetime import timedelta

import structlog

from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.errors import RabbitDLQError
from rabbitdlq.management import ManagementApi

__all__ = ["BROKERS_TIMEOUT", "warn_of_timeouts"]

log = structlog.stdlib.get_logger(__name__)

#: after which the broker closes the channel over a delivery that it has not heard of, unless it is set to another
#: (https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout)
BROKERS_TIMEOUT = timedelta(minutes=30)


async def warn_of_timeouts(queue: str, vhost: str, timeouts: Timeouts, management_url: str | None) -> None:
    """Log a warning where a handler may run longer than the broker waits. Never raises.

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
    limit = BROKERS_TIMEOUT
    if told is not None:
        limit, source = timedelta(milliseconds=told), "the queue's argument or policy"
    if timeouts.hard >= limit:
        log.warning(
            "timeout_above_brokers",
            queue=queue,
            hard_timeout_s=timeouts.hard.total_seconds(),
            broker_s=limit.total_seconds(),
            source=source,
            consequence="unless its consumer_timeout is set higher, the broker takes messages away from handlers that "
            "are still at work, and delivers them again",
        )
