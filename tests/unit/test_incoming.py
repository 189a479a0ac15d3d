"""How far letters may be ahead of whoever looks at them: the connection is paused, and not for ever."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rabbitdlq.broker import Connection, Delivery
from rabbitdlq.dead_letters import incoming as module
from rabbitdlq.dead_letters.incoming import HELD_BYTES, Incoming


class Frames:
    """A connection's stream, of which only is known whether it is read."""

    def __init__(self) -> None:
        self.paused = False
        self.told: list[str] = []

    def pause_reading(self) -> None:
        self.paused = True
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.paused = False
        self.told.append("resume")


class Letter:
    """A delivery of which only the size matters."""

    def __init__(self, size: int) -> None:
        self.size = size - HELD_BYTES

    def forget(self) -> None:
        self.size = 0


@pytest.fixture
def frames() -> Frames:
    return Frames()


@pytest.fixture
def incoming(frames: Frames, monkeypatch: pytest.MonkeyPatch) -> Incoming:
    """At most 10,000 bytes are ahead, or 20,000 with those that are read for the broker's sake."""
    monkeypatch.setattr(module, "AHEAD_BYTES", 10_000)
    monkeypatch.setattr(module, "MOST_BYTES", 20_000)
    monkeypatch.setattr(module, "TRICKLE_BYTES", 4_000)
    monkeypatch.setattr(module, "TRICKLE_SECONDS", 0.001)
    return Incoming(cast(Connection, SimpleNamespace(frames=frames)))


def letter(size: int) -> Any:
    return cast(Delivery, Letter(size))


async def test_reading_is_paused_while_too_much_waits(
    incoming: Incoming, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRICKLE_SECONDS", 1_000)
    incoming.due = 3
    for paused in (False, False, True):
        incoming.take(letter(5_000))
        assert frames.paused is paused
    assert (incoming.due, incoming.ahead, incoming.largest) == (0, 15_000, 5_000 - HELD_BYTES)
    await incoming.get()
    assert (frames.paused, incoming.ahead) == (False, 10_000)


async def test_one_after_the_other_is_read_for_the_broker_up_to_a_limit(incoming: Incoming, frames: Frames) -> None:
    """The broker ends a connection on which it can send nothing for half a minute."""
    count = 0
    while incoming.ahead <= 20_000:
        async with asyncio.timeout(5):
            while frames.paused:
                await asyncio.sleep(0)
        incoming.take(letter(2_500))
        count += 1
    assert count == 9
    assert frames.told == ["pause", *["resume", "pause"] * 2], "two letters each time"
    handle = incoming._trickling
    assert handle is not None
    async with asyncio.timeout(5):
        while handle.when() > asyncio.get_running_loop().time():
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert frames.paused, "enough is enough"


async def test_of_what_nobody_looks_at_only_the_number_is_kept(incoming: Incoming, frames: Frames) -> None:
    waiting = [letter(6_000), letter(6_000)]
    for each in waiting:
        incoming.take(each)
    assert frames.paused
    incoming.discard()
    assert not frames.paused
    waiting.append(letter(50_000))
    incoming.take(waiting[-1])
    assert not frames.paused
    assert [each.size for each in waiting] == [0, 0, 0]
    assert incoming.largest == 50_000 - HELD_BYTES
    assert (incoming.drain(), incoming.drain(), incoming.ahead) == (3, 0, 0)


async def test_the_end_is_told_again_and_again(incoming: Incoming) -> None:
    incoming.take(letter(5_000))
    incoming.end("the line is lost")
    assert incoming.ended
    assert [await incoming.get() is None for _ in range(3)] == [False, True, True]
    assert incoming.drain() == 0
    assert await incoming.get() is None
