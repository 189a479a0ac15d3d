"""What ``rabbitdlq demo`` runs: a shop's orders, a handler with a bug, and the same handler mended."""

import json
from pathlib import Path

__all__ = ["FAILING", "ORDERS", "RECOVERS", "TOPOLOGY_FILE", "jsonl"]

#: the topology of the demo; ``definitions/`` is generated from it
TOPOLOGY_FILE = Path(__file__).with_name("orders.toml")

#: orders without an address: the bug is that the handler takes one for granted
FAILING = {3, 6, 9}
#: the order that meets a payment service which is down for a moment
RECOVERS = 4

ORDERS = [
    {
        "order": number,
        "customer": customer,
        "total": total,
        **({} if number in FAILING else {"address": {"city": city}}),
    }
    for number, customer, total, city in (
        (1, "Ada", 31.5, "London"),
        (2, "Grace", 12.0, "Arlington"),
        (3, "Linus", 99.9, ""),
        (4, "Barbara", 47.25, "Boston"),
        (5, "Edsger", 8.4, "Nuenen"),
        (6, "Radia", 64.0, ""),
        (7, "Donald", 3.14, "Stanford"),
        (8, "Leslie", 20.0, "New York"),
        (9, "Margaret", 11.11, ""),
        (10, "Tony", 75.0, "Oxford"),
    )
]


def jsonl() -> str:
    """The orders as JSON Lines."""
    return "".join(json.dumps(order) + "\n" for order in ORDERS)
