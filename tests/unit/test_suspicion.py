"""What a delivery says of crashes, by broker and by queue type."""

from datetime import UTC, datetime
from typing import Any

import pytest

from rabbitdlq import names
from rabbitdlq.consumer.suspicion import Suspicion, Suspicions
from rabbitdlq.topology import Topology, Version
from rabbitdlq.wire import Headers, Properties
from tests.unit.recorded import Recorded

OLD, TRAVELS, TELLS = (3, 10, 8), (4, 0, 5), (4, 3, 6)
AT = datetime(2026, 1, 1, tzinfo=UTC)
NACKED_TWICE = [{"queue": "orders", "reason": "rejected", "count": 2, "exchange": "", "routing-keys": ["orders"]}]


def suspicions(version: Version = OLD, queue_type: Any = "quorum") -> Suspicions:
    made = Suspicions(Topology("orders", ["5s"], queue_type=queue_type))
    made.heed(version)
    return made


def crashes(version: Version, headers: dict[str, Any], queue_type: str = "quorum", *, redelivered: bool = True) -> int:
    properties = Properties(message_id="17", headers=Headers(headers))
    delivery = Recorded().delivery(properties, redelivered=redelivered)
    told = suspicions(version, queue_type)
    assert told.worth_asking(delivery) or not told.of(delivery).crashes
    assert told.delivered_before(delivery) is (told.of(delivery).crashes > 0)
    return told.of(delivery).crashes


@pytest.mark.parametrize(
    ("version", "headers", "count"),
    [
        (OLD, {}, 1),
        (OLD, {"x-delivery-count": 2}, 2),
        (TRAVELS, {"x-delivery-count": 3, "x-death": NACKED_TWICE}, 1),
        (TRAVELS, {"x-delivery-count": 2, "x-death": NACKED_TWICE}, 0),
        (TELLS, {"x-acquired-count": 3}, 0),
        (TELLS, {"x-acquired-count": 3, "x-delivery-count": 2}, 2),
    ],
)
def test_a_quorum_queue_counts(version: Version, headers: dict[str, Any], count: int) -> None:
    """C24: from 4.3 on what is given back raises another count than a crash; attempts go by neither."""
    assert crashes(version, headers) == count
    assert crashes(version, headers, redelivered=False) == 0


@pytest.mark.parametrize("version", [TRAVELS, TELLS])
def test_from_4_0_on_a_nack_would_carry_the_crashes_of_a_quorum_queue_up_the_ladder(
    version: Version,
) -> None:
    crashed = Recorded().delivery(Properties(headers=Headers({"x-delivery-count": 1})), redelivered=True)
    assert suspicions(version).would_travel(crashed)
    assert not suspicions(version, "classic").would_travel(crashed)
    assert not suspicions(OLD).would_travel(crashed)
    assert not suspicions(version).would_travel(Recorded().delivery(Properties(), redelivered=False))


@pytest.mark.parametrize("version", [OLD, TRAVELS, TELLS])
@pytest.mark.parametrize("headers", [{}, {"x-acquired-count": 3}, {"x-delivery-count": 7}])
def test_a_classic_queue_does_not_and_what_another_queue_wrote_says_nothing(
    version: Version, headers: dict[str, Any]
) -> None:
    assert crashes(version, headers, "classic") == 1
    assert crashes(version, headers, "classic", redelivered=False) == 0


def test_what_it_carries_is_added_to_what_its_queue_counts_and_carried_on() -> None:
    told = Headers({names.SUSPECT: "4 since 2026-01-01T00:00:00+00:00", "x-delivery-count": 2})
    made = suspicions(OLD)
    delivery = Recorded().delivery(
        Properties(message_id="17", headers=told), exchange="orders.return", redelivered=True
    )
    assert made.of(delivery) == Suspicion(6, AT)
    assert made.mark(delivery) == "6 since 2026-01-01T00:00:00+00:00"
    back = Recorded().delivery(Properties(message_id="17", headers=told), exchange="orders.return")
    assert made.worth_asking(back)
    assert (made.of(back), made.delivered_before(back)) == (Suspicion(4, AT), False)


def test_one_that_is_postponed_for_the_first_time_begins_to_count() -> None:
    made = suspicions(TELLS)
    delivery = Recorded().delivery(
        Properties(message_id="17", headers=Headers({"x-delivery-count": 2, "x-acquired-count": 2})), redelivered=True
    )
    before = datetime.now(UTC).replace(microsecond=0)
    crashes_told, since = (made.mark(delivery) or "").split(" since ")
    assert crashes_told == "2"
    assert before <= datetime.fromisoformat(since) <= datetime.now(UTC)
    assert made.mark(Recorded().delivery()) is None


@pytest.mark.parametrize("told", [True, 5, "x", "5", "-1 since 2026-01-01T00:00:00+00:00"])
def test_what_others_write_there_is_no_suspicion(told: Any) -> None:
    headers = Headers({names.SUSPECT: told})
    made = suspicions()
    for exchange in ("", "orders.return"):
        delivery = Recorded().delivery(Properties(message_id="17", headers=headers), exchange=exchange)
        assert made.of(delivery) == Suspicion(0)
    honest = Headers({names.SUSPECT: "5 since 2026-01-01T00:00:00+00:00"})
    assert made.of(Recorded().delivery(Properties(message_id="17", headers=honest))).crashes == 0, "from anybody"
