"""aio-pika as its documentation has it: a callback with ``message.process()``; publishes gathered by 500.

The failing path is the bare ladder: ``nack(requeue=False)`` three times, and the broker's routes do the rest; the last
one parks, nothing is republished. No history, no reason: what a program can have on this topology without rabbitdlq.
"""

import asyncio
import json

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

from tests.benchmarks.contenders.protocol import HandlerFailed, Job, Meter, main, payload


async def consume(job: Job, meter: Meter) -> None:
    take = meter.take

    async def on_message(message: AbstractIncomingMessage) -> None:
        async with message.process():
            take(json.loads(message.body))

    async def on_failing_message(message: AbstractIncomingMessage) -> None:
        try:
            take(json.loads(message.body))
        except HandlerFailed:
            await message.nack(requeue=False)
        else:
            await message.ack()

    connection = await aio_pika.connect_robust(job.url)
    async with connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=job.prefetch)
        queue = await channel.get_queue(job.queue)
        tag = await queue.consume(on_failing_message if job.scenario == "failing" else on_message)
        await meter.until_end()
        await queue.cancel(tag)
        await asyncio.sleep(0.2)  # the last acks are on their way


async def publish(job: Job, meter: Meter) -> None:
    connection = await aio_pika.connect_robust(job.url)
    async with connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)

        async def send(place: int) -> None:
            await channel.default_exchange.publish(
                aio_pika.Message(
                    json.dumps(payload(place)).encode(),
                    content_type="application/json",
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                ),
                routing_key=job.queue,
                mandatory=True,
            )

        meter.begin()
        for start in range(0, job.messages, 500):
            await asyncio.gather(*(send(place) for place in range(start, min(start + 500, job.messages))))
        meter.end()


if __name__ == "__main__":
    main({"consume": consume, "publish": publish})
