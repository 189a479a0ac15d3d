"""Failed attempts by message, in bounded memory: what the journal said, ready for the moment of parking."""

from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime, timedelta

from rabbitdlq import names
from rabbitdlq.dead_letter import AttemptRecord
from rabbitdlq.journal.events import JournalEvent

__all__ = ["HistoryIndex", "StartKey"]

#: workers' clocks may differ by this much before an attempt seems to be older than the one before it
CLOCK_SKEW = timedelta(seconds=5)
#: of one message: some producers give every message the same id, and adding looks at all of them
RECORDS_PER_MESSAGE = 100
#: messages that crashes brought back and whose handlers run: one a process
MOST_STARTS = 10_000
#: message id, lap, attempt, and a digest of what the message is: others may have the same id
StartKey = tuple[str, int, int, str]
#: what one record costs beside its texts, roughly
_RECORD_BYTES = 400


class HistoryIndex:
    """The attempts of the messages that are on the ladder. The longest untouched messages go first when it is full.

    Messages that were parked or recovered are forgotten: their story is told.
    """

    def __init__(self, max_bytes: int = 64_000_000) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._records: OrderedDict[str, list[tuple[int, AttemptRecord]]] = OrderedDict()
        #: who began the handler and when, and has not told of its end
        self._starts: OrderedDict[StartKey, set[tuple[str, datetime]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def size(self) -> int:
        """Bytes held, roughly."""
        return self._bytes

    def has_since(self, when: datetime) -> bool:
        """Whether some message failed later than that, and was neither parked nor recovered as far as is known."""
        # those touched last come first; what was read back later may be older than others
        return any(record.at > when for known in reversed(self._records.values()) for _, record in known)

    def add(self, event: JournalEvent) -> None:
        """Take in one event; one that is known already, or says nothing of an attempt, changes nothing."""
        if event.message_id is None:
            return
        if event.event in {names.STARTED, names.ENDED}:
            key = (event.message_id, event.lap or 1, event.attempt or 1, event.digest or "")
            if event.event == names.STARTED:
                self.add_start(key, event.worker or "", event.at)
            elif event.started_at is not None:
                self.add_end(key, event.worker or "", event.started_at)
        if event.event in {names.PARKED, names.RECOVERED, names.DROPPED}:
            self.forget(event.message_id, event.lap or 1, event.at)
            return
        record = event.record
        if record is not None:
            self.add_record(event.message_id, event.lap or 1, record)

    def add_record(self, message_id: str, lap: int, record: AttemptRecord) -> None:
        """Take in one failed attempt; one that is known already changes nothing."""
        known = self._records.get(message_id)
        if known is None:
            self._records[message_id] = [(lap, record)]
        else:
            key = (lap, record.attempt, record.at, record.worker)
            if any((old_lap, old.attempt, old.at, old.worker) == key for old_lap, old in known):
                return
            known.append((lap, record))
            if len(known) > RECORDS_PER_MESSAGE:
                self._bytes -= _cost(known.pop(0)[1])
            self._records.move_to_end(message_id)
        self._bytes += _cost(record)
        while self._bytes > self._max_bytes and self._records:
            for _, evicted in self._records.popitem(last=False)[1]:
                self._bytes -= _cost(evicted)

    def forget(self, message_id: str, lap: int, until: datetime) -> None:
        """Drop what is known of a message up to this lap and time: a fast replay may have failed again already."""
        known = self._records.pop(message_id, [])
        kept = [(told, record) for told, record in known if told > lap or record.at > until]
        self._bytes -= sum(_cost(record) for _, record in known) - sum(_cost(record) for _, record in kept)
        if kept:
            self._records[message_id] = kept

    def add_start(self, key: StartKey, worker: str, at: datetime) -> None:
        """Take in that a handler began; one that is known already changes nothing."""
        self._starts.setdefault(key, set()).add((worker, at))
        self._starts.move_to_end(key)
        if len(self._starts) > MOST_STARTS:
            self._starts.popitem(last=False)

    def add_end(self, key: StartKey, worker: str, started_at: datetime) -> None:
        """Take in that what this worker began then has ended."""
        starts = self._starts.get(key)
        if starts is None:
            return
        starts.discard((worker, started_at))
        if not starts:
            del self._starts[key]

    def starts(self, key: StartKey) -> list[datetime]:
        """When handlers of this attempt began of which nobody has told the end, the first one first."""
        return sorted(at for _, at in self._starts.get(key, ()))

    def history(self, message_id: str, lap: int, failures: int) -> list[AttemptRecord]:
        """The known attempts 1 to ``failures`` of this lap, in order.

        A message moved back by others keeps its lap's number: of several records of one attempt the latest counts,
        and one that is older than the attempt before it belongs to an earlier round.
        """
        known = self._records.get(message_id, ())
        if _straight(known, lap, failures):
            return [record for _, record in known]
        latest: dict[int, AttemptRecord] = {}
        for known_lap, record in known:
            told = latest.get(record.attempt)
            # by time, not by place: what is read back later may be older
            if known_lap == lap and 1 <= record.attempt <= failures and (told is None or record.at >= told.at):
                latest[record.attempt] = record
        story: list[AttemptRecord] = []
        for attempt in sorted(latest):
            record = latest[attempt]
            if not story or record.at >= story[-1].at - CLOCK_SKEW:
                story.append(record)
        return story

    def mixed(self, message_id: str, lap: int, failures: int) -> bool:
        """Whether one attempt of this round was told of twice: two messages share the id, or a crash ran it again."""
        if _straight(self._records.get(message_id, ()), lap, failures):
            return False
        told = sorted(
            (
                record
                for known, record in self._records.get(message_id, ())
                if known == lap and record.attempt <= failures
            ),
            key=lambda record: record.at,
        )
        starts = [place for place, record in enumerate(told) if record.attempt == 1]
        attempts = [record.attempt for record in told[starts[-1] if starts else 0 :]]
        return len(set(attempts)) < len(attempts)

    def last_attempt(self, message_id: str, lap: int) -> int:
        """The number of the attempt that was told of last; 0 where none is known."""
        told = [record for known, record in self._records.get(message_id, ()) if known == lap]
        return max(told, key=lambda record: record.at).attempt if told else 0


def _straight(known: Sequence[tuple[int, AttemptRecord]], lap: int, failures: int) -> bool:
    """Whether it is the attempts 1 to ``failures`` of this lap, one after the other, and nothing else: most are."""
    if len(known) != failures:
        return False
    before = None
    for number, (told, record) in enumerate(known, start=1):
        if told != lap or record.attempt != number or (before is not None and record.at < before):
            return False
        before = record.at
    return True


def _cost(record: AttemptRecord) -> int:
    return _RECORD_BYTES + len(record.error_message) + len(record.error_type) + len(record.worker)
