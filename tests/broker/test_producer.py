"""Publishing: what returns without an error has arrived, and every error says so in time."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from rabbitdlq import ConfigurationError, EntityNotFound, Producer, PublishRefused, PublishUnconfirmed, Unroutable
from rabbitdlq.wire import Properties
from tests.broker.kit import Bench
from tests.broker.looks import rests
from tests.broker.proxy import Proxy

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])


async def test_a_message_is_persistent_and_carries_id_timestamp_and_type(bench: Bench) -> None:
    topology = await bench.declared()
    before = int(time.time())
    (sent,) = await bench.send(topology, {"order": 1}, headers={"tenant": "acme"}, priority=3)
    taken = await bench.raw.take(topology.name)
    assert taken is not None
    body, properties, _ = taken
    assert body == b'{"order":1}'
    assert properties.timestamp is not None
    assert before <= properties.timestamp <= time.time()
    assert properties.table["tenant"] == "acme"
    assert properties.but(headers=None, timestamp=None) == Properties(
        content_type="application/json", delivery_mode=2, priority=3, message_id=sent
    )


async def test_what_no_queue_takes_is_an_error(bench: Bench) -> None:
    """C47: the return of an unroutable empty body was never noticed, and the publish waited for ever."""
    topology = bench.topology()
    async with Producer(bench.url, timeout=timedelta(seconds=5)) as producer:
        for payload in (b"", {"order": 1}):
            with pytest.raises(Unroutable, match=topology.name):
                await producer.send(topology.name, payload)
        with pytest.raises(EntityNotFound, match="t-nowhere"):
            await producer.send(topology.name, b"", exchange="t-nowhere")
        # the channel that the last one cost was replaced
        with pytest.raises(Unroutable):
            await producer.send(topology.name, b"")


async def test_a_returned_publish_is_never_taken_for_a_success_of_the_same_id(bench: Bench) -> None:
    """The client library knows a returned publish by its message id alone."""
    topology = await bench.declared()
    queues = [topology.name if n % 2 else "t-nowhere" for n in range(40)]
    async with Producer(bench.url) as producer:
        results = await asyncio.gather(
            *(producer.send(queue, n, message_id="same") for n, queue in enumerate(queues)), return_exceptions=True
        )
    for queue, result in zip(queues, results, strict=True):
        if queue == topology.name:
            assert result == "same"
        else:
            assert isinstance(result, Unroutable)
    bodies = [int(body) for body, _, _ in await bench.raw.take_all(topology.name)]
    assert sorted(bodies) == list(range(1, 40, 2))


async def test_a_full_queue_that_rejects_publishes_is_an_error(bench: Bench) -> None:
    queue = await bench.raw.queue(f"{bench.topology().name}-full", x_max_length=1, x_overflow="reject-publish")
    async with Producer(bench.url) as producer:
        results = [await _result(producer, queue, n) for n in range(5)]
    kept = [body for body, _, _ in await bench.raw.take_all(queue)]
    assert [result for result in results if not isinstance(result, str)]
    # a classic queue may take one more than it is allowed to; what it took it has confirmed, and nothing else
    assert len(kept) == sum(isinstance(result, str) for result in results)
    for result in results:
        assert isinstance(result, str | PublishRefused)


async def _result(producer: Producer, queue: str, payload: Any) -> str | Exception:
    try:
        return await producer.send(queue, payload)
    except Exception as error:
        return error


async def test_a_broker_that_hangs_is_an_error_within_the_deadline(bench: Bench) -> None:
    """C47: a publish waits for ever when the broker goes away."""
    topology = await bench.declared()
    async with Proxy(bench.url) as proxy, Producer(proxy.url, timeout=timedelta(seconds=2)) as producer:
        await producer.send(topology.name, "before")
        proxy.freeze()
        started = time.monotonic()
        results = await asyncio.gather(*(_result(producer, topology.name, n) for n in range(20)))
        assert time.monotonic() - started < 20, "one deadline for all, not one after the other"
        for result in results:
            assert isinstance(result, PublishUnconfirmed)
            assert "no confirm within 2 s" in str(result)
        proxy.thaw()
        assert isinstance(await producer.send(topology.name, "after"), str)


async def test_a_connection_lost_before_the_confirm_is_told_as_not_certain_and_the_next_publish_goes_on(
    bench: Bench,
) -> None:
    topology = await bench.declared()
    async with Proxy(bench.url) as proxy, Producer(proxy.url) as producer:
        await producer.send(topology.name, "before")
        proxy.freeze(towards=("client",))
        sending = asyncio.create_task(producer.send(topology.name, "arrives, and nobody knows"))
        await rests(bench, topology.name, 2)
        proxy.thaw()
        proxy.cut()
        with pytest.raises(PublishUnconfirmed, match="connection"):
            await sending
        await producer.send(topology.name, "after")
    assert len(await bench.raw.take_all(topology.name)) == 3


async def test_a_stream_of_payloads_is_confirmed_with_a_window_and_one_bad_payload_stops_no_other(
    bench: Bench,
) -> None:
    topology = await bench.declared()
    taken = 0

    async def payloads() -> AsyncIterator[Any]:
        nonlocal taken
        for n in range(300):
            taken += 1
            yield object() if n == 17 else {"n": n}

    reported = 0
    async with Producer(bench.url, window=20) as producer:
        reports = []
        async for report in producer.send_all(topology.name, payloads()):
            reports.append(report)
            reported += 1
            assert taken - reported <= 2 * 20 + 1, "more are in flight than the window allows"
    assert sorted(report.place for report in reports) == list(range(1, 301))
    (bad,) = [report for report in reports if report.error]
    assert bad.place == 18
    assert isinstance(bad.error, ConfigurationError)
    await rests(bench, topology.name, 299)


async def test_a_message_that_does_not_fit_into_a_frame_is_refused_and_costs_nobody_else(bench: Bench) -> None:
    topology = await bench.declared()
    async with Producer(bench.url) as producer:
        with pytest.raises(PublishRefused, match="do not fit into one frame"):
            await producer.send(topology.name, 1, headers={"large": "x" * 140_000})
        await producer.send(topology.name, 2)
    await rests(bench, topology.name, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_a_header_that_would_cost_the_connection_is_refused(bench: Bench, value: float) -> None:
    topology = await bench.declared()
    async with Producer(bench.url) as producer:
        with pytest.raises(ConfigurationError, match="header"):
            await producer.send(topology.name, 1, headers={"x": [value]})
        await producer.send(topology.name, 2)


async def test_a_body_beyond_the_brokers_limit_is_refused(bench: Bench) -> None:
    """C49: 16 MiB from 4.0 on, 128 MiB before."""
    topology = await bench.declared()
    limit = 16 * 2**20 if bench.raw.connection.version >= (4, 0) else 128 * 2**20
    async with Producer(bench.url) as producer:
        with pytest.raises(PublishRefused, match="larger"):
            await producer.send(topology.name, bytes(limit + 1))
        await producer.send(topology.name, "after")
    await rests(bench, topology.name, 1)


async def test_a_stream_of_payloads_arrives_in_its_order(bench: Bench) -> None:
    """Before the first connection was there, those that waited for it came in between the others."""
    topology = await bench.declared()

    async def payloads() -> AsyncIterator[int]:
        for number in range(1_200):
            yield number

    async with Producer(bench.url) as producer:
        places = [report.place async for report in producer.send_all(topology.name, payloads())]

    assert sorted(places) == list(range(1, 1_201))
    assert [int(body) for body, _, _ in await bench.raw.take_all(topology.name)] == list(range(1_200))
