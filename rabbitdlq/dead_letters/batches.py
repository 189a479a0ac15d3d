"""Letters on their way through an operation: in batches that the journal is told of first, at a pace, until stopped."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rabbitdlq.dead_letters.run_log import RunLog

__all__ = ["Batches", "Pace"]

T = TypeVar("T")

#: letters that are named in the journal together before they are sent: what a crash leaves in doubt
BATCH = 200
#: turns of the event loop in which what the journal is told goes out: one for the event, one for the message it is in
TURNS = 2
#: an event loop wakes up a millisecond late, which is several letters of a fast pace: so much is made up for
CATCH_UP_SECONDS = 0.05


class Pace:
    """At most so many a second, evenly; without a rate as fast as it goes."""

    def __init__(self, rate: float | None, stop: asyncio.Event) -> None:
        self.rate = rate
        self._stop = stop
        self._next: float | None = None

    async def turn(self) -> bool:
        """Return when the next letter may go; False where the operation was stopped instead."""
        if self._stop.is_set():
            return False
        if self.rate is None:
            return True
        clock = asyncio.get_running_loop().time
        self._next = clock() if self._next is None else max(self._next, clock() - CATCH_UP_SECONDS)
        while (left := self._next - clock()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._stop.wait()
                return False
            except TimeoutError:
                continue
        self._next += 1 / self.rate
        return True


@dataclass(slots=True)
class _Batch:
    number: int
    left: int
    undone: list[str] = field(default_factory=list)
    #: of one of its letters it is not known whether it arrived: only what finds the batch unsettled names it
    uncertain: bool = False


class Batches(Generic[T]):
    """Opens batches and settles them; used by one operation."""

    def __init__(
        self,
        log: RunLog,
        pace: Pace,
        key_of: Callable[[T], str],
        on_put_back: Callable[[T], None],
        halted: Callable[[], bool] = lambda: False,
    ) -> None:
        """``on_put_back`` is given the letters of a batch that were not begun because the operation was stopped, or
        ``halted`` by an error.
        """
        self._log = log
        self._pace = pace
        self._key_of = key_of
        self._on_put_back = on_put_back
        self._halted = halted
        self._under_way: dict[int, tuple[T, _Batch]] = {}
        self._place = 0

    @property
    def size(self) -> int:
        """Letters in a batch; what is slow is told of a second ahead."""
        return BATCH if self._pace.rate is None else max(1, min(BATCH, int(self._pace.rate)))

    async def open(self, letters: AsyncIterator[T]) -> AsyncIterator[T]:
        """The letters, one by one, each when its turn has come; they are counted from 1 for :meth:`ended`."""
        gathered: list[T] = []
        ahead: tuple[list[T], asyncio.Task[int]] | None = None
        async for letter in letters:
            gathered.append(letter)
            if len(gathered) >= self.size:
                # the journal is told of a batch before the one in front of it goes: told behind those letters it
                # answered behind them, and by then nothing was under way
                following, gathered = self._told(gathered), []
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                if ahead is not None:
                    async for each in self._opened(*ahead):
                        yield each
                ahead = following
        for last in (ahead, self._told(gathered) if gathered else None):
            if last is not None:
                async for each in self._opened(*last):
                    yield each

    def _told(self, letters: list[T]) -> "tuple[list[T], asyncio.Task[int]]":
        return letters, asyncio.create_task(self._log.sending([self._key_of(letter) for letter in letters]))

    async def _opened(self, letters: list[T], telling: "asyncio.Task[int]") -> AsyncIterator[T]:
        batch = _Batch(await telling, len(letters))
        for at, letter in enumerate(letters):
            if self._halted() or not await self._pace.turn():
                for rest in letters[at:]:
                    self._on_put_back(rest)
                    self._settle(rest, batch, done=False)
                return
            self._place += 1
            self._under_way[self._place] = (letter, batch)
            yield letter

    def at(self, place: int) -> T:
        """The letter that was the so-manieth."""
        return self._under_way[place][0]

    def ended(self, place: int, *, done: bool, certain: bool = True) -> None:
        """That letter is through; the last one of a batch settles it, unless something about it is uncertain."""
        letter, batch = self._under_way.pop(place)
        batch.uncertain = batch.uncertain or not certain
        self._settle(letter, batch, done=done)

    def _settle(self, letter: T, batch: _Batch, *, done: bool) -> None:
        batch.left -= 1
        if not done:
            batch.undone.append(self._key_of(letter))
        if not batch.left and not batch.uncertain:
            self._log.settled(batch.number, batch.undone)
