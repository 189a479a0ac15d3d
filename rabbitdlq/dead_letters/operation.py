"""One operation on dead letters, from its plan to its event in the journal: replay, drop or move."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from rabbitdlq import names
from rabbitdlq.broker import Connection, PublishLink, new_id
from rabbitdlq.dead_letters.archive import ArchiveWriter
from rabbitdlq.dead_letters.batches import Batches, Pace
from rabbitdlq.dead_letters.browse import Browser, Held
from rabbitdlq.dead_letters.plan import Planner, ReplayPlan
from rabbitdlq.dead_letters.replay import Canary, Target, outgoing_move, outgoing_replay
from rabbitdlq.dead_letters.report import RunReport
from rabbitdlq.dead_letters.run_log import RunLog, RunState, read_runs
from rabbitdlq.dead_letters.runner import Known, Runner
from rabbitdlq.dead_letters.selection import Selection
from rabbitdlq.dead_letters.traits import Traits
from rabbitdlq.dead_letters.watch import Outcomes
from rabbitdlq.errors import ConfigurationError, RunNotFound
from rabbitdlq.journal import JournalEvent, JournalReader, JournalWriter, read_journal
from rabbitdlq.topology import Topology

__all__ = ["Desk", "Operation", "new_run_id", "resumable", "runs_of"]

#: what tells that a message has begun its next lap
_HEARD_OF = frozenset({names.FAILED, names.PARKED, names.RECOVERED, names.SUCCEEDED, names.DROPPED})
#: for reading a journal of up to a gigabyte
JOURNAL_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Desk:
    """What every operation of one manager works with."""

    topology: Topology
    connection: Connection
    link: PublishLink
    writer: JournalWriter
    who: str


def new_run_id() -> str:
    """Sorts by time, and is short enough to be typed."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{new_id()[:6]}"


def _nothing(_: RunReport) -> None:
    pass


