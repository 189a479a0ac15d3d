"""What settling a delivery does, noted in its order: what was put into the journal, published, acked or nacked."""

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

from rabbitdlq.broker import Delivery, Outgoing, PublishLink
from rabbitdlq.broker.frames import Deliver
from rabbitdlq.errors import BrokerError
from rabbitdlq.journal import Entry, JournalWriter
from rabbitdlq.wire import Properties

__all__ = ["Recorded"]


class Recorded:
    """One delivery's channel, a journal's writer and a link for publishes; what they were told is in :attr:`steps`."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.published: list[Outgoing] = []
        #: the broker has the delivery back
        self.is_closed = False
        #: how publishes end that are not confirmed, one after the other
        self.refusals: list[BrokerError] = []
        self.connection = SimpleNamespace(frame_max=131_072)

    def delivery(
        self,
        properties: Properties | None = None,
        body: bytes = b"{}",
        *,
        exchange: str = "",
        routing_key: str = "orders",
        redelivered: bool = False,
    ) -> Delivery:
        """A delivery of this channel."""
        told = Deliver(1, redelivered, exchange.encode(), routing_key.encode())
        return Delivery(cast(Any, self), told, (properties or Properties(message_id="17")).encode(), body)

    @property
    def writer(self) -> JournalWriter:
        return cast(JournalWriter, self)

    @property
    def link(self) -> PublishLink:
        return cast(PublishLink, self)

    # --- the channel

    def settle(self, tag: int, how: str) -> bool:
        if not self.is_closed:
            self.steps.append(how)
        return not self.is_closed

    # --- the journal's writer

    async def append(self, entry: Entry) -> bool:
        return await self.begin(entry)

    def begin(self, entry: Entry) -> "asyncio.Future[bool]":
        self.steps.append(f"journal: {entry.event}")
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        written.set_result(True)
        return written

    # --- the link, and its publisher

    async def publisher(self, within: timedelta) -> "Recorded":
        return self

    async def publish(self, outgoing: Outgoing, *, timeout: timedelta) -> None:
        self.published.append(outgoing)
        if self.refusals:
            self.steps.append(f"refused: {outgoing.routing_key}")
            raise self.refusals.pop(0)
        self.steps.append(f"published: {outgoing.routing_key}")
