"""Letters in batches: named in the journal before they go, settled when all of a batch is through, at a pace."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, cast

import pytest

from rabbitdlq.dead_letters.batches import BATCH, CATCH_UP_SECONDS, Batches, Pace
from rabbitdlq.dead_letters.run_log import RunLog


class Log:
    """Keeps what it is told; a batch is confirmed at once, unless ``confirmed`` has to be set first."""

    def __init__(self) -> None:
        self.named: list[list[str]] = []
        self.settlements: dict[int, list[str]] = {}
        self.confirmed = asyncio.Event()
        self.confirmed.set()

    async def sending(self, keys: Sequence[str]) -> int:
        self.named.append(list(keys))
        number = len(self.named) - 1
        await self.confirmed.wait()
        return number

    def settled(self, batch: int, undone: Sequence[str]) -> None:
        assert batch not in self.settlements, "a batch is settled once"
        self.settlements[batch] = list(undone)


class Loop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while somebody works and jumps to the next timer when all wait."""

    now = 1_000.0
    #: seconds from a timer's time to its waking up
    late = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when + self.late)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class LateLoop(Loop):
    """One that wakes up a millisecond late, as a real one does."""

    late = 0.001


def on_a_fake_clock(work: Callable[[], Any], loop: type[Loop] = Loop) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(work())


async def each(letters: Iterable[str]) -> AsyncIterator[str]:
    for letter in letters:
        yield letter


class Bench:
    """Batches with a log, and what they put back."""

    def __init__(self, rate: float | None = None) -> None:
        self.log = Log()
        self.stop = asyncio.Event()
        self.put_back: list[str] = []
        self.batches = Batches[str](
            cast(RunLog, self.log), Pace(rate, self.stop), lambda letter: f"k{letter}", self.put_back.append
        )


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


async def test_every_letter_is_named_before_it_goes_and_each_batch_is_settled_once() -> None:
    bench, letters = Bench(), numbers(2 * BATCH + 50)
    gone = []

    async for letter in bench.batches.open(each(letters)):
        assert any(f"k{letter}" in batch for batch in bench.log.named)
        gone.append(letter)
        assert bench.batches.at(len(gone)) == letter
        bench.batches.ended(len(gone), done=letter not in ("3", "210"))

    assert gone == letters
    assert [len(batch) for batch in bench.log.named] == [BATCH, BATCH, 50]
    assert [key for batch in bench.log.named for key in batch] == [f"k{letter}" for letter in letters]
    assert bench.log.settlements == {0: ["k3"], 1: ["k210"], 2: []}
    assert bench.put_back == []


async def test_nothing_goes_before_the_journal_has_confirmed_its_batch() -> None:
    bench = Bench()
    bench.log.confirmed.clear()
    opened = bench.batches.open(each(numbers(BATCH)))
    first = asyncio.ensure_future(anext(opened))
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.log.named
    assert not first.done()

    bench.log.confirmed.set()

    assert await first == "0"
    await opened.aclose()  # type: ignore[attr-defined]


async def test_the_journal_is_told_of_a_batch_before_the_first_letter_of_the_one_in_front_of_it_goes() -> None:
    """Told behind these letters it answered behind them, and then nothing was under way any more."""
    bench = Bench()
    named = [len(bench.log.named) async for _ in bench.batches.open(each(numbers(3 * BATCH)))]
    assert named == [2] * BATCH + [3] * 2 * BATCH


async def test_letters_may_be_through_in_any_order() -> None:
    bench = Bench()
    gone = [letter async for letter in bench.batches.open(each(numbers(BATCH + 2)))]

    for place in range(len(gone), 1, -1):
        bench.batches.ended(place, done=True)
    assert bench.log.settlements == {1: []}
    bench.batches.ended(1, done=False)

    assert bench.log.settlements == {1: [], 0: ["k0"]}


async def test_a_batch_with_a_letter_of_which_nobody_knows_is_never_settled() -> None:
    """Only so a run that is gone on with names it."""
    bench = Bench()
    gone = [letter async for letter in bench.batches.open(each(numbers(BATCH + 1)))]

    bench.batches.ended(2, done=False, certain=False)
    for place in [1, *range(3, len(gone) + 1)]:
        bench.batches.ended(place, done=True)

    assert bench.log.settlements == {1: []}


@pytest.mark.parametrize("at", [0, 1, BATCH - 1, BATCH, BATCH + 7])
async def test_what_was_named_and_did_not_go_because_it_was_stopped_is_put_back_and_settled_as_not_done(
    at: int,
) -> None:
    bench, letters = Bench(), numbers(3 * BATCH)
    gone: list[str] = []
    if not at:
        bench.stop.set()

    async for letter in bench.batches.open(each(letters)):
        gone.append(letter)
        bench.batches.ended(len(gone), done=True)
        if len(gone) == at:
            bench.stop.set()

    named = [key for batch in bench.log.named for key in batch]
    assert gone == letters[:at]
    assert [f"k{letter}" for letter in [*gone, *bench.put_back]] == named
    assert [key for undone in bench.log.settlements.values() for key in undone] == named[at:]
    assert set(bench.log.settlements) == set(range(len(bench.log.named))), "no batch is in flight after a stop"


async def test_no_letters_are_no_batch() -> None:
    bench = Bench()
    assert [letter async for letter in bench.batches.open(each([]))] == []
    assert bench.log.named == []


@pytest.mark.parametrize(("rate", "size"), [(None, BATCH), (0.5, 1), (3, 3), (BATCH * 10.0, BATCH)])
async def test_what_is_slow_is_named_a_second_ahead(rate: float | None, size: int) -> None:
    assert Bench(rate).batches.size == size


def test_letters_go_evenly_at_the_rate() -> None:
    async def work() -> list[float]:
        bench, clock = Bench(10.0), asyncio.get_running_loop().time
        async with aclosing(bench.batches.open(each(numbers(25)))) as opened:  # type: ignore[type-var]
            return [clock() async for _ in opened]

    times = on_a_fake_clock(work)

    assert [round(time - times[0], 6) for time in times] == [round(number / 10, 6) for number in range(25)]


def test_a_fast_pace_is_kept_by_a_loop_that_wakes_up_late() -> None:
    """A pace of 2,000 a second was one of 1,000: the loop's clock was a millisecond late for each of them."""

    async def work() -> float:
        pace, clock = Pace(2_000.0, asyncio.Event()), asyncio.get_running_loop().time
        began = clock()
        for _ in range(1_001):
            assert await pace.turn()
        return clock() - began

    assert on_a_fake_clock(work, LateLoop) == pytest.approx(0.5, abs=0.01)


def test_time_that_was_lost_is_not_made_up_for_in_a_rush() -> None:
    async def work() -> list[float]:
        pace, clock = Pace(100.0, asyncio.Event()), asyncio.get_running_loop().time
        assert await pace.turn()
        await asyncio.sleep(60)
        times = []
        for _ in range(20):
            assert await pace.turn()
            times.append(clock())
        return times

    times = on_a_fake_clock(work)

    at_once = sum(time == times[0] for time in times)
    assert 1 <= at_once <= CATCH_UP_SECONDS * 100 + 2
    assert times[-1] - times[0] == pytest.approx((20 - at_once) / 100, abs=0.02)


def test_a_stop_ends_the_wait_for_the_next_turn() -> None:
    async def work() -> tuple[bool, bool, float]:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        pace = Pace(0.01, stop)
        began = loop.time()
        first = await pace.turn()
        loop.call_later(3, stop.set)
        return first, await pace.turn(), loop.time() - began

    assert on_a_fake_clock(work) == (True, False, 3)
