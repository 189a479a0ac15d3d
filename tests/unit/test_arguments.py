"""Arguments of another kind than is meant: what to give instead, at once, and not a bare AttributeError later."""

from typing import Any

import pytest

from rabbitdlq import ConfigurationError, Consumer, ConsumerGroup, DLQManager, Topology

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
        ({"handler": lambda: None}, "handler: .*lambda.* cannot be called with one argument, the message"),
    ],
)
def test_a_consumer_says_what_it_cannot_take(arguments: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {"topology": Topology("orders", ["5s"]), "handler": print, "url": URL, **arguments}

    with pytest.raises(ConfigurationError, match=f"^{reason}"):
        Consumer(**given)
