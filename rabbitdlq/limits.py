"""What a name, a number, a duration and a ladder may be; ladders that grow. Refusals name their key and the reason."""

import math
import re
from collections.abc import Iterable
from datetime import timedelta

from rabbitdlq.durations import MAX_MILLISECONDS, MAX_RUNGS, milliseconds, parse_duration
from rabbitdlq.errors import ConfigurationError

__all__ = [
    "MAX_EXCHANGE_BYTES",
    "MAX_NAME_BYTES",
    "TOPOLOGY_FORM",
    "check_kind",
    "check_name",
    "check_range",
    "check_whole",
    "check_word",
    "checked_delays",
    "checked_duration",
    "exponential",
    "optional_duration",
]

#: of a queue's name and of a routing key: one octet tells the length
MAX_NAME_BYTES = 255
#: the client library takes no longer names of exchanges; the broker itself would take 255 bytes
MAX_EXCHANGE_BYTES = 127
#: what the client library takes as the name of a queue or an exchange; the broker itself takes any UTF-8
_NAME = re.compile(r"[a-zA-Z0-9\-_.:@#,/+ ]+")
#: what is told to who gives a queue's name where its topology is meant
TOPOLOGY_FORM = 'a Topology, like Topology("orders", ["5s", "30s"])'


def check_word(key: str, value: str, words: tuple[str, ...]) -> None:
    """Refuse what is none of the words."""
    if value not in words:
        raise ConfigurationError(f"{key}: {value!r} is none of {', '.join(words)}")


def check_kind(key: str, value: object, kind: type | tuple[type, ...], give: str) -> None:
    """Refuse what is of another kind, and say what to give."""
    if not isinstance(value, kind):
        raise ConfigurationError(f"{key}: {value!r} cannot be used; give {give}")


def check_range(key: str, value: int, least: int, most: int) -> None:
    """Refuse a number below the least or above the most."""
    if not least <= value <= most:
        raise ConfigurationError(f"{key}: {value} is not between {least:,} and {most:,}")


def check_whole(**values: object) -> None:
    """Refuse what is no whole number above 0; True is none, and neither are "10" and 2.5."""
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{key}: {value!r} is no whole number above 0")


def check_name(key: str, name: str, most: int = MAX_NAME_BYTES) -> None:
    """Refuse what cannot be the name of a queue or, with its ``most``, of an exchange."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{key}: {name!r}: a name is made of a-z, A-Z, 0-9, space and - _ . : @ # , / +")
    if len(name) > most:
        raise ConfigurationError(f"{key}: {name!r} is longer than {most} bytes")


def checked_duration(key: str, value: str | timedelta) -> timedelta:
    """The duration; refuses a text that is none."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ConfigurationError(f"{key}: {error}") from error


def optional_duration(key: str, value: str | timedelta | None) -> timedelta | None:
    """The same, where None leaves it open."""
    return None if value is None else checked_duration(key, value)


def checked_delays(values: Iterable[str | timedelta]) -> tuple[timedelta, ...]:
    """The delays of a ladder; refuses a ladder without rungs or with too many, and a delay that no queue can keep."""
    if isinstance(values, str):
        raise ConfigurationError(f'delays: {values!r} is one text; write a list, like ["5s", "30s"]')
    delays = []
    for place, value in enumerate(values):
        key = f"delays[{place}]"
        delay = checked_duration(key, value)
        try:
            count = milliseconds(delay)
        except ValueError as error:
            raise ConfigurationError(f"{key}: {value} is not a whole number of milliseconds") from error
        if count <= 0:
            raise ConfigurationError(f"{key}: {value} is not above zero; a failed message has to wait")
        if count > MAX_MILLISECONDS:
            raise ConfigurationError(f"{key}: {value} is longer than RabbitMQ's 32-bit milliseconds, 49.7 days")
        delays.append(delay)
    if not 1 <= len(delays) <= MAX_RUNGS:
        raise ConfigurationError(f"delays: {len(delays)} given; a ladder has 1 to {MAX_RUNGS} rungs")
    return tuple(delays)


def exponential(
    first: str | timedelta, rungs: int, *, factor: float = 2.0, longest: str | timedelta | None = None
) -> tuple[timedelta, ...]:
    """Delays that grow by ``factor``, none above ``longest``.

    >>> [str(delay) for delay in exponential("5s", 4, factor=6, longest="10m")]
    ['0:00:05', '0:00:30', '0:03:00', '0:10:00']

    Raises :class:`ConfigurationError` for a factor below 1, no rungs, and a duration that is none or not above zero.
    """
    try:
        start = parse_duration(first)
        cap = None if longest is None else parse_duration(longest)
    except ValueError as error:
        raise ConfigurationError(f"exponential: {error}") from error
    for duration in (start, cap):
        if duration is not None and duration <= timedelta():
            raise ConfigurationError(f"exponential: {duration} is not above zero")
    if not (math.isfinite(factor) and factor >= 1):
        raise ConfigurationError(f"exponential: factor is {factor}; below 1 the delays would shrink")
    if not 1 <= rungs <= MAX_RUNGS:
        raise ConfigurationError(f"exponential: {rungs} rungs; a ladder has 1 to {MAX_RUNGS}")
    longest_possible = timedelta(milliseconds=MAX_MILLISECONDS)
    ceiling = longest_possible if cap is None else min(cap, longest_possible)
    delays, delay = [], min(start, ceiling)
    for _ in range(rungs):
        delays.append(timedelta(milliseconds=round(delay / timedelta(milliseconds=1))))
        delay = ceiling if delay > ceiling / factor else delay * factor
    return tuple(delays)
