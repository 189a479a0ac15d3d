"""Messages that a crash may have brought back: one of them may be what kills the process.

Everything that a process had prefetched is delivered again when it dies, guilty or not. So these run one at a time,
and the journal has the beginning and the end of each of their handlers: what begins again and again without ever
ending is parked, and what only lay beside it is never blamed. New messages go on meanwhile, and any of them may be the
killer: so the last beginning, by which a message is convicted, is one with nothing else at work in the process.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import structlog

from rabbitdlq import journal, names
from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.outcome import Park
from rabbitdlq.consumer.settle import Settler
from rabbitdlq.consumer.suspicion import Suspicion
from rabbitdlq.errors import BrokerError
from rabbitdlq.failure import Failure, fingerprint
from rabbitdlq.journal import HistoryIndex, JournalReader, JournalWriter, StartKey
from rabbitdlq.message import Message
from rabbitdlq.topology import Topology
from rabbitdlq.wire import WireError

__all__ = ["HELD_FOR", "MAX_STARTS", "Suspects", "start_key"]

log = structlog.stdlib.get_logger(__name__)

#: after so many beginnings without an end a message is parked. The crash that first made it suspect comes before
MAX_STARTS = 3
#: so many are not of handlers at work, whatever their messages' ids are derived from
CERTAIN_STARTS = 3 * MAX_STARTS
#: beginnings are looked for in that much of the journal: service managers restart what keeps dying minutes apart
READ_BACK = timedelta(hours=2)
READ_BACK_TIMEOUT = timedelta(seconds=30)
#: seconds that one waits for its turn: the broker closes the channel over what is not settled in 30 minutes
HELD_FOR = 600.0
#: ends that the journal does not have yet
MOST_UNTOLD = 1_000
ERROR_TYPE = "HandlerCrashed"


class Suspects:
    """Lets suspects through one after the other, and everything else at once."""

    def __init__(
        self,
        topology: Topology,
        settler: Settler,
        writer: JournalWriter,
        index: HistoryIndex,
        worker: str,
        *,
        hard_timeout: timedelta,
        lease: timedelta | None,
    ) -> None:
        """``hard_timeout``: no handler that is alive began longer ago. ``lease``: the work of a process that died is
        held up for so long."""
        self._settler = settler
        self._writer = writer
        self._index = index
        self._worker = worker
        self._crash_limit = topology.crash_limit
        self._hard_timeout = hard_timeout
        self._look_back_for = max(READ_BACK, (MAX_STARTS + 1) * (lease or timedelta()))
        #: is given what may be worked on
        self.let_through: Callable[[Delivery], None] = lambda _: None
        #: the one that was let through and has not come to its end
        self.current: Delivery | None = None
        #: with the time since when, by the event loop's clock
        self._held: deque[tuple[Delivery, float]] = deque()
        #: let through to be postponed, since their turn did not come in time
        self.overdue: set[Delivery] = set()
        self._begun: tuple[Delivery, Message, StartKey, datetime] | None = None
        self._untold: deque[journal.Entry] = deque(maxlen=MOST_UNTOLD)
        #: whose journal has been read, and how far back
        self._read_back: JournalReader | None = None
        self._read_since = datetime.max.replace(tzinfo=UTC)

    @property
    def held(self) -> int:
        """How many wait for their turn."""
        return len(self._held)

    def put(self, delivery: Delivery) -> None:
        """Let it through, now or when it is its turn."""
        if not self._settler.suspicions.worth_asking(delivery) or not self._is_suspect(delivery):
            self.let_through(delivery)
        elif self.current is None:
            self.current = delivery
            self.let_through(delivery)
        else:
            self._held.append((delivery, asyncio.get_running_loop().time()))

    def _is_suspect(self, delivery: Delivery) -> bool:
        try:
            return self._settler.suspicions.of(delivery).crashes > 0
        except WireError:
            return False  # its opening tells what is wrong with it

    def done(self, delivery: Delivery) -> None:
        """It has come to its end: the next one, please."""
        self.overdue.discard(delivery)
        if delivery is not self.current:
            return
        self.current = None
        while self._held:
            held, _ = self._held.popleft()
            if not held.gone:
                self.current = held
                self.let_through(held)
                return

    def look_at_the_clock(self, now: float) -> None:
        """Let those through whose turn did not come in time, to be postponed."""
        while self._held and now - self._held[0][1] >= HELD_FOR:
            delivery, _ = self._held.popleft()
            if not delivery.gone:
                self.overdue.add(delivery)
                self.let_through(delivery)

    def take_back(self) -> list[Delivery]:
        """Those that were not let through yet."""
        held = [delivery for delivery, _ in self._held]
        self._held.clear()
        return held

    async def convicted(self, delivery: Delivery, message: Message) -> Park | None:
        """What has begun too often without an end is to be parked.

        A journal that cannot be written or read counts nothing: then crashes are counted up to the delivery limit,
        with the innocents that lay beside it.
        """
        suspicion = self._settler.suspicions.of(delivery)
        await self._look_back(suspicion.since)
        starts = self._unended(suspicion, message)
        if len(starts) >= MAX_STARTS:
            return _crashed(
                message,
                f"its handler was begun {len(starts)} times, and each time the process was gone before it ended, or "
                f"its connection, for want of heartbeats: {_times(starts)}",
            )
        # one that was never postponed has its queue's own limit; and below 4.3 what was given back is counted, too
        if suspicion.since is not None and suspicion.crashes > self._crash_limit:
            return _crashed(message, f"{suspicion.crashes} processes that had it were gone before it was settled")
        return None

    def on_its_last(self, delivery: Delivery, message: Message) -> bool:
        """Whether one more beginning without an end convicts it: to be sure, nothing else may be at work then."""
        return len(self._unended(self._settler.suspicions.of(delivery), message, 1)) >= MAX_STARTS - 1

    def _unended(self, suspicion: Suspicion, message: Message, more: int = 0) -> list[datetime]:
        """When its handler began that did not end, and is not at work elsewhere; as it is after so many ``more``."""
        starts = self._index.starts(start_key(message))
        few = suspicion.crashes + more < MAX_STARTS and len(starts) + more < CERTAIN_STARTS
        if message.id_derived and few:
            # equal messages are not one: the others' handlers may be at work elsewhere, and have crashed nothing
            return [start for start in starts if start < datetime.now(UTC) - self._hard_timeout]
        return starts

    async def begin(self, delivery: Delivery, message: Message) -> None:
        """Tell the journal that its handler begins."""
        key, at = start_key(message), datetime.now(UTC)
        begun_before = len(self._index.starts(key))
        self._begun = (delivery, message, key, at)
        self._index.add_start(key, self._worker, at)
        log.warning(
            "message_suspected",
            message_id=message.id,
            queue=message.queue,
            attempt=message.attempt,
            begun_before=begun_before,
            parked_after=MAX_STARTS,
        )
        await self._writer.append(journal.started(message, key[-1], self._worker, at))

    async def end(self, delivery: Delivery) -> None:
        """Tell the journal that its handler has ended, if that had begun."""
        if self._begun is None or self._begun[0] is not delivery:
            return
        _, message, key, at = self._begun
        self._begun = None
        self._index.add_end(key, self._worker, at)
        self._untold.append(journal.ended(message, key[-1], self._worker, at))
        await self._tell()

    async def _tell(self) -> None:
        """Ends that could not be written are written later: without them the message would be blamed."""
        while self._untold:
            entry = self._untold[0]
            if not await self._writer.append(entry):
                return
            if self._untold and self._untold[0] is entry:
                self._untold.popleft()

    async def close(self) -> None:
        """Tell what could not be told before."""
        await self._tell()

    async def _look_back(self, suspect_since: datetime | None) -> None:
        await self._tell()
        reader, now = self._settler.reader, datetime.now(UTC)
        since = min(now, suspect_since or now) - self._look_back_for
        if reader is None or (reader is self._read_back and since >= self._read_since):
            return
        self._read_back, self._read_since = reader, since
        try:
            await reader.read_back(since, READ_BACK_TIMEOUT)
        except BrokerError as error:
            log.warning("journal_unreadable", error=str(error), consequence="crashes before this are not counted")


def start_key(message: Message) -> StartKey:
    """What tells it from others with its id; not its properties, which change when it is put into a rung."""
    return message.id, message.lap, message.attempt, hashlib.sha256(message.body).hexdigest()[:16]


def _times(starts: list[datetime]) -> str:
    return ", ".join(start.isoformat(timespec="seconds") for start in starts)


def _crashed(message: Message, why: str) -> Park:
    failure = Failure(ERROR_TYPE, why, None, fingerprint(ERROR_TYPE, "", message.queue))
    return Park(failure, datetime.now(UTC), names.CRASHED, 0.0)
