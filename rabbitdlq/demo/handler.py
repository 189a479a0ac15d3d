"""The demo's handler: ships orders. Orders without an address show its bug, unless RABBITDLQ_DEMO_FIXED is set."""

import os

from rabbitdlq import Message
from rabbitdlq.demo import RECOVERS

__all__ = ["handle"]


async def handle(message: Message) -> None:
    """Ship one order."""
    order = message.payload
    if order["order"] == RECOVERS and message.attempt == 1:
        raise ConnectionError("payment service: connection refused")
    ship(order, order.get("address", {}) if os.environ.get("RABBITDLQ_DEMO_FIXED") else order["address"])


def ship(order: dict[str, object], address: dict[str, str]) -> str:
    """Where the order goes."""
    return f"order {order['order']} goes to {address.get('city', 'the pick-up counter')}"
