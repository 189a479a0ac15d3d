"""Several consumer processes on one queue: each message is handled or parked once, and its history is whole."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.broker.kit import Bench, until
from tests.broker.looks import is_told, publish_many, rests
from tests.broker.worker import Order, worker_process


async def test_two_processes_share_500_messages_and_every_dead_letter_tells_of_all_its_attempts(
    bench: Bench, tmp_path: Path
) -> None:
    topology = await bench.declared(["200ms", "300ms"])
    dead = set(range(0, 500, 3))
    orders = [Order(n, failures=99 if n in dead else 0, takes=0.005) for n in range(500)]
    async with (
        worker_process(bench.url, topology, tmp_path / "a", "worker a") as a,
        worker_process(bench.url, topology, tmp_path / "b", "worker b") as b,
    ):
        await publish_many(bench, topology, map(asdict, orders))
        await until(
            lambda: a.count("succeeded") + b.count("succeeded") == 500 - len(dead), "every good message is handled"
        )
        await rests(bench, topology.dlq, len(dead))
        assert await a.terminate() == 0
        assert await b.terminate() == 0

    succeeded = Counter(run.n for run in a.runs + b.runs if run.what == "succeeded")
    assert succeeded == dict.fromkeys(set(range(500)) - dead, 1)
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
    assert Counter(letter.payload["n"] for letter in letters) == dict.fromkeys(dead, 1)
    for letter in letters:
        n = letter.payload["n"]
        assert [(record.attempt, record.error_message) for record in letter.history] == [
            (attempt, f"order {n}, attempt {attempt}") for attempt in (1, 2, 3)
        ]
        is_told(letter, 3)
    by_both = [letter for letter in letters if len({record.worker for record in letter.history}) == 2]
    assert by_both, "no message met both workers: this run proves nothing"
