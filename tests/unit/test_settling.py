"""Settling without a broker: what is told, published and acked, and in which order."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rabbitdlq import names
from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.outcome import Dropped, Outcome, Park, Postponed, Retry, Skipped, Succeeded
from rabbitdlq.consumer.rungs import Rungs
from rabbitdlq.consumer.settle import Settler
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import PublishRefused, PublishUnconfirmed
from rabbitdlq.failure import Failure
from rabbitdlq.journal import HistoryIndex
from rabbitdlq.message import Message, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties
from tests.unit.recorded import Recorded

ORDERS = Topology("orders", ["5s", "30s", "2m"])
NO = Failure("E", "no")
SUSPECTED = "1 since 2024-01-01T12:00:00+00:00"


def now() -> datetime:
    return datetime.now(UTC)


def message(attempt: int = 1, properties: Properties | None = None) -> Message:
    way = Arrival(attempt - 1, attempt - 1, "", "orders")
    return message_of(ORDERS, b"{}", properties or Properties(message_id="17"), way, failures=attempt - 1)


def retry(number: int, *, asked: timedelta | None = None) -> Retry:
    return Retry(NO, now(), ORDERS.rungs[number - 1], 1.0, asked)


class Full(PublishRefused):
    later = True


class Desk:
    """A settler whose every step is noted."""

    def __init__(self, topology: Topology = ORDERS) -> None:
        self.noted = Recorded()
        self.index = HistoryIndex()
        self.stopping, self.over = asyncio.Event(), asyncio.Event()
        self.settler = Settler(
            topology,
            self.noted.link,
            self.noted.writer,
            self.index,
            worker="w",
            stopping=self.stopping,
            over=self.over,
        )

    async def settle(self, outcome: Outcome, message_: Message | None = None, delivery: Delivery | None = None) -> str:
        settling = self.settler.settle(delivery or self.noted.delivery(), message_ or message(), outcome)
        return await asyncio.wait_for(settling, 5)


@pytest.mark.parametrize(
    ("outcome", "steps"),
    [
        (Dropped(NO, 1.0), ["journal: dropped", "ack"]),
        (retry(1), ["journal: failed", "dead"]),
        (retry(2, asked=timedelta(seconds=20)), ["journal: failed", "published: orders.retry.1", "ack"]),
        (Postponed("busy", 1.0), ["published: orders", "ack"]),
        (Postponed("breaker", 1.0, NO), ["journal: postponed", "published: orders", "ack"]),
        (Park(NO, now(), names.PERMANENT, 1.0), ["journal: failed", "published: orders", "ack", "journal: parked"]),
        (Succeeded(1.0), ["ack"]),
        (Skipped(0.0), ["ack"]),
    ],
)
async def test_what_has_to_be_safe_elsewhere_is_told_and_published_before_the_broker_may_forget_it(
    outcome: Outcome, steps: list[str]
) -> None:
    desk = Desk()
    assert await desk.settle(outcome) == "done"
    assert desk.noted.steps == steps


@pytest.mark.parametrize(
    "outcome",
    [
        Dropped(NO, 1.0),
        retry(1),
        retry(2, asked=timedelta(seconds=20)),
        Postponed("busy", 1.0),
        Postponed("breaker", 1.0, NO),
        Park(NO, now(), names.PERMANENT, 1.0),
        Succeeded(1.0),
        Skipped(0.0),
    ],
    ids=lambda outcome: outcome.name,
)
async def test_with_what_the_broker_has_back_nothing_is_done(outcome: Outcome) -> None:
    """Two would come of one, or a failure would be told that is no attempt any more."""
    desk = Desk()
    delivery = desk.noted.delivery()
    desk.noted.is_closed = True
    assert await desk.settle(outcome, delivery=delivery) == "too_late"
    assert desk.noted.steps == []
    assert desk.index.last_attempt("17", 1) == 0


@pytest.mark.parametrize("outcome", [Succeeded(1.0), Dropped(NO, 1.0)], ids=["succeeded", "dropped"])
async def test_the_failures_of_a_message_that_is_done_with_are_forgotten(outcome: Outcome) -> None:
    desk = Desk()
    await desk.settle(retry(1))
    assert desk.index.last_attempt("17", 1) == 1
    await desk.settle(outcome, message(2))
    assert desk.index.last_attempt("17", 1) == 0


@pytest.mark.parametrize(
    ("delays", "left", "rung", "nack"),
    [
        (["5s", "30s", "2m"], None, 1, True),
        (["5s", "30s", "2m"], None, 2, False),
        (["5s", "30s", "2m"], 1, 2, True),
        (["5s", "30s", "2m"], 1, 1, False),
        (["5s", "30s", "2m"], 2, 2, False),
        (["5s", "30s", "2m"], 2, 3, True),
        (["5s", "30s", "2m"], 3, 1, False),
        (["5s"], 1, 1, False),
    ],
)
async def test_one_that_was_put_into_a_rung_before_is_nacked_only_where_that_leads_to_the_rung_it_shall_wait_in(
    delays: list[str], left: int | None, rung: int, nack: bool
) -> None:
    """The broker goes by the rung that the message left last, which is not how often it has failed."""
    topology = Topology("orders", delays)
    desk = Desk(topology)
    told = Properties(message_id="17", headers=Headers({names.FAILURES: 0}))
    if left is None:
        delivery = desk.noted.delivery(told)
    else:
        key = topology.rungs[left - 1].key
        delivery = desk.noted.delivery(told, exchange=topology.return_exchange, routing_key=key)
    await desk.settle(Retry(NO, now(), topology.rungs[rung - 1], 1.0), message(1, told), delivery)
    assert desk.noted.steps[1:] == (["dead"] if nack else [desk.noted.steps[1], "ack"])
    assert [outgoing.exchange for outgoing in desk.noted.published] == ([] if nack else [topology.retry_exchange])


class TestARungThatCannotBeReached:
    async def test_a_failure_goes_on_by_a_nack(self) -> None:
        desk = Desk()
        desk.noted.refusals = [PublishUnconfirmed("the line is lost")]
        assert await desk.settle(retry(2, asked=timedelta(seconds=20))) == "done"
        assert desk.noted.steps == ["journal: failed", "refused: orders.retry.1", "dead"]

    async def test_what_the_broker_will_never_take_from_us_it_moves_by_itself(self) -> None:
        desk = Desk()
        desk.noted.refusals = [PublishRefused("too large")]
        assert await desk.settle(Postponed("busy", 1.0)) == "done"
        assert desk.noted.steps == ["refused: orders", "dead"]

    async def test_what_is_postponed_is_kept_and_tried_again_after_a_pause(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pauses = no_pauses(monkeypatch)
        desk = Desk()
        desk.noted.refusals = [Full("no room"), Full("no room")]
        assert await desk.settle(Postponed("busy", 1.0)) == "done"
        assert desk.noted.steps == ["refused: orders", "refused: orders", "published: orders", "ack"]
        assert pauses == [5.0, 5.0]

    async def test_until_the_broker_has_it_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        desk = Desk()

        async def lost(_: Rungs, __: timedelta) -> None:
            desk.noted.is_closed = True

        monkeypatch.setattr(Rungs, "_pause", lost)
        desk.noted.refusals = [PublishUnconfirmed("the line is lost")]
        assert await desk.settle(Postponed("busy", 1.0)) == "too_late"
        assert desk.noted.steps == ["refused: orders"]

    async def test_or_the_consumer_ends_and_the_broker_sends_no_more(self) -> None:
        desk = Desk()
        desk.stopping.set()
        desk.noted.refusals = [PublishUnconfirmed("the line is lost")]
        settling = asyncio.create_task(desk.settle(Postponed("busy", 1.0)))
        for _ in range(50):
            await asyncio.sleep(0)
        assert desk.noted.steps == ["refused: orders"], "given back now it would be here again at once"
        desk.over.set()
        assert await settling == "given_back"
        assert desk.noted.steps == ["refused: orders", "back"]

    @pytest.mark.parametrize(("delay", "pause"), [("50ms", 1.0), ("5s", 5.0), ("10m", 30.0)])
    async def test_the_pause_is_the_delay_of_the_rung_within_bounds(
        self, monkeypatch: pytest.MonkeyPatch, delay: str, pause: float
    ) -> None:
        pauses = no_pauses(monkeypatch)
        desk = Desk(Topology("orders", [delay]))
        desk.noted.refusals = [PublishUnconfirmed("the line is lost")]
        await desk.settle(Postponed("busy", 1.0))
        assert pauses == [pause]


def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have no pause between two tries; gives how long each would have been."""
    pauses: list[float] = []

    async def note(_: Rungs, time: timedelta) -> None:
        pauses.append(time.total_seconds())

    monkeypatch.setattr(Rungs, "_pause", note)
    return pauses


