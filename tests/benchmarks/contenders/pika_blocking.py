"""pika's BlockingConnection: ``start_consuming`` with a callback, an ack for each message."""

import json
from typing import Any

import pika

from tests.benchmarks.contenders.protocol import Job, Meter, main


def consume(job: Job, meter: Meter) -> None:
    take = meter.take
    connection = pika.BlockingConnection(pika.URLParameters(job.url))
    channel = connection.channel()

    def on_message(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        take(json.loads(body))
        channel.basic_ack(method.delivery_tag)
        if meter.ended:
            channel.stop_consuming()

    channel.basic_qos(prefetch_count=job.prefetch)
    channel.basic_consume(job.queue, on_message)
    channel.start_consuming()
    connection.sleep(0.3)  # a broker that sees the channel close may not have the last acks applied
    connection.close()


if __name__ == "__main__":
    main({"consume": consume})
