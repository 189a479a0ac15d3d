"""Bodies of many megabytes go the whole way."""

import hashlib
import random
from datetime import timedelta

import pytest

from rabbitdlq import Message, Producer
from tests.broker.kit import Bench, until
from tests.broker.looks import is_told, rests


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_very_large_body_goes_through_retry_parking_looking_and_replay(bench: Bench) -> None:
    """C49: 60 MiB where the broker takes them; from 4.0 on it takes 16 MiB."""
    size = (15 if bench.raw.connection.version >= (4, 0) else 60) * 2**20
    body = random.Random(49).randbytes(size)
    topology = await bench.declared(["100ms"])
    digests: list[str] = []
    broken = True

    async def handler(message: Message) -> None:
        digests.append(hashlib.sha256(message.payload).hexdigest())
        if broken:
            raise RuntimeError

    async with Producer(bench.url, timeout=timedelta(seconds=60)) as producer:
        await producer.send(topology.name, body)
    async with bench.running(topology, handler) as consumer:
        await rests(bench, topology.dlq, 1)
        broken = False
        async with bench.dlq(topology) as dlq:
            (letter,) = await dlq.peek_all()
            assert hashlib.sha256(letter.body).hexdigest() == digests[0]
            is_told(letter, 2)
            report = await dlq.replay_all()
        assert (report.done, report.errors) == (1, [])
        await until(lambda: consumer.summary.succeeded, "the replayed message is handled")
    assert digests == [hashlib.sha256(body).hexdigest()] * 3
    await rests(bench, topology.dlq, 0)
