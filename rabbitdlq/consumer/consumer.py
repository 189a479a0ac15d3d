"""The consumer: takes deliveries, runs the handler, settles, and comes back after every loss of the line."""

import asyncio
import contextlib
import os
import random
import socket
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import structlog

from rabbitdlq.broker import PublishLink
from rabbitdlq.consumer.attempt import Handler, is_async, run_attempt
from rabbitdlq.consumer.delivery import Delivery
from rabbitdlq.consumer.outcome import Outcome, Park, Released, Retry, Succeeded, decide, undecodable
from rabbitdlq.consumer.session import Session
from rabbitdlq.consumer.settle import PARK_TIMEOUT, Settlement, Settler
from rabbitdlq.deaths import arrival
from rabbitdlq.errors import AccessDenied, BrokerError, ConfigurationError, EntityNotFound, TopologyMismatch
from rabbitdlq.journal import HistoryIndex, JournalWriter
from rabbitdlq.message import Message, Undecodable, decode_payload, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import WireError

__all__ = ["Consumer", "ConsumerSummary"]

log = structlog.stdlib.get_logger(__name__)

MAX_PREFETCH = 65_535
#: reconnecting: first wait, and the longest
FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 5.0
#: a session that lasted this long was a good one: the next loss is repaired at once
LASTING_SECONDS = 5.0
DRAIN_POLL_SECONDS = 0.2
#: an empty look says little while a message is between two queues; this many in a row say it
DRAIN_LOOKS = 6
#: and this many while one of our own retries has not been seen again (another consumer may have taken it)
DRAIN_LOOKS_WITH_RETRIES_OUT = 50
#: what counts say when the journal does not know: far above any honest ladder
COUNTED_LAPS_LIMIT = 10


@dataclass(slots=True)
class ConsumerSummary:
    """How many deliveries ended how."""

    succeeded: int = 0
    retried: int = 0
    parked: int = 0
    released: int = 0
    #: could not be parked: the broker retries them, or parks them bare
    left_to_broker: int = 0
    #: settled after the line was lost: the broker delivers them again
    too_late: int = 0


