"""The tasks that run handlers: as many at once as allowed, none asleep while work waits, and the event loop's turn."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.gate import Gate
from rabbitdlq.consumer.slots import Slots
from rabbitdlq.consumer.workers import TURN, Workers


def delivery(number: int) -> Delivery:
    return cast(Delivery, number)


class Work:
    """What the workers are given to do: note who runs, and wait where told."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waits = True
        self.running = 0
        self.most = 0
        self.done: list[int] = []
        self.tasks: set[asyncio.Task[Any] | None] = set()

    async def __call__(self, each: Delivery) -> None:
        self.tasks.add(asyncio.current_task())
        self.running += 1
        self.most = max(self.most, self.running)
        if self.waits:
            await self.gate.wait()
        self.running -= 1
        self.done.append(cast(int, each))


NewWorkers = Callable[[int, Callable[[Delivery], Awaitable[None]]], Workers]


@pytest.fixture
async def new_workers() -> AsyncIterator[NewWorkers]:
    """Make workers that end with the test, however it ends: nothing but :meth:`Workers.end` ends them."""
    made: list[Workers] = []

    def make(concurrency: int, work: Callable[[Delivery], Awaitable[None]]) -> Workers:
        made.append(Workers(concurrency, work))
        return made[-1]

    yield make
    for workers in made:
        await workers.end(1)


