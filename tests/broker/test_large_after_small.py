"""Letters that are much larger than those before them: memory stays bounded, and their order what it was.

Of the first 292 it is learnt how large they are, and the rest was taken at once, however large: of 2,000 letters of
1 MB behind 300 of 100 bytes a reader that took its time had 864 MB in memory.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from rabbitdlq import Connection, Topology
from rabbitdlq.dead_letters import browse, incoming
from rabbitdlq.dead_letters.browse import Browser
from rabbitdlq.dead_letters.incoming import HELD_BYTES
from tests.broker.kit import Bench, until
from tests.broker.operator_kit import letters_left, park

SMALL, LARGE, SIZE = 300, 60, 262_144
LIMIT = 8 * SIZE
#: what has come when the limit is noticed: one chunk of the socket, and the letter that went beyond it
SLACK = 2 * SIZE + HELD_BYTES * SMALL


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "AHEAD_BYTES", LIMIT)
    monkeypatch.setattr(browse, "AHEAD_BYTES", LIMIT)
    monkeypatch.setattr(browse, "CHUNK_BYTES", LIMIT // 2)


@pytest.fixture
async def filled(bench: Bench) -> tuple[Topology, list[str]]:
    """A queue of small letters with large ones behind them; and their ids."""
    topology = await bench.declared()
    ids = await park(bench, topology, *(b"s" * 100 for _ in range(SMALL)))
    for number in range(SMALL, SMALL + LARGE):  # one after the other: of many large ones the order would be lost
        ids += await park(bench, topology, b"L" * SIZE, first=number)
    return topology, ids


@asynccontextmanager
async def browsing(bench: Bench, topology: Topology) -> AsyncIterator[Browser]:
    async with await Connection.open(bench.url) as connection, Browser(connection, topology, "ann") as browser:
        yield browser


def ahead(browser: Browser) -> int:
    """Bytes that have come and were not looked at."""
    assert browser._reading is not None
    return browser._reading[1].ahead


async def test_what_is_not_looked_at_yet_waits_at_the_broker(bench: Bench, filled: tuple[Topology, list[str]]) -> None:
    topology, ids = filled
    seen: list[str] = []
    async with browsing(bench, topology) as browser, aclosing(browser.read()) as letters:
        async for held in letters:
            seen.append(held.letter.id)
            if len(seen) == SMALL:
                await until(lambda: ahead(browser) > LIMIT, "as much has come as may")
                with pytest.raises(AssertionError):
                    await until(lambda: ahead(browser) > LIMIT + SLACK, "more than may", 0.5)
            elif len(seen) > SMALL:
                await asyncio.sleep(0)
                assert ahead(browser) <= LIMIT + SLACK
    assert seen == ids
    assert await letters_left(bench, topology.dlq) == ids


async def test_whoever_breaks_off_leaves_all_in_their_order(bench: Bench, filled: tuple[Topology, list[str]]) -> None:
    """The answer to the cancel comes behind all that is on its way, which is not read for now."""
    topology, ids = filled
    async with bench.dlq(topology) as dlq:
        async with asyncio.timeout(8), aclosing(dlq.each()) as letters:
            async for letter in letters:
                if letter.id == ids[SMALL]:
                    break
        assert await dlq.count() == len(ids)
    assert await letters_left(bench, topology.dlq) == ids


async def test_what_needs_no_lock_is_answered_while_reading_is_paused(
    bench: Bench, filled: tuple[Topology, list[str]]
) -> None:
    topology, ids = filled
    async with bench.dlq(topology) as dlq:
        async with aclosing(dlq.each()) as letters:
            async for letter in letters:
                if letter.id == ids[SMALL]:
                    async with asyncio.timeout(5):
                        assert await dlq.count() == 0
                        (summary,) = await dlq.summary()
                        assert (summary.dead, summary.in_use) == (0, True)
                        assert summary.held_by is not None
                        assert (summary.held_by.who, summary.held_by.doing) == (dlq.who, "looking")
                        assert await dlq.runs() == []
        (summary,) = await dlq.summary()
        assert (summary.dead, summary.in_use, summary.held_by) == (len(ids), False, None)


async def test_letters_that_are_to_be_removed_are_kept_up_to_the_limit_only(
    bench: Bench, filled: tuple[Topology, list[str]]
) -> None:
    """None is handed out to be removed before its consumer is gone, so a whole chunk was in memory."""
    topology, ids = filled
    async with browsing(bench, topology) as browser:
        first = [held async for held in browser.read(acting=True)]
        large = first[SMALL:]
        assert 1 <= len(large) <= LIMIT // SIZE
        assert [held.traits.id for held in first] == ids[: len(first)]
        del first, large
        await browser.give_back()
        assert [held.traits.id async for held in browser.read(acting=True)] == ids
    assert await letters_left(bench, topology.dlq) == ids


async def test_a_replay_goes_on_with_those_that_could_not_be_kept(
    bench: Bench, filled: tuple[Topology, list[str]]
) -> None:
    topology, ids = filled
    async with bench.dlq(topology) as one:
        plan = await one.plan()
    async with bench.dlq(topology) as other:
        report = await other.replay(plan)
    assert (report.done, report.stayed, report.left) == (len(ids), 0, 0)
    assert sorted(map(str, await letters_left(bench, topology.name))) == sorted(ids)
