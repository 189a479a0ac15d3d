"""Arguments of another kind than is meant: what to give instead, at once, and not a bare AttributeError later."""

from typing import Any

import pytest

from rabbitdlq import ConfigurationError, Consumer, ConsumerGroup, DLQManager, Topology, handler

URL = "amqp://127.0.0.1:1/"


@pytest.mark.parametrize(
    "topology", ["orders", None, {"orders": Topology("orders", ["5s"])}], ids=["name", "no", "all"]
)
def test_a_manager_is_of_a_topology_and_not_of_a_name(topology: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r'^topology: .* cannot be used; give a Topology, like Topology\("orders", \["5s", "30s"',
    ):
        DLQManager(topology, url=URL)


def test_a_group_is_of_consumers() -> None:
    consumer = Consumer(Topology("orders", ["5s"]), print, url=URL)

    with pytest.raises(ConfigurationError, match=r"^consumers: .* cannot be used; give a list of Consumers"):
        ConsumerGroup(consumer)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^consumers\[1\]: 'orders' cannot be used; give a Consumer"):
        ConsumerGroup([consumer, "orders"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"topology": "orders"}, r"topology: 'orders' cannot be used; give a Topology, like Topology\(\"orders\", "),
        ({"breaker": True}, r"breaker: True cannot be used; give a Breaker\(...\), or None for none"),
        ({"rate": 100}, 'rate: 100 cannot be used; give a text like "100/m", or a Rate'),
        ({"concurrency": "10"}, "concurrency: '10' is no whole number above 0"),
        ({"concurrency": 2.5}, "concurrency: 2.5 is no whole number above 0"),
        ({"concurrency": True}, "concurrency: True is no whole number above 0"),
        ({"prefetch": "20"}, "prefetch: '20' is no whole number above 0"),
        ({"priority": "high"}, "priority: 'high' is no whole number above 0"),
        ({"classify": [ValueError]}, "classify: .*ValueError.* cannot be used; give a dict from classes of exceptions"),
        ({"idempotency": 7}, 'idempotency: 7 cannot be used; give a store, or its URL, like "sqlite:done.db"'),
        ({"child_setup": 5}, "child_setup: 5 cannot be called"),
        ({"handler": lambda: None}, "handler: .*lambda.* cannot be called with one argument, the message"),
    ],
)
def test_a_consumer_says_what_it_cannot_take(arguments: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {"topology": Topology("orders", ["5s"]), "handler": print, "url": URL, **arguments}

    with pytest.raises(ConfigurationError, match=f"^{reason}"):
        Consumer(**given)


def test_so_does_a_mark() -> None:
    with pytest.raises(ConfigurationError, match=r"^classify: .* cannot be used; give a dict from classes of exceptio"):
        handler(classify=[ValueError])  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [{"priority": 2}, {"order": "weighted"}], ids=str)
def test_priorities_without_slots_would_do_nothing(group: dict[str, Any]) -> None:
    one = Consumer(Topology("orders", ["5s"]), print, url=URL, priority=group.get("priority", 1))
    two = Consumer(Topology("mails", ["5s"]), print, url=URL)

    with pytest.raises(ConfigurationError, match=r"^priority: without slots nobody ever waits .*; give slots$"):
        ConsumerGroup([one, two], priority=group.get("order", "strict"))
    assert ConsumerGroup([one, two], slots=3, priority=group.get("order", "strict")).queue == "orders, mails"