async def settled() -> None:
    """Some turns of the event loop: enough for any chain of wakings here."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize("before_start", [True, False])
async def test_as_many_run_at_once_as_there_is_concurrency_and_the_others_follow(
    new_workers: NewWorkers, before_start: bool
) -> None:
    work = Work()
    workers = new_workers(8, work)
    if not before_start:
        workers.start()
        await settled()
    for number in range(20):
        workers.put(delivery(number))
    if before_start:
        workers.start()
    await settled()

    assert (work.running, work.done) == (8, [])
    assert not workers.idle.is_set()

    work.gate.set()
    await asyncio.wait_for(workers.idle.wait(), 5)
    assert sorted(work.done) == list(range(20))
    assert work.most == 8
    assert await workers.end(5) == 0


async def test_one_that_comes_while_others_wait_in_their_handlers_is_begun_at_once(new_workers: NewWorkers) -> None:
    work = Work()
    workers = new_workers(3, work)
    workers.start()
    for number in range(3):
        workers.put(delivery(number))
        await settled()
        assert work.running == number + 1


async def test_handlers_that_never_wait_are_run_by_one_task(new_workers: NewWorkers) -> None:
    work = Work()
    work.waits = False
    workers = new_workers(50, work)
    workers.start()
    await settled()
    for number in range(200):
        workers.put(delivery(number))
    await asyncio.wait_for(workers.idle.wait(), 5)

    assert work.done == list(range(200))
    # its turn may end in between, then another one is awake
    assert len(work.tasks) <= 2


async def test_busy_handlers_leave_the_event_loop_its_turn(new_workers: NewWorkers) -> None:
    """Acks are written and heartbeats answered between them, however long the queue is."""
    turns: list[float] = []

    async def busy(_: Delivery) -> None:
        time.sleep(TURN)

    async def other() -> None:
        while True:
            turns.append(time.perf_counter())
            await asyncio.sleep(0)

    workers = new_workers(2, busy)
    for number in range(30):
        workers.put(delivery(number))
    beside = asyncio.create_task(other())
    workers.start()
    await asyncio.wait_for(workers.idle.wait(), 10)
    beside.cancel()

    assert len(turns) >= 10


async def test_what_nobody_has_begun_can_be_taken_back(new_workers: NewWorkers) -> None:
    work = Work()
    workers = new_workers(2, work)
    workers.start()
    for number in range(5):
        workers.put(delivery(number))
    await settled()

    assert workers.take_back() == [delivery(number) for number in (2, 3, 4)]
    assert not workers.idle.is_set()
    work.gate.set()
    await asyncio.wait_for(workers.idle.wait(), 5)
    assert work.done == [0, 1]


async def test_when_all_is_taken_back_they_are_idle(new_workers: NewWorkers) -> None:
    workers = new_workers(1, Work())
    workers.put(delivery(1))
    assert not workers.idle.is_set()
    workers.take_back()
    assert workers.idle.is_set()


async def test_a_handler_that_swallows_its_end_is_left_to_itself_and_takes_no_more(new_workers: NewWorkers) -> None:
    begun: list[int] = []
    gate = asyncio.Event()

    async def deaf(each: Delivery) -> None:
        begun.append(cast(int, each))
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue

    workers = new_workers(1, deaf)
    workers.start()
    workers.put(delivery(1))
    workers.put(delivery(2))
    await settled()

    assert await workers.end(0.05) == 1
    gate.set()
    await settled()
    assert begun == [1]


@pytest.mark.parametrize("fault", [RuntimeError, asyncio.CancelledError])
async def test_a_fault_in_the_work_ends_no_worker(new_workers: NewWorkers, fault: type[BaseException]) -> None:
    """A line of the log that failed ended the worker, and the consumer stayed connected and did nothing.

    So would a cancellation that is none of ours: the library cancels what waits for a line that was lost.
    """
    done: list[int] = []

    async def faulty(each: Delivery) -> None:
        if cast(int, each) < 5:
            raise fault
        done.append(cast(int, each))

    workers = new_workers(2, faulty)
    workers.start()
    for number in range(8):
        workers.put(delivery(number))
    await asyncio.wait_for(workers.idle.wait(), 5)

    assert done == [5, 6, 7]


async def test_whom_the_gate_calls_when_one_has_ended_finds_somebody_free(new_workers: NewWorkers) -> None:
    """It asks whether anybody wants to begin: a worker that still counted as busy would be told of by nobody later."""
    work = Work()
    work.waits = False
    workers = new_workers(1, work)
    wanted: list[bool] = []

    class Turnstile:
        """Lets one in, and the next only when it is asked again."""

        inside = False

        def enter(self, _: Delivery) -> bool:
            if self.inside:
                return False
            self.inside = True
            return True

        def begun(self) -> None:
            pass

        def leave(self, _: Delivery) -> None:
            self.inside = False
            wanted.append(workers.wants)

    workers.gate = cast(Any, Turnstile())
    for number in range(2):
        workers.put(delivery(number))
    workers.start()
    await settled()
    assert (work.done, wanted) == ([0, 1], [True, False])


async def test_another_takes_the_place_of_one_that_was_given_up_and_its_work_counts_until_it_is_settled(
    new_workers: NewWorkers,
) -> None:
    deaf, settling = asyncio.Event(), asyncio.Event()
    begun: list[int] = []
    tasks: list[asyncio.Task[Any]] = []

    async def handler(each: Delivery) -> None:
        begun.append(cast(int, each))
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        await (deaf.wait() if each == delivery(0) else asyncio.Event().wait())

    async def settle() -> None:
        await settling.wait()

    workers = new_workers(1, handler)
    workers.start()
    workers.put(delivery(0))
    workers.put(delivery(1))
    await settled()
    assert begun == [0]

    workers.abandon(tasks[0], asyncio.create_task(settle()))
    await settled()
    assert begun == [0, 1]
    assert (workers.busy, workers.abandoned) == (2, 1)
    settling.set()
    await settled()
    assert (workers.busy, workers.abandoned) == (1, 1)

    workers.put(delivery(2))
    deaf.set()
    await settled()
    assert tasks[0].done(), "it takes no more when it comes back: its place is taken"
    assert begun == [0, 1]
    assert (workers.busy, workers.abandoned) == (1, 0)


class Keeping:
    """Work whose even deliveries wait before they are settled."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.settle = asyncio.Event()
        self.others = asyncio.Event()
        self.tasks: dict[int, asyncio.Task[Any]] = {}

    async def __call__(self, each: Delivery) -> None:
        number = cast(int, each)
        self.begun.append(number)
        task = asyncio.current_task()
        assert task is not None
        self.tasks[number] = task
        await (self.settle if number % 2 == 0 else self.others).wait()


