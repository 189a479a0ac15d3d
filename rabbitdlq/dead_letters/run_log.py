"""An operator's run in the journal: written ahead, so that one that was killed can be gone on with.

Before anything is sent the whole plan is there; before a batch is sent its letters are named; when all of it is either
done or known to have stayed, it is settled. A batch that is not settled was in flight when the tool ended.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rabbitdlq import names
from rabbitdlq.dead_letter import iso
from rabbitdlq.journal import JournalEvent, JournalWriter, operated, run_event

__all__ = ["RunInfo", "RunLog", "RunState", "read_runs"]

#: keys in one event of a plan
PLAN_CHUNK = 1_000
#: each process numbers its batches from the next multiple: what a killed one wrote last may come after its heir's
#: first look at the journal
BATCHES_OF_ONE = 1_000_000
#: what an operation's own event is called
ENDS = {
    "replay": names.REPLAYED,
    "drop": names.DROPPED,
    "move": names.MOVED,
    "restore": names.RESTORED,
}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run, as ``rabbitdlq dlq runs`` lists it."""

    id: str
    #: replay, drop, move or restore
    operation: str
    queue: str
    who: str
    amqp_user: str | None
    selection: str
    #: where the letters went, the archive that they went to or came from
    target: str | None
    archive: str | None
    #: of a run that was gone on with, one for each start
    archives: tuple[str, ...]
    started_at: datetime
    planned: int
    #: None where it never came to its end: it is under way, or was killed
    ended_at: datetime | None
    #: done, stopped, aborted, failed; or unfinished
    outcome: str
    #: done, duplicates, stayed, left
    counts: dict[str, int]
    #: message ids of letters that were in flight when it was killed, and were sent again since
    in_flight: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As ``rabbitdlq dlq runs --json`` shows it."""
        return {
            "id": self.id,
            "operation": self.operation,
            "queue": self.queue,
            "who": self.who,
            "amqp_user": self.amqp_user,
            "selection": self.selection,
            "target": self.target,
            "archive": self.archive,
            "archives": list(self.archives),
            "started_at": iso(self.started_at),
            "planned": self.planned,
            "ended_at": iso(self.ended_at),
            "outcome": self.outcome,
            "counts": self.counts,
            "in_flight": list(self.in_flight),
        }


@dataclass(slots=True)
class RunState:
    """What the journal knows of one run."""

    started: JournalEvent
    chunks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    sending: dict[int, tuple[str, ...]] = field(default_factory=dict)
    #: the letters of a batch that were not done
    settled: dict[int, tuple[str, ...]] = field(default_factory=dict)
    ended: JournalEvent | None = None
    #: processes that were at it
    starts: int = 1
    #: message ids of letters that were in flight when one of them was killed, and were sent again by the next
    named: list[str] = field(default_factory=list)
    #: files that letters went to or came from, one for each start
    archives: list[str] = field(default_factory=list)

    @property
    def planned(self) -> list[str]:
        """The keys of all letters of the plan, in the order of the queue."""
        return [key for _, keys in sorted(self.chunks.items()) for key in keys]

    @property
    def is_planned(self) -> bool:
        """Whether the whole plan was written; nothing was sent before."""
        return sum(len(keys) for keys in self.chunks.values()) >= (self.started.count or 0)

    @property
    def done(self) -> list[str]:
        """The keys of letters that are known to be done with."""
        return [
            key
            for batch, keys in self.sending.items()
            if batch in self.settled
            for key in _without(keys, self.settled[batch])
        ]

    @property
    def in_flight(self) -> list[str]:
        """The keys of letters of which it is not known; one that several equal letters share is there once."""
        done, planned = Counter(self.done), Counter(self.planned)
        unsettled = [key for batch, keys in self.sending.items() if batch not in self.settled for key in keys]
        return [key for key in dict.fromkeys(unsettled) if done[key] < planned[key]]

    @property
    def next_batch(self) -> int:
        """The number of the first batch of a process that goes on with it."""
        return max(self.starts * BATCHES_OF_ONE, max(self.sending, default=-1) + 1)

    def info(self) -> RunInfo:
        """For people."""
        started, ended = self.started, self.ended
        counts = dict(ended.counts or {}) if ended else {"done": len(self.done), "in flight": len(self.in_flight)}
        return RunInfo(
            id=started.run or "",
            operation=started.operation or "",
            queue=started.queue,
            who=started.who or "",
            amqp_user=started.amqp_user,
            selection=started.selection or "",
            target=None if started.target is None else " ".join(filter(None, started.target)),
            archive=started.archive,
            archives=tuple(self.archives),
            started_at=started.at,
            planned=started.count or 0,
            ended_at=ended.at if ended else None,
            outcome=(ended.outcome or "done") if ended else "unfinished",
            counts=counts,
            in_flight=tuple(self.named),
        )


def _without(keys: Iterable[str], undone: Iterable[str]) -> list[str]:
    left = list(keys)
    for key in undone:
        if key in left:
            left.remove(key)
    return left


def read_runs(events: Iterable[JournalEvent]) -> dict[str, RunState]:
    """The runs that these events tell of, by id, oldest first."""
    runs: dict[str, RunState] = {}
    for event in events:
        if event.run is None:
            continue
        state = runs.get(event.run)
        if event.event == names.RUN_STARTED:
            if state is not None:  # gone on with
                state.ended, state.starts = None, state.starts + 1
            elif event.count is not None:
                state = runs[event.run] = RunState(event)
            else:
                continue  # gone on with, and its beginning is older than the journal
            if event.archive is not None:
                state.archives.append(event.archive)
        elif state is None:
            continue  # its beginning is older than the journal
        elif event.event == names.RUN_PLANNED:
            state.chunks[event.batch or 0] = event.keys
        elif event.event == names.RUN_SENDING:
            state.sending[event.batch or 0] = event.keys
            state.named.extend(event.ids)
        elif event.event == names.RUN_SETTLED:
            state.settled[event.batch or 0] = event.keys
        elif event.event in ENDS.values():
            state.ended = event
    return runs


class RunLog:
    """Writes one run. A journal that cannot be written stops nothing: :attr:`written` is False from then on."""

    def __init__(
        self,
        writer: JournalWriter,
        queue: str,
        run: str,
        operation: str,
        resumed: RunState | None = None,
        named: Sequence[str] = (),
    ) -> None:
        """``named`` grows by the message id of each letter that was in flight before, before it is sent again."""
        self._writer = writer
        self._named = named
        self._told_names = len(named)
        self._queue = queue
        self._operation = operation
        self._next_batch = resumed.next_batch if resumed else 0
        self._settling: set[asyncio.Future[bool]] = set()
        #: without its plan in the journal a run cannot be gone on with; and each try to write to an exchange that is
        #: missing closes the channel, with letters on it that are sent a second time then
        self._is_kept = True
        #: the run's id
        self.run = run
        #: whether everything so far is in the journal: then the run can be gone on with after a crash
        self.written = True

    async def start(self, keys: Sequence[str], **told: Any) -> None:
        """Write the plan: nothing is to be sent before this returns."""
        chunks = [keys[at : at + PLAN_CHUNK] for at in range(0, len(keys), PLAN_CHUNK)]
        # what is begun first is read first; nothing is sent until all of it is there
        await self._write(self._event(names.RUN_STARTED, operation=self._operation, count=len(keys), **told))
        written = [
            self._writer.begin(self._event(names.RUN_PLANNED, batch=number, keys=tuple(chunk)))
            for number, chunk in enumerate(chunks)
        ]
        self._note(all(await asyncio.gather(*written)))
        self._is_kept = self.written

    async def go_on(self, **told: Any) -> None:
        """The run is gone on with, on the plan that the journal has."""
        await self._write(self._event(names.RUN_STARTED, operation=self._operation, **told))

    async def sending(self, keys: Sequence[str]) -> int:
        """Name the letters that are about to be sent; gives the number of their batch."""
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        if not self._is_kept:
            return batch
        # whoever goes on after the next kill could not name them: they may be done by then
        ids, self._told_names = tuple(self._named[self._told_names :]), len(self._named)
        await self._write(self._event(names.RUN_SENDING, batch=batch, keys=tuple(keys), ids=ids))
        return batch

    def settled(self, batch: int, undone: Sequence[str]) -> None:
        """Every letter of the batch is done, but these."""
        if not self._is_kept:
            return
        writing = self._writer.begin(self._event(names.RUN_SETTLED, batch=batch, keys=tuple(undone)))
        self._settling.add(writing)
        writing.add_done_callback(self._settling.discard)

    async def end(self, *, who: str, amqp_user: str, ids: Sequence[str], count: int, **told: Any) -> None:
        """The operation's own event: who did what to how many."""
        await asyncio.gather(*self._settling)
        event = operated(
            ENDS[self._operation],
            self._queue,
            who=who,
            amqp_user=amqp_user,
            ids=ids,
            count=count,
            run=self.run,
            operation=self._operation,
            **told,
        )
        self._note(await self._writer.append(event))

    def _event(self, event: str, **more: Any) -> JournalEvent:
        return run_event(event, self._queue, self.run, **more)

    async def _write(self, event: JournalEvent) -> None:
        self._note(await self._writer.append(event))

    def _note(self, written: bool) -> None:
        self.written = self.written and written
