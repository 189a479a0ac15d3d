"""rabbitdlq through its public face, logging as its command line does."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

from rabbitdlq import AttemptRecord, Consumer, DLQManager, Message, Producer, Topology
from rabbitdlq.broker import Outgoing, PublishLink, new_id
from rabbitdlq.broker.stream import PublishStream
from rabbitdlq.deaths import Arrival
from rabbitdlq.failure import Failure
from rabbitdlq.logs import configure_logs
from rabbitdlq.message import message_of
from rabbitdlq.parking import Parking, new_park_id, park_properties
from rabbitdlq.wire import Properties
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


async def replay(job: Job, meter: Meter) -> None:
    """A whole run of the operator's tool, planning and journal included; or as many messages published."""
    topology = Topology(job.queue, job.delays)
    bodies = [json.dumps(payload(place) | {"more": "x" * 750}).encode() for place in range(job.messages)]
    if job.way == "publish":
        async with Producer(job.url) as producer:
            meter.begin()
            async for report in producer.send_all(job.queue, _each(bodies)):
                if report.error:
                    raise report.error
            meter.end()
        return
    await _fill(topology, job, bodies)
    # as the command line does
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    async with DLQManager(topology, url=job.url) as dlq:
        meter.begin()
        run = await dlq.replay_all()
        meter.end()
    if run.done != job.messages:
        raise RuntimeError(f"{run.done:,} of {job.messages:,} were replayed")


async def _fill(topology: Topology, job: Job, bodies: list[bytes]) -> None:
    """Dead letters as a consumer parks them after three attempts."""
    link = PublishLink(job.url, "rabbitdlq bench")
    frame_max = (await link.publisher()).connection.frame_max
    failure = Failure.of(_failed())
    now = datetime.now(UTC)
    records = [AttemptRecord(attempt, now, failure.type, failure.message, "bench:1", 3.2) for attempt in (1, 2, 3)]

    def letter(body: bytes) -> Outgoing:
        properties = Properties(
            content_type="application/json", delivery_mode=2, message_id=new_id(), timestamp=int(now.timestamp())
        )
        arrival = Arrival(2, 2, "shop", "order.created")
        message = message_of(topology, body, properties, arrival, failures=2)
        parking = Parking("exhausted", failure, records, "bench:1", now, new_park_id(message))
        return Outgoing(topology.dlx, topology.name, body, park_properties(message, parking, frame_max))

    stream = PublishStream(link, 500, timedelta(seconds=30))
    async for report in stream.run(_each(bodies), letter):
        if report.error:
            raise report.error
    await link.close()


def _failed() -> Exception:
    def refuse() -> None:
        raise ConnectionRefusedError("payment service: connection refused")

    try:
        refuse()
    except ConnectionRefusedError as error:
        return error
    raise AssertionError("it was refused")


async def _each(bodies: list[bytes]) -> AsyncIterator[bytes]:
    for body in bodies:
        yield body


if __name__ == "__main__":
    main({"consume": consume, "publish": publish, "replay": replay})
