"""Whether the broker may take a message away before its handler is done: what is held, and for how long."""

from datetime import timedelta
from typing import Any

import pytest
import structlog.testing

from rabbitdlq import Consumer, Message, Topology, handler
from rabbitdlq.consumer.acknowledging import Held, warn_of_timeouts
from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.consumer.handling import warn_of_ignored
from rabbitdlq.management import ManagementApi, QueueState

TOPOLOGY = Topology("orders", ["5s"])


async def coroutine(_: Message) -> None: ...


def plain(_: Message) -> None: ...


def consumer(handle: Any, **options: Any) -> Consumer:
    return Consumer(TOPOLOGY, handle, url="amqp://127.0.0.1:1/", **options)


async def warned(held: Held, management_url: str | None = None) -> list[Any]:
    with structlog.testing.capture_logs() as logs:
        await warn_of_timeouts("orders", "/", held, management_url)
    return [line for line in logs if line["log_level"] == "warning"]


@pytest.mark.parametrize(
    ("handle", "options", "minutes"),
    [
        (coroutine, {}, 25),
        (plain, {}, 30),
        (coroutine, {"prefetch": 10, "hard_timeout": "29m"}, 29),
        (coroutine, {"hard_timeout": "29m"}, 39),
        (plain, {"hard_timeout": "16m"}, 32),
        # in a child process it can be ended
        (print, {"hard_timeout": "16m", "isolation": "process"}, 26),
        (coroutine, {"hard_timeout": "16m", "isolation": "thread"}, 26),
        (coroutine, {"concurrency": 4, "prefetch": 9, "soft_timeout": "6m", "hard_timeout": "12m"}, 24),
        (coroutine, {"concurrency": 1, "prefetch": 100, "soft_timeout": "1m", "hard_timeout": "1m"}, 100),
        (coroutine, {"prefetch": 10, "hard_timeout": "31m"}, 31),
    ],
)
async def test_what_was_prefetched_waits_for_those_before_it(
    handle: Any, options: dict[str, Any], minutes: int
) -> None:
    """The broker counts from the delivery: below its limit, handlers were taken away from all the same."""
    held = consumer(handle, **options)._held

    assert held.longest == minutes * 60
    lines = await warned(held)
    assert [line["event"] for line in lines] == ["timeout_above_brokers"] * (minutes > 30)
    for line in lines:
        assert (line["held_s"], line["broker_s"], line["source"]) == (minutes * 60, 1800, "RabbitMQ's default")
        assert (line["prefetch"], line["concurrency"]) == (held.prefetch, held.concurrency)
        assert (line["soft_timeout_s"], line["hard_timeout_s"]) == (
            held.timeouts.soft.total_seconds(),
            held.timeouts.hard.total_seconds(),
        )
        assert (
            "give a smaller prefetch, shorter timeouts, or the queue a higher consumer-timeout" in line["consequence"]
        )


async def test_a_handler_that_may_run_until_the_very_limit_is_told_of() -> None:
    limit = timedelta(minutes=30)

    assert await warned(Held(Timeouts(limit, limit), 1, 1, cancellable=True))


async def test_the_queues_own_limit_counts_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def queue(*_: object) -> QueueState:
        return state

    monkeypatch.setattr(ManagementApi, "queue", queue)
    held = Held(Timeouts(timedelta(seconds=50), timedelta(seconds=55)), 2, 1, cancellable=True)
    for milliseconds, is_warned in ((105_000, False), (104_000, True)):
        state = QueueState({"x-consumer-timeout": milliseconds}, None, 0, 0, 0)
        lines = await warned(held, "http://guest:guest@127.0.0.1:1")
        assert [line["held_s"] for line in lines] == [105] * is_warned
        assert [line["source"] for line in lines] == ["the queue's argument or policy"] * is_warned


@pytest.mark.parametrize(
    ("handle", "options", "told"),
    [
        (plain, {"soft_timeout": "5s"}, ["soft_timeout_ignored"]),
        (plain, {"soft_timeout": "5s", "isolation": "thread"}, ["soft_timeout_ignored"]),
        (handler(soft_timeout="5s")(lambda message: None), {}, ["soft_timeout_ignored"]),
        (print, {"soft_timeout": "5s", "isolation": "process"}, []),
        (coroutine, {"soft_timeout": "5s"}, []),
        (coroutine, {"soft_timeout": "5s", "isolation": "thread"}, []),
        # it is limited as it was told
        (plain, {"soft_timeout": "5s", "hard_timeout": "5s"}, []),
        (plain, {"soft_timeout": "20m"}, []),
        (plain, {}, []),
        (handler(idempotency_key=lambda message: message.id)(lambda message: None), {}, ["idempotency_key_ignored"]),
        (handler(idempotency_key=lambda message: message.id)(lambda message: None), {"idempotency": "memory:"}, []),
    ],
)
def test_what_was_given_and_does_nothing_is_told_at_the_start(
    handle: Any, options: dict[str, Any], told: list[str]
) -> None:
    made = consumer(handle, **options)
    with structlog.testing.capture_logs() as logs:
        warn_of_ignored("orders", made._ignored)
    assert [line["event"] for line in logs] == told
    for line in logs:
        assert (line["log_level"], line["queue"]) == ("warning", "orders")
        words = "only hard_timeout limits a plain function here" if "soft" in line["event"] else "without a store"
        assert words in line["consequence"]
