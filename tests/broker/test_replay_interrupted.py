"""A replay that is stopped, cancelled or cut off: every letter is in one place at least, and the rest in its order."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from pamqp import commands

from rabbitdlq import BrokerError, DLQManager, RunReport, Selection, names
from rabbitdlq.wire import Properties
from tests.broker.kit import Bench, until
from tests.broker.looks import rests
from tests.broker.operator_kit import events_of, letters_left, park, taken, words
from tests.broker.proxy import Proxy

#: letters after which it is interrupted, and so many a second: at full speed all may be under way by then
STOP_AT, RATE = 300, 2_000


async def _by_the_event(dlq: DLQManager) -> RunReport:
    stop = asyncio.Event()

    def watch(report: RunReport) -> None:
        if report.done >= STOP_AT:
            stop.set()

    report = await dlq.replay(Selection(), rate=RATE, on_progress=watch, stop=stop)
    assert report.interrupted
    assert report.done + report.stayed < 1_000
    return report


async def _by_cancelling(dlq: DLQManager) -> RunReport:
    reached, last = asyncio.Event(), RunReport()

    def watch(report: RunReport) -> None:
        nonlocal last
        last = report
        if report.done >= STOP_AT:
            reached.set()

    task = asyncio.create_task(dlq.replay(Selection(), rate=RATE, on_progress=watch))
    await asyncio.wait_for(reached.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return last


@pytest.mark.parametrize(
    ("queue_type", "interrupt"),
    [("quorum", _by_the_event), ("quorum", _by_cancelling), ("classic", _by_cancelling)],
)
async def test_an_interrupted_run_leaves_the_rest_in_its_order(
    bench: Bench, interrupt: Callable[[DLQManager], Awaitable[RunReport]]
) -> None:
    """C9: a cancelled run lost what it had fetched, or gave away what somebody else held."""
    topology = await bench.declared()
    ids = await park(bench, topology, *(b"%d" % number for number in range(1_000)))
    somebody = await bench.raw.channel()
    for _ in range(2):
        assert isinstance((await somebody.basic_get(topology.dlq)).delivery, commands.Basic.GetOk)

    async with bench.dlq(topology) as dlq:
        report = await interrupt(dlq)

        assert report.found == 998
        moved = await letters_left(bench, topology.name)
        assert sorted(map(str, moved)) == sorted(report.ids)
        assert STOP_AT <= len(moved) < 998
        left = await words(dlq.each())
        assert left == [id for id in ids[2:] if id not in set(moved)]
        await somebody.close()
        await until(dlq.count, "what the other one held is back")
        assert {*map(str, moved), *left, "m0", "m1"} == set(ids)

    replayed = await events_of(bench, topology, names.REPLAYED)
    assert [event.count for event in replayed] == [len(moved)]


@pytest.mark.parametrize("queue_type", ["quorum"])
@pytest.mark.parametrize("lost", ["line", "confirms"])
async def test_a_run_that_loses_its_line_loses_no_letter(bench: Bench, lost: str) -> None:
    """C8: acknowledging before the publish loses letters, and so does publishing without waiting for the confirm."""
    topology = await bench.declared()
    ids = await park(bench, topology, *(b"%d" % number for number in range(200)))

    async with Proxy(bench.url) as proxy, DLQManager(topology, url=proxy.url) as dlq:
        lost_at = 0

        def watch(report: RunReport) -> None:
            """Once, at about the right time: several letters may be done between two reports."""
            nonlocal lost_at
            if lost_at or report.done < (50 if lost == "line" else 1):
                return
            lost_at = report.done
            if lost == "line":
                proxy.cut()
            else:
                publishing = proxy.lines[1]  # the second connection of a manager is for publishes
                proxy.freeze(lambda line: line is publishing, towards=("client",))

        # one by one: else all may be confirmed before the first is reported
        run = asyncio.create_task(dlq.replay(Selection(), rate=200, on_progress=watch))
        if lost == "confirms":
            await rests(bench, topology.name, 200)
            proxy.thaw()
            proxy.cut()
        with pytest.raises(BrokerError):
            await run
        assert 0 < lost_at < 200, "it was lost in the middle"

        at_work: list[Properties] = []

        async def everything() -> bool:
            """The broker takes back what was not acknowledged; it goes now."""
            await dlq.replay_all()
            at_work.extend(await taken(bench, topology.name))
            return {wire.message_id for wire in at_work} == set(ids) and len(at_work) >= at_least

        at_least = 201 if lost == "confirms" else 200
        await until(everything, "every letter is back at work")

    # whoever has one twice can tell: the copies carry one replay id, and two letters never share one
    assert len({(wire.message_id, wire.table.text(names.REPLAY_ID)) for wire in at_work}) == len(ids)
    assert len({wire.table.text(names.REPLAY_ID) for wire in at_work}) == len(ids)
