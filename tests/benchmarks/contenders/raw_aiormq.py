"""aiormq, the layer below aio-pika: publishes that do not wait for the socket, gathered by 500 for their confirms."""

import asyncio
import json
from typing import Any

import aiormq
from pamqp import commands

from tests.benchmarks.contenders.protocol import Job, Meter, main, payload


async def publish(job: Job, meter: Meter) -> None:
    connection = await aiormq.connect(job.url)
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    basic_publish: Any = channel.basic_publish  # its abstract class does not know of ``wait``

    async def send(place: int) -> None:
        await basic_publish(
            json.dumps(payload(place)).encode(),
            routing_key=job.queue,
            properties=commands.Basic.Properties(content_type="application/json", delivery_mode=2),
            mandatory=True,
            wait=False,
        )

    meter.begin()
    for start in range(0, job.messages, 500):
        await asyncio.gather(*(send(place) for place in range(start, min(start + 500, job.messages))))
    meter.end()
    await connection.close()


if __name__ == "__main__":
    main({"publish": publish})
