"""The one line in the log of a delivery that ended."""

import structlog

from rabbitdlq.consumer.outcome import Outcome
from rabbitdlq.consumer.rungs import Settlement
from rabbitdlq.message import Message

__all__ = ["Telling"]

log = structlog.stdlib.get_logger(__name__)

#: what a delivery's line says where its outcome was not what it came to
_TOLD = {"left_to_broker": "left_to_broker", "given_back": "released"}


class Telling:
    """Tells of the deliveries of one queue."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        #: bound at the first line: most of what one that is not shown costs is finding out that it is not
        self._log: structlog.stdlib.BoundLogger | None = None

    def settled(self, message: Message, outcome: Outcome, settlement: Settlement) -> None:
        """Failures have said so already, with their error.

        A program that has not set structlog up would have every success printed: there they are left out.
        """
        if settlement != "too_late" and not structlog.is_configured():
            return
        if self._log is None:
            self._log = log.bind(queue=self._queue)
        tell = self._log.warning if settlement == "too_late" else self._log.debug
        tell(
            "delivery_lost" if settlement == "too_late" else "delivery_settled",
            message_id=message.id,
            attempt=message.attempt,
            max_attempts=message.max_attempts,
            outcome=_TOLD.get(settlement, outcome.name),
            duration_ms=round(outcome.duration_ms, 3),
        )
