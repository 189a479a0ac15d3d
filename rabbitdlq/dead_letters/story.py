"""The whole story of one dead letter: what lies in the queue, joined with what the journal knows of its message."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rabbitdlq import names
from rabbitdlq.broker import Connection
from rabbitdlq.dead_letter import AttemptRecord, DeadLetter, iso
from rabbitdlq.errors import BrokerError
from rabbitdlq.failure import Failure
from rabbitdlq.journal import HistoryIndex, JournalEvent, JournalWriter, read_journal
from rabbitdlq.topology import Topology

__all__ = ["Lap", "OperatorAction", "Story", "last_replays", "last_replays_of", "story_of", "with_story"]

#: the journal is read from this long before the first known moment: clocks differ
_CLOCKS = timedelta(minutes=1)
#: of an earlier lap: the ladder may have been longer then
_MOST_ATTEMPTS = 1_000


@dataclass(frozen=True, slots=True)
class Lap:
    """All attempts between one arrival in the work queue and what ended them."""

    number: int
    attempts: tuple[AttemptRecord, ...]
    #: why it was parked at its end; None where that is not known
    reason: str | None
    parked_at: datetime | None

    def as_json(self) -> dict[str, Any]:
        """As ``rabbitdlq dlq show --json`` shows it."""
        return {
            "lap": self.number,
            "attempts": [record.as_json() for record in self.attempts],
            "reason": self.reason,
            "parked_at": iso(self.parked_at),
        }


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """Something that an operator did to the letter, or to its message when it was parked before."""

    #: replayed, dropped, ...
    event: str
    at: datetime
    who: str
    amqp_user: str | None
    #: letters that the operation was done to
    count: int
    #: False where the operation was done to more letters than its event names: this one may be among them
    named: bool

    def as_json(self) -> dict[str, Any]:
        """As ``rabbitdlq dlq show --json`` shows it."""
        return {
            "event": self.event,
            "at": iso(self.at),
            "who": self.who,
            "amqp_user": self.amqp_user,
            "count": self.count,
            "named": self.named,
        }


@dataclass(frozen=True, slots=True)
class Story:
    """A dead letter with its laps, oldest first, and what operators did to it."""

    letter: DeadLetter
    #: those the journal knows of, and the letter's own, which is the last
    laps: tuple[Lap, ...]
    actions: tuple[OperatorAction, ...]
    #: False where the journal could not be read: laps and actions may be missing
    journal_read: bool

    def as_json(self) -> dict[str, Any]:
        """The letter's documented JSON, and ``laps``, ``operator_actions`` and ``journal_read`` beside it."""
        return self.letter.as_json() | {
            "laps": [lap.as_json() for lap in self.laps],
            "operator_actions": [action.as_json() for action in self.actions],
            "journal_read": self.journal_read,
        }


async def with_story(
    connection: Connection, topology: Topology, writer: JournalWriter, letter: DeadLetter
) -> DeadLetter:
    """The letter with the attempts that the journal knows."""
    index, last = HistoryIndex(), None
    since = (letter.first_failed_at or letter.created_at or datetime.now(UTC)) - _CLOCKS
    try:
        async for event in read_journal(connection, topology, writer, since=since):
            if event.message_id == letter.id and event.event == names.FAILED:
                index.add(event)
                last = event if (event.lap or 1) == letter.lap else last
    except BrokerError:
        return letter
    return _joined(letter, topology, index, last)


async def last_replays(connection: Connection, topology: Topology, writer: JournalWriter) -> dict[str, datetime]:
    """When letters of each fingerprint were sent back last, as far as the journal reaches back; empty without one."""
    try:
        return last_replays_of([event async for event in read_journal(connection, topology, writer) if event.who])
    except BrokerError:
        return {}


def last_replays_of(events: Iterable[JournalEvent]) -> dict[str, datetime]:
    """When letters of each fingerprint were sent back last, as these events tell."""
    found: dict[str, datetime] = {}
    for event in events:
        if event.event == names.REPLAYED:
            for fingerprint in event.fingerprints or ():
                found[fingerprint] = max(event.at, found.get(fingerprint, event.at))
    return found


async def story_of(connection: Connection, topology: Topology, writer: JournalWriter, letter: DeadLetter) -> Story:
    """Everything that is known of the letter; reads the journal from the message's first known moment on."""
    index, last = HistoryIndex(), None
    laps: set[int] = set()
    parks: dict[int, JournalEvent] = {}
    actions: list[OperatorAction] = []
    known = [moment for moment in (letter.created_at, letter.first_failed_at, letter.moved_to_dlq_at) if moment]
    read = True
    try:
        since = min(known, default=None)
        async for event in read_journal(connection, topology, writer, since=since and since - _CLOCKS):
            if event.who is not None:
                actions += _action(event, letter)
            elif event.message_id != letter.id:
                continue
            elif event.event == names.FAILED:
                index.add(event)
                laps.add(event.lap or 1)
                last = event if (event.lap or 1) == letter.lap else last
            elif event.event == names.PARKED:
                parks[event.lap or 1] = event
    except BrokerError:
        read = False
    letter = _joined(letter, topology, index, last)
    earlier = [
        _earlier_lap(number, index.history(letter.id, number, _MOST_ATTEMPTS), parks.get(number))
        for number in sorted(laps | set(parks))
        if number < letter.lap
    ]
    own = Lap(letter.lap, letter.history, letter.reason, letter.moved_to_dlq_at)
    return Story(letter, (*earlier, own), tuple(actions), read)


def _earlier_lap(number: int, attempts: Iterable[AttemptRecord], park: JournalEvent | None) -> Lap:
    if park is None:
        return Lap(number, tuple(attempts), None, None)
    return Lap(number, tuple(attempts), park.reason, park.at)


def _action(event: JournalEvent, letter: DeadLetter) -> list[OperatorAction]:
    named = letter.id in event.ids
    count = event.count or len(event.ids)
    # one that names nobody may have been of this letter, too, if it came back; a purge it did not survive
    if not named and not (event.event == names.REPLAYED and letter.lap > 1 and count > len(event.ids)):
        return []
    return [OperatorAction(event.event, event.at, event.who or "", event.amqp_user, count, named)]


def _joined(letter: DeadLetter, topology: Topology, index: HistoryIndex, last: JournalEvent | None) -> DeadLetter:
    history = tuple(index.history(letter.id, letter.lap, max(letter.attempts, topology.max_attempts)))
    if last is None or len(history) < len(letter.history):
        return letter
    return replace(
        letter,
        history=history,
        history_partial=len(history) < letter.attempts,
        error=letter.error or _failure(last),
        max_attempts=letter.max_attempts or last.max_attempts,
    )


def _failure(event: JournalEvent) -> Failure:
    return Failure(event.error_type or "", event.error_message or "", event.traceback, event.fingerprint or "")
