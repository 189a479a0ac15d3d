"""What became of letters that were sent back: told by the journal, as the consumers write it."""

import asyncio
from datetime import timedelta
from typing import Literal

from rabbitdlq import names
from rabbitdlq.journal import JournalEvent

__all__ = ["Outcome", "Outcomes"]

#: ``open``: neither has been heard; ``retrying``: it failed, and waits on the ladder for its next attempt
Outcome = Literal["recovered", "back", "retrying", "open"]

_TOLD: dict[str, Outcome] = {
    names.SUCCEEDED: "recovered",
    names.RECOVERED: "recovered",
    names.PARKED: "back",
    names.FAILED: "retrying",
}


class Outcomes:
    """Follows replayed letters by message id and lap. Letters are expected before they are sent: some are fast."""

    def __init__(self) -> None:
        self._by_letter: dict[tuple[str, int], Outcome] = {}
        self._told = asyncio.Event()

    def expect(self, id: str, lap: int) -> None:
        """A message of this id is about to start this lap."""
        self._by_letter[id, lap] = "open"

    def forget(self, id: str, lap: int) -> None:
        """It was not sent after all."""
        self._by_letter.pop((id, lap), None)

    def take(self, event: JournalEvent) -> None:
        """An event of the journal; those of other messages change nothing."""
        outcome = _TOLD.get(event.event)
        if outcome is None or event.message_id is None:
            return
        letter = (event.message_id, event.lap or 1)
        # what has ended stays so: a failure of this lap that is read late has been overtaken
        if self._by_letter.get(letter) in ("open", "retrying"):
            self._by_letter[letter] = outcome
            self._told.set()

    def counts(self) -> dict[Outcome, int]:
        """How many letters stand how."""
        found: dict[Outcome, int] = {"recovered": 0, "back": 0, "retrying": 0, "open": 0}
        for outcome in self._by_letter.values():
            found[outcome] += 1
        return found

    def of(self, outcome: Outcome, limit: int = 100) -> list[str]:
        """The message ids of letters that stand so, at most so many."""
        return [id for (id, _), told in self._by_letter.items() if told == outcome][:limit]

    async def ended(self, within: timedelta, stop: asyncio.Event, *, first_failure: bool) -> None:
        """Return when every letter has ended, the time is over, or ``stop`` is set.

        With ``first_failure`` one that failed counts as ended, whatever its later attempts bring.
        """
        waiting = {"open"} if first_failure else {"open", "retrying"}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within.total_seconds()
        stopping = asyncio.create_task(stop.wait())
        try:
            while any(told in waiting for told in self._by_letter.values()) and not stop.is_set():
                left = deadline - loop.time()
                if left <= 0:
                    return
                self._told.clear()
                telling = asyncio.create_task(self._told.wait())
                await asyncio.wait((telling, stopping), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                telling.cancel()
        finally:
            stopping.cancel()
