"""Who gets a slot: consumers as pure values, and as real workers that share slots."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.breaker import Breaker, Circuit
from rabbitdlq.consumer.gate import Gate
from rabbitdlq.consumer.rate import Pacer
from rabbitdlq.consumer.slots import Order, Slots
from rabbitdlq.consumer.workers import Workers
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.rates import Rate
from tests.unit.strategies import quick


def turns(slots: Slots, wanting: set[int], count: int) -> list[int]:
    """Who is next, so many times, one slot at a time."""
    for place, share in enumerate(slots.shares):
        share.wants = lambda place=place: place in wanting  # type: ignore[misc]
    went = []
    for _ in range(count):
        place = next(place for place in wanting if slots.shares[place].enter())
        slots.shares[place].running -= 1
        went.append(place)
    return went


def test_strictly_the_highest_priority_is_next_and_equals_take_turns() -> None:
    slots = Slots(3, "strict", [1, 5, 5])
    assert set(turns(slots, {0, 1, 2}, 10)) == {1, 2}
    assert turns(slots, {1, 2}, 6) in ([1, 2] * 3, [2, 1] * 3)
    assert turns(slots, {0}, 3) == [0] * 3


@pytest.mark.parametrize("priorities", [(1, 1), (1, 3), (2, 5), (1, 2, 7)])
def test_by_weight_everybody_gets_the_share_of_its_priority(priorities: tuple[int, ...]) -> None:
    slots = Slots(len(priorities), "weighted", priorities)
    went = turns(slots, set(range(len(priorities))), 10 * sum(priorities))
    assert [went.count(place) for place in range(len(priorities))] == [10 * priority for priority in priorities]


def test_who_was_idle_has_saved_up_nothing() -> None:
    slots = Slots(2, "weighted", [1, 1])
    turns(slots, {0}, 100)
    assert turns(slots, {0, 1}, 10).count(1) <= 6


def test_one_slot_for_each_more_important_one_is_kept_free() -> None:
    slots = Slots(4, "strict", [1, 2, 3])
    low, middle, high = slots.shares
    assert [low.enter() for _ in range(4)] == [True, True, False, False]
    assert [middle.enter() for _ in range(3)] == [True, False, False]
    assert [high.enter() for _ in range(3)] == [True, False, False]
    low.leave()
    assert high.enter()


@settings(quick, max_examples=100)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 6),
    st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=100),
    st.sampled_from(["strict", "weighted"]),
)
def test_never_more_than_the_slots_and_always_one_for_the_more_important(
    priorities: list[int], more: int, steps: list[tuple[bool, int]], order: Order
) -> None:
    count = sum(each > min(priorities) for each in priorities) + 1 + more
    slots = Slots(count, order, priorities)
    for enters, place in steps:
        share = slots.shares[place % len(priorities)]
        if enters:
            share.enter()
        elif share.running:
            share.leave()
        assert sum(each.running for each in slots.shares) <= count
        for each in slots.shares:
            at_most = [other for other in slots.shares if other.priority <= each.priority]
            above = len(priorities) - len(at_most)
            assert sum(other.running for other in at_most) <= count - above


@pytest.mark.parametrize(
    ("count", "order", "priorities", "reason"),
    [
        (1, "strict", [1, 2], "slots: 1 is too few: .* at least 2"),
        (0, "strict", [1], "at least 1"),
        (3, "fair", [1], "'fair' is neither"),
        (3, "strict", [0], "0 is no whole number"),
        (3, "strict", [True], "True is no whole number"),
    ],
)
def test_what_cannot_be_shared_is_told(count: int, order: Order, priorities: list[int], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Slots(count, order, priorities)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Crew:
    """Workers with a gate; each delivery waits until it is let go."""

    def __init__(self, concurrency: int) -> None:
        self.begun: list[int] = []
        self.release = asyncio.Semaphore(0)
        self.workers = Workers(concurrency, self.work)

    async def work(self, delivery: Delivery) -> None:
        self.begun.append(cast(int, delivery))
        await self.release.acquire()

    def put(self, count: int) -> None:
        for number in range(count):
            self.workers.put(cast(Delivery, number))

    def gate(self, **what: object) -> Gate:
        gate = Gate(lambda: self.workers.wants, self.workers.nudge, **what)  # type: ignore[arg-type]
        self.workers.gate = gate
        return gate


NewCrew = Callable[[int], Crew]


@pytest.fixture
async def new_crew() -> AsyncIterator[NewCrew]:
    """Make crews whose workers end with the test, however it ends: nothing but :meth:`Workers.end` ends them."""
    crews: list[Crew] = []

    def make(concurrency: int) -> Crew:
        crews.append(Crew(concurrency))
        return crews[-1]

    yield make
    for crew in crews:
        if crew.workers.gate is not None:
            crew.workers.gate.close()
        await crew.workers.end(1)


async def settled() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_workers_of_two_consumers_share_slots_and_nobody_sleeps_while_one_is_free(new_crew: NewCrew) -> None:
    slots = Slots(3, "strict", [1, 2])
    low, high = new_crew(5), new_crew(5)
    low.gate(share=slots.shares[0])
    high.gate(share=slots.shares[1])
    for crew in (low, high):
        crew.workers.start()
    low.put(10)
    await settled()
    assert len(low.begun) == 2, "one slot is kept"
    high.put(4)
    await settled()
    assert len(high.begun) == 1
    for done in range(1, 3):
        low.release.release()
        await settled()
        assert (len(low.begun), len(high.begun)) == (2, 1 + done), "freed slots go to the more important one"
    for _ in range(4):
        high.release.release()
    await settled()
    assert (len(low.begun), len(high.begun)) == (4, 4)
    for _ in range(8):
        low.release.release()
    await settled()
    assert low.workers.idle.is_set()


async def test_what_is_taken_back_leaves_its_turn_to_the_others(new_crew: NewCrew) -> None:
    slots = Slots(2, "strict", [1, 2])
    low, high = new_crew(2), new_crew(3)
    low.gate(share=slots.shares[0])
    high.gate(share=slots.shares[1])
    for crew in (low, high):
        crew.workers.start()
    high.put(3)
    low.put(1)
    await settled()
    assert (len(low.begun), len(high.begun)) == (0, 2)
    assert len(high.workers.take_back()) == 1
    high.release.release()
    await settled()
    assert len(low.begun) == 1


async def test_while_the_breaker_is_open_nothing_is_begun_and_then_one_probe(new_crew: NewCrew) -> None:
    crew, clock = new_crew(3), Clock()
    circuit = Circuit(Breaker(min_attempts=1), clock, lambda: 1.0)
    crew.gate(circuit=circuit)
    crew.workers.start()
    circuit.ended(object(), "x", failed=True)
    crew.put(5)
    await settled()
    assert crew.begun == []
    clock.now += 5
    circuit.probe()
    crew.workers.nudge()
    await settled()
    assert crew.begun == [0]
    crew.release.release()  # it ended without a verdict: the next one takes its place
    await settled()
    assert crew.begun == [0, 1]


async def test_a_rate_lets_them_begin_one_after_the_other(new_crew: NewCrew) -> None:
    crew, loop = new_crew(5), asyncio.get_running_loop()
    began = loop.time()
    crew.gate(pacer=Pacer(Rate(50), loop.time))
    crew.workers.start()
    crew.put(4)
    async with asyncio.timeout(5):
        while len(crew.begun) < 4:
            await asyncio.sleep(0.005)
    assert loop.time() - began >= 3 / 50


async def test_what_is_taken_back_before_anybody_could_begin_it_lets_the_others_in_at_once(new_crew: NewCrew) -> None:
    slots = Slots(2, "strict", [1, 2])
    low, high = new_crew(2), new_crew(1)
    low.gate(share=slots.shares[0])
    high.gate(share=slots.shares[1])
    low.workers.start()  # nobody of the other crew is there to begin anything
    high.put(1)
    low.put(1)
    await settled()
    assert low.begun == []
    high.workers.take_back()
    await settled()
    assert low.begun == [0]


async def test_who_was_refused_is_told_when_the_more_important_one_has_begun(new_crew: NewCrew) -> None:
    slots = Slots(3, "strict", [1, 2])
    low, high = new_crew(2), new_crew(2)
    low.gate(share=slots.shares[0])
    high.gate(share=slots.shares[1])
    for crew in (low, high):
        crew.workers.start()
    await settled()
    low.put(1)
    high.put(1)
    await settled()
    assert (len(low.begun), len(high.begun)) == (1, 1)


async def test_one_whose_workers_are_all_busy_keeps_no_slot_from_the_others(new_crew: NewCrew) -> None:
    slots = Slots(3, "strict", [1, 2])
    low, high = new_crew(2), new_crew(1)
    low.gate(share=slots.shares[0])
    high.gate(share=slots.shares[1])
    for crew in (low, high):
        crew.workers.start()
    high.put(2)
    await settled()
    low.put(2)
    await settled()
    assert (len(low.begun), len(high.begun)) == (2, 1)


async def test_one_whose_breaker_is_open_keeps_no_slot_from_the_others(new_crew: NewCrew) -> None:
    slots = Slots(2, "strict", [1, 2])
    low, high = new_crew(2), new_crew(2)
    circuit = Circuit(Breaker(min_attempts=1), Clock(), lambda: 1.0)
    low.gate(share=slots.shares[0])
    high.gate(share=slots.shares[1], circuit=circuit)
    for crew in (low, high):
        crew.workers.start()
    circuit.ended(object(), "x", failed=True)
    high.put(1)
    low.put(1)
    await settled()
    assert (len(low.begun), len(high.begun)) == (1, 0)


async def test_one_that_waits_for_its_rate_holds_no_slot(new_crew: NewCrew) -> None:
    slots = Slots(2, "strict", [1, 2])
    low, high = new_crew(2), new_crew(2)
    low.gate(share=slots.shares[0])
    high.gate(share=slots.shares[1], pacer=Pacer(Rate(0.5), Clock()))
    for crew in (low, high):
        crew.workers.start()
    high.put(2)
    await settled()
    high.release.release()
    await settled()
    assert slots.shares[1].running == 0
    low.put(1)
    await settled()
    assert (len(low.begun), len(high.begun)) == (1, 1)
