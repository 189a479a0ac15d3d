"""The demo's handler: ships orders. Its bug shows on orders without an address, until RABBITDLQ_DEMO_FIXED is set."""

import os
from typing import Any

from rabbitdlq import Message
from rabbitdlq.demo import RECOVERS

__all__ = ["handle"]


async def handle(message: Message) -> None:
    """Ship one order."""
    order = message.payload
    if order["order"] == RECOVERS and message.attempt == 1:
        raise ConnectionError("payment service: connection refused")
    ship(order)


def city_of(order: dict[str, Any]) -> str:
    """With the bug: every order has an address, it thinks."""
    return str(order["address"]["city"])


def city_or_counter(order: dict[str, Any]) -> str:
    """Mended: without an address it is picked up."""
    return str(order["address"]["city"]) if "address" in order else "the pick-up counter"


def ship(order: dict[str, Any]) -> str:
    """Where the order goes."""
    return f"order {order['order']} goes to {_city(order)}"


_city = city_or_counter if os.environ.get("RABBITDLQ_DEMO_FIXED") else city_of
