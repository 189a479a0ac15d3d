"""A connection for publishing only: opened when it is needed, and again when it was lost.

Parking has one of its own, because a connection that publishes is blocked by a memory or disk alarm, and a blocked
connection stops its acks too (https://www.rabbitmq.com/docs/connection-blocked). The journal has another, because a
publish to an exchange that is missing or forbidden takes down what else is under way on its connection.
"""

import asyncio
from datetime import timedelta

from rabbitdlq.broker.connection import CONNECT_TIMEOUT, Connection
from rabbitdlq.broker.publisher import Outgoing, Publisher
from rabbitdlq.errors import BrokerUnavailable

__all__ = ["PublishLink"]


class PublishLink:
    """Publishes with confirms over a connection that comes back by itself."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._name = name
        self._publisher: Publisher | None = None
        self._opening = asyncio.Lock()

    async def publisher(self, within: timedelta = CONNECT_TIMEOUT) -> Publisher:
        """A publisher on a connection that is open, as far as the client has noticed.

        Raises :class:`BrokerError` where none can be had in time; others may be waiting for the same.
        """
        if self._publisher is not None and self._publisher.is_ready:
            return self._publisher
        try:
            async with asyncio.timeout(within.total_seconds()), self._opening:
                if self._publisher is None or not self._publisher.connection.is_open:
                    await self._drop()
                    self._publisher = await Publisher.open(await Connection.open(self._url, self._name))
                return self._publisher
        except TimeoutError as error:
            raise BrokerUnavailable(f"{self._name}: no connection within {within.total_seconds():g} s") from error

    async def publish(self, outgoing: Outgoing, *, timeout: timedelta, mandatory: bool = True) -> None:
        """As :meth:`Publisher.publish`; connecting has the same deadline."""
        publisher = await self.publisher(timeout)
        await publisher.publish(outgoing, timeout=timeout, mandatory=mandatory)

    @property
    def current(self) -> Publisher | None:
        """The publisher at hand, which may have lost its line."""
        return self._publisher

    async def _drop(self) -> None:
        if self._publisher is not None:
            await self._publisher.connection.close()
            self._publisher = None

    async def close(self) -> None:
        """Close the connection if there is one."""
        async with self._opening:
            await self._drop()
