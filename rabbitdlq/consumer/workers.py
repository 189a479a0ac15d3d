"""The tasks that run handlers: as many as there is concurrency, and none more for a message."""

import asyncio
import contextlib
import contextvars
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
        self._context: contextvars.Context
        self._abandoned: set[asyncio.Task[Any]] = set()
        #: what settles the messages of abandoned ones, and whose
        self._settling: dict[asyncio.Task[Any], asyncio.Task[Any]] = {}
        #: those whose delivery is not settled yet, but waits to be
        self._aside: set[asyncio.Task[Any]] = set()
        #: others have taken the place of all these
        self._replaced: set[asyncio.Task[Any]] = set()
        #: what every delivery has to pass, if there is anything to pass
        self.gate: Gate | None = None
        self._entered: dict[asyncio.Task[Any], tuple[Gate, Delivery]] = {}
        #: set while nothing waits and nobody works
        self.idle = asyncio.Event()
        self.idle.set()

    def start(self) -> None:
        """Make the tasks."""
        self._context = contextvars.copy_context()
        for _ in range(self._concurrency):
            self._add()

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
        return bool(self._waiting) and self.busy < self._concurrency and not self._ended

    @property
    def waiting(self) -> int:
        """How many nobody has begun."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """How many are in work, or being settled, without those that stepped aside."""
        return self._busy - len(self._aside)

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
        self._replace(task)
        self._settling[settling] = task
        settling.add_done_callback(self._settling.pop)
        settling.add_done_callback(lambda _: self._freed(task))

    def step_aside(self, task: asyncio.Task[Any]) -> None:
        """Let another take the place of a task whose delivery waits, and may do so for long, before it is settled.

        The task goes on and ends with that delivery, which counts as unsettled until then.
        """
        worker = self._settling.get(task, task)
        if worker in self._aside or (worker is task and task not in self._tasks):
            return
        self._aside.add(worker)
        if worker is task:  # else it was abandoned, and another has its place
            self._replace(task)
        self._leave_gate(worker)

    def _replace(self, task: asyncio.Task[Any]) -> None:
        self._replaced.add(task)
        self._add()

    def _add(self) -> None:
        # in a context of its own: what one has bound says nothing of what another works on
        self._tasks.append(asyncio.create_task(self._run(), context=self._context.copy()))

    def _freed(self, task: asyncio.Task[Any]) -> None:
        self._busy -= 1  # first: whom the gate calls asks whether somebody is free
        if self._aside:
            self._aside.discard(task)
        if self._entered:
            self._leave_gate(task)
        self._note_idle()

    def _leave_gate(self, task: asyncio.Task[Any]) -> None:
        if (entered := self._entered.pop(task, None)) is not None:
            gate, delivery = entered
            gate.leave(delivery)

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
        assert me is not None
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
                replaced = me in self._replaced
                if me not in self._abandoned:
                    self._freed(me)
            if replaced:
                self._abandoned.discard(me)
                self._replaced.discard(me)
                self._tasks.remove(me)
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
