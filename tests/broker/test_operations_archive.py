"""Deleting, moving and putting back: nothing is destroyed before it is on the disk, and all of it is in the journal."""

import asyncio
import errno
import os
import stat
from contextlib import aclosing
from pathlib import Path

import pytest

from rabbitdlq import (
    ConfigurationError,
    DeadLettersInUse,
    DLQManager,
    Selection,
    Topology,
    names,
)
from rabbitdlq.dead_letters import RunReport, batches
from rabbitdlq.dead_letters.archive import read_archive
from rabbitdlq.errors import ArchiveError, ReadOnly
from rabbitdlq.wire import Headers, Properties
from tests.broker.kit import Bench
from tests.broker.looks import rests
from tests.broker.operator_kit import events_of, letter_for, letters_left, nack_away, park, words

quorum_only = pytest.mark.parametrize("queue_type", ["quorum"])

#: what a broker passes on although hardly anybody sets it
ODD = Headers({"tenant": "größe", "ratio": 0.1, "seen": None, "tags": ["a", {"b": [1, True]}], "raw": b"\x00\xff"})


async def filled(bench: Bench, topology: Topology) -> list[str]:
    """Four letters, one parked by the broker; gives the ids."""
    bodies = (bytes(range(256)), b"", b'{"n": 1}')
    ids = await park(bench, topology, *bodies, headers=ODD, priority=5, type="order", content_type="text/plain")
    await bench.raw.publish(topology.name, b"bare", message_id="bare", headers=ODD)
    await nack_away(bench, topology.name, times=3)
    await rests(bench, topology.dlq, 4)
    return [*ids, "bare"]


# --- drop, purge, restore


async def test_what_was_dropped_can_be_put_back_to_the_byte(bench: Bench, tmp_path: Path) -> None:
    topology, copy = await bench.declared(), await bench.declared()
    ids = await filled(bench, topology)
    file = tmp_path / "some.jsonl"

    async with bench.dlq(topology) as dlq:
        before = {letter.id: (letter.body, letter.wire) for letter in await dlq.peek_all()}
        dropped = await dlq.drop(Selection(ids=frozenset({"m0", "m2", "bare"})), archive=file)
        assert (dropped.done, dropped.stayed, dropped.archive) == (3, 0, str(file))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert await words(dlq.each()) == ["m1"]
        assert [letter.id for letter in read_archive(file)] == ["m0", "m2", "bare"]

        with pytest.raises(ArchiveError, match="there is such a file, and it is never overwritten"):
            await dlq.drop("m1", archive=file)
        with pytest.raises(ConfigurationError, match=f"has dead letters of '{topology.name}', not of '{copy.name}'"):
            async with bench.dlq(copy) as other:
                await other.restore(file)

        assert (await dlq.restore(file)).done == 3
        twice = await dlq.restore(file)
        assert (twice.planned, twice.done, twice.before, twice.left) == (3, 0, 3, 0)
        after = {letter.id: (letter.body, letter.wire) for letter in await dlq.peek_all()}
    assert sorted(after) == sorted(ids)
    for id in ids:
        assert after[id][0] == before[id][0]
        assert _without_counts(after[id][1]) == _without_counts(before[id][1])


def _without_counts(wire: Properties) -> tuple[bytes, list[bytes]]:
    """What the queue adds to each delivery is not part of the message; some versions sort the headers for that."""
    headers = wire.table.without(names.DELIVERY_COUNTS.__contains__)
    return wire.encode(headers=False), sorted(headers.entries())


