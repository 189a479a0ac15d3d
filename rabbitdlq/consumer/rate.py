"""A consumer's own speed limit: so many messages in a time, evenly, however fast they come."""

import time
from collections.abc import Callable
from datetime import timedelta

import structlog

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.rates import Rate

__all__ = ["Pacer", "checked_rate", "prefetch_for", "warn_of_waits"]

log = structlog.stdlib.get_logger(__name__)

#: begun at once after an idle time: so many seconds' worth
BURST_SECONDS = 1.0
#: nothing that was prefetched waits longer for its turn: far below the broker's 30 minutes for an acknowledgement
LONGEST_WAIT = timedelta(minutes=5)
#: sixteen bits on the wire
MAX_PREFETCH = 65_535


def checked_rate(rate: Rate | str | None) -> Rate | None:
    """The rate that was given.

    Raises :class:`ConfigurationError` for what is none, and for one so slow that the broker would take even a single
    waiting message away before its turn.
    """
    if isinstance(rate, str):
        try:
            rate = Rate.parse(rate)
        except ValueError as error:
            raise ConfigurationError(f"rate: {error}") from error
    if rate is not None and rate.interval > 2 * LONGEST_WAIT:
        raise ConfigurationError(
            f"rate: {rate} is too slow: a message would be held so long that the broker takes it away; at least 6/h"
        )
    return rate


def prefetch_for(rate: Rate | None, concurrency: int, given: int | None = None) -> int:
    """The one that was given, or else twice the concurrency, but no more than the rate gets through before the broker
    grows impatient. Raises :class:`ConfigurationError` for what is no prefetch, or no concurrency.

    >>> prefetch_for(None, 10), prefetch_for(Rate.parse("100/s"), 10), prefetch_for(Rate.parse("60/h"), 10)
    (20, 20, 5)
    """
    if not 1 <= concurrency <= MAX_PREFETCH:
        raise ConfigurationError(f"concurrency: {concurrency} is not between 1 and {MAX_PREFETCH:,}")
    if given is not None:
        if not concurrency <= given <= MAX_PREFETCH:
            raise ConfigurationError(f"prefetch: {given} is not between concurrency and {MAX_PREFETCH:,}")
        return given
    most = min(2 * concurrency, MAX_PREFETCH)
    return most if rate is None else max(1, min(most, int(rate.per_second * LONGEST_WAIT.total_seconds())))


def warn_of_waits(queue: str, rate: Rate | None, prefetch: int) -> None:
    """Say so in the log where a prefetch that was given is too much for the rate."""
    if rate is not None and prefetch > 1 and prefetch * rate.interval > 2 * LONGEST_WAIT:
        log.warning(
            "prefetch_above_rate",
            queue=queue,
            prefetch=prefetch,
            rate=str(rate),
            waits_s=round((prefetch * rate.interval).total_seconds()),
            consequence="unless its consumer_timeout is set higher, the broker takes messages away that wait for "
            "their turn for 30 minutes, and delivers them again",
        )


class Pacer:
    """Whose turn it is at a rate. Pure: the clock is given."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1 / rate.per_second
        #: how far behind its time one may be begun
        self._slack = min(BURST_SECONDS, 10 * self._interval) if self._interval < BURST_SECONDS else 0.0
        self._clock = clock
        self._next = clock()

    @property
    def wait(self) -> float:
        """Seconds until the next may begin; 0 where it may now."""
        return max(0.0, self._next - self._clock())

    def begin(self) -> None:
        """One begins."""
        self._next = max(self._next, self._clock() - self._slack) + self._interval
