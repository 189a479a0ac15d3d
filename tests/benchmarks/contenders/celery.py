"""Celery: a task with late acks and no result, its worker without gossip, mingle and heartbeat, on a quorum queue.

``solo`` runs tasks in the worker's process; ``prefork`` in two processes beside it. Both prefetch 200 in all.
"""

import multiprocessing
import threading
import time
from typing import Any

import celery
import kombu
from celery.worker import state
from celery.worker.consumer.delayed_delivery import DelayedDelivery
from kombu.asynchronous import get_event_loop

from tests.benchmarks.contenders.protocol import Job, Meter, cpu_seconds, main, payload

PREFORKED = 2


def consume(job: Job, meter: Meter) -> None:
    # the worker would declare 28 queues for native delays, which nothing here uses
    DelayedDelivery.include_if = lambda *_: False
    arguments = ["worker", f"--queues={job.queue}", "--loglevel=CRITICAL"]
    arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    if job.way == "prefork":
        count = multiprocessing.Value("q", 0)
        began = multiprocessing.Value("d", 0.0)

        def take(_payload: Any) -> None:
            with count.get_lock():
                count.value += 1
                if count.value == 1:
                    began.value = time.monotonic()

        def watch() -> None:
            meter.begin()
            while count.value < job.messages:
                time.sleep(0.005)
            meter.count, meter.began = count.value, began.value
            meter.end()

        threading.Thread(target=watch, daemon=True).start()
        meter.on_end(lambda: threading.Timer(0.5, _stop).start())
        arguments += ["--pool=prefork", f"--concurrency={PREFORKED}"]
        app = _app(job, take, job.prefetch // PREFORKED)
    else:
        # by the worker's own loop, which sends the last acks with its next turn: it may sleep for ten seconds before
        meter.on_end(lambda: get_event_loop().call_later(0.5, _stop))
        arguments += ["--pool=solo"]
        app = _app(job, meter.take, job.prefetch)
    before = cpu_seconds()
    try:
        app.worker_main(arguments)
    except SystemExit as ended:
        if ended.code:
            raise
    if job.way == "prefork":  # what its processes used is known only now that they have ended
        meter.cpu = cpu_seconds() - before


def _stop() -> None:
    state.should_stop = 0


def fill(job: Job, _meter: Meter) -> None:
    app = _app(job, lambda _: None, 1)
    with app.producer_pool.acquire(block=True) as producer:
        for place in range(job.messages):
            app.tasks["handle"].apply_async((payload(place),), producer=producer)


def _app(job: Job, take: Any, prefetch: int) -> Any:
    app = celery.Celery("bench", broker=job.url)
    exchange = kombu.Exchange(job.queue, type="direct", durable=True)
    queue = kombu.Queue(job.queue, exchange, job.queue, queue_arguments={"x-queue-type": "quorum"})
    app.conf.update(
        task_queues=[queue],
        task_default_queue=job.queue,
        task_default_queue_type="quorum",
        task_default_exchange=job.queue,
        task_default_routing_key=job.queue,
        task_acks_late=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=prefetch,
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        broker_connection_retry_on_startup=True,
    )

    @app.task(name="handle")
    def handle(message: Any) -> None:
        take(message)

    return app


if __name__ == "__main__":
    main({"consume": consume, "fill": fill})
