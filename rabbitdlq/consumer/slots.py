"""Who may run a handler next, where several consumers share so many at once. Pure: nothing here waits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rabbitdlq.errors import ConfigurationError

__all__ = ["Order", "Share", "Slots"]

#: ``strict``: who waits with the highest priority is next; ``weighted``: messages are begun in the ratio of priorities
Order = Literal["strict", "weighted"]


@dataclass(frozen=True, slots=True)
class _Bound:
    """So many handlers these may run together, so that slots are left for those that are more important."""

    shares: "Sequence[Share]"
    most: int


class Share:
    """One consumer's part in the slots."""

    def __init__(self, slots: "Slots", priority: int, place: int) -> None:
        self.slots = slots
        self.priority = priority
        #: how many of its handlers run
        self.running = 0
        #: whether it has a message that it could begin at once, had it a slot
        self.wants: Callable[[], bool] = lambda: False
        #: called when it wants a slot and may have one
        self.nudge: Callable[[], object] = lambda: None
        self.bounds: list[_Bound] = []
        self._place = place
        self._passed = 0.0

    def enter(self) -> bool:
        """Take a slot; False where there is none for it now."""
        if not self.eligible or self.slots.other_before(self):
            return False
        self.running += 1
        start = max(self._passed, self.slots.passed)
        self.slots.passed, self._passed = start, start + 1 / self.priority
        return True

    def leave(self) -> None:
        """Give a slot back."""
        self.running -= 1
        self.slots.nudge_next()

    @property
    def eligible(self) -> bool:
        """Whether a slot is free that it may take."""
        return all(sum(share.running for share in bound.shares) < bound.most for bound in self.bounds)

    @property
    def rank(self) -> tuple[float, float, int]:
        """The lowest is next."""
        strict = self.slots.order == "strict"
        # who was idle has saved up nothing
        return -self.priority if strict else 0, max(self._passed, self.slots.passed), self._place


class Slots:
    """``count`` handlers at once over several consumers.

    One slot for each more important consumer is kept free of less important ones, so that slow handlers of a less
    important queue never hold them all.
    """

    def __init__(self, count: int, order: Order, priorities: Sequence[int]) -> None:
        """Raises :class:`ConfigurationError` where the least important would have no slot at all."""
        if order not in ("strict", "weighted"):
            raise ConfigurationError(f"priority: {order!r} is neither 'strict' nor 'weighted'")
        for priority in priorities:
            if type(priority) is not int or priority < 1:
                raise ConfigurationError(f"priority: {priority!r} is no whole number above 0")
        self.order: Order = order
        #: how far the last one that took a slot had come, in messages by priority
        self.passed = 0.0
        self.shares = [Share(self, priority, place) for place, priority in enumerate(priorities)]
        for share in self.shares:
            for level in sorted({other.priority for other in self.shares if other.priority >= share.priority}):
                kept = sum(other.priority > level for other in self.shares)
                shares = [other for other in self.shares if other.priority <= level]
                share.bounds.append(_Bound(shares, count - kept))
        least = min(priorities, default=1)
        needed = sum(priority > least for priority in priorities) + 1
        if count < needed:
            raise ConfigurationError(
                f"slots: {count} is too few: one is kept for each more important queue, and one is needed for the "
                f"others; at least {needed}"
            )

    def other_before(self, share: Share) -> bool:
        """Whether another one that wants a slot is to go first."""
        mine = share.rank
        return any(other.rank < mine and other.eligible and other.wants() for other in self.shares)

    def nudge_next(self) -> None:
        """Tell the first of those who want a slot that there is one; after everything that may change who that is."""
        wanting = [share for share in self.shares if share.eligible and share.wants()]
        if wanting:
            min(wanting, key=lambda share: share.rank).nudge()
