"""taskiq on taskiq-aio-pika: its receiver run from code, acks after the task, 200 tasks at a time."""

import asyncio
import logging
from typing import Any

from taskiq.api import run_receiver_task
from taskiq_aio_pika import AioPikaBroker, Exchange, Queue, QueueType

from tests.benchmarks.contenders.protocol import Job, Meter, main, payload


async def consume(job: Job, meter: Meter) -> None:
    logging.disable(logging.CRITICAL)
    broker, _ = _task(job, meter.take)
    broker.is_worker_process = True
    receiving = asyncio.create_task(
        run_receiver_task(broker, max_async_tasks=job.concurrency, max_prefetch=job.prefetch, run_startup=True)
    )
    ended = asyncio.create_task(meter.until_end())
    await asyncio.wait([receiving, ended], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.5)
    if receiving.done():
        receiving.result()
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    await broker.shutdown()


async def fill(job: Job, _meter: Meter) -> None:
    broker, task = _task(job, lambda _: None)
    await broker.startup()
    for start in range(0, job.messages, 500):
        places = range(start, min(start + 500, job.messages))
        await asyncio.gather(*(task.kiq(payload(place)) for place in places))
    await broker.shutdown()


def _task(job: Job, take: Any) -> tuple[Any, Any]:
    broker = AioPikaBroker(
        job.url,
        qos=job.prefetch,
        exchange=Exchange(name=job.queue),
        task_queues=[Queue(name=job.queue, type=QueueType.QUORUM)],
        dead_letter_queue=Queue(name=f"{job.queue}.dead", type=QueueType.QUORUM),
    )

    @broker.task(task_name="handle")
    async def handle(message: Any) -> None:
        take(message)

    return broker, handle


if __name__ == "__main__":
    main({"consume": consume, "fill": fill})
