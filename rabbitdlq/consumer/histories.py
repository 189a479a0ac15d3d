"""The attempts before this one, from what is known of them and from the journal."""

from datetime import timedelta

import structlog

from rabbitdlq.dead_letter import AttemptRecord
from rabbitdlq.deaths import deaths_of
from rabbitdlq.errors import BrokerError
from rabbitdlq.journal import HistoryIndex, JournalReader
from rabbitdlq.message import Message
from rabbitdlq.topology import Topology

__all__ = ["earlier_attempts"]

log = structlog.stdlib.get_logger(__name__)

HISTORY_TIMEOUT = timedelta(seconds=5)
READ_BACK_TIMEOUT = timedelta(seconds=30)
#: an attempt is journaled at most this long before the death that ``x-death`` dates, to the second
WRITTEN_BEFORE_DEATH = timedelta(seconds=30)


async def earlier_attempts(
    topology: Topology, index: HistoryIndex, reader: JournalReader | None, message: Message
) -> tuple[list[AttemptRecord], bool]:
    """The failed attempts before this one, and whether some are missing."""
    failures = message.attempt - 1
    history = index.history(message.id, message.lap, failures)
    if len(history) >= failures:
        return history, index.mixed(message.id, message.lap, failures)
    if reader is not None:
        deaths = deaths_of(message.properties.table)
        since = min((death.time for death in deaths if death.time), default=None)
        try:
            # an attempt is written before its nack: what the journal does not have by now, it never will
            await reader.sync(HISTORY_TIMEOUT)
            if since is not None and topology.journal == "stream":
                # a message that waited long in the work queue failed before this consumer's reading began
                await reader.read_back(since - WRITTEN_BEFORE_DEATH, READ_BACK_TIMEOUT)
        except BrokerError as error:
            log.warning("journal_behind", queue=message.queue, message_id=message.id, error=str(error))
    history = index.history(message.id, message.lap, failures)
    return history, len(history) < failures or index.mixed(message.id, message.lap, failures)
