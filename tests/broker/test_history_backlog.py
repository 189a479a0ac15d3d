"""Histories of messages that failed long before the consumer that parks them was started."""

from datetime import timedelta

import pytest

from rabbitdlq import Message
from rabbitdlq.consumer import session
from tests.broker.kit import Bench, until

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])


async def test_a_consumer_reads_the_journal_back_for_a_message_that_waited_longer_than_its_look_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = await bench.declared(["50ms", "1s"])
    (message_id,) = await bench.send(topology, "x")

    async def fail(message: Message) -> None:
        if message.attempt == 2:
            first.stop()  # by whoever waits for the failure it would be stopped too late
        raise RuntimeError(f"attempt {message.attempt}")

    async with bench.running(topology, fail) as first:
        await until(lambda: first.summary.retried == 2, "two failures")
    # the look-back ends after these two failures, as if they were hours ago
    monkeypatch.setattr(session, "JOURNAL_MARGIN", -timedelta(minutes=1))
    await bench.drain(topology, fail)

    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    assert letter.id == message_id
    assert [record.error_message for record in letter.history] == ["attempt 1", "attempt 2", "attempt 3"]
    assert not letter.history_partial