async def test_what_was_put_into_a_rung_is_expected_back_after_the_longest_wait_of_all() -> None:
    desk = Desk()
    began = now()
    await desk.settle(retry(3, asked=timedelta(minutes=1)))
    await desk.settle(Postponed("busy", 1.0))
    assert began + timedelta(minutes=2) <= desk.settler.rungs.until <= now() + timedelta(minutes=2)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    ("delivered", "suspect"),
    [
        ({"redelivered": True}, True),
        ({"exchange": ORDERS.return_exchange, "routing_key": ORDERS.rungs[0].key}, None),
        ({}, False),
        ({"exchange": ORDERS.dlx}, False),
    ],
    ids=["redelivered", "from a rung", "from a publisher", "from elsewhere"],
)
async def test_a_suspect_stays_one_when_it_is_postponed_and_nobody_else_becomes_one_by_a_header(
    delivered: dict[str, Any], suspect: bool | None, told: bool
) -> None:
    """Anybody may publish a header of that name: only on what came from a rung it is as the header says."""
    desk = Desk()
    properties = Properties(message_id="17", headers=Headers({names.SUSPECT: SUSPECTED} if told else {}))
    await desk.settle(Postponed("busy", 1.0), message(1, properties), desk.noted.delivery(properties, **delivered))
    (outgoing,) = desk.noted.published
    assert (names.SUSPECT in outgoing.properties.table) is (told if suspect is None else suspect)
