"""dramatiq: an actor and its worker in this process, with the prefetch of the others.

Its queues are classic by default; here they are quorum queues, like those of the others, by the method that builds
their arguments. The failing path is its own: ``max_retries=2`` with a backoff of 100 ms, waited for in the worker's
memory and in the delay queue, then its dead-letter queue.
"""

import logging
import time
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from tests.benchmarks.contenders.protocol import Job, Meter, main, payload


class QuorumBroker(RabbitmqBroker):
    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_queue_arguments(queue_name)
        return arguments | {"x-queue-type": "quorum"}


def consume(job: Job, meter: Meter) -> None:
    logging.disable(logging.CRITICAL)
    take = meter.take
    broker, _ = _actor(job, take)
    worker = dramatiq.Worker(broker, worker_threads=job.concurrency, worker_timeout=100)
    worker.queue_prefetch = job.prefetch  # what dramatiq_queue_prefetch in the environment would say
    worker.start()
    meter.wait()
    time.sleep(0.5)
    worker.stop()
    broker.close()


def fill(job: Job, _meter: Meter) -> None:
    broker, actor = _actor(job, lambda _: None)
    for place in range(job.messages):
        actor.send(payload(place))
    broker.close()


def _actor(job: Job, take: Any) -> tuple[RabbitmqBroker, Any]:
    broker = QuorumBroker(url=job.url)
    dramatiq.set_broker(broker)

    @dramatiq.actor(queue_name=job.queue, max_retries=2, min_backoff=100, max_backoff=100)
    def handle(message: Any) -> None:
        take(message)

    return broker, handle


if __name__ == "__main__":
    main({"consume": consume, "fill": fill})
