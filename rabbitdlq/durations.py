"""Durations as people write them (``500ms``, ``5s``, ``2m``, ``1h``, ``7d``) and as the broker wants them.

This module imports nothing of ours: errors have durations, too.
"""

import re
from datetime import timedelta

__all__ = ["MAX_MILLISECONDS", "MAX_RUNGS", "format_duration", "milliseconds", "parse_duration"]

MAX_RUNGS = 32
#: the broker's timers are 32-bit: a longer x-message-ttl is taken and then cannot be kept
MAX_MILLISECONDS = 2**32 - 1

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
#: the sign is read so that "-5s" is told to be negative, and not to be no duration
_PATTERN = re.compile(r"(-?\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", re.ASCII)


def parse_duration(value: str | timedelta) -> timedelta:
    """The duration that ``value`` says; raises :class:`ValueError` with the reason where it says none.

    >>> parse_duration("1.5s")
    datetime.timedelta(seconds=1, microseconds=500000)
    """
    if isinstance(value, timedelta):
        return value
    match = _PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a duration; write a number and a unit, like 500ms, 5s, 2m, 1h or 7d")
    if match[1].startswith("-"):
        raise ValueError(f"{value!r} is negative")
    try:
        return timedelta(milliseconds=float(match[1]) * _UNITS[match[2]])
    except OverflowError:
        raise ValueError(f"{value[:40]!r} is longer than any clock can tell") from None


def milliseconds(duration: timedelta) -> int:
    """Whole milliseconds; raises :class:`ValueError` for a duration with a fraction of one."""
    count, rest = divmod(duration, timedelta(milliseconds=1))
    if rest:
        raise ValueError(f"{duration} is not a whole number of milliseconds, the broker's unit")
    return count


def format_duration(duration: timedelta) -> str:
    """The shortest exact way to write it with one unit.

    >>> [format_duration(timedelta(seconds=seconds)) for seconds in (0.5, 5, 90, 120, 86400)]
    ['500ms', '5s', '90s', '2m', '1d']
    """
    count = milliseconds(duration)
    unit = next(unit for unit in ("d", "h", "m", "s", "ms") if count % _UNITS[unit] == 0)
    return f"{count // _UNITS[unit]}{unit}"
