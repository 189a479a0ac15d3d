"""rabbitdlq through its public face, logging as its command line does."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from rabbitdlq import Consumer, Message, Producer, Topology
from rabbitdlq.logs import configure_logs
from tests.benchmarks.contenders.protocol import Job, Meter, main, payload


async def consume(job: Job, meter: Meter) -> None:
    configure_logs("json", "info")
    take = meter.take

    async def handle(message: Message) -> None:
        take(message.payload)

    consumer = Consumer(
        Topology(job.queue, job.delays), handle, url=job.url, concurrency=job.concurrency, prefetch=job.prefetch
    )
    loop = asyncio.get_running_loop()
    meter.on_end(lambda: loop.call_soon_threadsafe(consumer.stop))
    await consumer.run()


async def publish(job: Job, meter: Meter) -> None:
    async with Producer(job.url) as producer:
        meter.begin()
        if job.way == "send_all":
            async for report in producer.send_all(job.queue, _payloads(job.messages)):
                if report.error:
                    raise report.error
        else:
            for start in range(0, job.messages, 500):
                places = range(start, min(start + 500, job.messages))
                await asyncio.gather(*(producer.send(job.queue, payload(place)) for place in places))
        meter.end()


async def _payloads(count: int) -> AsyncIterator[Any]:
    for place in range(count):
        yield payload(place)


if __name__ == "__main__":
    main({"consume": consume, "publish": publish})