async def test_another_takes_the_place_of_one_that_waits_to_be_settled_and_as_many_run_afterwards_as_before(
    new_workers: NewWorkers,
) -> None:
    """Under an alarm what was to be postponed held every worker, and consuming stopped."""
    work = Keeping()
    workers = new_workers(1, work)
    workers.start()
    for number in (0, 1, 3):
        workers.put(delivery(number))
    await settled()
    for _ in range(2):
        workers.step_aside(work.tasks[0])
        await settled()
        assert work.begun == [0, 1], "one takes its place, and no more than one"
    assert (workers.busy, workers.waiting, workers.wants) == (1, 1, False)

    work.settle.set()
    await settled()
    assert work.tasks[0].done(), "its place is taken"
    assert work.begun == [0, 1], "as many at once as before"
    work.settle.clear()
    work.others.set()
    await settled()
    assert (work.begun, workers.busy) == ([0, 1, 3], 0)
    assert workers.idle.is_set()


async def test_what_waits_to_be_settled_keeps_them_from_being_idle_and_is_ended_with_them(
    new_workers: NewWorkers,
) -> None:
    work = Keeping()
    workers = new_workers(2, work)
    workers.start()
    workers.put(delivery(0))
    await settled()
    workers.step_aside(work.tasks[0])
    workers.put(delivery(1))
    work.others.set()
    await settled()
    assert (work.begun, workers.busy, workers.waiting) == ([0, 1], 0, 0)
    assert not workers.idle.is_set(), "it is not settled"

    assert await workers.end(5) == 0
    assert work.tasks[0].cancelled()
    assert workers.idle.is_set()


async def test_what_waits_to_be_settled_holds_no_slot(new_workers: NewWorkers) -> None:
    kept, good = Keeping(), Keeping()
    shares = Slots(1, "strict", [1, 1]).shares
    both = [new_workers(4, work) for work in (kept, good)]
    for workers, share in zip(both, shares, strict=True):
        workers.gate = Gate(lambda workers=workers: workers.wants, workers.nudge, share=share)  # type: ignore[misc]
        workers.start()
    await settled()
    both[0].put(delivery(0))
    both[0].put(delivery(1))
    both[1].put(delivery(3))
    await settled()
    assert (kept.begun, good.begun) == ([0], [])

    both[0].step_aside(kept.tasks[0])
    await settled()
    assert (kept.begun, good.begun) == ([0], [3]), "it goes round"
    kept.others.set()
    good.others.set()
    await settled()
    assert (kept.begun, [share.running for share in shares]) == ([0, 1], [0, 0])
    kept.settle.set()
    await settled()
    assert [share.running for share in shares] == [0, 0]
    assert all(workers.idle.is_set() for workers in both)


@pytest.mark.parametrize("ends", ["the handler first", "the settling first"])
async def test_one_that_was_given_up_and_whose_message_waits_to_be_settled_holds_no_slot_either(
    new_workers: NewWorkers, ends: str
) -> None:
    work, settle = Keeping(), asyncio.Event()
    (share,) = Slots(1, "strict", [1]).shares
    workers = new_workers(1, work)
    workers.gate = Gate(lambda: workers.wants, workers.nudge, share=share)
    workers.start()
    for number in (0, 1, 3):
        workers.put(delivery(number))
    await settled()
    settles = asyncio.create_task(settle.wait())
    workers.abandon(work.tasks[0], settles)
    if ends == "the handler first":
        work.settle.set()
        await settled()
    assert work.begun == [0]
    workers.step_aside(settles)
    await settled()
    assert (work.begun, workers.busy, share.running) == ([0, 1], 1, 1)
    settle.set()
    work.settle.set()
    await settled()
    assert (work.begun, workers.busy, workers.abandoned) == ([0, 1], 1, 0)
    work.others.set()
    await settled()
    assert (work.begun, workers.busy, share.running) == ([0, 1, 3], 0, 0)
    assert workers.idle.is_set()