@dataclass(slots=True)
class Operation:
    """What is to be done, and how; used once."""

    desk: Desk
    #: replay, drop or move
    name: str
    selection: Selection
    #: made before, by a dry run; else it is made now
    plan: ReplayPlan | None = None
    #: the run that is gone on with, and its state
    resumed: RunState | None = None
    target: Target | None = None
    archive: ArchiveWriter | None = None
    rate: float | None = None
    canary: Canary | None = None
    watch: timedelta | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    on_progress: Callable[[RunReport], None] = _nothing
    #: is given a new run's plan before anything is done; an error that it raises ends it there
    before: Callable[[ReplayPlan], Awaitable[None]] | None = None
    #: an id that names no letter, or several, is an error instead of a line in the report
    strict: bool = False

    async def run(self, browser: Browser) -> RunReport:
        """Do it; the browser holds the lock.

        Raises :class:`BrokerError` where the broker went away, :class:`ArchiveError` where the archive cannot be
        written, after the journal was told what was done by then.
        """
        report = RunReport(self.name)
        report.archive = str(self.archive.path) if self.archive else None
        if self.resumed is not None:
            keys, kept, known = await self._resume(self.resumed, report, browser)
        else:
            keys, kept = await self._planned(browser, report)
            known = Known()
        self.on_progress(report)
        if not keys:
            return report
        log = RunLog(
            self.desk.writer,
            self.desk.topology.name,
            report.run,
            self.name,
            self.resumed,
            report.in_flight,
        )
        told: dict[str, Any] = {
            "who": self.desk.who,
            "amqp_user": self.desk.connection.user,
            "selection": self.resumed.info().selection if self.resumed else self.selection.describe(),
            "target": (self.target.exchange, self.target.routing_key) if self.target else None,
            # whoever goes on may be in another directory
            "archive": str(self.archive.path.absolute()) if self.archive else None,
        }
        await (log.start(keys, **told) if self.resumed is None else log.go_on(**told))
        runner = Runner(browser, report, keys, self.stop, self.on_progress, known)
        try:
            async with self._following() as outcomes:
                await self._carry_out(runner, browser, report, log, kept, outcomes)
            runner.finish()
        except BaseException:
            await self._end(log, report, told, "failed")
            raise
        report.interrupted = self.stop.is_set() and bool(report.left)
        await self._end(log, report, told, report.outcome)
        return report

    async def _end(self, log: RunLog, report: RunReport, told: dict[str, Any], outcome: str) -> None:
        await log.end(
            who=self.desk.who,
            amqp_user=self.desk.connection.user,
            ids=report.ids,
            count=report.done,
            outcome=outcome,
            counts=report.counts(),
            fingerprints=dict(report.fingerprints.most_common(100)) or None,
            **{name: told[name] for name in ("selection", "target", "archive")},
        )
        report.journaled = log.written

    async def _planned(self, browser: Browser, report: RunReport) -> tuple[list[str], list[Held] | None]:
        report.run = new_run_id()
        plan, kept = self.plan, None
        if plan is None:
            planner = Planner(self.desk.topology, self.selection)
            plan = await planner.read(browser)
            kept = planner.kept
            if kept is None:  # they were too large to be kept: all are read a second time
                await browser.give_back()
        for id, error in plan.problems:
            if self.strict:
                raise error
            report.stay(id, str(error))
        report.found, report.held = browser.count, plan.held
        report.planned = plan.count + len(plan.problems)
        if self.before is not None and plan.count:
            await self.before(plan)
        return list(plan.keys), kept

    async def _resume(
        self, state: RunState, report: RunReport, browser: Browser
    ) -> tuple[list[str], list[Held] | None, Known]:
        info = state.info()
        await browser.give_back()  # what the killed one held may have come back meanwhile
        report.run, report.found, report.planned = info.id, browser.count, info.planned
        report.in_flight.extend(state.named)
        done, in_flight = Counter(state.done), state.in_flight
        report.before = done.total()
        heard: set[str] = set()
        if in_flight and self.name == "replay":
            desk = self.desk
            reading = read_journal(
                desk.connection, desk.topology, desk.writer, since=info.started_at, timeout=JOURNAL_TIMEOUT
            )
            async for event in reading:
                if event.event in _HEARD_OF and event.replay_id is not None:
                    heard.add(event.replay_id)
        # two letters that are equal in all have one key: which of them was heard of cannot be told
        planned = Counter(state.planned)

        def overtaken(traits: Traits) -> bool:
            return traits.key in heard and planned[traits.key] == 1

        ended_well = state.ended is not None and state.ended.outcome in ("stopped", "aborted")
        return state.planned, None, Known(done, frozenset(in_flight), overtaken, leftovers=not ended_well)

    # --- the way through

    async def _carry_out(
        self,
        runner: Runner,
        browser: Browser,
        report: RunReport,
        log: RunLog,
        kept: list[Held] | None,
        outcomes: Outcomes | None,
    ) -> None:
        act = self._act(runner, log, outcomes)
        report.phase = "sending"
        if self.canary is not None and outcomes is not None:
            await runner.run(act, kept, most=self.canary.count)
            kept = None
            if not runner.is_halted:
                await browser.give_back()
                await self._judge(self.canary, report, outcomes)
        if not report.aborted:
            await runner.run(act, kept)
        if self.watch is not None and outcomes is not None and not report.aborted:
            await browser.give_back()
            self._wait(report)
            await outcomes.ended(self.watch, self.stop)
            report.outcomes = outcomes.counts()

    def _wait(self, report: RunReport) -> None:
        report.phase = "waiting"
        self.on_progress(report)

    async def _judge(self, canary: Canary, report: RunReport, outcomes: Outcomes) -> None:
        """Whether to go on after the first few."""
        self._wait(report)
        await outcomes.ended(canary.wait, self.stop)
        counts = report.outcomes = outcomes.counts()
        failed, sent = counts["back"] + counts["retrying"], sum(counts.values())
        report.phase = "sending"
        if self.stop.is_set():
            return
        if not sent:
            report.aborted = f"none of the {report.stayed} that were to go first could be sent"
        elif failed + counts["recovered"] == 0:
            report.aborted = (
                f"none of the {sent} sent first has succeeded or failed within {canary.wait.total_seconds():g} s; is "
                "there a consumer of rabbitdlq at work, and the journal readable?"
            )
        elif failed / sent > canary.abort_above:
            report.aborted = (
                f"of the {sent} sent first {counts['back']} are back and {counts['retrying']} failed and are tried "
                f"again, more than {canary.abort_above:.0%}"
            )

    def _act(
        self, runner: Runner, log: RunLog, outcomes: Outcomes | None
    ) -> Callable[[AsyncIterator[Held]], Awaitable[None]]:
        def unsent(held: Held) -> None:
            if outcomes is not None:
                outcomes.forget(held.traits.id, held.traits.lap + 1)

        def put_back(held: Held) -> None:
            runner.put_back(held)
            unsent(held)

        def halted() -> bool:
            return runner.is_halted

        async def act(letters: AsyncIterator[Held]) -> None:
            batches = Batches[Held](log, Pace(self.rate, self.stop), lambda held: held.traits.key, put_back, halted)
            if self.name == "drop":
                await runner.destroy(letters, batches, self.archive)
                return
            moving = self.target.routing_key if self.name == "move" and self.target else None
            await runner.send(
                _expected(letters, outcomes) if outcomes is not None else letters,
                batches,
                self.desk.link,
                lambda held: outgoing_replay(held, self.target) if moving is None else outgoing_move(held, moving),
                unsent,
            )

        return act

    @asynccontextmanager
    async def _following(self) -> AsyncIterator[Outcomes | None]:
        """What becomes of the letters, from the journal; None where nobody wants to know."""
        if self.canary is None and self.watch is None:
            yield None
            return
        outcomes = Outcomes()
        reader = JournalReader(self.desk.topology, self.desk.writer, outcomes.take)
        await reader.start(self.desk.connection, datetime.now(UTC) - timedelta(minutes=1), lambda: None)
        try:
            yield outcomes
        finally:
            await reader.close()


