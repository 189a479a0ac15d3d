"""The tasks that run handlers: as many as there is concurrency, and none more for a message."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import structlog

from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.gate import Gate

__all__ = ["Workers"]

log = structlog.stdlib.get_logger(__name__)

#: seconds after which a worker whose handlers never wait lets the event loop have its turn
TURN = 0.002


class Workers:
    """Long-lived tasks that take waiting deliveries one after the other.

    A delivery wakes one sleeping worker. That one wakes the next only if more is waiting, which finds nothing left
    unless the first had to wait inside its handler: handlers that never wait cost no switch of tasks.
    """

    def __init__(self, concurrency: int, work: Callable[[Delivery], Awaitable[None]]) -> None:
        self._work = work
        self._concurrency = concurrency
        self._waiting: deque[Delivery] = deque()
        self._sleeping: list[asyncio.Future[None]] = []
        self._waking = False
        self._busy = 0
        self._ended = False
        self._tasks: list[asyncio.Task[None]] = []
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._settling: set[asyncio.Task[Any]] = set()
        #: what every delivery has to pass, if there is anything to pass
        self.gate: Gate | None = None
        self._entered: dict[asyncio.Task[Any] | None, tuple[Gate, Delivery]] = {}
        #: set while nothing waits and nobody works
        self.idle = asyncio.Event()
        self.idle.set()

    def start(self) -> None:
        """Make the tasks."""
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self._concurrency)]

    def put(self, delivery: Delivery) -> None:
        """Let one of them take it."""
        self._waiting.append(delivery)
        self.idle.clear()
        if self._sleeping and not self._waking:
            self._wake()

    def nudge(self) -> None:
        """The gate may be open again: let one of them try."""
        if self.wants and self._sleeping and not self._waking:
            self._wake()

    @property
    def wants(self) -> bool:
        """Whether something waits and somebody is free to begin it."""
        return bool(self._waiting) and self._busy < self._concurrency and not self._ended

    @property
    def waiting(self) -> int:
        """How many nobody has begun."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """How many are in work, or being settled."""
        return self._busy

    @property
    def abandoned(self) -> int:
        """How many do not come back from work that is settled."""
        return len(self._abandoned)

    def take_back(self) -> list[Delivery]:
        """Those that nobody has begun."""
        waiting = list(self._waiting)
        self._waiting.clear()
        if self.gate is not None:
            self.gate.begun()
        self._note_idle()
        return waiting

    def abandon(self, task: asyncio.Task[Any], settling: asyncio.Task[Any]) -> None:
        """Let another take the place of a task that does not come back from its work; ``settling`` ends that work."""
        self._abandoned.add(task)
        self._tasks.append(asyncio.create_task(self._run()))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        settling.add_done_callback(lambda _: self._freed(task))

    def _freed(self, task: asyncio.Task[Any] | None) -> None:
        self._busy -= 1  # first: whom the gate calls asks whether somebody is free
        if self._entered and (entered := self._entered.pop(task, None)) is not None:
            gate, delivery = entered
            gate.leave(delivery)
        self._note_idle()

    async def end(self, within: float) -> int:
        """Cancel them all; gives how many had not ended in that many seconds and are left to themselves."""
        self._ended = True
        for task in self._tasks:
            task.cancel()
        given_up = {task for task in self._abandoned if not task.done()}  # they have been waited for
        waited_for = set(self._tasks) - given_up
        deaf = (await asyncio.wait(waited_for, timeout=within))[1] if waited_for else set()
        for task in deaf | given_up:
            # asyncio.run() would cancel them once more at its end, and wait for ever
            asyncio.tasks._unregister_task(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined] # they have been told of
        return len(deaf) + len(given_up)

    def _wake(self) -> None:
        while self._sleeping:
            woken = self._sleeping.pop()
            if not woken.done():
                self._waking = True
                woken.set_result(None)
                return

    def _note_idle(self) -> None:
        if not self._busy and not self._waiting:
            self.idle.set()

    async def _run(self) -> None:
        waiting, me = self._waiting, asyncio.current_task()
        turn_ends = perf_counter() + TURN
        while not self._ended:  # a handler may swallow the cancellation that ends its worker
            gate = self.gate
            if not waiting or (gate is not None and not gate.enter(waiting[0])):
                await self._sleep()
                turn_ends = perf_counter() + TURN
                continue
            delivery = waiting.popleft()
            if waiting and self._sleeping and not self._waking:
                self._wake()
            self._busy += 1
            if gate is not None:
                self._entered[me] = (gate, delivery)
                gate.begun()
            try:
                await self._work(delivery)
            except (Exception, asyncio.CancelledError):  # whatever it is, the next delivery has to be worked on
                if self._ended:
                    raise
                with contextlib.suppress(Exception):
                    log.exception("worker_failed", delivery_tag=delivery.tag)
            finally:
                if me not in self._abandoned:
                    self._freed(me)
            if me in self._abandoned:
                self._abandoned.discard(me)
                self._tasks = [task for task in self._tasks if task is not me]
                return
            if perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = perf_counter() + TURN

    async def _sleep(self) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append(woken)
        try:
            await woken
        finally:
            if not woken.cancelled():
                self._waking = False
