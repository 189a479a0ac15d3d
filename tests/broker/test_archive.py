"""Letters that were archived and destroyed are put back as they were."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rabbitdlq import DeadLetter, Topology
from rabbitdlq.dead_letters.archive import ArchiveWriter, read_archive, restored
from rabbitdlq.wire import Headers, Properties
from tests.broker.kit import Bench
from tests.broker.looks import rests
from tests.broker.operator_kit import letter_for, letters_left, nack_away, park

EVERY_TYPE = {
    "text": "größe",
    "bytes": b"\x00\xff",
    "number": -(2**63),
    "double": 1e300,
    "date": datetime(2024, 1, 1, tzinfo=UTC),
    "nested": {"list": [None, True, {"x": b"\xfe"}]},
}


async def archived_and_purged(bench: Bench, topology: Topology, path: Path) -> list[DeadLetter]:
    """What was there, and is now in the archive only."""
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
        with ArchiveWriter(path, queue=topology.name, who="ann", why="all") as archive:
            for letter in letters:
                archive.write(letter)
            archive.sync()
            assert (await dlq.purge(archive=None)).done == len(letters)
    return letters


async def put_back(bench: Bench, topology: Topology, path: Path) -> list[DeadLetter]:
    for letter in read_archive(path):
        await bench.raw.republish(restored(letter, topology.dlq))
    async with bench.dlq(topology) as dlq:
        return await dlq.peek_all()


async def test_letters_are_put_back_byte_for_byte(bench: Bench, tmp_path: Path) -> None:
    topology = await bench.declared()
    await park(bench, topology, b'{"order": 1}', b"", bytes(range(256)), headers=Headers(EVERY_TYPE), priority=3)
    await park(bench, topology, b"y" * 1_000_000, first=3, priority=3)

    before = await archived_and_purged(bench, topology, tmp_path / "a")
    assert await bench.raw.count(topology.dlq) == 0
    after = await put_back(bench, topology, tmp_path / "a")

    assert after == before
    assert [letter.wire.encode() for letter in after] == [letter.wire.encode() for letter in before]
    assert [letter.id for letter in after] == ["m0", "m1", "m2", "m3"]
    async with bench.dlq(topology) as dlq:
        assert (await dlq.replay_all()).done == 4
    assert await letters_left(bench, topology.name) == ["m0", "m1", "m2", "m3"]


async def test_what_was_looked_at_goes_back_without_the_queues_own_counts(bench: Bench, tmp_path: Path) -> None:
    """A quorum queue tells on each delivery how often it was given back."""
    topology = await bench.declared()
    await park(bench, topology, b"a")
    async with bench.dlq(topology) as dlq:
        (first,) = await dlq.peek_all()

    await archived_and_purged(bench, topology, tmp_path / "a")
    (after,) = await put_back(bench, topology, tmp_path / "a")

    assert after == first


async def test_a_letter_that_the_broker_parked_keeps_its_story(bench: Bench, tmp_path: Path) -> None:
    """The client publishes ``x-death`` then, and a broker may think what it likes of that: it has to show it."""
    topology = await bench.declared()
    await bench.raw.publish(
        topology.name, b"{}", message_id="m0", user_id="guest", headers=Headers(EVERY_TYPE), expiration="60000"
    )
    await nack_away(bench, topology.name, times=3)
    await rests(bench, topology.dlq, 1)

    (before,) = await archived_and_purged(bench, topology, tmp_path / "a")
    assert (before.bare, before.reason, before.attempts) == (True, "exhausted", 3)
    (after,) = await put_back(bench, topology, tmp_path / "a")

    assert after.wire.table.raw("x-death") == before.wire.table.raw("x-death")
    assert after.original == {**before.original, "user_id": "guest"}, "another account could not publish it"
    assert after == replace(before, wire=after.wire, original=after.original)
    async with bench.dlq(topology) as dlq:
        assert (await dlq.replay("m0")).done == 1


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_a_bare_letter_without_an_id_keeps_the_one_it_was_shown_with(bench: Bench, tmp_path: Path) -> None:
    topology = await bench.declared()
    await bench.raw.publish(topology.name, b"body")
    await nack_away(bench, topology.name, times=3)
    await rests(bench, topology.dlq, 1)

    (before,) = await archived_and_purged(bench, topology, tmp_path / "a")
    (after,) = await put_back(bench, topology, tmp_path / "a")

    assert (after.id, after.id_derived, after.attempts) == (before.id, True, 3)


@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_what_others_put_there_neither_expires_nor_reaches_further_queues(bench: Bench, tmp_path: Path) -> None:
    topology = await bench.declared()
    further = await bench.raw.queue(f"{topology.name}-further")
    parked = letter_for(topology, b"a", Properties(message_id="m0"))
    await bench.raw.publish(
        topology.dlq,
        b"a",
        message_id="m0",
        expiration="600000",
        headers=parked.properties.table.plus({"CC": [further]}),
    )
    assert await bench.raw.count(further) == 1

    (before,) = await archived_and_purged(bench, topology, tmp_path / "a")
    (after,) = await put_back(bench, topology, tmp_path / "a")

    assert await bench.raw.count(further) == 1
    assert after.wire.expiration is None
    assert after.original == {**before.original, "CC": [further], "expiration": "600000"}
