"""What a crash may have brought back: who is let through when, and who is blamed. With a journal of the test's own."""

import asyncio
import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from rabbitdlq.consumer.outcome import Park
from rabbitdlq.consumer.suspects import CERTAIN_STARTS, HELD_FOR, MAX_STARTS, READ_BACK, Suspects
from rabbitdlq.consumer.suspicion import Suspicion
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import BrokerUnavailable
from rabbitdlq.journal import Entry, HistoryIndex
from rabbitdlq.message import Message, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties, WireError

ORDERS = Topology("orders", ["5s"])
HARD_TIMEOUT = timedelta(minutes=15)


@dataclass(eq=False)
class Delivered:
    """A delivery, as far as suspects look at one."""

    name: str
    suspect: bool = True
    gone: bool = False
    broken: bool = False
    crashes: int = 1
    since: datetime | None = None

    def __repr__(self) -> str:
        return self.name


class Reader:
    """Notes how far back it is asked to read; ``down``: it cannot."""

    def __init__(self, *, down: bool = False) -> None:
        self.asked: list[timedelta] = []
        self.down = down

    async def read_back(self, since: datetime, timeout: timedelta) -> None:
        self.asked.append(datetime.now(UTC) - since)
        if self.down:
            raise BrokerUnavailable("gone")


class Settler:
    """Says of each delivery what it was made with."""

    def __init__(self) -> None:
        self.reader: Reader | None = Reader()
        self.suspicions = self

    def worth_asking(self, delivery: Delivered) -> bool:
        return True

    def of(self, delivery: Delivered) -> Suspicion:
        if delivery.broken:
            raise WireError("broken properties")
        return Suspicion(delivery.crashes if delivery.suspect else 0, delivery.since)


class Writer:
    """Takes events while it is up."""

    def __init__(self) -> None:
        self.up = True
        self.told: list[str] = []

    async def append(self, entry: Entry) -> bool:
        if self.up:
            self.told.append(entry.event)
        return self.up


class Lane:
    """Suspects, and what they were given and gave."""

    def __init__(self, lease: timedelta | None = None) -> None:
        self.settler, self.writer, self.index = Settler(), Writer(), HistoryIndex()
        self.through: list[Delivered] = []
        self.suspects = Suspects(
            ORDERS,
            cast(Any, self.settler),
            cast(Any, self.writer),
            self.index,
            "w",
            hard_timeout=HARD_TIMEOUT,
            lease=lease,
        )
        self.suspects.let_through = cast(Any, self.through.append)

    def put(self, *deliveries: Delivered) -> None:
        for each in deliveries:
            self.suspects.put(cast(Any, each))

    @property
    def current(self) -> Delivered | None:
        return cast(Delivered | None, self.suspects.current)

    def take_back(self) -> list[Delivered]:
        return cast(list[Delivered], self.suspects.take_back())

    @property
    def overdue(self) -> set[Delivered]:
        return cast(set[Delivered], self.suspects.overdue)

    def done(self, delivery: Delivered) -> None:
        self.suspects.done(cast(Any, delivery))

    async def convicted(self, message: Message, delivery: Delivered | None = None) -> Park | None:
        return await self.suspects.convicted(cast(Any, delivery or Delivered("x")), message)

    async def begin(self, delivery: Delivered, message: Message) -> None:
        await self.suspects.begin(cast(Any, delivery), message)

    async def end(self, delivery: Delivered) -> None:
        await self.suspects.end(cast(Any, delivery))


def message(id: str | None = "m", attempt: int = 1, body: bytes = b"1") -> Message:
    way = Arrival(attempt - 1, attempt - 1, "", "orders")
    return message_of(ORDERS, body, Properties(message_id=id), way, failures=attempt - 1)


class TestWhoseTurnItIs:
    async def test_one_at_a_time_in_the_order_they_came_and_everything_else_at_once(self) -> None:
        lane = Lane()
        a, b, c = (Delivered(name) for name in "abc")
        new, broken = Delivered("new", suspect=False), Delivered("broken", broken=True)
        lane.put(a, b, new, c, broken)
        assert lane.through == [a, new, broken]
        assert (lane.current, lane.suspects.held) == (a, 2)

        lane.done(new)
        lane.done(broken)
        assert lane.through == [a, new, broken], "the end of others makes room for nobody"
        lane.done(a)
        assert lane.through[3:] == [b]
        lane.done(b)
        assert lane.through[3:] == [b, c]
        lane.done(c)
        assert lane.current is None

    async def test_one_that_the_broker_has_taken_back_meanwhile_is_passed_over(self) -> None:
        lane = Lane()
        a, b, c = (Delivered(name) for name in "abc")
        lane.put(a, b, c)
        b.gone = True
        lane.done(a)
        assert lane.through == [a, c]
        assert (lane.current, lane.suspects.held) == (c, 0)

    async def test_those_that_wait_can_be_taken_back(self) -> None:
        lane = Lane()
        a, b, c = (Delivered(name) for name in "abc")
        lane.put(a, b, c)
        assert lane.take_back() == [b, c]
        assert lane.suspects.held == 0
        lane.done(a)
        assert lane.through == [a]

    async def test_whose_turn_does_not_come_in_time_is_let_through_as_overdue(self) -> None:
        """To be postponed: the one whose turn it is keeps it."""
        lane = Lane()
        a, gone, b, c = (Delivered(name) for name in ("a", "gone", "b", "c"))
        now = asyncio.get_running_loop().time()
        lane.put(a, gone, b, c)
        gone.gone = True
        lane.suspects.look_at_the_clock(now + HELD_FOR - 1)
        assert lane.through == [a]
        lane.suspects.look_at_the_clock(asyncio.get_running_loop().time() + HELD_FOR)
        assert lane.through == [a, b, c]
        assert lane.overdue == {b, c}
        lane.done(b)
        assert lane.overdue == {c}
        assert lane.current is a