async def _expected(letters: AsyncIterator[Held], outcomes: Outcomes) -> AsyncIterator[Held]:
    """The same, each announced before it is sent: a fast consumer's answer may come before the confirm."""
    async for held in letters:
        outcomes.expect(held.traits.id, held.traits.lap + 1)
        yield held


async def runs_of(desk: Desk) -> dict[str, RunState]:
    """All runs that the journal still knows, oldest first."""
    reading = read_journal(desk.connection, desk.topology, desk.writer, timeout=JOURNAL_TIMEOUT)
    events: list[JournalEvent] = [event async for event in reading if event.run is not None]
    return read_runs(events)


async def resumable(desk: Desk, run: str, operation: str) -> RunState:
    """A run that can be gone on with; raises :class:`ConfigurationError` saying why it cannot."""
    if desk.topology.journal != "stream":
        raise ConfigurationError(
            f"run {run!r}: the journal of {desk.topology.name!r} is live and keeps nothing, so no run can be resumed"
        )
    state = (await runs_of(desk)).get(run)
    if state is None:
        raise RunNotFound(
            f"no run {run!r} in the journal of {desk.topology.name!r}; 'rabbitdlq dlq runs {desk.topology.name}' shows "
            "those there are"
        )
    info = state.info()
    if info.operation != operation:
        raise ConfigurationError(f"run {run!r} is a {info.operation}: go on with 'rabbitdlq dlq {info.operation}'")
    if info.outcome == "done":
        raise ConfigurationError(f"run {run!r} is done: there is nothing to go on with")
    if not state.is_planned:
        raise ConfigurationError(
            f"run {run!r} ended before its plan was in the journal: start a new one; what it did, if anything, is not "
            "known"
        )
    return state
