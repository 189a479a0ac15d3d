"""The consumer: takes deliveries, runs the handler, settles, and comes back after every loss of the line."""

import asyncio
import contextlib
import os
import random
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import structlog

from rabbitdlq.broker import Delivery, PublishLink, heartbeat_of
from rabbitdlq.consumer.acknowledging import Held, warn_of_timeouts
from rabbitdlq.consumer.attempt import Handler
from rabbitdlq.consumer.breaker import Breaker, BreakerState
from rabbitdlq.consumer.classify import Classes
from rabbitdlq.consumer.draining import until_drained
from rabbitdlq.consumer.gate import Gate
from rabbitdlq.consumer.handling import options_of, warn_of_ignored
from rabbitdlq.consumer.health import Health, health_of
from rabbitdlq.consumer.isolation import IsolatedIn, abandoned_limit
from rabbitdlq.consumer.once import KeyOf, Once
from rabbitdlq.consumer.pausing import Pausing
from rabbitdlq.consumer.processor import Processor
from rabbitdlq.consumer.rate import Pacer, checked_rate, prefetch_for, warn_of_waits
from rabbitdlq.consumer.session import Session
from rabbitdlq.consumer.settle import PARK_TIMEOUT, Settler
from rabbitdlq.consumer.signs import Signs
from rabbitdlq.consumer.slots import Share
from rabbitdlq.consumer.summary import ConsumerSummary
from rabbitdlq.consumer.suspects import Suspects
from rabbitdlq.consumer.watch import Watch
from rabbitdlq.consumer.workers import Workers
from rabbitdlq.errors import BrokerError, BrokerUnavailable, ConfigurationError, TopologyMismatch
from rabbitdlq.idempotency import IdempotencyStore
from rabbitdlq.journal import HistoryIndex, JournalWriter
from rabbitdlq.limits import TOPOLOGY_FORM, check_kind, check_whole, checked_duration
from rabbitdlq.rates import Rate
from rabbitdlq.topology import Topology

__all__ = ["Consumer"]

log = structlog.stdlib.get_logger(__name__)

