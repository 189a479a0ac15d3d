"""One delivery brought to its end, without a broker: whatever fails on the way, the broker finds the message again."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from rabbitdlq import names
from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.attempt import Attempt
from rabbitdlq.consumer.classify import Classifier
from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.consumer.once import Once
from rabbitdlq.consumer.outcome import Outcome
from rabbitdlq.consumer.processor import Processor
from rabbitdlq.consumer.suspects import Suspects
from rabbitdlq.errors import Drop
from rabbitdlq.idempotency import MemoryStore
from rabbitdlq.message import Message
from rabbitdlq.wire import Headers, Properties
from tests.unit.test_put_into_rungs import death
from tests.unit.test_settling import ORDERS, Desk

KEY, MINUTE = "orders:17", timedelta(minutes=1)


async def fine(_: Message) -> None: ...


class Turns:
    """Suspects that were let through before the test, and are never convicted; notes whose turn is over."""

    def __init__(self) -> None:
        self.current: Delivery | None = None
        self.overdue: set[Delivery] = set()
        self.over: list[Delivery] = []
        self.last = False
        self.told: list[str] = []

    def done(self, delivery: Delivery) -> None:
        self.over.append(delivery)

    def look_at_the_clock(self, now: float) -> None:
        pass

    async def convicted(self, *_: object) -> None:
        pass

    def on_its_last(self, _: Delivery, __: Message) -> bool:
        return self.last

    async def begin(self, delivery: Delivery, message: Message) -> None:
        self.told.append("begin")

    async def end(self, delivery: Delivery) -> None:
        self.told.append("end")


class Station(Desk):
    """A processor and its settler, whose every step is noted."""

    def __init__(
        self,
        handler: Callable[[Message], Awaitable[None]],
        *,
        store: MemoryStore | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        super().__init__()
        timeouts = timeouts or Timeouts()
        self.turns = Turns()
        self.processor = Processor(
            ORDERS,
            Attempt(handler, Classifier()),
            self.settler,
            cast(Suspects, self.turns),
            self.index,
            self.stopping.is_set,
            None,
            timeouts,
            None if store is None else Once(store, None, None, timeouts),
        )

    def break_settling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have a fault in the settler."""

        async def fault(_: Delivery, __: Message, ___: Outcome) -> None:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(self.settler, "settle", fault)

    async def process(self, delivery: Delivery | None = None) -> None:
        await asyncio.wait_for(self.processor.process(delivery or self.noted.delivery()), 5)


