"""Rates, shares and waiting times as they are typed."""

import re
from datetime import timedelta

from rabbitdlq.durations import parse_duration
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.rates import Rate

__all__ = ["parse_pace", "parse_rate", "parse_share", "parse_wait"]

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*(%?)", re.ASCII)


def parse_pace(option: str, text: str) -> Rate:
    """A rate like 5/s or 100/m; raises :class:`ConfigurationError` with the option's name."""
    try:
        return Rate.parse(text)
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from error


def parse_rate(text: str | None) -> float | None:
    """How many a second; None for None. Raises :class:`ConfigurationError` for what is no rate.

    >>> parse_rate("50/s"), parse_rate("600/m"), parse_rate("5")
    (50.0, 10.0, 5.0)
    """
    return None if text is None else parse_pace("--rate", text).per_second


def parse_share(text: str) -> float:
    """From 0 to 1; raises :class:`ConfigurationError` for what is no share.

    >>> parse_share("10%"), parse_share("0.25")
    (0.1, 0.25)
    """
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 2.0
    if share > 1:
        raise ConfigurationError(f"--abort-above: {text!r} is no share; write 10% or 0.1")
    return share


def parse_wait(option: str, text: str) -> timedelta:
    """A time like 30s or 2m; raises :class:`ConfigurationError` with the option's name."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from error
