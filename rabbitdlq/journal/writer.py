"""Appending to the journal: confirmed, under a deadline, and never in the way of the work."""

from datetime import timedelta

import structlog

from rabbitdlq.broker import Outgoing, PublishLink, new_id
from rabbitdlq.errors import BrokerError
from rabbitdlq.journal.events import JournalEvent
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties

__all__ = ["JournalWriter"]

log = structlog.stdlib.get_logger(__name__)


class JournalWriter:
    """Writes events. A journal that cannot be written is logged; the message goes its way all the same."""

    def __init__(self, topology: Topology, link: PublishLink, timeout: timedelta = timedelta(seconds=5)) -> None:
        self._topology = topology
        self._link = link
        self._timeout = timeout

    async def append(self, event: JournalEvent) -> bool:
        """Publish the event and wait for its confirm; False where that failed."""
        try:
            await self.publish(event)
        except BrokerError as error:
            log.warning(
                "journal_unwritable",
                queue=event.queue,
                lost_event=event.event,
                message_id=event.message_id,
                attempt=event.attempt,
                error=str(error),
            )
            return False
        return True

    async def publish(self, event: JournalEvent) -> None:
        """Publish the event and wait for its confirm; raises :class:`BrokerError`."""
        outgoing = Outgoing(
            exchange=self._topology.journal_exchange,
            routing_key=event.event,
            body=event.encode(),
            properties=Properties(
                content_type="application/json",
                delivery_mode=2,
                message_id=new_id(),
                timestamp=int(event.at.timestamp()),
                app_id="rabbitdlq",
            ),
        )
        # "live": with nobody listening there is no queue to take it, and that is no error
        await self._link.publish(outgoing, timeout=self._timeout, mandatory=self._topology.journal == "stream")
