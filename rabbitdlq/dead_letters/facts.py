"""What matters of dead letters that are to be sent back, before any is."""

from collections import Counter
from dataclasses import dataclass, field, replace

from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters.plan import ReplayPlan

__all__ = ["LetterFacts"]


@dataclass(slots=True)
class LetterFacts:
    """What matters of the letters that were chosen; filled by :meth:`add`, or all at once."""

    count: int = 0
    #: of the bodies
    total_bytes: int = 0
    largest_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    #: by the work queue they failed in
    origins: Counter[str] = field(default_factory=Counter)
    #: that had one; it does not go with them
    user_ids: int = 0
    expirations: int = 0
    #: that the loop breaker holds: they stay
    held: int = 0

    @classmethod
    def of(cls, plan: ReplayPlan) -> "LetterFacts":
        """Those of a plan."""
        return cls(
            count=plan.count,
            total_bytes=plan.total_bytes,
            largest_bytes=plan.largest_bytes,
            reasons=Counter(plan.reasons),
            origins=Counter(plan.origins),
            held=plan.held,
        )

    def of_origin(self, queue: str) -> "LetterFacts":
        """Of those that failed in this queue; their size as if all were of average size."""
        count = self.origins[queue]
        share = self.total_bytes * count // self.count if self.count else 0
        return replace(self, count=count, total_bytes=share, origins=Counter({queue: count}))

    def add(self, letter: DeadLetter, *, held: bool = False) -> None:
        """Count one letter; one that is ``held`` is not sent, and counts as that only."""
        if held:
            self.held += 1
            return
        self.count += 1
        self.total_bytes += len(letter.body)
        self.largest_bytes = max(self.largest_bytes, len(letter.body))
        self.reasons[letter.reason] += 1
        self.origins[letter.queue] += 1
        self.user_ids += letter.wire.user_id is not None or "user_id" in letter.original
        self.expirations += letter.wire.expiration is not None or "expiration" in letter.original
