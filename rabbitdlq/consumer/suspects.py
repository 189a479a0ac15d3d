"""Messages that a crash may have brought back: one of them may be what kills the process.

Everything that a process had prefetched is delivered again when it dies, guilty or not. So these run one at a time,
and the journal has the beginning and the end of each of their handlers: what begins again and again without ever
ending is parked, and what only lay beside it is never blamed.
"""

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import structlog

from rabbitdlq import journal, names
from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.outcome import Park
from rabbitdlq.consumer.settle import Settler
from rabbitdlq.errors import BrokerError
from rabbitdlq.failure import Failure, fingerprint
from rabbitdlq.journal import HistoryIndex, JournalReader, JournalWriter
from rabbitdlq.message import Message
from rabbitdlq.wire import WireError

__all__ = ["MAX_STARTS", "Suspects"]

log = structlog.stdlib.get_logger(__name__)

#: after so many beginnings without an end a message is parked. The crash that first made it suspect comes before
MAX_STARTS = 3
#: beginnings are looked for in that much of the journal: service managers restart what keeps dying minutes apart
READ_BACK = timedelta(hours=2)
READ_BACK_TIMEOUT = timedelta(seconds=30)
ERROR_TYPE = "HandlerCrashed"


class Suspects:
    """Lets suspects through one after the other, and everything else at once."""

    def __init__(self, settler: Settler, writer: JournalWriter, index: HistoryIndex, worker: str) -> None:
        self._settler = settler
        self._writer = writer
        self._index = index
        self._worker = worker
        #: is given what may be worked on
        self.let_through: Callable[[Delivery], None] = lambda _: None
        #: the one that was let through and has not come to its end
        self.current: Delivery | None = None
        self._held: deque[Delivery] = deque()
        self._begun: tuple[Delivery, Message] | None = None
        self._untold: list[journal.Entry] = []
        #: whose journal has been read far enough
        self._read_back: JournalReader | None = None

    def put(self, delivery: Delivery) -> None:
        """Let it through, now or when it is its turn."""
        if not delivery.redelivered or not self._is_suspect(delivery):
            self.let_through(delivery)
        elif self.current is None:
            self.current = delivery
            self.let_through(delivery)
        else:
            self._held.append(delivery)

    def _is_suspect(self, delivery: Delivery) -> bool:
        try:
            return self._settler.delivered_before(delivery)
        except WireError:
            return False  # its opening tells what is wrong with it

    def done(self, delivery: Delivery) -> None:
        """It has come to its end: the next one, please."""
        if delivery is not self.current:
            return
        self.current = None
        while self._held:
            held = self._held.popleft()
            if not held.gone:
                self.current = held
                self.let_through(held)
                return

    def take_back(self) -> list[Delivery]:
        """Those that were not let through yet."""
        held = list(self._held)
        self._held.clear()
        return held

    async def begin(self, delivery: Delivery, message: Message) -> Park | None:
        """Tell the journal that its handler begins; what has begun too often is to be parked instead.

        A journal that cannot be written or read counts nothing: then the broker's delivery limit is the net.
        """
        await self._look_back()
        starts = self._index.starts(message.id, message.lap, message.attempt)
        if len(starts) >= MAX_STARTS:
            return _crashed(message, starts)
        at = datetime.now(UTC)
        self._begun = (delivery, message)
        self._index.add_start(message.id, message.lap, message.attempt, self._worker, at)
        log.warning(
            "message_suspected",
            message_id=message.id,
            queue=message.queue,
            attempt=message.attempt,
            begun_before=len(starts),
            parked_after=MAX_STARTS,
        )
        await self._writer.append(journal.started(message, self._worker, at))
        return None

    async def end(self, delivery: Delivery) -> None:
        """Tell the journal that its handler has ended, if that had begun."""
        if self._begun is None or self._begun[0] is not delivery:
            return
        message, at = self._begun[1], datetime.now(UTC)
        self._begun = None
        self._index.add_end(message.id, message.lap, message.attempt, self._worker, at)
        self._untold.append(journal.ended(message, self._worker, at))
        await self._tell()

    async def _tell(self) -> None:
        """Ends that could not be written are written later: without them the message would be blamed."""
        while self._untold:
            if not await self._writer.append(self._untold[0]):
                return
            del self._untold[0]

    async def _look_back(self) -> None:
        await self._tell()
        reader = self._settler.reader
        if reader is None or reader is self._read_back:
            return
        self._read_back = reader
        try:
            await reader.read_back(datetime.now(UTC) - READ_BACK, READ_BACK_TIMEOUT)
        except BrokerError as error:
            log.warning("journal_unreadable", error=str(error), consequence="crashes before this are not counted")


def _crashed(message: Message, starts: list[datetime]) -> Park:
    times = ", ".join(start.isoformat(timespec="seconds") for start in starts)
    failure = Failure(
        ERROR_TYPE,
        f"its handler was begun {len(starts)} times, and each time the process was gone before it ended: {times}",
        None,
        fingerprint(ERROR_TYPE, "", message.queue),
    )
    return Park(failure, datetime.now(UTC), names.CRASHED, 0.0)
