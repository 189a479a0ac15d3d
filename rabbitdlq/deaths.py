"""``x-death``: what the broker remembers of a message's dead-lettering.

The array has one entry per (queue, reason), the latest death first, each with a count
(https://www.rabbitmq.com/docs/dlx#effects). Any client may publish anything under that name, so odd shapes are "no
deaths", never an exception; and what a header says counts only on a delivery that came through the return exchange.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rabbitdlq.texts import printable, shorten
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, decoded, remembered

__all__ = ["Arrival", "Death", "arrival", "deaths_of", "parse_deaths", "rejections"]


@dataclass(frozen=True, slots=True)
class Death:
    """One entry of ``x-death``. Names that are not UTF-8 are written as on deliveries, with ``\\xff``."""

    queue: str
    reason: str
    count: int
    #: the exchange and the key the message had been published with before it came to ``queue``
    exchange: str
    routing_key: str
    #: of the first death of this queue and reason
    time: datetime | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a delivery came to the work queue, and what that says of its past."""

    #: handler runs that failed in this lap, by the rung the message left last; 0 when it did not come from a rung
    failures: int
    #: what all rungs counted together; more than ``failures`` where a rung is missing or a header is stale
    counted: int
    exchange: str
    routing_key: str
    #: it was put into a rung by a publish, and since then nacked that often; None where it climbed by nacks alone
    nacked_since: int | None = None


def parse_deaths(value: Any) -> tuple[Death, ...]:
    """The well-formed entries, the latest death first."""
    if not isinstance(value, list):
        return ()
    return tuple(death for entry in value if isinstance(entry, Mapping) for death in [_parse_death(entry)] if death)


def deaths_of(headers: Headers) -> tuple[Death, ...]:
    """What the message's ``x-death`` tells."""
    raw = headers.raw("x-death")
    return () if raw is None else _parse_raw(raw)


@remembered
def _parse_raw(raw: bytes) -> tuple[Death, ...]:
    return parse_deaths(decoded(raw))


def _parse_death(entry: Mapping[str, Any]) -> Death | None:
    queue, reason, count = _name(entry.get("queue")), _name(entry.get("reason")), entry.get("count", 1)
    if not queue or not reason:
        return None
    keys, time = entry.get("routing-keys"), entry.get("time")
    return Death(
        queue=queue,
        reason=reason,
        count=count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 1,
        exchange=_name(entry.get("exchange")),
        # the publisher's key; those of its CC header follow
        routing_key=_name(keys[0]) if isinstance(keys, list) and keys else "",
        time=time if isinstance(time, datetime) else None,
    )


def _name(value: Any) -> str:
    """A name or a key exactly as a delivery shows it: what is derived from it must not change between attempts."""
    if type(value) is str and value.isascii() and len(value) < 256:
        return value
    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
    return shorten(printable(text), 255, "") if isinstance(text, str) else ""


def rejections(deaths: Sequence[Death], queue: str) -> int:
    """How often the message was rejected or nacked in this queue."""
    return sum(death.count for death in deaths if death.queue == queue and death.reason == "rejected")


def arrival(topology: Topology, exchange: str, routing_key: str, deaths: Sequence[Death]) -> Arrival:
    """What a delivery with this exchange, this key and these deaths says.

    Only the return exchange speaks of this lap: whatever came another way (publisher, replay, shovel, the management
    UI's "Move messages") starts one, whatever header it carries.
    """
    if exchange != topology.return_exchange:
        return Arrival(0, 0, exchange, _name(routing_key))
    rungs = [
        (rung.number, death.count)
        for death in deaths
        if death.reason == "expired" and (rung := topology.rung_of(death.queue)) is not None
    ]
    failures = rungs[0][0] if rungs else 0
    origin = next((death for death in deaths if death.queue == topology.name and death.reason == "rejected"), None)
    counted, nacked = sum(count for _, count in rungs), rejections(deaths, topology.name)
    return Arrival(
        failures=failures,
        counted=counted,
        exchange=origin.exchange if origin else exchange,
        routing_key=origin.routing_key if origin else _name(routing_key),
        # each nack is one death in the work queue and one in a rung; only a publish gets there without the first
        nacked_since=nacked if counted == nacked + 1 else None,
    )