async def test_a_full_disk_destroys_nothing(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH", 3)
    topology = await bench.declared()
    ids = await park(bench, topology, *(b"%d" % number for number in range(10)))
    write, room = os.write, 0

    def until_full(file: int, data: bytes) -> int:
        nonlocal room
        some = min(room, len(data))
        room -= some
        if not some:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:some])

    async def drop(bytes_left: int) -> tuple[Path, RunReport]:
        nonlocal room
        room, file, seen = bytes_left, tmp_path / f"{bytes_left}.jsonl", [RunReport()]
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", until_full)
            with pytest.raises(ArchiveError, match="No space left on device"):
                await dlq.drop(Selection(), archive=file, on_progress=seen.append)
        return file, seen[-1]

    async with bench.dlq(topology) as dlq:
        for bytes_left in (0, 1_000):
            file, _ = await drop(bytes_left)
            assert not file.exists(), "what holds nothing is in nobody's way"
            assert await words(dlq.each()) == ids
        file, report = await drop(9_000)
        assert report.done in (3, 6)
        assert report.left == 10 - report.done
        assert await words(dlq.each()) == ids[report.done :]
        assert {*ids[: report.done]} <= {letter.id for letter in read_archive(file)}
    event = (await events_of(bench, topology, names.DROPPED))[-1]
    assert (event.outcome, event.count, event.archive) == ("failed", report.done, str(file))


