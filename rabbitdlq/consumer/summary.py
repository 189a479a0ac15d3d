"""What a consumer has done so far, in numbers."""

from dataclasses import dataclass

from rabbitdlq.consumer.outcome import Dropped, Outcome, Park, Postponed, Released, Retry, Skipped, Succeeded
from rabbitdlq.consumer.rungs import Settlement

__all__ = ["ConsumerSummary"]


@dataclass(slots=True)
class ConsumerSummary:
    """How many deliveries ended how."""

    succeeded: int = 0
    retried: int = 0
    parked: int = 0
    released: int = 0
    #: the handler said that nobody needs them
    dropped: int = 0
    #: their work was done before: acknowledged, without a run of the handler
    skipped: int = 0
    #: could not be done then, with no attempt spent
    postponed: int = 0
    #: could not be parked: they are retried, or the broker parks them bare
    left_to_broker: int = 0
    #: settled after the line was lost: the broker delivers them again
    too_late: int = 0

    def count(self, outcome: Outcome, settlement: Settlement) -> None:
        """One more that ended so."""
        if settlement == "too_late":
            self.too_late += 1
            return
        if settlement == "left_to_broker":
            self.left_to_broker += 1
            return
        if settlement == "given_back":
            self.released += 1
            return
        match outcome:
            case Succeeded():
                self.succeeded += 1
            case Skipped():
                self.skipped += 1
            case Retry():
                self.retried += 1
            case Park():
                self.parked += 1
            case Dropped():
                self.dropped += 1
            case Postponed():
                self.postponed += 1
            case Released():  # given back, or too late
                pass
