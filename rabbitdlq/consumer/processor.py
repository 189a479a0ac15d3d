"""What happens to one delivery: open it, run the attempt, decide the outcome, settle, log one line."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import Any

import structlog

from rabbitdlq import names
from rabbitdlq.broker import Delivery, cancelled_by_us
from rabbitdlq.consumer.attempt import Attempt, Failed, Interrupted, Result
from rabbitdlq.consumer.classify import Rule
from rabbitdlq.consumer.company import Company
from rabbitdlq.consumer.counts import AttemptCounts
from rabbitdlq.consumer.deadlines import Running, Timeouts
from rabbitdlq.consumer.once import Once
from rabbitdlq.consumer.opening import Opener
from rabbitdlq.consumer.outcome import (
    Dropped,
    Outcome,
    Postponed,
    Released,
    decide,
    unreadable,
)
from rabbitdlq.consumer.rungs import Settlement
from rabbitdlq.consumer.settle import Settler
from rabbitdlq.consumer.summary import ConsumerSummary
from rabbitdlq.consumer.suspects import Suspects
from rabbitdlq.consumer.telling import Telling
from rabbitdlq.errors import Transient
from rabbitdlq.idempotency import Claim
from rabbitdlq.journal import HistoryIndex
from rabbitdlq.message import Message
from rabbitdlq.topology import Topology

__all__ = ["Processor"]

log = structlog.stdlib.get_logger(__name__)

#: seconds in which handlers that are interrupted may clean up, and threads and processes be left or killed
CLEANUP_SECONDS = 6.0
#: seconds in which a loop that stood still notices that its connection is gone
SEEING_A_LOSS = 0.1
#: why one is postponed that a crash may have brought back
OVERDUE = "waited too long for its turn among those that a crash brought back"
#: and one that comes to its handler in that very moment, or has to be alone, too
ONE_ALONE = "another one has to run alone"
#: seconds in which others may end before one runs alone. Who is still at work then has killed nobody for so long; and
#: without an end of the wait one might never run where handlers take long
ALONE_WITHIN = 60.0


class Processor:
    """Brings deliveries to their end, one at a time for each worker that calls :meth:`process`."""

    def __init__(
        self,
        topology: Topology,
        attempt: Attempt,
        settler: Settler,
        suspects: Suspects,
        index: HistoryIndex,
        stopping: Callable[[], bool],
        payload_type: Any,
        timeouts: Timeouts,
        once: Once | None,
    ) -> None:
        self._topology = topology
        self._timeouts = timeouts
        #: is given the task of a handler that nobody waits for any longer, and the one that settles its message instead
        self.on_abandoned: Callable[[asyncio.Task[Any], asyncio.Task[Any]], None] = lambda *_: None
        #: is given the task of a message that waits for long before it is settled, and holds up nobody
        self.on_kept: Callable[[asyncio.Task[Any]], None] = lambda _: None
        settler.rungs.on_kept = self._kept
        #: has the last word on what becomes of a delivery whose handler has run
        self.judge: Callable[[Delivery, Message, Result, Outcome], Outcome] | None = None
        self._opener = Opener(topology, payload_type, index)
        self._attempt = attempt
        self._given_up = 0
        self._settler = settler
        self._suspects = suspects
        self._once = once
        self._stopping = stopping
        self._telling = Telling(topology.name)
        #: their handlers may still be at work: a claim on what they work on stays
        self._runs_on: set[Delivery] = set()
        self._running: dict[asyncio.Task[Any], Running] = {}
        self._company = Company()
        #: when the event loop was seen to stand still last, by :func:`time.perf_counter`
        self.stood_still_at: Callable[[], float] = lambda: -1.0
        self.summary = ConsumerSummary()
        #: of every run of the handler
        self.counts = AttemptCounts()

    async def process(self, delivery: Delivery) -> None:
        """Bring one delivery to its end. Never raises but for a cancellation of the worker."""
        suspect = delivery is self._suspects.current
        if not suspect and delivery not in self._suspects.overdue:
            return await self._process(delivery, suspect=False)
        try:
            await self._process(delivery, suspect=suspect)
        finally:
            self._suspects.done(delivery)

    def join(self, company: Company) -> None:
        """Share the process with others: one message may have to run alone."""
        self._company = company
        company.join(self)

    def _kept(self, task: asyncio.Task[Any], delivery: Delivery) -> None:
        self.on_kept(task)
        self._suspects.done(delivery)  # it runs nothing any more: the next one, please

    def leave(self) -> None:
        """The consumer has ended: nobody waits for what of its handlers runs on."""
        for running in self._running.values():
            self._company.let_go(running.delivery)
        self._company.leave(self)

    def ask_again(self) -> None:
        """The consumer is to stop: whoever waits for another one's end need not."""
        self._company.ask_again()

    @property
    def held_up(self) -> bool:
        """Whether nothing begins, because one has to run alone; may be asked from another thread."""
        return self._company.holder is not None

    @property
    def at_work(self) -> int:
        """How many handlers run, without those that were given up."""
        return len(self._running)

    async def _process(self, delivery: Delivery, *, suspect: bool) -> None:
        if self._company.holder is not None and delivery not in self._suspects.overdue:
            await self._company.opened(self._stopping)
        if delivery.gone:
            return
        message: Message | None = None
        try:
            if self._stopping():
                if await self._settler.rungs.give_back(delivery) == "given_back":
                    self.summary.released += 1
                return
            message, problem = self._opener.open(delivery)
            # in the worker's own context, where the next message takes their place
            structlog.contextvars.bind_contextvars(message_id=message.id, queue=message.queue, attempt=message.attempt)
            outcome: Outcome | None
            if problem is not None:
                outcome = unreadable(problem)
            elif delivery in self._suspects.overdue:
                outcome = Postponed(OVERDUE, 0.0)
            elif suspect:
                outcome = await self._try(message, delivery)
            else:
                outcome = await self._once_or_always(message, delivery)
            # else its message was settled without it
            if outcome is not None and await self._settle(delivery, message, outcome) != "too_late" and suspect:
                await self._suspects.end(delivery)
        except (Exception, asyncio.CancelledError):
            if cancelled_by_us():
                raise
            # a fault of ours must neither end the worker nor lose the message: the ladder brings it again; and a
            # library that cancels what waits for a line that was lost cancels no worker of ours
            delivery.nack(requeue=False)
            if message is None:
                structlog.contextvars.unbind_contextvars("message_id", "queue", "attempt")
            log.exception("delivery_unsettled", queue=self._topology.name, delivery_tag=delivery.tag)

    async def _try(self, message: Message, delivery: Delivery) -> Outcome | None:
        """Run it with all the caution that a message deserves which a crash has brought back."""
        if (park := await self._suspects.convicted(delivery, message)) is not None:
            return park
        if not self._suspects.on_its_last(delivery, message):
            return await self._once_or_always(message, delivery)
        if self._once is not None and (instead := await self._not_to_run(self._once, message, delivery)) is not None:
            return instead
        log.warning(
            "message_runs_alone",
            message_id=message.id,
            queue=message.queue,
            attempt=message.attempt,
            consequence="nothing else begins in this process until it has ended or is given up",
        )
        async with self._company.alone(delivery, ALONE_WITHIN, self._stopping) as alone:
            if delivery.gone:
                return None
            return await self._once_or_always(message, delivery) if alone else Postponed(ONE_ALONE, 0.0)

    async def _not_to_run(self, once: Once, message: Message, delivery: Delivery) -> Outcome | None:
        """What the store makes of it without a run: nobody is to wait for one that does not run."""
        begun = await self._claim(once, message, delivery)
        if not isinstance(begun, tuple):
            return begun
        claimed, claim = begun
        if claim is not None:
            await once.end(claimed, claim, Released(0.0))
        return None

    async def _claim(self, once: Once, message: Message, delivery: Delivery) -> tuple[Message, Claim | None] | Outcome:
        """The message as its handler gets it, with the claim; or what becomes of it without one."""
        begun = await once.begin(message)
        return self._decide(delivery, message, begun) if isinstance(begun, Failed) else begun

    async def _settle(self, delivery: Delivery, message: Message, outcome: Outcome) -> Settlement:
        settlement = await self._settler.settle(delivery, message, outcome)
        self.summary.count(outcome, settlement)
        self._telling.settled(message, outcome, settlement)
        return settlement

    def release(self, delivery: Delivery) -> None:
        """Give back a delivery that nobody has begun."""
        if delivery.nack(requeue=True):
            self.summary.released += 1

    async def interrupt(self) -> None:
        """Cancel the handlers that run, and nothing that is being settled; the messages of deaf ones go back."""
        if not self._running:
            return
        log.warning("handlers_interrupted", queue=self._topology.name, count=len(self._running))
        for task in self._running:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLEANUP_SECONDS):
                while self._running:
                    await asyncio.sleep(0.02)
        for running in list(self._running.values()):
            self._leave_behind(running, Released(0.0), "it did not end when the consumer did: its message goes back")

    def _once_or_always(self, message: Message, delivery: Delivery) -> Coroutine[Any, Any, Outcome | None]:
        # no coroutine of its own: most consumers have no store, and every message comes by here
        if self._once is None:
            return self._begin(message, delivery)
        return self._run_once(self._once, message, delivery)

    async def _run_once(self, once: Once, message: Message, delivery: Delivery) -> Outcome | None:
        begun = await self._claim(once, message, delivery)
        if not isinstance(begun, tuple):
            return begun
        message, claim = begun
        outcome = await self._begin(message, delivery)
        ended = outcome
        if isinstance(outcome, Dropped):
            # once the store says that it is done nobody asks the handler again: the journal has to know why before
            if await self._settle(delivery, message, outcome) == "too_late":
                ended = Released(0.0)
            else:
                await self._suspects.end(delivery)
            outcome = None
        if claim is not None and delivery not in self._runs_on:
            await once.end(message, claim, ended)
        self._runs_on.discard(delivery)
        return outcome

    def _begin(self, message: Message, delivery: Delivery) -> Coroutine[Any, Any, Outcome | None]:
        if delivery is not self._suspects.current:
            return self._run(message, delivery)
        return self._run_suspect(message, delivery)

    async def _run_suspect(self, message: Message, delivery: Delivery) -> Outcome | None:
        await self._suspects.begin(delivery, message)
        began = perf_counter()
        try:
            return await self._run(message, delivery)
        finally:
            if self.stood_still_at() < began:
                await self._suspects.end(delivery)
            else:  # who blocks the event loop loses the connection, and comes again: it has ended when it is settled
                await asyncio.sleep(SEEING_A_LOSS)

    async def _run(self, message: Message, delivery: Delivery) -> Outcome | None:
        """The outcome; None where the handler ended after it had been given up."""
        if self._stopping():  # store and journal may have taken their time
            return Released(0.0)
        if self._company.holder is not None and self._company.holder is not delivery:
            return Postponed(ONE_ALONE, 0.0)  # a claim must not wait for it
        task = asyncio.current_task()
        assert task is not None
        running = self._running[task] = Running(task, delivery, message, perf_counter())
        try:
            result = await self._attempt.run(message, running)
        finally:
            self._running.pop(task, None)
            if self._company.holder is not None:
                self._company.left()
            while task.cancelling():  # the interruption was the handler's; settling goes on
                task.uncancel()
        if running.given_up:
            took = round(perf_counter() - running.began, 1)
            self._given_up -= 1
            log.warning("handler_ended_late", message_id=message.id, queue=message.queue, duration_s=took)
            return None
        if running.runs_on and self._once is not None:
            self._runs_on.add(delivery)
        if running.cancelled:
            result = self._timed_out(running, result)
        return self._decide(delivery, message, result)

    def _decide(self, delivery: Delivery, message: Message, result: Result) -> Outcome:
        self.counts.took(result.duration_ms)
        if isinstance(result, Failed):
            self.counts.failed(result.failure.type)
        outcome = decide(self._topology, message, result)
        return outcome if self.judge is None else self.judge(delivery, message, result, outcome)

    # --- handlers that take too long

    def look_at_the_clock(self) -> None:
        """Cancel handlers that have run into the soft timeout, give up those that have run into the hard one."""
        now = perf_counter()
        self._suspects.look_at_the_clock(asyncio.get_running_loop().time())
        soft, hard = self._timeouts.soft.total_seconds(), self._timeouts.hard.total_seconds()
        for running in list(self._running.values()):
            took = now - running.began
            # a plain function cannot be cancelled, only be left alone
            if took >= (soft if self._attempt.is_async else hard) and not running.cancelled:
                running.cancelled, running.told = True, running.failure(self._limit())
                running.task.cancel()
            elif took >= hard + self._timeouts.look_every and running.cancelled:
                self._give_up(running)

    @property
    def kept(self) -> int:
        """Messages that wait unacknowledged until a rung can be reached."""
        return self._settler.rungs.kept

    @property
    def abandoned(self) -> int:
        """Handlers that run on though nobody waits for them any longer."""
        return self._given_up + len(self._attempt.left)

    def running_for(self, seconds: float) -> int:
        """How many handlers have been at work for so long; may be asked from another thread."""
        now = perf_counter()
        return sum(now - running.began >= seconds for running in list(self._running.values()))

    def _limit(self) -> timedelta:
        return self._timeouts.soft if self._attempt.is_async else self._timeouts.hard

    def _timed_out(self, running: Running, result: Result) -> Result:
        """A handler that succeeds all the same has succeeded; what another raised while it cleaned up is told."""
        match result:
            case Interrupted(duration_ms):
                assert running.told is not None
                return Failed(running.told, Rule(Transient), datetime.now(UTC), duration_ms, reason=names.TIMEOUT)
            case Failed():
                return replace(result, reason=names.TIMEOUT)
            case _:
                return result

    def _give_up(self, running: Running) -> None:
        """Its attempt has failed: it does not listen."""
        took = (perf_counter() - running.began) * 1000
        failed = Failed(
            running.failure(self._timeouts.hard), Rule(Transient), datetime.now(UTC), took, reason=names.TIMEOUT
        )
        outcome = self._decide(running.delivery, running.message, failed)
        self._leave_behind(running, outcome, "it did not end when it was cancelled: the attempt has failed")

    def _leave_behind(self, running: Running, outcome: Outcome, consequence: str) -> None:
        """Settle its message without it. Somebody else takes its place."""
        running.given_up = True
        self._given_up += 1
        del self._running[running.task]
        self._company.let_go(running.delivery)  # its task is still in there, and may be so for ever
        self._company.left()
        message = running.message
        log.error(
            "handler_abandoned",
            message_id=message.id,
            queue=message.queue,
            attempt=message.attempt,
            duration_s=round(perf_counter() - running.began, 1),
            consequence=f"{consequence}, and it is left to itself",
        )
        settling = asyncio.create_task(self._settle_without(running.delivery, message, outcome))
        self.on_abandoned(running.task, settling)

    async def _settle_without(self, delivery: Delivery, message: Message, outcome: Outcome) -> None:
        try:
            await self._suspects.end(delivery)
            await self._settle(delivery, message, outcome)
        except Exception:
            delivery.nack(requeue=False)
            log.exception("delivery_unsettled", queue=self._topology.name, delivery_tag=delivery.tag)
        finally:
            self._suspects.done(delivery)
