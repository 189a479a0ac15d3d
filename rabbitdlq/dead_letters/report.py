"""What an operation on dead letters did: every planned letter is in one of its counts."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rabbitdlq.dead_letters.watch import Outcome

__all__ = ["MAX_NAMED", "RunReport"]

#: letters that a report names one by one
MAX_NAMED = 100


@dataclass(slots=True)
class RunReport:
    """What a replay, drop, move or restore did. ``done + before + stayed + left`` is the number of letters planned."""

    operation: str = "replay"
    #: the id of the run, for ``--resume``
    run: str = ""
    #: letters in the queue when it started
    found: int = 0
    #: letters in the plan; of a run that is gone on with, in the whole plan
    planned: int = 0
    #: sent back, dropped, moved or restored
    done: int = 0
    #: of a run that is gone on with: done already, by what the journal and the queue say
    before: int = 0
    #: second copies of one letter, left by a crash: taken out without being sent again
    duplicates: int = 0
    #: letters that could not be done and are where they were, and why (the first hundred)
    stayed: int = 0
    errors: list[tuple[str, str]] = field(default_factory=list)
    #: left out because they came back too often
    held: int = 0
    #: message ids of those done
    ids: list[str] = field(default_factory=list)
    #: of a run that is gone on with: done now, and maybe once before; nobody knows
    in_flight: list[str] = field(default_factory=list)
    #: of those done, by fingerprint
    fingerprints: Counter[str] = field(default_factory=Counter)
    #: stopped before the end; what was not begun is untouched
    interrupted: bool = False
    #: why it ended by itself before the end
    aborted: str = ""
    #: the file that dropped letters were written to
    archive: str | None = None
    #: what became of those sent: of the canary's when it was judged, of all with a watch
    outcomes: dict[Outcome, int] | None = None
    #: "planning", "sending", "waiting" for outcomes
    phase: str = "planning"
    #: False where the journal could not be written: the run cannot be gone on with
    journaled: bool = True

    @property
    def left(self) -> int:
        """Letters of the plan that were not begun."""
        return max(0, self.planned - self.done - self.before - self.stayed)

    @property
    def looked_at(self) -> int:
        """Letters of the plan that are through, one way or the other."""
        return self.done + self.before + self.stayed

    def stay(self, id: str, why: str) -> None:
        """One letter is where it was."""
        self.stayed += 1
        self.note(id, why)

    def note(self, id: str, why: str) -> None:
        """Name a letter, as long as there is room."""
        if len(self.errors) < MAX_NAMED:
            self.errors.append((id, why))

    @property
    def outcome(self) -> str:
        """In one word, for the journal: done, stopped or aborted."""
        return "stopped" if self.interrupted else "aborted" if self.aborted else "done"

    def counts(self) -> dict[str, int]:
        """For the journal."""
        return {
            "done": self.done,
            "before": self.before,
            "duplicates": self.duplicates,
            "stayed": self.stayed,
            "left": self.left,
        }

    def as_json(self) -> dict[str, Any]:
        """As ``--json`` shows it."""
        return {
            "operation": self.operation,
            "run": self.run,
            "found": self.found,
            "planned": self.planned,
            **self.counts(),
            "held": self.held,
            "errors": [{"id": id, "error": why} for id, why in self.errors],
            "in_flight": self.in_flight,
            "interrupted": self.interrupted,
            "aborted": self.aborted or None,
            "archive": self.archive,
            "outcomes": self.outcomes,
            "journaled": self.journaled,
        }