#: reconnecting: first wait, and the longest
FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 5.0
#: a session that lasted this long was a good one: the next loss is repaired at once
LASTING_SECONDS = 5.0


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
        grace: timedelta | str = timedelta(seconds=30),
        park_timeout: timedelta | str = PARK_TIMEOUT,
        worker: str | None = None,
        classify: Classes | None = None,
        payload_type: Any = None,
        soft_timeout: timedelta | str | None = None,
        hard_timeout: timedelta | str | None = None,
        isolation: IsolatedIn | None = None,
        max_memory: str | int | None = None,
        child_setup: Callable[[], Any] | None = None,
        breaker: Breaker | None = Breaker(),  # noqa: B008 - a frozen value
        rate: Rate | str | None = None,
        priority: int = 1,
        idempotency: IdempotencyStore | str | None = None,
        idempotency_key: KeyOf | None = None,
        lease: timedelta | str | None = None,
        management_url: str | None = None,
    ) -> None:
        """``prefetch``: unacknowledged deliveries, twice the concurrency unless given. ``drain``: end when work queue
        and ladder are empty. ``grace``: how long handlers may go on after :meth:`stop`. ``park_timeout``: deadline
        for parking before the broker's own way is taken. ``worker``: this consumer's name in histories. ``classify``:
        what kind of failure exceptions of other people's classes are, for instance ``{ValueError: Permanent}``, the
        most specific class first; ``payload_type``: what payloads have to be, for instance a pydantic model.
        ``soft_timeout``: a handler that takes longer is cancelled, 10 minutes unless given; ``hard_timeout``: one that
        goes on all the same is given up, 15 minutes. ``isolation``: where handlers run, "async" (plain functions in a
        thread), "thread", or "process", where the end of a handler's process costs its own attempt and nothing else;
        ``max_memory``: what each such process may have, for instance "512MiB". These six go before what
        :func:`handler` says. ``child_setup``: called in each process before anything else. ``breaker``:
        when to pause because what handlers need is out of order; None for never. ``rate``: so many are begun in a
        time, evenly, for instance ``"100/m"``; with a slow one the prefetch is smaller, unless given. ``priority``:
        among the consumers of a :class:`ConsumerGroup`. ``idempotency``: where to keep what was done, a store or its
        URL, so that a message that comes twice is handled once; ``idempotency_key``: by what its queue knows it, its id
        unless given; ``lease``: how long a claim outlives the process that died with it, at least ``hard_timeout``.
        ``management_url``: the API that tells how long the broker waits for handlers of this queue. Times are
        timedeltas or texts like "30s"; :class:`ConfigurationError` is raised for what cannot be used.
        """
        check_kind("topology", topology, Topology, TOPOLOGY_FORM)
        check_kind("breaker", breaker, (Breaker, type(None)), "a Breaker(...), or None for none")
        check_kind("rate", rate, (Rate, str, type(None)), 'a text like "100/m", or a Rate')
        check_whole(concurrency=concurrency, prefetch=concurrency if prefetch is None else prefetch, priority=priority)
        park_timeout = checked_duration("park_timeout", park_timeout)
        options = options_of(handler)
        classes = options.classes(classify)
        payload_type = options.payload_type if payload_type is None else payload_type
        timeouts = options.timeouts(soft_timeout, hard_timeout)
        isolated = options.isolated(isolation, max_memory, child_setup)
        self._rate = checked_rate(rate)
        self._prefetch = prefetch = prefetch_for(self._rate, concurrency, prefetch)
        self.topology = topology
        self.concurrency, self.priority = concurrency, priority
        self.worker = worker or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:4]}"
        self._url = url
        self._drain, self._grace = drain, checked_duration("grace", grace)
        self._settle_time = park_timeout * 3
        self._index = HistoryIndex()
        self._link = PublishLink(url, f"rabbitdlq park {topology.name} {self.worker}", patience=park_timeout)
        # not the parks' connection: a journal that is missing or forbidden ends the connection it is written on
        journal = f"rabbitdlq journal {topology.name} {self.worker}"
        self._journal_link = PublishLink(url, journal, patience=timedelta())  # an event is worth no wait of a worker
        self._writer = JournalWriter(topology, self._journal_link)
        self._stopping, self._over, self._hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._settler = Settler(
            topology,
            self._link,
            self._writer,
            self._index,
            worker=self.worker,
            stopping=self._stopping,
            over=self._over,
            park_timeout=park_timeout,
        )
        self._attempt = isolated.attempt(handler, classes, payload_type, timeouts)
        self._once = Once.of(idempotency, idempotency_key, options.idempotency_key, lease, timeouts)
        lease = None if self._once is None else self._once.lease
        self._suspects = Suspects(
            topology, self._settler, self._writer, self._index, self.worker, hard_timeout=timeouts.hard, lease=lease
        )
        self._management_url = management_url
        self._processor = Processor(
            topology,
            self._attempt,
            self._settler,
            self._suspects,
            self._index,
            self._stopping.is_set,
            payload_type,
            timeouts,
            self._once,
        )
        self._asking: asyncio.Task[None] | None = None
        self._held = Held(timeouts, prefetch, concurrency, self._attempt.is_async or isolated.where == "process")
        self._ignored = options.ignored(soft_timeout, self._held, self._once)
        self._workers = Workers(concurrency, self._processor.process)
        self._suspects.let_through = self._workers.put
        self._processor.on_abandoned, self._processor.on_kept = self._workers.abandon, self._workers.step_aside
        self._pausing = None if breaker is None else Pausing(topology.name, breaker, prefetch, self._give_back)
        self._gate = Gate(
            lambda: self._workers.wants,
            self._workers.nudge,
            circuit=None if self._pausing is None else self._pausing.circuit,
            pacer=None if self._rate is None else Pacer(self._rate),
        )
        self._workers.gate = None if self._gate.always_open else self._gate
        if self._pausing is not None:
            self._pausing.govern(self._workers, self._gate)
            self._processor.judge = self._pausing.judge
        #: what :meth:`health` and metrics are made of
        self.signs = Signs(
            self._processor, self._workers, self._suspects, self._writer, self._link, self._journal_link, timeouts
        )
        self._watch = Watch(
            topology.name,
            self._processor,
            self.signs,
            timeouts,
            abandoned_limit(concurrency),
            lambda: self.breaker_state,
            heartbeat_of(url),
        )
        self._begun = False

    @property
    def summary(self) -> ConsumerSummary:
        """How many deliveries ended how, so far."""
        return self._processor.summary

    @property
    def queue(self) -> str:
        """The name of the work queue."""
        return self.topology.name

    @property
    def breaker_state(self) -> BreakerState | None:
        """How the breaker stands; None where there is none."""
        return None if self._pausing is None else self._pausing.circuit.state

    def health(self) -> Health:
        """How the consumer is now; may be asked from any thread, also while the event loop is blocked."""
        return health_of(self.signs.vitals(), queue=self.topology.name, worker=self.worker)

    def take_slots_of(self, share: Share) -> None:
        """Begin nothing without a slot, from now on; for a group, before :meth:`run`."""
        self._gate.join(share)
        self._workers.gate = self._gate

    def stop(self) -> None:
        """Take no more, let handlers finish within the grace time, release the rest. A second call ends the grace."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        self.signs.stop()

    async def run(self) -> ConsumerSummary:
        """Consume until :meth:`stop`, or with ``drain`` until everything is done. A consumer runs once.

        Raises :class:`BrokerError` where the first connection cannot be made, and :class:`TopologyMismatch` at any
        time; later losses of the connection are repaired with growing pauses. With ``drain`` raises
        :class:`AccessDenied` or :class:`EntityNotFound` where the ladder's queues cannot be seen. With isolation
        "process" raises :class:`ConfigurationError` where the handler's process cannot start; and always
        :class:`HandlersAbandoned`, after what runs has had its grace, when too many handlers did not end in time.
        """
        if self._begun:
            raise ConfigurationError("a Consumer runs once; make another for the next run")
        self._begun = True
        warn_of_waits(self.topology.name, self._rate, self._prefetch)
        warn_of_ignored(self.topology.name, self._ignored)
        await self._attempt.start()
        if self._once is not None:
            try:
                await self._once.open()
            except BaseException:
                await self._attempt.close()
                raise
        self._workers.start()
        watching = asyncio.create_task(self._watch.run(self.stop))
        try:
            await self._sessions()
        finally:
            watching.cancel()
            if self._asking is not None:
                self._asking.cancel()
            self._gate.close()
            deaf = await self._workers.end(self._settle_time.total_seconds())
            self._processor.leave()
            if deaf:  # a handler that swallows its cancellation must not keep the process from ending
                log.error("handlers_abandoned", queue=self.topology.name, count=deaf)
            await self._attempt.close()
            await self._suspects.close()
            if self._once is not None:
                await self._once.close()
            self.signs.enter("ended")
            await self._writer.close()
            await self._link.close()
            await self._journal_link.close()
        if self._watch.stuck is not None:
            raise self._watch.stuck
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
                self._suspects.put,
                prefetch=self._prefetch if self._pausing is None else self._pausing.prefetch,
                name=f"rabbitdlq consume {self.topology.name} {self.worker}",
                on_ready=self._use,
            )
            try:
                if not await self._opened(session):
                    return
            except BrokerError as error:
                # a handler may have begun at once, and blocked the event loop until there was no line any more
                first = first and not (session.began and isinstance(error, BrokerUnavailable))
                if first or isinstance(error, TopologyMismatch):
                    raise
                self.signs.enter("lost", str(error))
                log.warning("reconnect_failed", queue=self.topology.name, error=str(error), next_try_in_s=backoff)
                await self._pause(backoff * random.uniform(0.8, 1.2))  # noqa: S311 - spreads reconnects, no secret
                backoff = min(backoff * 2, LONGEST_BACKOFF)
                continue
            self.signs.enter("consuming")
            log.info("consumer_started", queue=self.topology.name, worker=self.worker, reconnected=not first)
            first, opened_at = False, asyncio.get_running_loop().time()
            try:
                await self._until_over(session)
                if self._stopping.is_set():
                    await self._finish(session)
                    return
                self.signs.enter("lost", session.reason)
                log.warning("consumer_lost", queue=self.topology.name, reason=session.reason)
            finally:
                self._take_back()  # the broker has them back already
                await session.close()
            if asyncio.get_running_loop().time() - opened_at >= LASTING_SECONDS:
                backoff = FIRST_BACKOFF
            else:  # each loss costs what was prefetched a delivery count
                await self._pause(backoff)
                backoff = min(backoff * 2, LONGEST_BACKOFF)

    def _use(self, session: Session) -> None:
        """Before the session's first delivery: parks need its reader, and to know what the broker counts."""
        self._settler.reader, self._settler.rungs.repair = session.reader, session.repair
        self._settler.suspicions.heed(session.version)
        if self._asking is None:
            self._asking = asyncio.create_task(
                warn_of_timeouts(self.topology.name, session.vhost, self._held, self._management_url)
            )

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
        if self._pausing is not None:
            waits.append(asyncio.create_task(self._pausing.follow(session)))
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
        await until_drained(self.topology, session, self._workers, self._index, self._settler)
        self.signs.drained = True
        self._stopping.set()

    def _take_back(self) -> list[Delivery]:
        """Those that nobody has begun; their place among the suspects is free again."""
        taken = self._suspects.take_back() + self._workers.take_back()
        for delivery in taken:
            self._suspects.done(delivery)
        return taken

    def _give_back(self) -> None:
        for delivery in self._take_back():
            self._processor.release(delivery)

    async def _finish(self, session: Session) -> None:
        """No more deliveries; those not begun go back; handlers get the grace time; then they are interrupted.

        What is being settled is never interrupted: it has deadlines of its own.
        """
        try:
            await session.stop_taking()
        finally:
            self._over.set()
        self._give_back()
        self._processor.ask_again()
        self._workers.gate = None  # what may still come is given back, too
        hurried = asyncio.create_task(self._hurry.wait())
        idle = asyncio.create_task(self._workers.idle.wait())
        try:
            await asyncio.wait(
                [hurried, idle], timeout=self._grace.total_seconds(), return_when=asyncio.FIRST_COMPLETED
            )
            await self._processor.interrupt()
            await asyncio.wait([idle], timeout=self._settle_time.total_seconds())
        finally:
            hurried.cancel()
            idle.cancel()
