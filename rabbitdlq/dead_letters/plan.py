"""The frozen set of letters that an operation is about to be done to, and what can be said of it beforehand."""

from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rabbitdlq.dead_letter import iso
from rabbitdlq.dead_letters.browse import Browser, Held
from rabbitdlq.dead_letters.groups import Group, Grouping
from rabbitdlq.dead_letters.looking import ambiguous, not_found
from rabbitdlq.dead_letters.selection import Selection
from rabbitdlq.dead_letters.traits import Traits
from rabbitdlq.errors import DeadLetterError
from rabbitdlq.topology import Topology

__all__ = ["Planner", "ReplayPlan"]

#: letters that were planned are kept up to this size, so that they need not be read a second time
KEPT_BYTES = 192 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Letters of one dead-letter queue, as they were when the plan was made. Copies of one letter count as one."""

    queue: str
    selection: Selection
    made_at: datetime
    #: letters in the queue
    found: int
    #: of the planned letters, in the order of the queue
    keys: tuple[str, ...]
    #: second copies of planned letters, left by a crash: they go without being sent
    copies: int
    #: letters that belong to the selection and are held by the loop breaker
    held: int
    #: of all bodies, and of the largest
    total_bytes: int
    largest_bytes: int
    oldest: datetime | None
    newest: datetime | None
    reasons: Mapping[str, int]
    #: by the work queue they failed in
    origins: Mapping[str, int]
    fingerprints: Mapping[str, int]
    #: ids that were asked for and have no place in the plan, and why
    problems: tuple[tuple[str, DeadLetterError], ...]
    #: by fingerprint, where they were asked for
    groups: tuple[Group, ...] = ()

    @property
    def count(self) -> int:
        """Letters in the plan."""
        return len(self.keys)

    def as_json(self) -> dict[str, Any]:
        """As ``--dry-run --json`` shows it."""
        return {
            "queue": self.queue,
            "selection": self.selection.describe(),
            "found": self.found,
            "count": self.count,
            "copies": self.copies,
            "held": self.held,
            "total_bytes": self.total_bytes,
            "largest_bytes": self.largest_bytes,
            "oldest": iso(self.oldest),
            "newest": iso(self.newest),
            "reasons": dict(self.reasons),
            "origins": dict(self.origins),
            "problems": [{"id": id, "error": str(error)} for id, error in self.problems],
            "groups": [group.as_json() for group in self.groups],
        }


class Planner:
    """Reads the queue once and makes the plan of it."""

    def __init__(self, topology: Topology, selection: Selection, *, grouped: bool = False) -> None:
        self._topology = topology
        self._selection = selection
        self._everything = selection.everything
        self._grouping = Grouping("fingerprint") if grouped else None
        self._planned: list[Traits] = []
        self._seen: set[tuple[str, int]] = set()
        self._copies = self._held = self._bytes = 0
        #: the planned letters and their copies, as long as they are not too large together
        self.kept: list[Held] | None = []
        self._kept_bytes = 0

    async def read(self, browser: Browser) -> ReplayPlan:
        """The plan; the browser holds the letters afterwards."""
        async with aclosing(browser.read()) as letters:
            async for held in letters:
                self._take(held)
        problems = self._problems()
        if self._selection.ids:
            unclear = {id for id, _ in problems}
            # of letters that are equal in all the oldest is meant
            named = {
                traits.key: traits
                for traits in reversed(self._planned)
                if traits.id not in unclear or traits.key in self._selection.ids
            }
            self._planned = list(reversed(named.values()))
        return self._plan(browser.count, problems)

    def _take(self, held: Held) -> None:
        traits, selection = held.traits, self._selection
        copy = (traits.key, hash(held.body))
        if traits.repeated and copy in self._seen:
            self._copies += 1
            self._keep(held)
            return
        if not (self._everything or selection.matches(held.letter)):
            held.forget()
            return
        if traits.lap >= self._topology.max_laps and not selection.held and not selection.ids:
            self._held += 1
            held.forget()
            return
        if selection.limit is not None and len(self._planned) >= selection.limit:
            held.forget()
            return
        if self._grouping is not None:
            self._grouping.add(held.letter)
        held.forget()
        self._seen.add(copy)
        self._planned.append(traits)
        self._bytes += traits.size
        self._keep(held)

    def _keep(self, held: Held) -> None:
        if self.kept is None:
            return
        self._kept_bytes += held.size
        self.kept.append(held)
        if self._kept_bytes > KEPT_BYTES:
            self.kept = None

    def _problems(self) -> list[tuple[str, DeadLetterError]]:
        """Ids that name no letter, or several that are not one: those stay where they are."""
        if not self._selection.ids:
            return []
        by_id: dict[str, list[str]] = {}
        for traits in self._planned:
            for name in {traits.id, traits.key} & self._selection.ids:
                by_id.setdefault(name, []).append(traits.key)
        problems: list[tuple[str, DeadLetterError]] = []
        narrowed = "" if replace(self._selection, ids=frozenset()).everything else " that the other filters match"
        for id in sorted(self._selection.ids):
            keys = list(dict.fromkeys(by_id.get(id, [])))
            if not keys:
                problems.append((id, not_found(self._topology, id, narrowed)))
            elif len(keys) > 1 and id not in keys:
                park_ids = ["" if key.startswith("bare-") else key for key in keys]
                problems.append((id, ambiguous(self._topology, id, len(keys), park_ids)))
        return problems

    def _plan(self, found: int, problems: list[tuple[str, DeadLetterError]]) -> ReplayPlan:
        times = [traits.parked_at for traits in self._planned if traits.parked_at is not None]
        return ReplayPlan(
            queue=self._topology.name,
            selection=self._selection,
            made_at=datetime.now(UTC),
            found=found,
            keys=tuple(traits.key for traits in self._planned),
            copies=self._copies,
            held=self._held,
            total_bytes=self._bytes,
            largest_bytes=max((traits.size for traits in self._planned), default=0),
            oldest=min(times, default=None),
            newest=max(times, default=None),
            reasons=Counter(traits.reason for traits in self._planned),
            origins=Counter(traits.queue for traits in self._planned),
            fingerprints=Counter(traits.fingerprint for traits in self._planned if traits.fingerprint),
            problems=tuple(problems),
            groups=tuple(self._grouping.groups()) if self._grouping is not None else (),
        )
