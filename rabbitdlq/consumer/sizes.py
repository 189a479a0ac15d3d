"""Amounts of memory as people write them (``512MiB``, ``2GB``)."""

import re

from rabbitdlq.errors import ConfigurationError

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?i?b|)", re.ASCII | re.IGNORECASE)


def parse_size(value: str | int, name: str = "max_memory") -> int:
    """The bytes that ``value`` says; raises :class:`ConfigurationError` with ``name`` for what is no size above zero.

    >>> parse_size("512MiB"), parse_size("2GB"), parse_size(1_000)
    (536870912, 2000000000, 1000)
    """
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value.strip())
        unit = _UNITS.get(match[2].lower()) if match else None
        size = round(float(match[1]) * unit) if match and unit else 0
    else:
        size = value if type(value) is int else 0
    if size <= 0:
        raise ConfigurationError(
            f"{name}: {value!r} is no size; write bytes, or a number and a unit, like 512MiB or 2GB"
        )
    return size


def format_size(size: int) -> str:
    """In MiB, for people.

    >>> format_size(536_870_912)
    '512 MiB'
    """
    return f"{size / 2**20:,.0f} MiB"
