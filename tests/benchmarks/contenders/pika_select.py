"""pika's asynchronous adapter, SelectConnection: one thread, callbacks, an ack for each message."""

import json
from typing import Any

import pika

from tests.benchmarks.contenders.protocol import Job, Meter, main, payload

#: publishes that wait for their confirm at once, as many as the others have
WINDOW = 500


def consume(job: Job, meter: Meter) -> None:
    take = meter.take

    def on_message(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        take(json.loads(body))
        channel.basic_ack(method.delivery_tag)
        if meter.ended:  # a moment later: a broker that sees the channel close may not have the last acks applied
            channel.connection.ioloop.call_later(0.3, channel.connection.close)

    def on_channel(channel: Any) -> None:
        channel.basic_qos(prefetch_count=job.prefetch)
        channel.basic_consume(job.queue, on_message)

    _loop(job, on_channel)


def publish(job: Job, meter: Meter) -> None:
    properties = pika.BasicProperties(content_type="application/json", delivery_mode=2)
    sent = confirmed = 0

    def more(channel: Any) -> None:
        nonlocal sent
        while sent < job.messages and sent - confirmed < WINDOW:
            channel.basic_publish("", job.queue, json.dumps(payload(sent)).encode(), properties, mandatory=True)
            sent += 1

    def on_channel(channel: Any) -> None:
        def on_confirm(frame: Any) -> None:
            nonlocal confirmed
            if frame.method.NAME != "Basic.Ack":
                raise RuntimeError(f"not taken: {frame.method}")
            confirmed = frame.method.delivery_tag if frame.method.multiple else confirmed + 1
            if confirmed == job.messages:
                meter.end()
                channel.connection.close()
            elif sent - confirmed < WINDOW // 2:
                more(channel)

        def begin(_frame: Any) -> None:
            meter.begin()
            more(channel)

        channel.add_on_return_callback(lambda *returned: _refuse(returned))
        channel.confirm_delivery(on_confirm, begin)

    _loop(job, on_channel)


def _refuse(returned: Any) -> None:
    raise RuntimeError(f"returned: {returned[1]}")


def _loop(job: Job, on_channel: Any) -> None:
    connection = pika.SelectConnection(
        pika.URLParameters(job.url),
        on_open_callback=lambda opened: opened.channel(on_open_callback=on_channel),
        on_close_callback=lambda closed, _reason: closed.ioloop.stop(),
    )
    connection.ioloop.start()


if __name__ == "__main__":
    main({"consume": consume, "publish": publish})
