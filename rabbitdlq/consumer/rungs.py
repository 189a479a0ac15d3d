"""Into a rung by a publish: for messages that a nack would not bring there."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import structlog

from rabbitdlq.broker import Delivery, Outgoing, PublishLink
from rabbitdlq.errors import (
    AccessDenied,
    BrokerError,
    EntityNotFound,
    PublishRefused,
    PublishUnconfirmed,
    Unroutable,
)
from rabbitdlq.message import Message
from rabbitdlq.topology import Rung, Topology
from rabbitdlq.wire import Properties

__all__ = ["Rungs", "Settlement", "is_missing"]

Settlement = Literal["done", "left_to_broker", "given_back", "too_late"]

log = structlog.stdlib.get_logger(__name__)

#: between two tries: the rung's delay, within these bounds
_SHORTEST_PAUSE, _LONGEST_PAUSE = timedelta(seconds=1), timedelta(seconds=30)
#: the longest where the broker does not confirm
_UNCONFIRMED_PAUSE = timedelta(minutes=5)
#: seconds after which a try that the broker does not answer, as under an alarm, holds no worker any longer
_PROMPT = 1.0


def is_missing(error: BrokerError) -> bool:
    """Whether it says that something of the topology is not there."""
    return isinstance(error, Unroutable | EntityNotFound)


class Rungs:
    """The ladder of one topology, as a publisher reaches it."""

    def __init__(
        self,
        topology: Topology,
        link: PublishLink,
        *,
        stopping: asyncio.Event,
        over: asyncio.Event,
        timeout: timedelta,
    ) -> None:
        """``stopping``: set when the consumer is to end; ``over``: set when the broker sends no more; ``timeout`` of
        each publish."""
        self._topology = topology
        self._link = link
        self._stopping = stopping
        self._over = over
        self._timeout = timeout
        #: when the last message that was put here is to be back
        self.until = datetime.min.replace(tzinfo=UTC)
        #: what settles messages that wait unacknowledged until their rung can be reached
        self._keeping: set[asyncio.Task[Any]] = set()
        #: is given each of these tasks, once, and its delivery: whoever else has work to do need not wait for it
        self.on_kept: Callable[[asyncio.Task[Any], Delivery], None] = lambda *_: None
        #: declares again what is missing of the topology, on the session at hand
        self.repair: Callable[[], Awaitable[object]] | None = None

    @property
    def kept(self) -> int:
        """How many messages wait unacknowledged until their rung can be reached; may be asked from another thread."""
        return len(self._keeping)

    async def put_or_keep(
        self, delivery: Delivery, message: Message, rung: Rung, properties: Properties, *, else_nack: bool = False
    ) -> Settlement:
        """Put it into the rung and ack it when that is confirmed; until then it is kept, unless ``else_nack``.

        A consumer that ends gives back what it keeps. A crash between confirm and ack runs it twice: once from the
        rung, and once because the broker delivers it again.
        """
        task = asyncio.current_task()
        assert task is not None
        slow = asyncio.get_running_loop().call_later(_PROMPT, self._keep, task, delivery)
        try:
            return await self._put_or_keep(delivery, message, rung, properties, else_nack, task)
        finally:
            slow.cancel()
            self._keeping.discard(task)

    def _keep(self, task: asyncio.Task[Any], delivery: Delivery) -> None:
        if task not in self._keeping:
            self._keeping.add(task)
            self.on_kept(task, delivery)

    async def _put_or_keep(
        self,
        delivery: Delivery,
        message: Message,
        rung: Rung,
        properties: Properties,
        else_nack: bool,
        task: asyncio.Task[Any],
    ) -> Settlement:
        if delivery.gone:  # the journal may have taken its time
            return "too_late"
        pause, told, mended = min(max(rung.delay, _SHORTEST_PAUSE), _LONGEST_PAUSE), False, False
        while (error := await self._put(message, rung, properties)) is not None:
            if is_missing(error) and not mended:
                mended = True
                if await self.repaired(message):
                    continue
            # what the broker will never take from us it may well move by itself
            never = isinstance(error, AccessDenied) or (isinstance(error, PublishRefused) and not error.later)
            nack = else_nack or never
            if not told or never:
                told = True
                log.warning(
                    "rung_unreachable",
                    message_id=message.id,
                    queue=message.queue,
                    rung=rung.queue,
                    error=str(error),
                    consequence="nacked: it goes on from the rung it came from"
                    if nack
                    else "kept until it can be put there, or the consumer ends",
                )
            if nack:
                return "done" if delivery.nack(requeue=False) else "too_late"
            # given back it would be here again at once, and each time one delivery nearer to the limit of its queue
            self._keep(task, delivery)
            await self._pause(pause)
            if isinstance(error, PublishUnconfirmed):  # it may have arrived: each try may be a copy
                pause = min(2 * pause, _UNCONFIRMED_PAUSE)
            if delivery.gone:
                return "too_late"
            if self._stopping.is_set():
                return await self.give_back(delivery)
        return "done" if delivery.ack() else "too_late"

    async def repaired(self, message: Message) -> bool:
        """Whether what was missing of the topology was declared again."""
        if self.repair is None:
            return False
        try:
            await self.repair()
        except BrokerError as error:
            log.error("topology_missing", queue=message.queue, message_id=message.id, error=str(error))
            return False
        return True

    async def _put(self, message: Message, rung: Rung, properties: Properties) -> BrokerError | None:
        # the way a nack takes: who consumes need not have the right to write into any queue there is
        key = message.queue if rung.number == 1 else self._topology.rungs[rung.number - 2].key
        outgoing = Outgoing(self._topology.retry_exchange, key, message.body, properties)
        try:
            await self._link.publish(outgoing, timeout=self._timeout)
        except BrokerError as error:
            return error
        self.until = max(self.until, datetime.now(UTC) + rung.delay)
        return None

    async def give_back(self, delivery: Delivery) -> Settlement:
        """Put it back into the work queue at the consumer's end.

        Not before the broker sends no more: it would be here again at once, a delivery nearer to the queue's limit.
        """
        if not delivery.gone:
            await self._over.wait()
        return "given_back" if delivery.nack(requeue=True) else "too_late"

    async def _pause(self, time: timedelta) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(time.total_seconds()):
                await self._stopping.wait()
