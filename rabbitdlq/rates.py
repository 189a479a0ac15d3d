"""Rates as people write them (``50/s``, ``600/m``, ``1000/h``)."""

import re
from dataclasses import dataclass
from datetime import timedelta

__all__ = ["Rate"]

_PATTERN = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(?:/\s*([smh]))?", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3_600}


@dataclass(frozen=True, slots=True)
class Rate:
    """So many in a time, spread evenly over it."""

    per_second: float

    def __post_init__(self) -> None:
        """Raises :class:`ValueError` unless it is above zero."""
        number = isinstance(self.per_second, int | float)  # a text is for parse()
        if not number or not 0 < self.per_second < float("inf"):
            raise ValueError(f"{self.per_second!r} a second is no rate above zero")

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """The rate that a text says, per second where it names no unit; raises :class:`ValueError` with the reason.

        >>> Rate.parse("50/s").per_second, Rate.parse("600/m").per_second, Rate.parse("5").per_second
        (50.0, 10.0, 5.0)
        """
        match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
        rate = float(match[1]) / _SECONDS[match[2] or "s"] if match else 0.0
        if rate <= 0:
            raise ValueError(f"{text!r} is no rate above zero; write 50/s, 600/m or 1000/h")
        return cls(rate)

    @property
    def interval(self) -> timedelta:
        """From one to the next."""
        return timedelta(seconds=1 / self.per_second)

    def __str__(self) -> str:
        """In the shortest time that makes it a whole number, like ``100/m``; by the hour where none does."""
        counts = {unit: round(self.per_second * seconds, 6) for unit, seconds in _SECONDS.items()}
        unit = next((unit for unit, count in counts.items() if count.is_integer() and count), "h")
        return f"{counts[unit]:.10g}/{unit}"