@quorum_only
async def test_nothing_is_destroyed_before_it_is_on_the_disk(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was only written is gone after a power cut."""
    topology = await bench.declared()
    ids = await park(bench, topology, b"a", b"b")
    file = tmp_path / "all.jsonl"
    synced: list[int] = []

    def sync(_: int) -> None:
        synced.append(file.read_bytes().count(b"\n"))
        if synced[-1] > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", sync)
    async with bench.dlq(topology) as dlq:
        with pytest.raises(ArchiveError, match="cannot be written to the disk: Input/output error"):
            await dlq.drop(Selection(), archive=file)
        assert await words(dlq.each()) == ids
    assert synced[-1] == 3


@quorum_only
async def test_a_refused_drop_leaves_no_file_behind(bench: Bench, tmp_path: Path) -> None:
    """The next try with the same name was refused, because there was such a file."""
    topology = await bench.declared()
    await park(bench, topology, b"a")
    file = tmp_path / "all.jsonl"
    async with bench.dlq(topology) as dlq, DLQManager(topology, url=bench.url, who="ann@desk") as other:
        async with aclosing(other.each()) as letters:
            await anext(letters)
            with pytest.raises(DeadLettersInUse, match=r"ann@desk is looking since"):
                await dlq.drop(Selection(), archive=file)
        assert not file.exists()
        assert (await dlq.drop(Selection(), archive=file)).done == 1


async def test_purging_takes_those_that_are_held_too(bench: Bench, tmp_path: Path) -> None:
    topology = await bench.declared(max_laps=2)
    held = Headers({names.LAP: 2})
    for _ in range(2):
        await park(bench, topology, b"a", b"b")
        await park(bench, topology, b"c", first=2, headers=held)
        async with bench.dlq(topology) as dlq:
            assert (await dlq.drop(Selection(), archive=None)).held == 1
            await park(bench, topology, b"d", first=3)
            file = None if (tmp_path / "all.jsonl").exists() else tmp_path / "all.jsonl"
            assert (await dlq.purge(archive=file)).done == 2
            assert await dlq.count() == 0
    assert [letter.id for letter in read_archive(tmp_path / "all.jsonl")] == ["m2", "m3"]


# --- move


async def test_letters_are_moved_as_they_are_or_stay(bench: Bench) -> None:
    topology = await bench.declared()
    ids = await filled(bench, topology)
    await bench.raw.republish(letter_for(topology, b"again", Properties(message_id="twice")))
    await bench.raw.republish(letter_for(topology, b"again", Properties(message_id="twice"), repeated=True))
    aside = await bench.raw.queue(f"{topology.name}-aside", x_queue_type=bench.queue_type)

    async with bench.dlq(topology) as dlq:
        before = {letter.id: _without_counts(letter.wire) for letter in await dlq.peek_all()}
        lost = await dlq.move(Selection(), "no-such-queue")
        assert (lost.planned, lost.done, lost.stayed, lost.left) == (5, 0, 5, 0)
        assert all("'no-such-queue'" in why and "no queue took" in why for _, why in lost.errors)
        assert await words(dlq.each()) == [*ids, "twice"]
        with pytest.raises(ConfigurationError, match="is where they are"):
            await dlq.move(Selection(), topology.dlq)

        moved = await dlq.move(Selection(ids=frozenset({"m0", "bare", "twice"})), aside)
        assert (moved.done, moved.duplicates, moved.stayed) == (3, 1, 0)
        assert await words(dlq.each()) == ["m1", "m2"]
    found = {str(properties.message_id): properties for _, properties, _ in await bench.raw.take_all(aside)}
    assert {id: _without_counts(wire) for id, wire in found.items()} == {id: before[id] for id in found}
    assert list(found) == ["m0", "bare", "twice"]


# --- who did what


@quorum_only
async def test_each_change_is_in_the_journal_and_read_only_makes_none(bench: Bench, tmp_path: Path) -> None:
    topology = await bench.declared()
    aside = await bench.raw.queue(f"{topology.name}-aside")
    ids = await park(bench, topology, *(b"x" for _ in range(6)))
    file = tmp_path / "one.jsonl"

    async with DLQManager(topology, url=bench.url, who="eve", read_only=True) as eve:
        for change in (
            eve.replay_all,
            lambda: eve.drop(Selection(), archive=file),
            lambda: eve.purge(archive=None),
            lambda: eve.purge(archive=file),
            lambda: eve.move(Selection(), aside),
            lambda: eve.restore(file),
            lambda: eve.push({}, "by hand"),
            lambda: eve.pop("m0"),
            lambda: eve.resume("some-run"),
        ):
            with pytest.raises(ReadOnly):
                await change()
        assert not file.exists()
        assert await words(eve.each()) == ids
        assert (await eve.plan()).count == 6
    async with DLQManager(topology, url=bench.url, who="ann@desk") as dlq:
        done = [
            await dlq.replay("m0"),
            await dlq.move(Selection(reasons=frozenset({"exhausted"}), limit=2), aside),
            await dlq.drop("m3", archive=file),
            await dlq.restore(file),
            await dlq.replay(Selection(ids=frozenset({"m4", "nope"}))),
        ]
        runs = await dlq.runs()

    kinds = (names.REPLAYED, names.MOVED, names.DROPPED, names.RESTORED)
    events = await events_of(bench, topology, *kinds)
    assert [(event.event, event.count, event.ids, event.selection, event.archive) for event in events] == [
        ("replayed", 1, ("m0",), "id=m0", None),
        ("moved", 2, ("m1", "m2"), "reason=exhausted limit=2", None),
        ("dropped", 1, ("m3",), "id=m3", str(file)),
        ("restored", 1, ("m3",), None, str(file)),
        ("replayed", 1, ("m4",), "id=m4,nope", None),
    ]
    assert {(event.who, event.amqp_user, event.outcome) for event in events} == {("ann@desk", "guest", "done")}
    assert [event.run for event in events] == [report.run for report in done] == [info.id for info in runs]
    assert events[1].target == ("", aside)
    assert [dict(event.counts or {})["stayed"] for event in events] == [0, 0, 0, 0, 1]


@quorum_only
async def test_a_restore_that_is_stopped_adds_up(bench: Bench, tmp_path: Path) -> None:
    topology = await bench.declared()
    ids = await park(bench, topology, *(b"%d" % number for number in range(40)))
    stop = asyncio.Event()

    def watch(report: RunReport) -> None:
        if report.done >= 5:
            stop.set()

    async with bench.dlq(topology) as dlq:
        await dlq.drop(Selection(), archive=tmp_path / "all.jsonl")
        report = await dlq.restore(tmp_path / "all.jsonl", rate=20, stop=stop, on_progress=watch)
        assert report.interrupted
        assert (report.planned, report.done + report.left, report.stayed) == (40, 40, 0)
        assert 5 <= report.done < 40
        assert await words(dlq.each()) == ids[: report.done]
        assert (await dlq.restore(tmp_path / "all.jsonl")).done == report.left
    assert await letters_left(bench, topology.dlq) == ids
