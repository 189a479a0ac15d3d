"""A connection for publishing only: opened when it is needed, and again when it was lost.

Parking has one of its own, because a connection that publishes is blocked by a memory or disk alarm, and a blocked
connection stops its acks too (https://www.rabbitmq.com/docs/connection-blocked). The journal has another, because a
publish to an exchange that is missing or forbidden takes down what else is under way on its connection.

An alarm blocks a connection at its first publish, not before. From then on the broker does not read it: what was
written waits in the socket, and is published when the alarm is over, long after the publisher has given it up. So a
link that knows patience resets a blocked connection, which makes the broker forget what it has not read, and asks on a
new one, by a message that reaches no queue, when publishing goes on.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog

from rabbitdlq.broker.connection import CONNECT_TIMEOUT, Connection
from rabbitdlq.broker.publisher import Outgoing, Publisher, new_id
from rabbitdlq.errors import BrokerError, BrokerUnavailable, PublishUnconfirmed
from rabbitdlq.wire import Properties

__all__ = ["Blocked", "PublishLink"]

log = structlog.stdlib.get_logger(__name__)

#: seconds in which what the broker read before it blocked the connection may still be confirmed
_LAST_CONFIRMS = 0.5
#: between two tries to ask, when there is no connection to be had
_ASK_AGAIN = 1.0
#: for so long one question may go without an answer; then it is asked on a new connection
_ANSWER = timedelta(minutes=5)
#: channels are not made anew more often, in seconds; and for so long the old one's publishes may be confirmed
_RENEW_AGAIN, _OLD_CHANNEL = 10.0, 60.0


async def _close_later(publisher: Publisher) -> None:
    await asyncio.sleep(_OLD_CHANNEL)
    await publisher.close()


@dataclass(frozen=True, slots=True)
class Blocked:
    """The broker takes no publishes for now."""

    #: in its words: "low on memory", "low on disk"
    reason: str
    since: datetime
    #: the same by the event loop's clock
    at: float


class PublishLink:
    """Publishes with confirms over a connection that comes back by itself."""

    def __init__(self, url: str, name: str, *, patience: timedelta | None = None) -> None:
        """``patience``: for how long after the broker has blocked the connection publishes wait for its end; those
        that come later are refused at once. Without it every publish waits for its own deadline.
        """
        self._url = url
        self._name = name
        self._patience = patience
        self._publisher: Publisher | None = None
        self._opening = asyncio.Lock()
        self._renewed_at = float("-inf")
        self._closing: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._unblocked = asyncio.Event()
        #: while an alarm of the broker keeps this link from publishing; known with ``patience`` only
        self.blocked: Blocked | None = None
        #: how often it was
        self.blockings = 0
        #: is called when that begins, and when it is over
        self.on_blocked: Callable[[Blocked | None], None] = lambda _: None

    async def publisher(self, within: timedelta = CONNECT_TIMEOUT) -> Publisher:
        """A publisher on a connection that is open, as far as the client has noticed.

        Raises :class:`BrokerError` where none can be had in time; others may be waiting for the same.
        """
        if self.blocked is None and self._publisher is not None and self._publisher.is_ready:
            return self._publisher
        try:
            async with asyncio.timeout(within.total_seconds()):
                while self.blocked is not None:
                    await self._until_unblocked(self.blocked)
                async with self._opening:
                    if self._publisher is None or not self._publisher.connection.is_open:
                        await self._drop()
                        self._publisher = await self._open()
                    return self._publisher
        except TimeoutError as error:
            why = "no connection" if self.blocked is None else f"blocked by the broker, which is {self.blocked.reason},"
            raise BrokerUnavailable(f"{self._name}: {why} within {within.total_seconds():g} s") from error

    async def publish(self, outgoing: Outgoing, *, timeout: timedelta, mandatory: bool = True) -> None:
        """As :meth:`Publisher.publish`; connecting has the same deadline."""
        publisher = await self.publisher(timeout)
        await publisher.publish(outgoing, timeout=timeout, mandatory=mandatory)

    async def renew(self) -> None:
        """Use a new channel from now on; what is under way keeps the old one for a while.

        A channel of RabbitMQ 3.10 that a full queue has refused is refused for ever, also when there is room again.
        """
        now, old = asyncio.get_running_loop().time(), self._publisher
        if old is None or not old.is_ready or now < self._renewed_at + _RENEW_AGAIN:
            return
        self._renewed_at = now
        with contextlib.suppress(BrokerError):
            self._publisher = await Publisher.open(old.connection)
            closing = asyncio.create_task(_close_later(old))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def unblocked(self) -> None:
        """Return when no alarm keeps it from publishing, however long that takes."""
        while self.blocked is not None:
            await self._unblocked.wait()

    @property
    def current(self) -> Publisher | None:
        """The publisher at hand, which may have lost its line."""
        return self._publisher

    async def _open(self) -> Publisher:
        connection = await Connection.open(self._url, self._name)
        if self._patience is not None:
            connection.frames.on_blocked = self._told
        return await Publisher.open(connection)

    async def _drop(self) -> None:
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            await publisher.connection.close()

    async def close(self) -> None:
        """Close the connection if there is one."""
        for closing in self._closing:
            closing.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        async with self._opening:
            await self._drop()

    # --- alarms

    async def _until_unblocked(self, blocked: Blocked) -> None:
        assert self._patience is not None
        left = blocked.at + self._patience.total_seconds() - asyncio.get_running_loop().time()
        text = f"{self._name}: the broker takes no publishes since {blocked.since:%H:%M:%S} UTC: {blocked.reason}"
        if left <= 0:
            raise BrokerUnavailable(text)
        try:
            async with asyncio.timeout(left):
                await self._unblocked.wait()
        except TimeoutError as error:
            raise BrokerUnavailable(text) from error

    def _told(self, reason: str | None) -> None:
        if reason is None:
            if self.blocked is not None and self._publisher is not None:  # it was over before we had reset anything
                if self._asking is not None:
                    self._asking.cancel()
                self._over()
        elif self.blocked is None:
            self.blocked = Blocked(reason, datetime.now(UTC), asyncio.get_running_loop().time())
            self.blockings += 1
            self._unblocked.clear()
            log.warning("publishing_blocked", connection=self._name, reason=reason)
            self._asking = asyncio.create_task(self._ask())
            self.on_blocked(self.blocked)

    def _over(self) -> None:
        blocked, self.blocked, self._asking = self.blocked, None, None
        self._unblocked.set()
        if blocked is not None:
            took = (datetime.now(UTC) - blocked.since).total_seconds()
            log.info("publishing_unblocked", connection=self._name, blocked_s=round(took, 1))
        self.on_blocked(None)

    async def _ask(self) -> None:
        """Reset the connection, and find out on others when publishing goes on; the one that has an answer is kept."""
        await asyncio.sleep(_LAST_CONFIRMS)
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            publisher.connection.reset()
        while True:
            asking: Publisher | None = None
            try:
                asking = await Publisher.open(await Connection.open(self._url, self._name))
                # with a body: a message without one is read as a whole before the broker blocks, and confirmed
                question = Outgoing("", f"rabbitdlq.{new_id()}", b"?", Properties(message_id=new_id()))
                await asking.publish(question, timeout=_ANSWER, mandatory=False)
                answered = True
            except (BrokerUnavailable, PublishUnconfirmed):
                answered = False
            except BrokerError:
                answered = True  # an account that may not publish there has an answer, too
            except asyncio.CancelledError:
                if asking is not None:
                    asking.connection.reset()
                raise
            if asking is not None and answered and asking.connection.is_open:
                asking.connection.frames.on_blocked = self._told
                self._publisher = asking
                self._over()
                return
            if asking is not None:
                asking.connection.reset()
            await asyncio.sleep(_ASK_AGAIN)