class TestAFaultOfOurs:
    async def test_leaves_the_message_to_the_ladder_and_the_worker_alive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        station = Station(fine)
        station.break_settling(monkeypatch)
        with capture_logs() as logs:
            await station.process()
        assert station.noted.steps == ["dead"]
        assert [line["event"] for line in logs] == ["delivery_unsettled"]

    async def test_so_it_does_in_properties_that_cannot_be_read(self) -> None:
        station = Station(fine)
        broken = station.noted.delivery()
        broken._raw = b"\x80"
        await station.process(broken)
        assert station.noted.steps == ["dead"]

    async def test_ends_the_turn_of_a_suspect_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        station = Station(fine)
        station.break_settling(monkeypatch)
        station.turns.current = delivery = station.noted.delivery(redelivered=True)
        await station.process(delivery)
        assert station.turns.over == [delivery]

    async def test_leaves_the_message_of_a_handler_that_was_given_up_to_the_ladder(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        over = asyncio.Event()

        async def deaf(_: Message) -> None:
            while not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    continue

        limit = timedelta(milliseconds=1)
        station = Station(deaf, timeouts=Timeouts(limit, limit))
        station.break_settling(monkeypatch)
        working = asyncio.create_task(station.process())
        try:
            async with asyncio.timeout(5):
                while not station.noted.steps:
                    station.processor.look_at_the_clock()
                    await asyncio.sleep(0.001)
            assert station.noted.steps == ["dead"]
        finally:
            over.set()
            await working
        assert station.noted.steps == ["dead"], "and its end settles nothing"


class TestADrop:
    async def test_is_settled_once_and_its_key_is_done(self) -> None:
        async def drop(_: Message) -> None:
            raise Drop("no use")

        store = MemoryStore()
        await store.open()
        station = Station(drop, store=store)
        await station.process()
        assert station.noted.steps == ["journal: dropped", "ack"]
        assert (station.processor.summary.dropped, station.processor.summary.too_late) == (1, 0)
        assert (await store.claim(KEY, MINUTE)).state == "done"

    async def test_that_comes_too_late_gives_its_claim_back(self) -> None:
        """The broker delivers it again: somebody has to ask the handler, or nobody would ever tell the journal."""
        store = MemoryStore()
        await store.open()

        async def drop(_: Message) -> None:
            station.noted.is_closed = True
            raise Drop("no use")

        station = Station(drop, store=store)
        await station.process()
        assert station.noted.steps == []
        assert (station.processor.summary.dropped, station.processor.summary.too_late) == (0, 1)
        assert (await store.claim(KEY, MINUTE)).state == "new"


async def test_a_suspect_whose_turn_did_not_come_in_time_is_postponed_and_its_handler_does_not_run() -> None:
    async def never(_: Message) -> None:
        raise AssertionError

    station = Station(never)
    delivery = station.noted.delivery(redelivered=True)
    station.turns.overdue.add(delivery)
    await station.process(delivery)
    assert station.noted.steps == ["published: orders", "ack"]
    assert station.processor.summary.postponed == 1
    assert names.SUSPECT in station.noted.published[0].properties.table


class TestTheLastBeginningOfASuspect:
    """Nothing else begins meanwhile: it must not last longer than it has to."""

    def station(self, handler: Callable[[Message], Awaitable[None]], **options: Any) -> tuple[Station, Delivery]:
        station = Station(handler, **options)
        station.turns.last = True
        station.turns.current = delivery = station.noted.delivery(redelivered=True)
        return station, delivery

    async def test_ends_when_its_handler_is_given_up(self) -> None:
        over, seen = asyncio.Event(), list[str]()

        async def deaf(message: Message) -> None:
            seen.append(message.id)
            while len(seen) == 1 and not over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await over.wait()

        limit = timedelta(milliseconds=1)
        station, delivery = self.station(deaf, timeouts=Timeouts(limit, limit))
        working = asyncio.create_task(station.process(delivery))
        try:
            async with asyncio.timeout(5):
                while not seen:
                    await asyncio.sleep(0.001)
                assert station.processor.held_up
                while station.processor.held_up:
                    station.processor.look_at_the_clock()
                    await asyncio.sleep(0.001)
            await station.process(station.noted.delivery())
            assert len(seen) == 2, "the next one runs"
        finally:
            over.set()
            await working

    async def test_makes_nobody_wait_where_its_work_is_claimed_elsewhere(self) -> None:
        store = MemoryStore()
        await store.open()
        await store.claim(KEY, MINUTE)
        station, delivery = self.station(fine, store=store)
        with capture_logs() as logs:
            await station.process(delivery)
        assert station.processor.summary.postponed == 1
        assert "message_runs_alone" not in [line["event"] for line in logs]

    async def test_is_told_of_as_ended_where_it_was_dropped_after_the_loop_had_stood_still(self) -> None:
        async def drop(_: Message) -> None:
            raise Drop("no use")

        store = MemoryStore()
        await store.open()
        station, delivery = self.station(drop, store=store)
        station.processor.stood_still_at = lambda: float("inf")
        await station.process(delivery)
        assert station.turns.told == ["begin", "end"]

    async def test_one_that_is_lost_after_the_loop_had_stood_still_has_not_ended(self) -> None:
        async def lost(_: Message) -> None:
            station.noted.is_closed = True

        station, delivery = self.station(lost)
        station.processor.stood_still_at = lambda: float("inf")
        await station.process(delivery)
        assert station.turns.told == ["begin"]


WAITED = death(ORDERS.rungs[1].queue, "expired")
NACKED = death("orders", "rejected")


@pytest.mark.parametrize(
    ("told", "deaths", "attempt"),
    [
        (0, [WAITED], 1),
        (1, [WAITED], 2),
        (1, [death(ORDERS.rungs[0].queue, "expired"), NACKED, WAITED], 3),
        (99, [WAITED], ORDERS.max_attempts + 1),
        (-1, [WAITED], 3),
        ("x", [WAITED], 3),
        (None, [WAITED], 3),
        (1, [WAITED, NACKED], 3),
        (1, [], 1),
    ],
)
async def test_what_a_message_says_of_its_failures_counts_on_one_that_was_put_into_a_rung_and_within_the_ladder(
    told: object, deaths: list[dict[str, Any]], attempt: int
) -> None:
    """Anybody may publish a header of that name, and into the return exchange."""
    seen: list[int] = []

    async def handler(message: Message) -> None:
        seen.append(message.attempt)

    station = Station(handler)
    headers = Headers({"x-death": deaths} | ({} if told is None else {names.FAILURES: told}))
    properties = Properties(message_id="17", headers=headers)
    key = ORDERS.rungs[1].key
    await station.process(station.noted.delivery(properties, exchange=ORDERS.return_exchange, routing_key=key))
    assert seen == [attempt]
    await station.process(station.noted.delivery(properties))
    assert seen[1:] == [1], "on any other way it counts nothing"
