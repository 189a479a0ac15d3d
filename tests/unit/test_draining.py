"""How often a consumer that drains looks at an empty queue before it believes that everything is done."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from rabbitdlq.broker import Delivery
from rabbitdlq.consumer import draining
from rabbitdlq.consumer.workers import Workers
from rabbitdlq.dead_letter import AttemptRecord
from rabbitdlq.errors import AccessDenied, BrokerError, BrokerUnavailable, EntityNotFound
from rabbitdlq.journal import HistoryIndex
from rabbitdlq.topology import Topology

ORDERS = Topology("orders", ["5s"])
NOTHING_PUT = datetime.min.replace(tzinfo=UTC)
FEW, MANY = draining.LOOKS, draining.LOOKS_WITH_RETRIES_OUT


@dataclass
class Rungs:
    until: datetime


@dataclass
class Settler:
    rungs: Rungs


class Session:
    """Answers as it was told, and then that all is empty; counts the looks."""

    def __init__(self, *answers: bool | BrokerError) -> None:
        self.answers = list(answers)
        self.looks = 0

    async def idle_in_broker(self) -> bool:
        self.looks += 1
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, BrokerError):
            raise answer
        return answer


async def _nothing(_: Delivery) -> None: ...


def ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


async def drained(
    monkeypatch: pytest.MonkeyPatch,
    session: Session,
    *,
    index: HistoryIndex | None = None,
    put_until: datetime = NOTHING_PUT,
    workers: Workers | None = None,
) -> int:
    """Wait until it is; gives how often the session was asked."""
    monkeypatch.setattr(draining, "POLL_SECONDS", 0)
    settler = Settler(Rungs(put_until))
    workers = workers or Workers(1, _nothing)
    waiting = draining.until_drained(ORDERS, cast(Any, session), workers, index or HistoryIndex(), cast(Any, settler))
    await asyncio.wait_for(waiting, 5)
    return session.looks


async def test_where_nothing_is_known_to_be_out_a_few_looks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await drained(monkeypatch, Session()) == FEW


@pytest.mark.parametrize(("seconds", "looks"), [(-5, MANY), (0, MANY), (60, FEW)])
async def test_what_this_process_put_into_a_rung_is_waited_for_until_it_is_long_overdue(
    monkeypatch: pytest.MonkeyPatch, seconds: float, looks: int
) -> None:
    assert await drained(monkeypatch, Session(), put_until=ago(seconds)) == looks


@pytest.mark.parametrize(("seconds", "looks"), [(0, MANY), (20, MANY), (60, FEW)])
async def test_so_is_what_is_known_to_have_failed(monkeypatch: pytest.MonkeyPatch, seconds: float, looks: int) -> None:
    index = HistoryIndex()
    index.add_record("m", 1, AttemptRecord(1, ago(seconds), "E", "no", "another process", 1.0))
    assert await drained(monkeypatch, Session(), index=index) == looks


@pytest.mark.parametrize("answer", [False, BrokerUnavailable("the line is lost")])
async def test_one_look_that_does_not_find_it_empty_begins_the_count_anew(
    monkeypatch: pytest.MonkeyPatch, answer: bool | BrokerError
) -> None:
    session = Session(*[True] * (FEW - 1), answer)
    assert await drained(monkeypatch, session) == FEW + FEW


async def test_while_a_handler_is_at_work_the_broker_is_not_even_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, session = Workers(1, _nothing), Session()
    workers.put(cast(Delivery, 1))
    waiting = asyncio.create_task(drained(monkeypatch, session, workers=workers))
    for _ in range(100):
        await asyncio.sleep(0)
    assert session.looks == 0
    workers.take_back()
    assert await waiting == FEW


async def test_a_handler_that_begins_during_a_look_begins_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(1, _nothing)

    class Busy(Session):
        async def idle_in_broker(self) -> bool:
            if self.looks == FEW - 1:
                workers.put(cast(Delivery, 1))
                asyncio.get_running_loop().call_soon(workers.take_back)
            return await super().idle_in_broker()

    assert await drained(monkeypatch, Busy(), workers=workers) == FEW + FEW


@pytest.mark.parametrize("error", [AccessDenied("no right"), EntityNotFound("no such rung")])
async def test_where_the_ladder_cannot_be_seen_it_is_told(monkeypatch: pytest.MonkeyPatch, error: BrokerError) -> None:
    with pytest.raises(type(error)):
        await drained(monkeypatch, Session(error))
