"""The consumer: takes deliveries, runs the handler, settles, and comes back after every loss of the line."""

import asyncio
import contextlib
import os
import random
import socket
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from rabbitdlq.broker import PublishLink
from rabbitdlq.consumer.attempt import Handler
from rabbitdlq.consumer.classify import Classes
from rabbitdlq.consumer.deadlines import BROKERS_TIMEOUT
from rabbitdlq.consumer.handling import options_of
from rabbitdlq.consumer.processor import ConsumerSummary, Processor
from rabbitdlq.consumer.pulse import Pulse
from rabbitdlq.consumer.session import Session
from rabbitdlq.consumer.settle import PARK_TIMEOUT, Settler
from rabbitdlq.consumer.workers import Workers
from rabbitdlq.errors import AccessDenied, BrokerError, ConfigurationError, EntityNotFound, TopologyMismatch
from rabbitdlq.journal import HistoryIndex, JournalWriter
from rabbitdlq.topology import Topology

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
#: and this many while a message that failed has not been seen again: another consumer may have taken it, or a busy
#: broker, whose counts know nothing of messages that are being dead-lettered, takes its time
DRAIN_LOOKS_WITH_RETRIES_OUT = 50
#: for that long after its delay a message is waited for
LATE_BY = timedelta(seconds=30)


class Consumer:
    """Consumes one work queue with ``concurrency`` handlers at a time.

    ``handler`` is ``async def`` or a plain function (run in a thread) of one argument, a :class:`Message`. Returning
    is success; an exception is a failed attempt, which the broker brings back after the ladder's next delay, or parks
    when the attempts are used up; :class:`Permanent` parks at once, :class:`Drop` lets go of it.
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
        classify: Classes | None = None,
        payload_type: Any = None,
        soft_timeout: timedelta | None = None,
        hard_timeout: timedelta | None = None,
    ) -> None:
        """``prefetch``: unacknowledged deliveries, twice the concurrency unless given. ``drain``: end when work queue
        and ladder are empty. ``grace``: how long handlers may go on after :meth:`stop`. ``park_timeout``: deadline
        for parking before the broker's own way is taken. ``worker``: this consumer's name in histories. ``classify``:
        what kind of failure exceptions of other people's classes are, for instance ``{ValueError: Permanent}``, the
        most specific class first; ``payload_type``: what payloads have to be, for instance a pydantic model.
        ``soft_timeout``: a handler that takes longer is cancelled, 10 minutes unless given; ``hard_timeout``: one that
        goes on all the same is given up, 15 minutes. These four go before what :func:`handler` says.
        """
        options = options_of(handler)
        classes = dict(options.classify) | dict(classify or {})
        payload_type = options.payload_type if payload_type is None else payload_type
        timeouts = options.timeouts(soft_timeout, hard_timeout)
        if concurrency < 1:
            raise ConfigurationError(f"concurrency: {concurrency} is below 1")
        prefetch = 2 * concurrency if prefetch is None else prefetch
        if not concurrency <= prefetch <= MAX_PREFETCH:
            raise ConfigurationError(f"prefetch: {prefetch} is not between concurrency and {MAX_PREFETCH:,}")
        self.topology = topology
        self.worker = worker or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:4]}"
        self._url = url
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
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._processor = Processor(
            topology,
            handler,
            self._settler,
            self._index,
            self._stopping.is_set,
            classes,
            payload_type,
            timeouts,
        )
        self._timeouts = timeouts
        self._workers = Workers(concurrency, self._processor.process)
        self._processor.on_abandoned = self._workers.abandon
        self._begun = False

    @property
    def summary(self) -> ConsumerSummary:
        """How many deliveries ended how, so far."""
        return self._processor.summary

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
        if self._timeouts.hard > BROKERS_TIMEOUT:
            log.warning(
                "timeout_above_brokers",
                queue=self.topology.name,
                hard_timeout_s=self._timeouts.hard.total_seconds(),
                broker_s=BROKERS_TIMEOUT.total_seconds(),
                consequence="unless its consumer_timeout is set higher, the broker takes messages away from handlers "
                "that are still at work, and delivers them again",
            )
        self._workers.start()
        pulse = Pulse(self.topology.name, self._timeouts.look_every)
        watching = asyncio.create_task(self._watch(pulse))
        pulse.start()
        try:
            await self._sessions()
        finally:
            pulse.stop()
            watching.cancel()
            deaf = await self._workers.end(self._settle_time.total_seconds())
            if deaf:  # a handler that swallows its cancellation must not keep the process from ending
                log.error("handlers_abandoned", queue=self.topology.name, count=deaf)
            await self._link.close()
            await self._journal_link.close()
        return self.summary

    async def _watch(self, pulse: Pulse) -> None:
        while True:
            await asyncio.sleep(self._timeouts.look_every)
            pulse.beat()
            self._processor.look_at_the_clock()

    # --- sessions

    async def _sessions(self) -> None:
        backoff, first = FIRST_BACKOFF, True
        while not self._stopping.is_set():
            session = Session(
                self.topology,
                self._url,
                self._writer,
                self._index,
                self._workers.put,
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
                self._workers.take_back()  # nobody has begun them, and the broker has them back already
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
        while looks < (DRAIN_LOOKS_WITH_RETRIES_OUT if self._retries_out() else DRAIN_LOOKS):
            await asyncio.sleep(DRAIN_POLL_SECONDS)
            try:
                idle = self._workers.idle.is_set() and await session.idle_in_broker()
            except (AccessDenied, EntityNotFound):
                raise  # from 4.3 on a rung is counted by those only who have a right on it
            except BrokerError:
                idle = False  # the session ends by itself, and the next one looks again
            looks = looks + 1 if idle and self._workers.idle.is_set() else 0
        self._stopping.set()

    def _retries_out(self) -> bool:
        """Whether a message may still be on its way back, sent there by this process or by another."""
        return self._index.has_since(datetime.now(UTC) - max(self.topology.delays) - LATE_BY)

    async def _finish(self, session: Session) -> None:
        """No more deliveries; those not begun go back; handlers get the grace time; then they are interrupted.

        What is being settled is never interrupted: it has deadlines of its own.
        """
        await session.stop_taking()
        for delivery in self._workers.take_back():
            self._processor.release(delivery)
        hurried = asyncio.create_task(self._hurry.wait())
        idle = asyncio.create_task(self._workers.idle.wait())
        try:
            await asyncio.wait(
                [hurried, idle], timeout=self._grace.total_seconds(), return_when=asyncio.FIRST_COMPLETED
            )
            interrupted = self._processor.interrupt()
            if interrupted:
                log.warning("handlers_interrupted", queue=self.topology.name, count=interrupted)
            await asyncio.wait([idle], timeout=self._settle_time.total_seconds())
        finally:
            hurried.cancel()
            idle.cancel()
