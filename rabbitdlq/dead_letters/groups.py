"""Dead letters counted by bug, or by something else they have in common. Memory grows with the groups only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rabbitdlq import names
from rabbitdlq.dead_letter import DeadLetter, iso
from rabbitdlq.dead_letters.selection import error_line
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.texts import printable

__all__ = ["KEYS", "Group", "Grouping", "worker_of"]

#: characters of a group's text that people read, and of one that tells groups apart
_SIGNATURE_LENGTH, _KEY_LENGTH = 200, 500
#: how letters are called that have no error, or no worker
NO_ERROR, NONE = "(no error recorded)", "(none)"


@dataclass(frozen=True, slots=True)
class Group:
    """Letters that have one thing in common."""

    #: the fingerprint, reason, routing key, ...; empty where the letters have none
    key: str
    #: the same for people: "Type: first line of an example's message" for a fingerprint
    signature: str
    count: int
    #: of all letters that were looked at, from 0 to 1
    share: float
    #: None where no letter tells when it was parked
    first_parked: datetime | None
    last_parked: datetime | None
    #: when letters of this group were sent back last; None where that is not known
    last_replayed: datetime | None
    #: of the letter that was parked last
    example_id: str
    #: how many were sent back before and failed again, and in which lap the furthest of them is
    came_back: int
    max_lap: int
    #: how it stands since the time that was asked for: new, growing, regressed or quiet; None where none was asked for
    state: str | None

    def as_json(self) -> dict[str, Any]:
        """As ``rabbitdlq dlq groups --json`` shows it."""
        return {
            "key": self.key,
            "signature": self.signature,
            "count": self.count,
            "share": round(self.share, 6),
            "first_parked": iso(self.first_parked),
            "last_parked": iso(self.last_parked),
            "last_replayed": iso(self.last_replayed),
            "example_id": self.example_id,
            "came_back": self.came_back,
            "max_lap": self.max_lap,
            "state": self.state,
        }


class Grouping:
    """Counts letters by what they have in common: fingerprint, error, type, reason, routing-key or worker."""

    def __init__(self, by: str = "fingerprint") -> None:
        """Raises :class:`ConfigurationError` for another ``by``."""
        if by not in KEYS:
            raise ConfigurationError(f"letters cannot be grouped by {by!r}; by {', '.join(KEYS)}")
        self.by = by
        self._key = KEYS[by]
        self._counted: dict[str, _Counted] = {}
        #: letters that were added
        self.count = 0

    def add(self, letter: DeadLetter) -> None:
        """Take in one letter; nothing of it is kept but texts of bounded length."""
        self.count += 1
        key = self._key(letter)
        counted = self._counted.get(key)
        if counted is None:
            counted = self._counted[key] = _Counted()
        counted.add(letter)

    def groups(self, last_replayed: Mapping[str, datetime] | None = None, since: datetime | None = None) -> list[Group]:
        """The groups, the largest first.

        ``last_replayed`` tells by key when letters were sent back last. With ``since`` each group has a state:
        ``regressed`` where letters that had been sent back, or others of the group after such a replay, were parked
        since then; ``new`` where all were parked since then, ``growing`` where some were; ``quiet`` where none was.
        """
        replays = last_replayed or {}
        found = [self._group(key, counted, replays.get(key), since) for key, counted in self._counted.items()]
        return sorted(found, key=lambda group: (-group.count, group.key))

    def _group(self, key: str, counted: "_Counted", replayed: datetime | None, since: datetime | None) -> Group:
        return Group(
            key=key,
            signature=(counted.signature or NO_ERROR) if self.by == "fingerprint" else (key or NONE),
            count=counted.count,
            share=counted.count / self.count,
            first_parked=counted.first,
            last_parked=counted.last,
            last_replayed=replayed,
            example_id=counted.example_id,
            came_back=counted.came_back,
            max_lap=counted.max_lap,
            state=None if since is None else counted.state(since, replayed),
        )


@dataclass(slots=True)
class _Counted:
    """What is known of a group while letters come in."""

    count: int = 0
    first: datetime | None = None
    last: datetime | None = None
    #: when one that had been sent back before was parked last
    last_back: datetime | None = None
    example_id: str = ""
    signature: str = ""
    came_back: int = 0
    max_lap: int = 1

    def add(self, letter: DeadLetter) -> None:
        self.count += 1
        parked = letter.moved_to_dlq_at
        if not self.example_id or (parked is not None and (self.last is None or parked >= self.last)):
            self.example_id = letter.id
            self.signature = "" if letter.error is None else error_line(letter.error)[:_SIGNATURE_LENGTH]
        if parked is not None:
            self.first = parked if self.first is None else min(self.first, parked)
            self.last = parked if self.last is None else max(self.last, parked)
        if letter.lap > 1:
            self.came_back += 1
            self.max_lap = max(self.max_lap, letter.lap)
            if parked is not None:
                self.last_back = parked if self.last_back is None else max(self.last_back, parked)

    def state(self, since: datetime, replayed: datetime | None) -> str:
        if self.first is None or self.last is None or self.last < since:
            return "quiet"
        came_back = self.last_back is not None and self.last_back >= since
        if came_back or (replayed is not None and self.last > replayed):
            return "regressed"
        return "new" if self.first >= since else "growing"


def _error(letter: DeadLetter) -> str:
    return "" if letter.error is None else error_line(letter.error)[:_KEY_LENGTH]


def _type(letter: DeadLetter) -> str:
    return "" if letter.error is None else letter.error.type


def _fingerprint(letter: DeadLetter) -> str:
    return "" if letter.error is None else letter.error.fingerprint


def worker_of(letter: DeadLetter) -> str:
    """Who parked it; of one that the broker parked, who had the last attempt that is known."""
    if letter.bare:
        return letter.history[-1].worker if letter.history else ""
    return printable(letter.wire.table.text(names.WORKER) or "")


#: what letters can be grouped by
KEYS: Mapping[str, Callable[[DeadLetter], str]] = {
    "fingerprint": _fingerprint,
    "error": _error,
    "type": _type,
    "reason": lambda letter: letter.reason,
    "routing-key": lambda letter: letter.routing_key,
    "worker": worker_of,
}
