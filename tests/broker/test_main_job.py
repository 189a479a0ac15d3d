"""The main job: fail, wait, come back, rest in the dead-letter queue with the whole story."""

import asyncio
import time
from collections import defaultdict
from typing import Any

from rabbitdlq import Message
from tests.broker.kit import Bench


async def test_four_of_ten_messages_rest_in_the_dead_letter_queue_after_three_attempts_each(bench: Bench) -> None:
    topology = await bench.declared(["200ms", "400ms"])
    payloads = [{"order": number, "will_fail": number in {1, 4, 5, 8}} for number in range(10)]
    ids = await bench.send(topology, *payloads, headers={"tenant": "acme"})
    started: dict[int, list[float]] = defaultdict(list)

    async def handler(message: Message) -> None:
        started[message.payload["order"]].append(time.monotonic())
        assert message.max_attempts == 3
        if message.payload["will_fail"]:
            raise RuntimeError(f"order {message.payload['order']} failed the {message.attempt}. time")

    consumer = await bench.drain(topology, handler)

    assert (consumer.summary.succeeded, consumer.summary.retried, consumer.summary.parked) == (6, 8, 4)
    for number, payload in enumerate(payloads):
        assert len(started[number]) == (3 if payload["will_fail"] else 1)
        if payload["will_fail"]:
            first, second, third = started[number]
            assert second - first >= 0.2
            assert third - second >= 0.4
    async with bench.dlq(topology) as dlq:
        letters = {letter.id: letter for letter in await dlq.peek_all()}
    assert set(letters) == {ids[number] for number in (1, 4, 5, 8)}
    for number in (1, 4, 5, 8):
        shown: dict[str, Any] = letters[ids[number]].as_json()
        assert shown["payload"] == payloads[number]
        assert shown["headers"] == {"tenant": "acme"}
        assert shown["properties"]["content_type"] == "application/json"
        assert shown["properties"]["delivery_mode"] == 2
        assert shown["created_at"] is not None
        assert shown["moved_to_dlq_at"] > shown["created_at"]
        assert (shown["reason"], shown["attempts"], shown["retry_count"], shown["max_retries"]) == (
            "exhausted",
            3,
            2,
            2,
        )
        assert [record["attempt"] for record in shown["error_history"]] == [1, 2, 3]
        assert [record["error_message"] for record in shown["error_history"]] == [
            f"order {number} failed the {attempt}. time" for attempt in (1, 2, 3)
        ]
        assert shown["error"]["type"] == "RuntimeError"
        assert "in handler" in shown["error"]["traceback"]
        assert shown["history_partial"] is False
    for queue in (topology.name, *(rung.queue for rung in topology.rungs)):
        assert await bench.raw.count(queue) == 0


async def test_a_plain_function_runs_in_a_thread_and_does_not_hold_up_its_neighbours(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, *range(4))
    together = [0]
    most = [0]

    def handler(message: Message) -> None:
        together[0] += 1
        most[0] = max(most[0], together[0])
        deadline = time.monotonic() + 10
        while most[0] < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        together[0] -= 1

    await bench.drain(topology, handler, concurrency=4)

    assert most[0] == 4


async def test_a_message_that_recovers_is_handled_once_more_and_leaves_no_dead_letter(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, "x")
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        await asyncio.sleep(0)
        if message.attempt == 1:
            raise OSError("not yet")

    await bench.drain(topology, handler)

    assert attempts == [1, 2]
    assert await bench.raw.count(topology.dlq) == 0
