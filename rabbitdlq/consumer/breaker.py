"""The breaker: when most attempts fail because of something outside, trying on only spends attempts.

::

    closed ──most attempts of the window failed──▶ open ──the pause is over──▶ half-open
       ▲                                            ▲                             │
       │                                            └──────the probe failed───────┤
       └───────────────────────────────the probe did not────────────────────────┘

Pure: what happened is told, what to do is asked, and the clock is given.
"""

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.limits import checked_duration

__all__ = ["Breaker", "BreakerState", "Change", "Circuit", "Position"]

Position = Literal["closed", "open", "half-open"]
Change = Literal["opened", "closed", "probe failed"]

#: the window moves in steps of this part of it
STEPS = 10
#: failing messages of one step that are told apart
KEPT_IDS = 1_000
#: windows after which also the last attempts say nothing any more
OLDEST = 10


@dataclass(frozen=True, slots=True)
class Breaker:
    """When a consumer pauses, and for how long.

    What counts as a failure: that the handler, or ``classify``, called the error :class:`Transient` or
    :class:`External`; a handler that took too long; and of errors that nobody named a :class:`ConnectionError`, a
    :class:`TimeoutError` or a :class:`socket.gaierror`, also as the cause of another one. A message counts once in a
    window, so that one that always fails pauses nobody.

    Where attempts are slow or few, a window has less than ``min_attempts``: then the last ``min_attempts`` are looked
    at, as far as they are not older than ten windows, and a message counts once among them.
    """

    #: the attempts of this time are looked at, and of slow ones at least the last ``min_attempts``
    window: timedelta
    #: fewer in ten windows say nothing
    min_attempts: int
    #: it opens when this part of them failed, or more
    share: float
    #: to the first probe; each that fails doubles it
    first_pause: timedelta
    longest_pause: timedelta
    #: errors of classes that nobody named count, too: a bug in the handler pauses the queue then
    unknown: bool

    def __init__(
        self,
        window: timedelta | str = timedelta(seconds=30),
        min_attempts: int = 5,
        share: float = 0.5,
        first_pause: timedelta | str = timedelta(seconds=5),
        longest_pause: timedelta | str = timedelta(minutes=5),
        unknown: bool = False,
    ) -> None:
        """Times are timedeltas or texts like ``"30s"``. Raises :class:`ConfigurationError` for what makes no sense."""
        put = object.__setattr__
        for name, value in (("window", window), ("first_pause", first_pause), ("longest_pause", longest_pause)):
            put(self, name, checked_duration(f"breaker: {name}", value))
        put(self, "min_attempts", min_attempts)
        put(self, "share", share)
        put(self, "unknown", unknown)
        self._check()

    def _check(self) -> None:
        for name in ("window", "first_pause", "longest_pause"):
            value = getattr(self, name)
            if value <= timedelta():
                raise ConfigurationError(f"breaker: {name}: {value.total_seconds():g} s is not above zero")
        if self.longest_pause < self.first_pause:
            raise ConfigurationError(
                f"breaker: longest_pause: {self.longest_pause.total_seconds():g} s is below first_pause, "
                f"{self.first_pause.total_seconds():g} s"
            )
        if type(self.min_attempts) is not int or self.min_attempts < 1:
            raise ConfigurationError(f"breaker: min_attempts: {self.min_attempts!r} is no whole number above 0")
        if not 0 < self.share <= 1:
            raise ConfigurationError(f"breaker: share: {self.share!r} is not above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class BreakerState:
    """How a consumer's breaker stands."""

    position: Position
    #: since when it has been closed, or not closed
    since: datetime
    #: the attempts that are looked at, and how many of them failed; while it is not closed, those that opened it
    attempts: int
    failures: int
    #: failed probes since it opened
    probes: int = 0
    next_probe_at: datetime | None = None


@dataclass(slots=True)
class _Step:
    attempts: int = 0
    failures: int = 0
    failed: set[str] = field(default_factory=set)


class _Last:
    """The last attempts, so many at most, and not older than that; each failing message once."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        #: when each ended, and the message where it failed
        self._ended: deque[tuple[float, str | None]] = deque()
        self._failed: set[str] = set()

    def add(self, now: float, failed: str | None) -> None:
        """One more has ended."""
        if failed is not None:
            if failed in self._failed:
                return
            self._failed.add(failed)
        self._ended.append((now, failed))
        if len(self._ended) > self._most:
            self._forget()

    def totals(self, now: float) -> tuple[int, int]:
        """How many there are, and how many of them failed."""
        while self._ended and now - self._ended[0][0] > self._seconds:
            self._forget()
        return len(self._ended), len(self._failed)

    def _forget(self) -> None:
        _, failed = self._ended.popleft()
        if failed is not None:
            self._failed.discard(failed)


class Circuit:
    """The running state of one :class:`Breaker`."""

    def __init__(
        self,
        options: Breaker,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),  # noqa: S311 - spreads probes, no secret
    ) -> None:
        """``clock`` gives seconds; each pause is multiplied by what ``jitter`` gives."""
        self.options = options
        self._clock = clock
        self._jitter = jitter
        self.position: Position = "closed"
        self._step = options.window.total_seconds() / STEPS
        self._steps: deque[_Step] = deque([_Step()], maxlen=STEPS)
        self._step_ends = clock() + self._step
        self._last = self._none_yet()
        self._since = datetime.now(UTC)
        self._opened_at = self._closed_at = float("-inf")
        self._counted = (0, 0)
        self._probe: object = None
        #: since it opened
        self.failed_probes = 0
        self._pause = 0.0
        self._next_probe = 0.0

    @property
    def state(self) -> BreakerState:
        """How it stands now."""
        if self.position == "closed":
            now = self._clock()
            self._move_on(now)
            return BreakerState("closed", self._since, *self._totals(now))
        at = None
        if self.position == "open":
            at = datetime.now(UTC) + timedelta(seconds=self.next_probe_in)
        return BreakerState(self.position, self._since, *self._counted, self.failed_probes, at)

    @property
    def next_probe_in(self) -> float:
        """Seconds until the pause is over."""
        return max(0.0, self._next_probe - self._clock())

    @property
    def open_for(self) -> float:
        """Seconds since it opened."""
        return self._clock() - self._opened_at

    # --- before an attempt

    @property
    def blocked(self) -> bool:
        """Whether no attempt may begin now; while half-open a single one may, the probe."""
        return self.position != "closed" and (self.position == "open" or self._probe is not None)

    def begin(self, token: object) -> None:
        """An attempt begins that was not :attr:`blocked`."""
        if self.position == "half-open":
            self._probe = token

    def probe(self) -> None:
        """The pause is over: let the next attempt be a probe."""
        if self.position == "open":
            self.position, self._probe = "half-open", None

    # --- after an attempt

    def ended(self, token: object, message_id: str, failed: bool) -> Change | None:
        """An attempt ended; what that changed."""
        if self.position == "closed":
            return self._counting(message_id, failed)
        if self.position == "half-open" and token is self._probe and token is not None:
            return self._judge(failed)
        return None  # it had begun before: it says nothing about now

    def gone(self, token: object) -> bool:
        """What was to be a probe came to nothing: whether another may take its place."""
        if self.position == "half-open" and token is self._probe:
            self._probe = None
            return True
        return False

    def _counting(self, message_id: str, failed: bool) -> Change | None:
        now = self._clock()
        if now >= self._step_ends:
            self._move_on(now)
        step = self._steps[-1]
        if not failed:
            step.attempts += 1
            self._last.add(now, None)
            return None
        if any(message_id in each.failed for each in self._steps):
            return None
        if len(step.failed) < KEPT_IDS:
            step.failed.add(message_id)
        step.attempts += 1
        step.failures += 1
        self._last.add(now, message_id)
        attempts, failures = self._totals(now)
        if attempts < self.options.min_attempts or failures < self.options.share * attempts:
            return None
        self._counted, self.failed_probes, self._opened_at = (attempts, failures), 0, now
        self._since = datetime.now(UTC)
        # one that is hardly closed again: the outage goes on, and so do the pauses
        again = now - self._closed_at < self.options.window.total_seconds()
        self._open(self._pause * 2 if again else self.options.first_pause.total_seconds())
        return "opened"

    def _judge(self, failed: bool) -> Change:
        self._probe = None
        if failed:
            self.failed_probes += 1
            self._open(self._pause * 2)
            return "probe failed"
        self.position, self._since, self._closed_at = "closed", datetime.now(UTC), self._clock()
        self._steps = deque([_Step()], maxlen=STEPS)
        self._step_ends = self._closed_at + self._step
        self._last = self._none_yet()
        return "closed"

    def _open(self, pause: float) -> None:
        self.position = "open"
        self._pause = min(pause, self.options.longest_pause.total_seconds())
        self._next_probe = self._clock() + self._pause * self._jitter()

    def _totals(self, now: float) -> tuple[int, int]:
        """Of the window; of the last ones where it has fewer than are wanted."""
        attempts = sum(step.attempts for step in self._steps)
        if attempts < self.options.min_attempts:
            return self._last.totals(now)
        return attempts, sum(step.failures for step in self._steps)

    def _none_yet(self) -> _Last:
        return _Last(self.options.min_attempts, OLDEST * self.options.window.total_seconds())

    def _move_on(self, now: float) -> None:
        passed = int((now - self._step_ends) // self._step) + 1 if now >= self._step_ends else 0
        for _ in range(min(passed, STEPS)):
            self._steps.append(_Step())
        self._step_ends += passed * self._step
