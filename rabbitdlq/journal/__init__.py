"""The append-only record of failures, recoveries and operator actions: a stream in the broker."""

from rabbitdlq.journal.events import (
    Entry,
    JournalEvent,
    attempt_record,
    dropped,
    ended,
    failed,
    marker,
    operated,
    parked,
    postponed,
    recovered,
    run_event,
    started,
    succeeded,
)
from rabbitdlq.journal.index import HistoryIndex, StartKey
from rabbitdlq.journal.tail import JournalReader, read_journal
from rabbitdlq.journal.writer import JournalWriter

__all__ = [
    "Entry",
    "HistoryIndex",
    "JournalEvent",
    "JournalReader",
    "JournalWriter",
    "StartKey",
    "attempt_record",
    "dropped",
    "ended",
    "failed",
    "marker",
    "operated",
    "parked",
    "postponed",
    "read_journal",
    "recovered",
    "run_event",
    "started",
    "succeeded",
]
