"""``DLQManager``: everything that can be done with the dead letters of one work queue. Every door uses this class."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rabbitdlq import names
from rabbitdlq.broker import Connection, close_channel, count_messages
from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters.archive import ArchiveReader, ArchiveWriter, read_archive
from rabbitdlq.dead_letters.browse import Browser
from rabbitdlq.dead_letters.groups import Group, Grouping
from rabbitdlq.dead_letters.looking import QueueSummary, find, read_letters, summarize
from rabbitdlq.dead_letters.operation import Operation, resumable, runs_of
from rabbitdlq.dead_letters.plan import Planner, ReplayPlan
from rabbitdlq.dead_letters.preflight import Finding, preflight_plan
from rabbitdlq.dead_letters.pushing import message_to_push, pushed
from rabbitdlq.dead_letters.replay import Canary, Target
from rabbitdlq.dead_letters.report import RunReport
from rabbitdlq.dead_letters.restore import Restoring
from rabbitdlq.dead_letters.run_log import RunInfo
from rabbitdlq.dead_letters.runner import PUBLISH_TIMEOUT
from rabbitdlq.dead_letters.selection import Selection, check_selection, checked_moment
from rabbitdlq.dead_letters.session import Session
from rabbitdlq.dead_letters.story import Story, last_replays, story_of, with_story
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.limits import check_kind, optional_duration
from rabbitdlq.message import Message
from rabbitdlq.topology import Topology

__all__ = ["DLQManager"]

EVERYTHING = Selection()
_DOING = {"replay": "replaying", "drop": "dropping", "move": "moving", "restore": "restoring"}


class DLQManager(Session):
    """The dead letters of one work queue: look, replay, drop, push. Used as an async context manager.

    ::

        async with DLQManager(Topology("orders", ["5s", "30s"]), url="amqp://guest:guest@127.0.0.1/") as dlq:
            for letter in await dlq.peek(10):
                print(letter.id, letter.reason, letter.error)
            await dlq.replay_all()

    Looking removes nothing and keeps the order. Every operation holds the queue's lock while it works and raises
    :class:`DeadLettersInUse` where another operator holds it. What changes something is written to the journal.
    """

    # --- looking

    async def peek(self, limit: int = 20, selection: Selection | None = None) -> list[DeadLetter]:
        """The oldest letters, at most ``limit``; of those that belong to the selection."""
        return [letter async for letter in self._letters(limit, selection, None)]

    async def peek_all(self) -> list[DeadLetter]:
        """All letters, oldest first. For more than memory holds use :meth:`each`."""
        return [letter async for letter in self._letters(None, None, None)]

    async def each(
        self,
        limit: int | None = None,
        selection: Selection | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> AsyncGenerator[DeadLetter, None]:
        """The letters one after the other, oldest first, in bounded memory; the lock is held until the end.

        ``limit`` counts those that belong to the selection; ``on_progress`` is told how many letters were read, of how
        many. Copies of one letter that a crash parked twice are shown once. Until it has ended or is closed, every
        other operation of this manager raises :class:`DeadLettersInUse`: collect the ids first, then change.
        """
        async with aclosing(self._letters(limit, selection, on_progress)) as letters:
            try:
                async for letter in letters:
                    self._reading = True
                    yield letter
            finally:
                self._reading = False

    async def _letters(
        self, limit: int | None, selection: Selection | None, on_progress: Callable[[int, int], None] | None
    ) -> AsyncGenerator[DeadLetter, None]:
        check_selection(selection)
        async with self._browse(on_progress) as browser, aclosing(read_letters(browser, limit, selection)) as letters:
            async for letter in letters:
                yield letter

    async def groups(
        self,
        by: str = "fingerprint",
        since: datetime | timedelta | str | None = None,
        selection: Selection | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Group]:
        """How many letters of each bug there are, most first; also by error, reason, routing-key, worker or type.

        With ``since``, a moment as in a :class:`Selection`, each group says whether it is new, growing or regressed
        since then. Memory grows with the number of groups. Raises :class:`ConfigurationError` for another ``by``.
        """
        grouping, since = Grouping(by), checked_moment("since", since)
        async with aclosing(self._letters(None, selection, on_progress)) as letters:
            async for letter in letters:
                grouping.add(letter)
        # the journal tells of fingerprints only
        known = by == "fingerprint"
        replayed = await last_replays(await self._connected(), self.topology, self._writer) if known else {}
        return grouping.groups(last_replayed=replayed, since=since)

    async def get(self, id: str) -> DeadLetter:
        """The letter with this message id or park id; one that the broker parked bare gets its story from the journal.

        Raises :class:`DeadLetterNotFound`, or :class:`AmbiguousDeadLetter` where several have the id.
        """
        letter = await self._find_one(id)
        if not (letter.bare or letter.history_partial):
            return letter
        return await with_story(await self._connected(), self.topology, self._writer, letter)

    async def story(self, id: str, on_progress: Callable[[int, int], None] | None = None) -> Story:
        """The same letter with its earlier laps and what operators did to it, as far as the journal reaches back.

        Raises as :meth:`get` does; where the journal cannot be read, the story says so.
        """
        letter = await self._find_one(id, on_progress)
        return await story_of(await self._connected(), self.topology, self._writer, letter)

    async def _find_one(self, id: str, on_progress: Callable[[int, int], None] | None = None) -> DeadLetter:
        async with self._browse(on_progress) as browser:
            return (await find(browser, self.topology, id))[0].letter

    async def count(self) -> int:
        """Letters that are ready; needs no lock."""
        async with self._aside() as connection:
            channel = await connection.channel()
            try:
                return await count_messages(channel, self.topology.dlq)
            finally:
                await close_channel(channel)

    async def summary(self, queues: Iterable[Topology] | None = None) -> list[QueueSummary]:
        """How the work queues stand: waiting, on the ladder, dead. Of this manager's queue unless others are given."""
        async with self._aside() as connection:
            return [await summarize(connection, topology) for topology in queues or [self.topology]]

    # --- changing

    async def push(
        self,
        message: Message | Any,
        error: BaseException | str,
        *,
        message_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> str:
        """Park a message by hand: one that a handler was given, or any payload. Gives its id once it is confirmed.

        A handler that pushes its message has to return then: if it raises, the message becomes a second letter, too.
        """
        self._check_writable("push")
        if not isinstance(message, Message):
            message = message_to_push(self.topology, message, message_id, headers)
        publisher = await self._link.publisher()
        outgoing = pushed(self.topology, message, error, self.who, publisher.connection.frame_max)
        await publisher.publish(outgoing, timeout=PUBLISH_TIMEOUT)
        await self._record(names.PUSHED, [message.id], 1)
        return message.id

    async def pop(self, id: str) -> DeadLetter:
        """Take a letter out of the queue for good and give it to the caller, who answers for it from then on."""
        self._check_writable("pop")
        async with self._browse(doing="dropping") as browser:
            copies = await find(browser, self.topology, id)
            for held in copies:
                held.remove()
                await held.settled()
        letter = copies[0].letter
        await self._record(names.POPPED, [letter.id], 1)
        return letter

    async def plan(
        self, selection: Selection = EVERYTHING, on_progress: Callable[[int, int], None] | None = None
    ) -> ReplayPlan:
        """Which letters an operation would be done to, in groups; nothing is changed.

        The plan can be given to :meth:`replay`, :meth:`drop` and :meth:`move` instead of a selection: they are done to
        these letters then, whatever has come since.
        """
        check_selection(selection)
        async with self._browse(on_progress) as browser:
            return await Planner(self.topology, selection, grouped=True).read(browser)

    async def preflight(
        self, plan: ReplayPlan, *, to: Target | None = None, management_url: str | None = None
    ) -> list[Finding]:
        """What can be known of a replay before anything is sent; more with the URL of the management API.

        Unless a target is given, each of the work queues that the letters came from is looked at.
        """
        # a publish in an alarm blocks the connection for good
        async with await Connection.open(self._url, f"rabbitdlq preflight {self.topology.name}") as connection:
            return await preflight_plan(connection, self.topology, plan, to, management_url)

    async def replay(
        self,
        what: str | Selection | ReplayPlan,
        *,
        to: Target | None = None,
        rate: float | None = None,
        canary: Canary | None = None,
        watch: timedelta | str | None = None,
        before: Callable[[ReplayPlan], Awaitable[None]] | None = None,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[RunReport], None] | None = None,
    ) -> RunReport:
        """Send letters back to the work queue each came from, for a new lap with all attempts; or ``to`` a target.

        The set is frozen when it starts: what fails again meanwhile is not picked up. One that cannot be sent stays
        where it is, with the reason in the report, and the others go. ``rate`` is in letters a second. ``canary``
        sends a few first and goes on only if few enough of them fail. ``watch`` waits so long for the consumers to be
        through with them. ``before`` is given the plan when nothing has been sent yet, as for :meth:`preflight`; an
        error that it raises ends the replay there. ``stop`` ends it between two letters.

        An id raises :class:`DeadLetterNotFound` or :class:`AmbiguousDeadLetter`; a broker that goes away
        :class:`BrokerUnavailable` or :class:`PublishUnconfirmed`, after which the run can be resumed.
        """
        if to is not None and (to.queue == self.topology.dlq or to.exchange == self.topology.dlx):
            raise ConfigurationError(f"{to} leads to where they are")
        operation = await self._operation("replay", what, stop, on_progress)
        operation.target, operation.rate, operation.canary, operation.before = to, rate, canary, before
        operation.watch = optional_duration("watch", watch)
        return await self._run(operation, "replaying")

    async def replay_one(self) -> RunReport:
        """Send the oldest letter back; an empty queue gives an empty report."""
        return await self.replay(Selection(limit=1))

    async def replay_all(
        self, *, stop: asyncio.Event | None = None, on_progress: Callable[[RunReport], None] | None = None
    ) -> RunReport:
        """Send back every letter that is there when it starts, but those that the loop breaker holds."""
        return await self.replay(EVERYTHING, stop=stop, on_progress=on_progress)

    async def drop(
        self,
        what: str | Selection | ReplayPlan,
        *,
        archive: str | Path | None,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[RunReport], None] | None = None,
    ) -> RunReport:
        """Delete letters, each when it is in the new file ``archive`` and on the disk; None keeps nothing of them.

        Raises as :meth:`replay` does, and :class:`ArchiveError` where the file cannot be made or written.
        """
        operation = await self._operation("drop", what, stop, on_progress)
        async with self._browse(doing="dropping") as browser:
            return await self._archived(operation, archive, browser)

    async def purge(
        self,
        *,
        archive: str | Path | None,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[RunReport], None] | None = None,
    ) -> RunReport:
        """Delete every letter, also those that the loop breaker holds; as :meth:`drop`.

        Without an archive the broker does it, at once and without anybody looking at them.
        """
        if archive is None:
            self._check_writable("purge")
            async with self._browse(doing="dropping") as browser:
                count = await browser.purge()
            await self._record(names.PURGED, [], count)
            return RunReport("drop", found=count, planned=count, done=count)
        return await self.drop(Selection(held=True), archive=archive, stop=stop, on_progress=on_progress)

    async def move(
        self,
        what: str | Selection | ReplayPlan,
        to_queue: str,
        *,
        rate: float | None = None,
        before: Callable[[ReplayPlan], Awaitable[None]] | None = None,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[RunReport], None] | None = None,
    ) -> RunReport:
        """Put letters apart, as they are: into another queue, which has to exist. ``before`` as in :meth:`replay`."""
        if to_queue == self.topology.dlq:
            raise ConfigurationError(f"{to_queue!r} is where they are")
        operation = await self._operation("move", what, stop, on_progress)
        operation.target, operation.rate, operation.before = Target.of_queue(to_queue), rate, before
        return await self._run(operation, "moving")

    async def restore(
        self,
        archive: str | Path,
        *,
        rate: float | None = None,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[RunReport], None] | None = None,
    ) -> RunReport:
        """Put the letters of an archive back into the dead-letter queue; those that are there already are left out.

        Raises :class:`ConfigurationError` for a file that is no archive, or one of another queue.
        """
        operation = await self._operation("restore", EVERYTHING, stop, on_progress)
        operation.rate = rate
        reader = self._archive_of(archive)
        async with self._browse(doing="restoring") as browser:
            return await Restoring(operation, reader).run(browser)

    async def runs(self) -> list[RunInfo]:
        """The operations on these letters that the journal knows of, oldest first; also those that were killed."""
        async with self._aside() as connection:
            return [state.info() for state in (await runs_of(await self._desk(connection))).values()]

    async def resume(
        self,
        run: str,
        operation: str = "replay",
        *,
        archive: str | Path | None = None,
        rate: float | None = None,
        canary: Canary | None = None,
        watch: timedelta | str | None = None,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[RunReport], None] | None = None,
    ) -> RunReport:
        """Go on with a run that was stopped or killed: nothing is left out, and nothing done twice that is known of.

        Letters that were in flight are named in the report: they may have been sent before. Rate, canary and watch are
        not those of the run's beginning, but those given here. ``archive`` is a new file for a drop. Raises
        :class:`RunNotFound` or :class:`ConfigurationError` where there is nothing to go on with.
        """
        resumed = await self._operation(operation, EVERYTHING, stop, on_progress)
        resumed.rate, resumed.canary, resumed.watch = rate, canary, optional_duration("watch", watch)
        async with self._browse(doing=_DOING.get(operation, operation)) as browser:
            # under the lock: whoever is at it still, or goes on with it too, would write on
            state = resumed.resumed = await resumable(resumed.desk, run, operation)
            if state.started.target is not None:
                resumed.target = Target(*state.started.target)
            if operation == "restore":
                reader = self._archive_of(archive or state.started.archive or "")
                return await Restoring(resumed, reader).run(browser)
            if operation == "drop" and archive is None and state.started.archive is not None:
                raise ConfigurationError(
                    f"run {run!r} writes what it drops to an archive: name a new file to go on with"
                )
            return await self._archived(resumed, archive if operation == "drop" else None, browser)

    async def _operation(
        self,
        name: str,
        what: str | Selection | ReplayPlan,
        stop: asyncio.Event | None,
        on_progress: Callable[[RunReport], None] | None,
    ) -> Operation:
        self._check_writable(name)
        check_kind("what", what, (str, Selection, ReplayPlan), "an id, a plan, or Selection(ids=[...])")
        if isinstance(what, ReplayPlan) and what.queue != self.topology.name:
            raise ConfigurationError(f"the plan is of dead letters of {what.queue!r}, not of {self.topology.name!r}")
        return Operation(
            await self._desk(),
            name,
            Selection([what]) if isinstance(what, str) else what.selection if isinstance(what, ReplayPlan) else what,
            what if isinstance(what, ReplayPlan) else None,
            stop=stop or asyncio.Event(),
            on_progress=on_progress or (lambda _: None),
            strict=isinstance(what, str),
        )

    async def _run(self, operation: Operation, doing: str) -> RunReport:
        async with self._browse(doing=doing) as browser:
            return await operation.run(browser)

    async def _archived(self, operation: Operation, archive: str | Path | None, browser: Browser) -> RunReport:
        if archive is None:
            return await operation.run(browser)
        why = operation.resumed.info().selection if operation.resumed else operation.selection.describe()
        writer = ArchiveWriter(archive, queue=self.topology.name, who=self.who, why=why)
        try:
            with writer:
                operation.archive = writer
                return await operation.run(browser)
        finally:
            if not writer.count:
                writer.path.unlink(missing_ok=True)  # nothing is in it

    def _archive_of(self, archive: str | Path) -> ArchiveReader:
        reader = read_archive(archive)
        if reader.header.queue != self.topology.name:
            raise ConfigurationError(
                f"archive {str(archive)!r} has dead letters of {reader.header.queue!r}, not of {self.topology.name!r}"
            )
        return reader
