"""What became of letters that were sent back: told by the journal, as the consumers write it."""

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Literal

from rabbitdlq import names
from rabbitdlq.journal import JournalEvent

__all__ = ["Outcome", "Outcomes"]

#: ``open``: neither has been heard; ``retrying``: it failed, and waits on the ladder for its next attempt
Outcome = Literal["recovered", "back", "retrying", "open"]

#: what an event says of a letter, and how that one stood before: several may have one id and one lap
_TOLD: dict[str, tuple[Outcome, tuple[Outcome, ...]]] = {
    names.SUCCEEDED: ("recovered", ("open", "retrying")),
    names.RECOVERED: ("recovered", ("retrying", "open")),
    names.DROPPED: ("recovered", ("retrying", "open")),  # by its handler: nobody needs it any more
    names.PARKED: ("back", ("retrying", "open")),
    names.FAILED: ("retrying", ("open",)),
}


class Outcomes:
    """Follows replayed letters by message id and lap. Letters are expected before they are sent: some are fast."""

    def __init__(self) -> None:
        self._by_letter: dict[tuple[str, int], list[Outcome]] = {}
        #: kept up to date: of many letters nobody wants to count anew at every event
        self._counts: Counter[Outcome] = Counter()
        self._told = asyncio.Event()

    def expect(self, id: str, lap: int) -> None:
        """A message of this id is about to start this lap."""
        self._by_letter.setdefault((id, lap), []).append("open")
        self._counts["open"] += 1

    def forget(self, id: str, lap: int) -> None:
        """It was not sent after all."""
        letters = self._by_letter.get((id, lap), [])
        if "open" in letters:
            letters.remove("open")
            self._counts["open"] -= 1
            self._told.set()

    def take(self, event: JournalEvent) -> None:
        """An event of the journal; those of other messages change nothing."""
        told = _TOLD.get(event.event)
        letters = self._by_letter.get((event.message_id or "", event.lap or 1))
        if told is None or not letters:
            return
        outcome, before = told
        if outcome == "retrying" and (event.attempt or 1) > 1 and "retrying" in letters:
            return
        # what has ended stays so: a failure of this lap that is read late has been overtaken
        place = next((letters.index(each) for each in before if each in letters), None)
        if place is not None:
            self._counts[letters[place]] -= 1
            self._counts[outcome] += 1
            letters[place] = outcome
            self._told.set()

    def counts(self) -> dict[Outcome, int]:
        """How many letters stand how."""
        return {outcome: self._counts[outcome] for outcome in ("recovered", "back", "retrying", "open")}

    async def ended(self, within: timedelta, stop: asyncio.Event) -> None:
        """Return when every letter has recovered or is back, the time is over, or ``stop`` is set."""
        waiting: tuple[Outcome, ...] = ("open", "retrying")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within.total_seconds()
        stopping = asyncio.create_task(stop.wait())
        try:
            while any(self._counts[each] for each in waiting) and not stop.is_set():
                left = deadline - loop.time()
                if left <= 0:
                    return
                self._told.clear()
                telling = asyncio.create_task(self._told.wait())
                await asyncio.wait((telling, stopping), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                telling.cancel()
        finally:
            stopping.cancel()
