"""FastStream on RabbitMQ: a subscriber on a queue that exists, its prefetch set on the channel.

Its fastest documented setting: no type coercion (``apply_types=False``) and no log (``logger=None``). The failing path
is FastStream's ``AckPolicy.REJECT_ON_ERROR`` on the same ladder: it rejects, the broker waits, brings back, and parks.
"""

import asyncio
from typing import Any

from faststream import AckPolicy
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

from tests.benchmarks.contenders.protocol import Job, Meter, main, payload


async def consume(job: Job, meter: Meter) -> None:
    take = meter.take
    broker = RabbitBroker(job.url, default_channel=Channel(prefetch_count=job.prefetch), apply_types=False, logger=None)

    @broker.subscriber(RabbitQueue(job.queue, declare=False), ack_policy=AckPolicy.REJECT_ON_ERROR)
    async def handle(message: Any) -> None:
        take(message)

    await broker.start()
    await meter.until_end()
    await asyncio.sleep(0.2)
    await broker.stop()


async def publish(job: Job, meter: Meter) -> None:
    channel = Channel(publisher_confirms=True, on_return_raises=True)
    async with RabbitBroker(job.url, default_channel=channel, apply_types=False, logger=None) as broker:

        async def send(place: int) -> None:
            await broker.publish(payload(place), queue=job.queue, persist=True, mandatory=True)

        meter.begin()
        for start in range(0, job.messages, 500):
            await asyncio.gather(*(send(place) for place in range(start, min(start + 500, job.messages))))
        meter.end()


if __name__ == "__main__":
    main({"consume": consume, "publish": publish})
