"""The message as a handler sees it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from rabbitdlq import names
from rabbitdlq.deaths import Arrival
from rabbitdlq.texts import printable
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties

__all__ = [
    "MAX_LAP",
    "Message",
    "Undecodable",
    "created_at",
    "decode_payload",
    "derived_id",
    "is_json",
    "lap_of",
    "message_of",
    "published_with",
    "told_lap",
]

#: beyond this, seconds since 1970 are in the year 5138: the client meant milliseconds
_MILLISECONDS_FROM = 100_000_000_000


#: more laps than this, nobody has replayed: a foreign header, and the next lap has to fit into one too
MAX_LAP = 1_000_000_000


class Undecodable(ValueError):
    """The body is not what its content type says."""


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery, given to the handler."""

    #: the publisher's message id, or a derived one where it set none
    id: str
    #: JSON decoded for JSON content types and for none, text for ``text/*``, else the bytes
    payload: Any
    body: bytes
    #: 1 for the first run of this lap
    attempt: int
    max_attempts: int
    #: 1, and one more after every replay
    lap: int
    #: the work queue
    queue: str
    #: exchange and routing key as the publisher set them, also after retries and replays
    exchange: str
    routing_key: str
    properties: Properties
    #: what is claimed in the consumer's store of what was done; None without one, and for a message without a key
    idempotency_key: str | None = None

    @property
    def headers(self) -> Mapping[str, Any]:
        """The message's headers, decoded when they are looked at."""
        return self.properties.table

    @property
    def id_derived(self) -> bool:
        """Whether the publisher set no id. Two messages with the same derived one are equal, and may be two."""
        return not self.properties.message_id or self.properties.table.get(names.ID_DERIVED) is True

    @property
    def content_type(self) -> str | None:
        """As the publisher set it."""
        return self.properties.content_type

    @property
    def created_at(self) -> datetime | None:
        """The publisher's timestamp; None where it set none."""
        return created_at(self.properties)


def decode_payload(body: bytes, properties: Properties) -> Any:
    """The payload by content type; raises :class:`Undecodable` with the place where JSON or text breaks.

    Bytes where the type is neither JSON nor text, or names a character set that is unknown here.
    """
    if properties.content_encoding and properties.content_encoding.lower() not in {"utf-8", "identity"}:
        return body
    kind, parameters = _kind(properties.content_type or "application/json")
    try:
        if kind == "application/json" or kind.endswith("+json"):
            return _json(body)
        if kind.startswith("text/"):
            return body.decode(_charset(parameters))
    except LookupError:
        return body
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"body of {len(body):,} bytes is not valid {printable(kind)}: {error}") from error
    return body


def is_json(properties: Properties) -> bool:
    """Whether the body is JSON by its content type, or has none."""
    if properties.content_encoding and properties.content_encoding.lower() not in {"utf-8", "identity"}:
        return False
    kind, _ = _kind(properties.content_type or "application/json")
    return kind == "application/json" or kind.endswith("+json")


@lru_cache(maxsize=100)
def _kind(content_type: str) -> tuple[str, list[str]]:
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    return kind, parameters


def _json(body: bytes) -> Any:
    """JSON is UTF-8 whatever its type says (RFC 8259); some clients put a byte order mark before it."""
    try:
        return from_json(body)
    except ValueError:
        # slower, takes a little more (half a surrogate pair), and says best what is wrong
        return json.loads(body.decode("utf-8-sig"))


def _charset(parameters: list[str]) -> str:
    named = (parameter.removeprefix("charset=") for parameter in parameters if parameter.startswith("charset="))
    return next(named, "utf-8").strip('"') or "utf-8"


def derived_id(body: bytes, properties: Properties, routing_key: str) -> str:
    """An id for a message without one: the same on every attempt, by whichever process.

    It covers body, key and the publisher's properties, and not what the broker adds on the way.
    """
    digest = hashlib.sha256()
    for part in (
        body,
        routing_key.encode("utf-8", "surrogateescape"),
        # the broker takes the expiration away when a message dies for the first time
        properties.but(headers=None, expiration=None).encode(),
        # and sorts the headers
        *sorted(properties.table.without(_is_brokers).entries()),
    ):
        digest.update(len(part).to_bytes(8, "big") + part)
    return f"derived-{digest.hexdigest()[:24]}"


def _is_brokers(name: str) -> bool:
    return names.is_brokers(name) or name in names.ROUTING_HEADERS or name in names.OURS


def created_at(properties: Properties) -> datetime | None:
    """The publisher's timestamp as a date; seconds by the standard, milliseconds where it can only be those."""
    if properties.timestamp is None:
        return None
    seconds: float = properties.timestamp
    if properties.timestamp >= _MILLISECONDS_FROM:
        seconds /= 1000
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def lap_of(headers: Headers) -> int:
    """Which lap a message is in: a replay by us says so; a dead letter moved here by others starts the next one."""
    known = told_lap(headers)
    return known + 1 if names.PARK_ID in headers else known


def told_lap(headers: Headers) -> int:
    """The lap that the header tells; 1 where it tells none that can be counted on."""
    lap = headers.number(names.LAP)
    return lap if lap is not None and 1 <= lap <= MAX_LAP else 1


def published_with(headers: Headers, arrival: Arrival) -> tuple[str, str]:
    """Exchange and routing key as the first publisher set them."""
    exchange, key = headers.text(names.EXCHANGE), headers.text(names.ROUTING_KEY)
    if exchange is not None and key is not None:
        return exchange, key
    return arrival.exchange, arrival.routing_key


def message_of(
    topology: Topology, body: bytes, properties: Properties, arrival: Arrival, failures: int, payload: Any = None
) -> Message:
    """The handler's view of a delivery that failed ``failures`` times before. The payload is decoded by the caller."""
    headers = properties.table
    exchange, routing_key = published_with(headers, arrival)
    message_id = properties.message_id or derived_id(body, properties, routing_key)
    return Message(
        id=printable(message_id),
        payload=payload,
        body=body,
        attempt=failures + 1,
        max_attempts=topology.max_attempts,
        lap=lap_of(headers),
        queue=topology.name,
        exchange=exchange,
        routing_key=routing_key,
        properties=properties,
    )
