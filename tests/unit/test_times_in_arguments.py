"""Times in arguments: a timedelta, or a text as in a topology; anything else is told by its argument's name at once."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from rabbitdlq import (
    Breaker,
    Canary,
    ConfigurationError,
    Consumer,
    DLQManager,
    MemoryStore,
    Producer,
    RetryAfter,
    Selection,
    Supervisor,
    Topology,
    handler,
)
from rabbitdlq.consumer.deadlines import HARD_TIMEOUT, Timeouts
from rabbitdlq.consumer.handling import HandlerOptions, options_of
from rabbitdlq.idempotency import SQLiteStore, record, store_of

MINUTE, FIVE = timedelta(minutes=1), timedelta(seconds=5)


URL = "amqp://127.0.0.1:1/"
TOPOLOGY = Topology("orders", ["5s"])


def consumer(**options: Any) -> Consumer:
    return Consumer(TOPOLOGY, print, url=URL, **options)


@handler(soft_timeout="5s", hard_timeout="1m")
def handle(message: object) -> None:
    """It says its times as texts."""


def test_a_handler_may_say_its_times_as_texts_and_so_may_its_consumer() -> None:
    assert options_of(handle).timeouts(None, None) == Timeouts(FIVE, MINUTE)
    assert HandlerOptions().timeouts("5s", None) == Timeouts(FIVE, HARD_TIMEOUT)
    assert options_of(handle).timeouts("1s", timedelta(seconds=2)) == Timeouts(
        timedelta(seconds=1), timedelta(seconds=2)
    )


def test_a_consumer_may_be_told_its_times_as_texts() -> None:
    """A grace of "5s" was taken and failed when the consumer was stopped, with its handlers at work."""
    options = {"grace": "5s", "park_timeout": "1m", "soft_timeout": "5s", "hard_timeout": "1m", "lease": "2h"}
    told = consumer(idempotency="memory:", **options)

    assert (told._grace, told._settle_time, told._held.timeouts) == (FIVE, 3 * MINUTE, Timeouts(FIVE, MINUTE))
    assert told._once is not None
    assert told._once.lease == timedelta(hours=2)


def test_a_breaker_may_be_told_its_times_as_texts() -> None:
    told = Breaker(window="1m", first_pause="5s", longest_pause="1m")

    assert told == Breaker(MINUTE, first_pause=FIVE, longest_pause=MINUTE)
    assert hash(told) == hash(Breaker(MINUTE, first_pause=FIVE, longest_pause=MINUTE))


async def test_a_store_may_be_told_its_times_as_texts() -> None:
    assert store_of("memory:", keep="1m").keep == MINUTE
    async with MemoryStore(keep="7d") as store:
        assert store.keep == timedelta(days=7)


@pytest.mark.parametrize(
    ("given", "delay"),
    [("30s", 30), ("500ms", 0.5), ("2m", 120), (timedelta(hours=1), 3600), (30, 30), (0.25, 0.25)],
)
def test_a_handler_may_ask_for_a_pause_as_a_topology_says_its_delays(given: Any, delay: float) -> None:
    asked = RetryAfter(given)

    assert asked.delay == timedelta(seconds=delay)
    assert str(asked) == f"not before {delay:g} s have gone by"


@pytest.mark.parametrize("given", ["soon", "-5s", None, [], float("nan"), float("inf"), 1e300])
def test_a_pause_that_is_none_says_so(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^RetryAfter: delay: ."):
        RetryAfter(given)


async def watched(watch: Any) -> None:
    dlq = DLQManager(TOPOLOGY, url=URL)

    async def desk(*_: object) -> object:
        return None

    dlq._desk = desk  # type: ignore[method-assign, assignment]
    await dlq.replay(Selection(), watch=watch)


def recorded(keep: Any) -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        record(database, "key", keep=keep)


async def claimed(lease: Any) -> None:
    async with MemoryStore() as store:
        await store.claim("key", lease)


@pytest.mark.parametrize(
    ("argument", "use"),
    [
        ("soft_timeout", lambda value: handler(soft_timeout=value)),
        ("hard_timeout", lambda value: handler(hard_timeout=value)),
        ("soft_timeout", lambda value: HandlerOptions().timeouts(value, None)),
        ("hard_timeout", lambda value: HandlerOptions().timeouts(None, value)),
        ("soft_timeout", lambda value: consumer(soft_timeout=value)),
        ("hard_timeout", lambda value: consumer(hard_timeout=value)),
        ("grace", lambda value: consumer(grace=value)),
        ("park_timeout", lambda value: consumer(park_timeout=value)),
        ("lease", lambda value: consumer(idempotency="memory:", lease=value)),
        ("timeout", lambda value: Producer(URL, timeout=value)),
        ("expiration", lambda value: Producer(URL).send("orders", {}, expiration=value)),
        ("canary: wait", lambda value: Canary(wait=value)),
        ("first_wait", lambda value: Supervisor(["true"], 1, first_wait=value)),
        ("longest_wait", lambda value: Supervisor(["true"], 1, longest_wait=value)),
        ("breaker: window", lambda value: Breaker(window=value)),
        ("breaker: first_pause", lambda value: Breaker(first_pause=value)),
        ("breaker: longest_pause", lambda value: Breaker(longest_pause=value)),
        ("idempotency: keep", lambda value: MemoryStore(keep=value)),
        ("idempotency: keep", lambda value: SQLiteStore("done.db", keep=value)),
        ("idempotency: keep", recorded),
        ("idempotency: lease", claimed),
        ("watch", watched),
    ],
)
@pytest.mark.parametrize("value", [5, "5", "soon", "-5s", [FIVE]], ids=str)
async def test_what_is_no_time_is_told_by_the_name_of_its_argument(
    argument: str, use: Callable[[Any], Any], value: Any
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{argument}: .* (is not a duration|is negative)"):
        await used if (used := use(value)) is not None else None
