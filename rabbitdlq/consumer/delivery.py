"""One delivery: the bytes that came, and the channel on which they have to be settled."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiormq.abc
import structlog
from pamqp import commands

from rabbitdlq.broker import Channel, original_properties, translated
from rabbitdlq.errors import BrokerError
from rabbitdlq.wire import Properties

__all__ = ["Delivery"]

log = structlog.stdlib.get_logger(__name__)

#: an ack that the socket does not take in this time is given up; the broker delivers the message again
SETTLE_SECONDS = 30.0


@dataclass(slots=True)
class Delivery:
    """A message that the broker waits to hear about. It can be settled once, on its own channel only."""

    channel: Channel
    tag: int
    exchange: str
    routing_key: str
    redelivered: bool
    body: bytes
    _raw_headers: object = field(repr=False)
    _settled: bool = False

    @classmethod
    def of(cls, channel: Channel, delivered: aiormq.abc.DeliveredMessage) -> "Delivery":
        """From what the client library hands out."""
        frame = delivered.delivery
        if not isinstance(frame, commands.Basic.Deliver) or frame.delivery_tag is None:
            raise TypeError(f"not a delivery: {frame!r}")
        return cls(
            channel=channel,
            tag=frame.delivery_tag,
            exchange=frame.exchange or "",
            routing_key=frame.routing_key or "",
            redelivered=bool(frame.redelivered),
            body=delivered.body,
            _raw_headers=delivered.header.properties.headers,
        )

    def properties(self) -> Properties:
        """The message's properties, byte for byte; raises :class:`WireError` where they are broken."""
        return original_properties(self._raw_headers)

    @property
    def gone(self) -> bool:
        """Whether the channel is closed: the broker has taken the message back and delivers it again."""
        return bool(self.channel.is_closed)

    async def ack(self) -> bool:
        """The message is done with; False where that came too late."""
        return await self._settle("ack", lambda: self.channel.basic_ack(self.tag))

    async def nack(self, *, requeue: bool) -> bool:
        """Back into the work queue, or out through its dead-letter exchange; False where that came too late."""
        # nack, not reject: on 4.3 a reject adds to the delivery count that travels with the message
        return await self._settle("nack", lambda: self.channel.basic_nack(self.tag, requeue=requeue))

    async def _settle(self, how: str, call: Callable[[], Awaitable[None]]) -> bool:
        if self._settled:
            return False  # the broker closes the channel over a second settlement
        self._settled = True
        try:
            with translated(how):
                async with asyncio.timeout(SETTLE_SECONDS):
                    await call()
        except BrokerError as error:
            log.warning("settled_too_late", settlement=how, delivery_tag=self.tag, error=str(error))
            return False
        return True
