"""Who is at work in this process: one of them may have to be alone, so that a crash can only be its own.

A process dies with all its handlers, whichever consumers they belong to. Nobody can tell afterwards which of them it
was, unless only one was at work.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary, WeakSet

__all__ = ["Company"]


class _Member(Protocol):
    @property
    def at_work(self) -> int: ...


class Company:
    """All consumers of one event loop, which most processes have one of."""

    _of_loops: ClassVar["WeakKeyDictionary[asyncio.AbstractEventLoop, Company]"] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._members: WeakSet[_Member] = WeakSet()
        self._turn = asyncio.Lock()
        self._open, self._changed = asyncio.Event(), asyncio.Event()
        #: who is alone, or waits for it: nobody else begins anything
        self.holder: object | None = None

    @classmethod
    def of_this_loop(cls) -> "Company":
        """The one that all consumers of the running event loop share."""
        return cls._of_loops.setdefault(asyncio.get_running_loop(), cls())

    def join(self, member: _Member) -> None:
        """Count its handlers, as long as it is there."""
        self._members.add(member)

    def leave(self, member: _Member) -> None:
        """Its handlers are waited for no longer, though some may run on."""
        self._members.discard(member)
        self._changed.set()

    async def opened(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Wait until nobody has to be alone, or one is to stop."""
        while self.holder is not None and not stopping():
            await self._open.wait()

    def ask_again(self) -> None:
        """Somebody is to stop: let those that wait see it."""
        self._open.set()
        if self.holder is not None:
            self._open.clear()
        self._changed.set()

    def let_go(self, holder: object) -> None:
        """It need not be alone any longer; of anybody else this changes nothing."""
        if self.holder is holder:
            self.holder = None
            self._turn.release()  # first: who is next to be alone comes before all others
            self._open.set()

    def left(self) -> None:
        """A handler has ended; to be told while there is a :attr:`holder`."""
        self._changed.set()

    @asynccontextmanager
    async def alone(
        self, holder: object, within: float, stopping: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[bool]:
        """Let nobody else begin, and wait until all others have ended, or so many seconds are over, or one is to stop.

        Gives False where another one had its turn all that time. Whoever is inside may be let go before its end.
        """
        deadline = asyncio.get_running_loop().time() + within
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            yield False
            return
        self.holder = holder
        self._open.clear()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    while any(member.at_work for member in self._members) and not stopping():
                        self._changed.clear()
                        await self._changed.wait()
            yield True
        finally:
            self.let_go(holder)