class TestWhoIsBlamed:
    async def test_what_began_so_often_without_an_end_and_nothing_that_differs_from_it(self) -> None:
        lane = Lane()
        for _ in range(MAX_STARTS):
            assert await lane.convicted(message()) is None
            await lane.begin(Delivered("x"), message())
        park = await lane.convicted(message())
        assert park is not None
        assert park.reason == "crashed"
        for other in (
            message(attempt=2),
            message("other"),
            message(body=b"2"),
            dataclasses.replace(message(), lap=2),
        ):
            assert await lane.convicted(other) is None

    async def test_of_equal_messages_without_ids_only_beginnings_that_no_handler_at_work_can_have_made(self) -> None:
        lane = Lane()
        equal = message(None)
        await lane.begin(Delivered("x"), equal)
        (key,) = lane.index._starts
        for minutes in (20, 21):
            lane.index.add_start(key, f"w{minutes}", datetime.now(UTC) - timedelta(minutes=minutes))
        assert await lane.convicted(equal) is None, "the third began just now"
        lane.index.add_start(key, "w22", datetime.now(UTC) - HARD_TIMEOUT - timedelta(seconds=1))
        assert await lane.convicted(equal) is not None

    async def test_unless_there_are_many_or_the_queue_has_counted_as_many_crashes(self) -> None:
        """Else a killer without an id, which is started anew at once, takes its neighbours along."""
        lane = Lane()
        equal = message(id=None)
        await lane.begin(Delivered("x"), equal)
        (key,) = lane.index._starts
        for n in range(1, CERTAIN_STARTS):
            assert await lane.convicted(equal) is None
            assert (await lane.convicted(equal, Delivered("x", crashes=MAX_STARTS)) is not None) is (n >= MAX_STARTS)
            lane.index.add_start(key, f"w{n}", datetime.now(UTC))
        assert await lane.convicted(equal) is not None

    async def test_one_that_was_postponed_has_its_crashes_counted_here_up_to_the_limit_of_the_queue(self) -> None:
        """With each publish into a rung the broker begins anew. What was never postponed it counts itself."""
        lane = Lane()
        many = ORDERS.crash_limit + 1
        assert await lane.convicted(message(), Delivered("x", crashes=many)) is None
        assert await lane.convicted(message(), Delivered("x", crashes=many - 1, since=datetime.now(UTC))) is None
        parked = await lane.convicted(message(), Delivered("x", crashes=many, since=datetime.now(UTC)))
        assert parked is not None
        assert parked.reason == "crashed"
        assert parked.failure.message == f"{many} processes that had it were gone before it was settled"

    async def test_the_end_of_another_is_not_its_end(self) -> None:
        lane = Lane()
        one, other = Delivered("one"), Delivered("other")
        await lane.begin(one, message())
        await lane.end(other)
        assert lane.writer.told == ["started"]
        await lane.end(one)
        await lane.end(one)
        assert lane.writer.told == ["started", "ended"]

    async def test_an_end_that_cannot_be_written_is_written_later_and_once(self) -> None:
        """Without it other processes would blame the message."""
        lane = Lane()
        a, b = Delivered("a"), Delivered("b")
        await lane.begin(a, message("1"))
        lane.writer.up = False
        await lane.end(a)
        await lane.begin(b, message("2"))
        await lane.end(b)
        assert lane.writer.told == ["started"]
        assert not lane.index._starts, "this process knows it all the same"

        lane.writer.up = True
        await lane.convicted(message("3"))
        await lane.convicted(message("3"))
        assert lane.writer.told == ["started", "ended", "ended"]


class TestLookingBack:
    @pytest.mark.parametrize(
        ("lease", "least"),
        [
            (None, READ_BACK),
            (timedelta(minutes=1), READ_BACK),
            (timedelta(hours=1), (MAX_STARTS + 1) * timedelta(hours=1)),
        ],
    )
    async def test_the_journal_is_read_back_once_as_far_as_a_killer_could_have_begun(
        self, lease: timedelta | None, least: timedelta
    ) -> None:
        """While the claim of a process that died is there, the message is postponed, and begins later."""
        lane = Lane(lease)
        reader = lane.settler.reader
        assert reader is not None
        for _ in range(2):
            await lane.convicted(message())
        (asked,) = reader.asked
        assert least <= asked < least + timedelta(minutes=1)

    async def test_and_further_for_one_that_has_been_suspect_for_longer(self) -> None:
        """A backlog or a slow rung may lie between two beginnings."""
        lane = Lane()
        reader = lane.settler.reader
        assert reader is not None
        await lane.convicted(message())
        long_ago = Delivered("x", since=datetime.now(UTC) - timedelta(hours=5))
        for _ in range(2):
            await lane.convicted(message(), long_ago)
        _, asked = reader.asked
        assert timedelta(hours=5) + READ_BACK <= asked < timedelta(hours=5, minutes=1) + READ_BACK

    async def test_each_session_reads_back_and_a_journal_that_cannot_be_read_blames_nobody(self) -> None:
        lane = Lane()
        await lane.convicted(message())
        lane.settler.reader = second = Reader(down=True)
        for _ in range(2):
            assert await lane.convicted(message()) is None
        assert len(second.asked) == 1

    async def test_without_a_journal_nothing_is_read(self) -> None:
        lane = Lane()
        lane.settler.reader = None
        assert await lane.convicted(message()) is None
