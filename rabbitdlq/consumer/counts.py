"""What is counted of attempts while they end, for metrics: durations, and which errors they failed with."""

from bisect import bisect_left

__all__ = ["BOUNDS_SECONDS", "OTHER_ERRORS", "AttemptCounts"]

#: upper ends of the buckets: from handlers that only compute to those that wait for others
BOUNDS_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)
_BOUNDS_MS = tuple(bound * 1000 for bound in BOUNDS_SECONDS)
#: error classes that are told apart; a label that anything can be put into would grow without end
MOST_ERRORS = 50
OTHER_ERRORS = "other"


class AttemptCounts:
    """Counts that cost next to nothing: they are made for every message, and read when somebody asks."""

    __slots__ = ("_buckets", "_seconds", "errors")

    def __init__(self) -> None:
        #: one more than there are bounds, for what took longer; each attempt is in one of them
        self._buckets = [0] * (len(_BOUNDS_MS) + 1)
        self._seconds = 0.0
        #: failed attempts by the class of their error
        self.errors: dict[str, int] = {}

    def took(self, duration_ms: float) -> None:
        """A handler ended after so long."""
        self._buckets[bisect_left(_BOUNDS_MS, duration_ms)] += 1
        self._seconds += duration_ms

    def failed(self, error_type: str) -> None:
        """With an error of this class."""
        if error_type not in self.errors and len(self.errors) >= MOST_ERRORS:
            error_type = OTHER_ERRORS
        self.errors[error_type] = self.errors.get(error_type, 0) + 1

    @property
    def seconds(self) -> float:
        """All durations together."""
        return self._seconds / 1000

    def cumulative(self) -> list[tuple[float, int]]:
        """How many took at most so many seconds, for each bound, and for infinity at the end.

        >>> counts = AttemptCounts()
        >>> for duration_ms in (0.5, 1.0, 3_000, 1e9):
        ...     counts.took(duration_ms)
        >>> counts.cumulative()[0], counts.cumulative()[-2], counts.cumulative()[-1]
        ((0.001, 2), (900.0, 3), (inf, 4))
        """
        total, counted = 0, []
        for bound, count in zip((*BOUNDS_SECONDS, float("inf")), list(self._buckets), strict=True):
            total += count
            counted.append((bound, total))
        return counted
