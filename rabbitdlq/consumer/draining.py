"""Knowing that everything is done: nothing waits, nothing is on the ladder, nothing is in work."""

import asyncio
from datetime import UTC, datetime, timedelta

from rabbitdlq.consumer.session import Session
from rabbitdlq.consumer.settle import Settler
from rabbitdlq.consumer.workers import Workers
from rabbitdlq.errors import AccessDenied, BrokerError, EntityNotFound
from rabbitdlq.journal import HistoryIndex
from rabbitdlq.topology import Topology

__all__ = ["until_drained"]

POLL_SECONDS = 0.2
#: an empty look says little while a message is between two queues; this many in a row say it
LOOKS = 6
#: and this many while a message that failed has not been seen again: another consumer may have taken it, or a busy
#: broker, whose counts know nothing of messages that are being dead-lettered, takes its time
LOOKS_WITH_RETRIES_OUT = 50
#: for that long after its delay a message is waited for
LATE_BY = timedelta(seconds=30)


async def until_drained(
    topology: Topology, session: Session, workers: Workers, index: HistoryIndex, settler: Settler
) -> None:
    """Return once that is so. Raises :class:`AccessDenied` or :class:`EntityNotFound` where it cannot be seen."""
    looks = 0
    while looks < (LOOKS_WITH_RETRIES_OUT if _retries_out(topology, index, settler) else LOOKS):
        await asyncio.sleep(POLL_SECONDS)
        try:
            idle = workers.idle.is_set() and await session.idle_in_broker()
        except (AccessDenied, EntityNotFound):
            raise  # from 4.3 on a rung is counted by those only who have a right on it
        except BrokerError:
            idle = False  # the session ends by itself, and the next one looks again
        looks = looks + 1 if idle and workers.idle.is_set() else 0


def _retries_out(topology: Topology, index: HistoryIndex, settler: Settler) -> bool:
    """Whether a message may still be on its way back, sent there by this process or by another."""
    # what was only postponed is not in the index: it has not failed
    return settler.rungs.until > datetime.now(UTC) - LATE_BY or index.has_since(
        datetime.now(UTC) - max(topology.delays) - LATE_BY
    )
