"""Sending dead letters back: the set is frozen, a pace is kept, and what is not sent is where it was."""

import asyncio
import time
from collections.abc import Iterable
from datetime import timedelta

import pytest

from rabbitdlq import ConfigurationError, DeadLetter, DLQManager, Message, Selection, Topology, WorkBinding, names
from rabbitdlq.dead_letters import RunReport, Target, plan, runner
from rabbitdlq.wire import Properties
from tests.broker.kit import Bench, until
from tests.broker.looks import rests
from tests.broker.operator_kit import events_of, letter_for, letters_left, park, words

quorum_only = pytest.mark.parametrize("queue_type", ["quorum"])
classic_only = pytest.mark.parametrize("queue_type", ["classic"])


def balanced(report: RunReport) -> bool:
    """Whether every letter of the plan is in one of the counts."""
    return report.planned == report.done + report.before + report.stayed + report.left


async def _fails(_: Message) -> None:
    raise OSError("still broken")


async def park_of(bench: Bench, topology: Topology, *queues: str, first: int = 0) -> list[str]:
    """A letter each that says it failed in that queue; gives the ids."""
    ids = [f"m{number}" for number in range(first, first + len(queues))]
    for id, queue in zip(ids, queues, strict=True):
        await bench.raw.republish(letter_for(topology, b"{}", Properties(message_id=id), queue=queue))
    return ids


# --- which letters


@pytest.mark.parametrize("rounds", [False, True])
async def test_a_large_set_goes_once_and_in_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, rounds: bool
) -> None:
    """Letters that do not fit into memory are read a second time, and nothing is held longer than the broker allows."""
    monkeypatch.setattr(plan, "KEPT_BYTES", 0)
    if rounds:
        monkeypatch.setattr(runner, "ROUND_SECONDS", 0.0)
    topology = await bench.declared()
    ids = await park(bench, topology, *(b"%d" % number for number in range(12 if rounds else 500)))
    some = Selection(ids=frozenset(ids[1::2]))

    async with bench.dlq(topology) as dlq:
        report = await dlq.replay(some)
        assert (report.planned, report.done, report.stayed, report.errors) == (len(ids) // 2, len(ids) // 2, 0, [])
        assert await words(dlq.each()) == ids[::2]
        moved = await dlq.move(Selection(limit=2), topology.name)
        assert (moved.done, moved.left, moved.stayed) == (2, 0, 0)
        dropped = await dlq.drop(Selection(), archive=None)
        assert (dropped.done, dropped.stayed) == (len(ids) // 2 - 2, 0)
    assert await letters_left(bench, topology.name) == [*ids[1::2], ids[0], ids[2]]
    assert await bench.raw.count(topology.dlq) == 0
