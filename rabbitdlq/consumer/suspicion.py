"""What a delivery says of crashes that brought it back: its queue's count, and what a postponed message carries."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from rabbitdlq import names
from rabbitdlq.broker import Delivery
from rabbitdlq.dead_letter import read_time
from rabbitdlq.deaths import deaths_of, rejections
from rabbitdlq.topology import Topology, Version

__all__ = ["Suspicion", "Suspicions"]

_MARK = names.SUSPECT.encode()
_WORDS = re.compile(r"(\d{1,9}) since (\S{1,40})")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Of one delivery."""

    #: deliveries of this message that may have ended in a crash; innocents that lay beside a killer have some, too
    crashes: int
    #: when it was postponed first since it has been suspect
    since: datetime | None = None


class Suspicions:
    """Reads deliveries of one work queue; what counts are worth depends on the broker and on the queue's type."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._travels = self._tells_crashes = self._counts_travel = False

    def heed(self, version: Version) -> None:
        """The broker is of this version."""
        # 4.0 to 4.2 carry the delivery count through the ladder, and call every returned message redelivered
        self._travels = (4, 0) <= version < (4, 3)
        self._counts_travel = version >= (4, 0) and self._topology.queue_type == "quorum"
        # from 4.3 on a quorum queue counts crashes apart from what was given back
        self._tells_crashes = version >= (4, 3) and self._topology.queue_type == "quorum"

    def worth_asking(self, delivery: Delivery) -> bool:
        """Whether it may be suspect; of most deliveries that is known without a look at their properties."""
        return delivery.redelivered or (self._returned(delivery) and delivery.mentions(_MARK))

    def of(self, delivery: Delivery) -> Suspicion:
        """What there is against it. Raises :class:`WireError` for broken properties."""
        here = self._crashes_here(delivery)
        if self._returned(delivery):  # anybody may publish a header of that name
            told = delivery.properties().table.text(names.SUSPECT)
            words = None if told is None else _WORDS.fullmatch(told)
            if words is not None:
                return Suspicion(int(words[1]) + here, read_time(words[2]))
        return Suspicion(here)

    def would_travel(self, delivery: Delivery) -> bool:
        """Whether a nack would carry its crashes up the ladder, where they look like new ones (4.0.5 and 4.3.6)."""
        return self._counts_travel and self._crashes_here(delivery) > 0

    def delivered_before(self, delivery: Delivery) -> bool:
        """Whether an earlier delivery of this very attempt may have ended in a crash, maybe with its park confirmed.

        Raises :class:`WireError` for broken properties.
        """
        return self._crashes_here(delivery) > 0

    def mark(self, delivery: Delivery) -> str | None:
        """What it is to carry when it is put into a rung, which makes the broker forget; None for no suspect."""
        suspicion = self.of(delivery)
        if not suspicion.crashes:
            return None
        since = suspicion.since or datetime.now(UTC)
        return f"{suspicion.crashes} since {since.isoformat(timespec='seconds')}"

    def _returned(self, delivery: Delivery) -> bool:
        return delivery.exchange == self._topology.return_exchange

    def _crashes_here(self, delivery: Delivery) -> int:
        if not delivery.redelivered:
            return 0
        if self._topology.queue_type != "quorum":
            return 1  # a classic queue counts nothing; a header of that name came from another queue
        headers = delivery.properties().table
        count = headers.number("x-delivery-count") or 0
        if self._tells_crashes:
            return count
        if self._travels:
            return max(0, count - rejections(deaths_of(headers), self._topology.name))
        return max(1, count)
