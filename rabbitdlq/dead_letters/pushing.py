"""Parking a message by hand."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rabbitdlq import names
from rabbitdlq.broker import Outgoing, new_id
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.failure import Failure
from rabbitdlq.message import Message, message_of
from rabbitdlq.parking import Parking, new_park_id, park_properties
from rabbitdlq.producer import encode_payload
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties, WireError

__all__ = ["message_to_push", "pushed"]


def message_to_push(
    topology: Topology, payload: Any, message_id: str | None, headers: Mapping[str, Any] | None
) -> Message:
    """A message that nobody has delivered; raises :class:`ConfigurationError` for what AMQP cannot carry."""
    body, content_type = encode_payload(payload)
    try:
        properties = Properties(
            content_type=content_type,
            delivery_mode=2,
            message_id=message_id or new_id(),
            timestamp=int(datetime.now(UTC).timestamp()),
            headers=Headers(headers) if headers else None,
        )
        properties.encode()
    except WireError as broken:
        raise ConfigurationError(f"message for {topology.dlq!r}: {broken}") from broken
    return message_of(topology, body, properties, Arrival(0, 0, "", topology.name), failures=-1)


def pushed(topology: Topology, message: Message, error: BaseException | str, who: str, frame_max: int) -> Outgoing:
    """The dead letter to publish for it."""
    parking = Parking(
        reason=names.PUSHED,
        failure=Failure.of(error),
        history=(),
        worker=who,
        parked_at=datetime.now(UTC),
        park_id=new_park_id(message),
        history_partial=message.attempt > 0,
    )
    return Outgoing(topology.dlx, topology.name, message.body, park_properties(message, parking, frame_max))