class Consumer:
    """Consumes one work queue with ``concurrency`` handlers at a time.

    ``handler`` is ``async def`` or a plain function (run in a thread) of one argument, a :class:`Message`. Returning
    is success; an exception is a failed attempt, which the broker brings back after the ladder's next delay, or parks
    when the attempts are used up; :class:`Permanent` parks at once.
    """

    def __init__(
        self,
        topology: Topology,
        handler: Handler,
        *,
        url: str,
        concurrency: int = 10,
        prefetch: int | None = None,
        drain: bool = False,
        grace: timedelta = timedelta(seconds=30),
        park_timeout: timedelta = PARK_TIMEOUT,
        worker: str | None = None,
    ) -> None:
        """``prefetch``: unacknowledged deliveries, twice the concurrency unless given. ``drain``: end when work queue
        and ladder are empty. ``grace``: how long handlers may go on after :meth:`stop`. ``park_timeout``: deadline
        for parking before the broker's own way is taken. ``worker``: this consumer's name in histories.
        """
        is_async(handler)
        if concurrency < 1:
            raise ConfigurationError(f"concurrency: {concurrency} is below 1")
        prefetch = 2 * concurrency if prefetch is None else prefetch
        if not concurrency <= prefetch <= MAX_PREFETCH:
            raise ConfigurationError(f"prefetch: {prefetch} is not between concurrency and {MAX_PREFETCH:,}")
        self.topology = topology
        self.worker = worker or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:4]}"
        self.summary = ConsumerSummary()
        self._handler = handler
        self._url = url
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._drain = drain
        self._grace = grace
        self._settle_time = park_timeout * 3
        self._index = HistoryIndex()
        self._link = PublishLink(url, f"rabbitdlq park {topology.name} {self.worker}")
        # not the parks' connection: a journal that is missing or forbidden ends the connection it is written on
        self._journal_link = PublishLink(url, f"rabbitdlq journal {topology.name} {self.worker}")
        self._writer = JournalWriter(topology, self._journal_link)
        self._settler = Settler(
            topology, self._link, self._writer, self._index, worker=self.worker, park_timeout=park_timeout
        )
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self._busy = 0
        self._idle = asyncio.Event()
        self._in_handler: set[asyncio.Task[Any]] = set()
        self._begun = False
        self._ending = False
        self._retries_out: set[str] = set()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Take no more, let handlers finish within the grace time, release the rest. A second call ends the grace."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def run(self) -> ConsumerSummary:
        """Consume until :meth:`stop`, or with ``drain`` until everything is done. A consumer runs once.

        Raises :class:`BrokerError` where the first connection cannot be made, and :class:`TopologyMismatch` at any
        time; later losses of the connection are repaired with growing pauses. With ``drain`` raises
        :class:`AccessDenied` or :class:`EntityNotFound` where the ladder's queues cannot be seen.
        """
        if self._begun:
            raise ConfigurationError("a Consumer runs once; make another for the next run")
        self._begun = True
        workers = [asyncio.create_task(self._work()) for _ in range(self._concurrency)]
        try:
            await self._sessions()
        finally:
            self._ending = True
            for worker in workers:
                worker.cancel()
            _, deaf = await asyncio.wait(workers, timeout=self._settle_time.total_seconds())
            if deaf:  # a handler that swallows its cancellation must not keep the process from ending
                log.error("handlers_abandoned", queue=self.topology.name, count=len(deaf))
            await self._link.close()
            await self._journal_link.close()
        return self.summary

    # --- sessions

    async def _sessions(self) -> None:
        backoff, first = FIRST_BACKOFF, True
        while not self._stopping.is_set():
            session = Session(
                self.topology,
                self._url,
                self._writer,
                self._index,
                self._deliveries.put_nowait,
                prefetch=self._prefetch,
                name=f"rabbitdlq consume {self.topology.name} {self.worker}",
                on_ready=self._use,
            )
            try:
                if not await self._opened(session):
                    return
            except BrokerError as error:
                if first or isinstance(error, TopologyMismatch):
                    raise
                log.warning("reconnect_failed", queue=self.topology.name, error=str(error), next_try_in_s=backoff)
                await self._pause(backoff * random.uniform(0.8, 1.2))  # noqa: S311 - spreads reconnects, no secret
                backoff = min(backoff * 2, LONGEST_BACKOFF)
                continue
            log.info("consumer_started", queue=self.topology.name, worker=self.worker, reconnected=not first)
            first, opened_at = False, asyncio.get_running_loop().time()
            try:
                await self._until_over(session)
                if self._stopping.is_set():
                    await self._finish(session)
                    return
                log.warning("consumer_lost", queue=self.topology.name, reason=session.reason)
            finally:
                self._forget_waiting()
                await session.close()
            if asyncio.get_running_loop().time() - opened_at >= LASTING_SECONDS:
                backoff = FIRST_BACKOFF
            else:  # each loss costs what was prefetched a delivery count
                await self._pause(backoff)
                backoff = min(backoff * 2, LONGEST_BACKOFF)

    def _use(self, session: Session) -> None:
        """Before the session's first delivery: parks need its reader, and to know what the broker counts."""
        self._settler.reader = session.reader
        self._settler.delivery_count_travels = (4, 0) <= session.version < (4, 3)

    async def _opened(self, session: Session) -> bool:
        """Whether the session was opened; a stop does not wait for a broker that does not answer."""
        opening, stopping = asyncio.create_task(session.open()), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return False
            await opening
            return True
        finally:
            opening.cancel()
            stopping.cancel()
            await asyncio.gather(opening, stopping, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _until_over(self, session: Session) -> None:
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(session.ended.wait()),
            asyncio.create_task(self._stopping.wait()),
        ]
        if self._drain:
            waits.append(asyncio.create_task(self._until_drained(session)))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _until_drained(self, session: Session) -> None:
        """Set the stop once nothing waits, nothing is on the ladder and nothing is in work."""
        looks = 0
        while looks < (DRAIN_LOOKS_WITH_RETRIES_OUT if self._retries_out else DRAIN_LOOKS):
            await asyncio.sleep(DRAIN_POLL_SECONDS)
            try:
                idle = not self._busy and self._deliveries.empty() and await session.idle_in_broker()
            except (AccessDenied, EntityNotFound):
                raise  # from 4.3 on a rung is counted by those only who have a right on it
            except BrokerError:
                idle = False  # the session ends by itself, and the next one looks again
            looks = looks + 1 if idle and not self._busy and self._deliveries.empty() else 0
        self._stopping.set()

    async def _finish(self, session: Session) -> None:
        """No more deliveries; those not begun go back; handlers get the grace time; then they are interrupted.

        What is being settled is never interrupted: it has deadlines of its own.
        """
        await session.stop_taking()
        while not self._deliveries.empty():
            await self._release(self._deliveries.get_nowait())
        hurried = asyncio.create_task(self._hurry.wait())
        idle = asyncio.create_task(self._idle.wait())
        try:
            self._note_idle()
            await asyncio.wait(
                [hurried, idle], timeout=self._grace.total_seconds(), return_when=asyncio.FIRST_COMPLETED
            )
            if self._in_handler:
                log.warning("handlers_interrupted", queue=self.topology.name, count=len(self._in_handler))
            for task in self._in_handler:
                task.cancel()
            await asyncio.wait([idle], timeout=self._settle_time.total_seconds())
        finally:
            hurried.cancel()
            idle.cancel()

    def _note_idle(self) -> None:
        if self._busy or not self._deliveries.empty():
            self._idle.clear()
        else:
            self._idle.set()

    def _forget_waiting(self) -> None:
        """Deliveries of a lost channel that nobody has begun: the broker has them back already."""
        while not self._deliveries.empty():
            self._deliveries.get_nowait()

    async def _release(self, delivery: Delivery) -> None:
        if await delivery.nack(requeue=True):
            self.summary.released += 1

    # --- deliveries

    async def _work(self) -> None:
        while not self._ending:
            delivery = await self._deliveries.get()
            if delivery.gone:
                continue
            self._busy += 1
            self._note_idle()
            try:
                if self._stopping.is_set():
                    await self._release(delivery)
                else:
                    await self._process(delivery)
            except Exception:
                # a fault of ours must neither end the worker nor lose the message: the ladder brings it again
                log.exception("delivery_unsettled", queue=self.topology.name, delivery_tag=delivery.tag)
                await delivery.nack(requeue=False)
            finally:
                self._busy -= 1
                self._note_idle()

    async def _process(self, delivery: Delivery) -> None:
        message = self._open(delivery)
        self._retries_out.discard(message.id)
        with structlog.contextvars.bound_contextvars(
            message_id=message.id, queue=message.queue, attempt=message.attempt
        ):
            outcome = await self._attempt(message)
            settlement = await self._settler.settle(delivery, message, outcome)
        self._count(message, outcome, settlement)
        log.info(
            "delivery_lost" if settlement == "too_late" else "delivery_settled",
            message_id=message.id,
            queue=message.queue,
            attempt=message.attempt,
            max_attempts=message.max_attempts,
            outcome="left_to_broker" if settlement == "left_to_broker" else outcome.name,
            duration_ms=round(outcome.duration_ms, 3),
        )

    async def _attempt(self, message: Message) -> Outcome:
        try:
            message = replace(message, payload=decode_payload(message.body, message.properties))
        except Undecodable as error:
            return undecodable(error)
        task = asyncio.current_task()
        assert task is not None
        self._in_handler.add(task)
        try:
            result = await run_attempt(self._handler, message)
        finally:
            self._in_handler.discard(task)
            while task.cancelling():  # the interruption was the handler's; settling goes on
                task.uncancel()
        return decide(self.topology, message, result)

    def _open(self, delivery: Delivery) -> Message:
        try:
            properties = delivery.properties()
        except WireError as error:
            raise WireError(f"delivery {delivery.tag} of {self.topology.name!r}: {error}") from error
        way = arrival(self.topology, delivery.exchange, delivery.routing_key, properties.table.get("x-death"))
        message = message_of(self.topology, delivery.body, properties, way, way.failures)
        if way.counted <= way.failures:
            return message
        failures = self._failures_of_odd_arrival(message, way.failures, way.counted)
        return replace(message, attempt=failures + 1)

    def _failures_of_odd_arrival(self, message: Message, failures: int, counted: int) -> int:
        """More waits than rungs: a rung is missing and the message went round, or (below 4.0) the header is stale.

        The journal tells them apart: it knows how far this lap has come.
        """
        told = self._index.last_attempt(message.id, message.lap)
        known = max(failures, told)
        if counted > COUNTED_LAPS_LIMIT * self.topology.max_attempts:
            known = max(known, self.topology.max_attempts)
        log.warning(
            "x_death_counts_more",
            message_id=message.id,
            queue=message.queue,
            attempt=known + 1,
            by_rung=failures,
            by_counts=counted,
            by_journal=told,
        )
        return known

    def _count(self, message: Message, outcome: Outcome, settlement: Settlement) -> None:
        if settlement == "too_late":
            self.summary.too_late += 1
            return
        if settlement == "left_to_broker":
            self.summary.left_to_broker += 1
            return
        match outcome:
            case Succeeded():
                self.summary.succeeded += 1
            case Retry():
                self.summary.retried += 1
                if self._drain:
                    self._retries_out.add(message.id)
            case Park():
                self.summary.parked += 1
            case Released():
                self.summary.released += 1
