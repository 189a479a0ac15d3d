"""Into a rung by a publish: what a message carries there, and how its attempts are counted when it comes back."""

import json
from typing import Any

import pytest

from rabbitdlq import names
from rabbitdlq.deaths import Arrival, arrival, parse_deaths
from rabbitdlq.message import Message, message_of
from rabbitdlq.parking import ladder_properties
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties

ORDERS = Topology("orders", ["5s", "30s"])


def message(properties: Properties) -> Message:
    return message_of(ORDERS, b"{}", properties, Arrival(0, 0, "shop", "order.created"), failures=0)


def death(queue: str, reason: str, count: int = 1) -> dict[str, Any]:
    return {"queue": queue, "reason": reason, "count": count, "exchange": "", "routing-keys": ["orders"]}


def waited(number: int, count: int = 1) -> dict[str, Any]:
    return death(ORDERS.rungs[number - 1].queue, "expired", count)


@pytest.mark.parametrize(
    ("deaths", "nacked"),
    [
        ([waited(1)], 0),
        ([waited(1), death("orders", "rejected"), waited(2)], 1),
        ([waited(1, 2), death("orders", "rejected", 2), waited(2)], 2),
        ([death("orders", "expired"), waited(1)], 0),
        ([death("payments", "rejected"), waited(1)], 0),
        ([death("orders.dlq", "rejected", 3), waited(1)], 0),
        ([waited(1), death("orders", "rejected")], None),
        ([waited(2), death("orders", "rejected", 2), waited(1)], None),
        ([waited(1, 2), waited(2)], None),
        ([], None),
    ],
    ids=[
        "no nack since",
        "one nack since",
        "two nacks since",
        "it had expired in the work queue",
        "it had been rejected in another queue",
        "it had been rejected in the dead-letter queue",
        "one nack, and nothing else",
        "two nacks, and nothing else",
        "more waits than one without a nack",
        "no deaths",
    ],
)
def test_a_wait_more_than_nacks_says_that_it_was_put_there_and_how_often_it_was_nacked_since(
    deaths: list[dict[str, Any]], nacked: int | None
) -> None:
    way = arrival(ORDERS, ORDERS.return_exchange, ORDERS.rungs[0].key, parse_deaths(deaths))
    assert way.nacked_since == nacked


def test_it_says_that_it_is_suspect_only_where_that_is_told_now() -> None:
    told_before = Headers({names.SUSPECT: "1 since 2024-01-01T12:00:00+00:00"})

    assert names.SUSPECT not in ladder_properties(message(Properties(message_id="17", headers=told_before)), 0).table


def test_what_the_broker_wrote_is_not_kept_as_if_a_publisher_had() -> None:
    brokers = {"x-death": [death("orders", "rejected")], "x-delivery-count": 3, "x-first-death-queue": "orders"}
    properties = Properties(message_id="17", expiration="1000", headers=Headers(brokers | {"tenant": "acme"}))

    there = ladder_properties(message(properties), 1)
    assert json.loads(there.table[names.ORIGINAL]) == {"expiration": "1000"}
    assert not set(brokers) & set(there.table)
    assert there.table["tenant"] == "acme"


def test_what_was_moved_out_of_it_before_is_kept_beside_what_is_moved_now() -> None:
    headers = Headers({names.ORIGINAL: '{"expiration":"1000","user_id":"shop"}'})

    there = ladder_properties(message(Properties(message_id="17", expiration="2000", headers=headers)), 1)
    assert json.loads(there.table[names.ORIGINAL]) == {"expiration": "2000", "user_id": "shop"}
    again = ladder_properties(message(there), 2)
    assert again.table[names.ORIGINAL] == there.table[names.ORIGINAL]


def test_a_derived_id_goes_with_it_and_stays_a_derived_one() -> None:
    """It is no key by which two messages are one."""
    first = message(Properties())
    assert first.id_derived

    for failures in (1, 2):
        there = ladder_properties(first, failures)
        assert there.message_id == first.id
        again = message(Properties.parse(there.encode()))
        assert (again.id, again.id_derived) == (first.id, True)
        first = again


def test_an_id_of_its_publisher_is_not_called_derived() -> None:
    assert names.ID_DERIVED not in ladder_properties(message(Properties(message_id="17")), 1).table
