"""Putting a message into a rung by a publish that does not go well."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from rabbitdlq.consumer.rungs import Rungs
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnavailable,
    EntityNotFound,
    PublishRefused,
    PublishUnconfirmed,
    Unroutable,
)
from rabbitdlq.message import message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties
from tests.unit.recorded import Recorded

ORDERS = Topology("orders", ["5s", "2m"])
MESSAGE = message_of(ORDERS, b"{}", Properties(message_id="17"), Arrival(0, 0, "", "orders"), failures=0)
SECONDS = [5, 5, 5]


def full() -> PublishRefused:
    error = PublishRefused("full")
    error.later = True
    return error


class Ladder:
    """The rungs of a queue, with publishes that end as told and pauses that take no time."""

    def __init__(self, *errors: BrokerError) -> None:
        self.noted = Recorded()
        self.noted.refusals = list(errors)
        self.stopping, self.over = asyncio.Event(), asyncio.Event()
        self.pauses: list[float] = []
        self.kept: list[int] = []
        self.on_pause: Callable[[], None] = lambda: None
        self.rungs = Rungs(
            ORDERS, self.noted.link, stopping=self.stopping, over=self.over, timeout=timedelta(seconds=1)
        )
        self.rungs._pause = self._pause  # type: ignore[method-assign]

    async def _pause(self, time: timedelta) -> None:
        self.pauses.append(time.total_seconds())
        self.kept.append(self.rungs.kept)
        self.on_pause()

    async def put(self, rung: int = 0, **options: Any) -> str:
        properties = Properties(message_id="17")
        return await self.rungs.put_or_keep(self.noted.delivery(), MESSAGE, ORDERS.rungs[rung], properties, **options)


async def test_it_is_acked_when_the_rung_has_it_and_kept_until_then() -> None:
    ladder = Ladder(BrokerUnavailable("no line"), full(), BrokerUnavailable("no line"))
    assert await ladder.put() == "done"
    assert ladder.noted.steps[-1] == "ack"
    assert "dead" not in ladder.noted.steps
    assert (ladder.pauses, ladder.kept, ladder.rungs.kept) == (SECONDS, [1, 1, 1], 0)


@pytest.mark.parametrize(("rung", "seconds"), [(0, [5, 10, 20, 40]), (1, [30, 60, 120, 240])])
async def test_what_may_have_arrived_is_repeated_ever_more_slowly(rung: int, seconds: list[float]) -> None:
    """Each try may be one more copy."""
    ladder = Ladder(*(PublishUnconfirmed("no confirm") for _ in range(4)))
    assert await ladder.put(rung) == "done"
    assert ladder.pauses == seconds


@pytest.mark.parametrize("error", [AccessDenied("no right"), PublishRefused("too large")])
async def test_what_the_broker_will_never_take_from_us_is_left_to_it(error: BrokerError) -> None:
    """Waiting would mend nothing, and hold a worker."""
    ladder = Ladder(error)
    assert await ladder.put() == "done"
    assert (ladder.noted.steps[-1], ladder.pauses) == ("dead", [])


async def test_where_the_ladder_goes_on_by_itself_nobody_waits() -> None:
    ladder = Ladder(BrokerUnavailable("no line"))
    assert await ladder.put(else_nack=True) == "done"
    assert (ladder.noted.steps[-1], ladder.pauses) == ("dead", [])


@pytest.mark.parametrize("error", [Unroutable("no queue"), EntityNotFound("no exchange")])
@pytest.mark.parametrize("mends", [True, False])
async def test_what_is_missing_is_declared_once_and_then_waited_for(error: BrokerError, mends: bool) -> None:
    ladder = Ladder(error) if mends else Ladder(error, error, error)
    repairs: list[bool] = []

    async def repair() -> None:
        repairs.append(True)

    ladder.rungs.repair = repair
    with capture_logs() as logs:
        assert await ladder.put() == "done"
    assert repairs == [True]
    assert len(ladder.pauses) == (0 if mends else 2)
    assert [line["event"] for line in logs] == ([] if mends else ["rung_unreachable"]), "what is waited for is told"


async def test_a_repair_that_fails_is_no_end_of_it() -> None:
    ladder = Ladder(Unroutable("no queue"))

    async def repair() -> None:
        raise AccessDenied("no right to declare")

    ladder.rungs.repair = repair
    assert await ladder.put() == "done"
    assert len(ladder.pauses) == 1


async def test_at_the_consumers_end_it_is_given_back_once_the_broker_sends_no_more() -> None:
    ladder = Ladder(*(BrokerUnavailable("no line") for _ in range(9)))
    ladder.on_pause = ladder.stopping.set
    putting = asyncio.create_task(ladder.put())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not putting.done()
    assert "back" not in ladder.noted.steps
    ladder.over.set()
    assert await putting == "given_back"
    assert ladder.noted.steps[-1] == "back"


async def test_what_the_broker_has_back_is_published_no_more() -> None:
    ladder = Ladder(BrokerUnavailable("no line"))

    def lost() -> None:
        ladder.noted.is_closed = True

    ladder.on_pause = lost
    assert await ladder.put() == "too_late"
    assert ladder.noted.published == [] or len(ladder.noted.published) == 1
