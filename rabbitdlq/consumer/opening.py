"""What a delivery is: its message, the attempt that it is on, and what keeps it from being read."""

from dataclasses import replace
from typing import Any

import structlog

from rabbitdlq import names
from rabbitdlq.broker import Delivery
from rabbitdlq.consumer.payload import InvalidPayload, PayloadReader
from rabbitdlq.deaths import Arrival, Death, arrival, deaths_of
from rabbitdlq.journal import HistoryIndex
from rabbitdlq.message import Message, Undecodable, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties, WireError

__all__ = ["Opener"]

log = structlog.stdlib.get_logger(__name__)

#: what counts say when the journal does not know: far above any honest ladder
COUNTED_LAPS_LIMIT = 10
KEPT_WAYS = 1_000


class Opener:
    """Opens the deliveries of one work queue."""

    def __init__(self, topology: Topology, payload_type: Any, index: HistoryIndex) -> None:
        self._topology = topology
        self._reader = PayloadReader(payload_type)
        self._index = index
        self._ways: dict[tuple[str, str, tuple[Death, ...]], Arrival] = {}

    def open(self, delivery: Delivery) -> tuple[Message, Undecodable | InvalidPayload | None]:
        """The message, and why its payload cannot be read, if so. Raises :class:`WireError` for broken properties."""
        try:
            properties = delivery.properties()
        except WireError as error:
            raise WireError(f"delivery {delivery.tag} of {self._topology.name!r}: {error}") from error
        way = self._way(delivery, properties)
        payload, problem = None, None
        try:
            payload = self._reader.read(delivery.body, properties)
        except (Undecodable, InvalidPayload) as error:
            problem = error
        message = message_of(self._topology, delivery.body, properties, way, way.failures, payload)
        if way.nacked_since is not None and (told := properties.table.number(names.FAILURES)) is not None and told >= 0:
            # it was put into a rung, which says nothing of how often it had failed by then
            told = min(told, self._topology.max_attempts)
            return replace(message, attempt=told + way.nacked_since + 1), problem
        if way.counted > way.failures:
            failures = self._failures_of_odd_arrival(message, way.failures, way.counted)
            message = replace(message, attempt=failures + 1)
        return message, problem

    def _way(self, delivery: Delivery, properties: Properties) -> Arrival:
        """How it came; the same for many messages."""
        # foreign deaths are not even looked at: only the return exchange speaks of this lap
        deaths = deaths_of(properties.table) if delivery.exchange == self._topology.return_exchange else ()
        key = (delivery.exchange, delivery.routing_key, deaths)
        way = self._ways.get(key)
        if way is None:
            if len(self._ways) >= KEPT_WAYS:
                self._ways.clear()
            way = self._ways[key] = arrival(self._topology, delivery.exchange, delivery.routing_key, deaths)
        return way

    def _failures_of_odd_arrival(self, message: Message, failures: int, counted: int) -> int:
        """More waits than rungs: a rung is missing and the message went round, or (below 4.0) the header is stale.

        The journal tells them apart: it knows how far this lap has come.
        """
        told = self._index.last_attempt(message.id, message.lap)
        known = max(failures, told)
        if counted > COUNTED_LAPS_LIMIT * self._topology.max_attempts:
            known = max(known, self._topology.max_attempts)
        log.warning(
            "x_death_counts_more",
            message_id=message.id,
            queue=message.queue,
            attempt=known + 1,
            by_rung=failures,
            by_counts=counted,
            by_journal=told,
        )
        return known
