"""Sending dead letters back: published to the work queue, confirmed, only then taken out of the dead-letter queue."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta

from rabbitdlq.broker import Outgoing, PublishLink
from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters.browse import Held
from rabbitdlq.errors import BrokerError, BrokerUnavailable, PublishUnconfirmed
from rabbitdlq.parking import replay_properties

__all__ = ["ReplayReport", "Replayer"]

PUBLISH_TIMEOUT = timedelta(seconds=30)
WINDOW = 200
#: failures that a report names one by one
MAX_NAMED = 100


@dataclass(slots=True)
class ReplayReport:
    """What a replay did. ``replayed + duplicates + stayed`` is the number of letters looked at."""

    #: letters in the queue when it started
    found: int = 0
    replayed: int = 0
    #: second copies of one letter, left by a crash: taken out without being sent again
    duplicates: int = 0
    #: letters that are still in the dead-letter queue, and why (the first hundred)
    stayed: int = 0
    errors: list[tuple[str, str]] = field(default_factory=list)
    #: ids of those replayed
    ids: list[str] = field(default_factory=list)
    #: stopped before the end; what was not looked at is untouched
    interrupted: bool = False

    def add(self, other: "ReplayReport") -> None:
        """Take in what another replay did."""
        self.replayed += other.replayed
        self.duplicates += other.duplicates
        self.stayed += other.stayed
        self.errors += other.errors
        self.ids += other.ids
        self.interrupted = self.interrupted or other.interrupted


class Replayer:
    """Replays letters with a window of publishes in flight."""

    def __init__(self, link: PublishLink, report: ReplayReport, on_progress: Callable[[ReplayReport], None]) -> None:
        self._link = link
        self._report = report
        self._on_progress = on_progress
        self._sent: dict[tuple[str, int], asyncio.Task[bool]] = {}
        self._fatal: BrokerError | None = None

    async def run(self, letters: AsyncIterator[Held], stop: asyncio.Event | None = None) -> None:
        """Replay all of them, or until ``stop`` is set: then those in flight are finished and no more are begun.

        Raises :class:`BrokerUnavailable` where the broker went away; the report tells what was done by then.
        """
        running: set[asyncio.Task[bool]] = set()
        try:
            async for held in letters:
                if stop is not None and stop.is_set():
                    self._report.interrupted = True
                    break
                if self._fatal is not None:
                    break
                running.add(self._begin(held))
                if len(running) >= WINDOW:
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if running:
                await asyncio.wait(running)
        if self._fatal is not None:
            raise self._fatal

    def _begin(self, held: Held) -> asyncio.Task[bool]:
        """A repeated letter of one that was sent already is its copy: it waits for the first and is not sent again."""
        letter = held.letter
        key = letter.copy_key
        first = self._sent.get(key) if key and letter.repeated else None
        task = asyncio.create_task(self._replay(held) if first is None else self._second_copy(held, first))
        if key and first is None:
            self._sent[key] = task
        return task

    async def _second_copy(self, held: Held, first: "asyncio.Task[bool]") -> bool:
        if not await first:
            self._stay(held.letter, "its first copy was not replayed")
            return False
        try:
            held.remove()
        except BrokerError as error:
            self._stay(held.letter, str(error))
            return False
        self._report.duplicates += 1
        self._on_progress(self._report)
        return True

    async def _replay(self, held: Held) -> bool:
        letter = held.letter
        if not held.readable:
            self._stay(letter, "its properties cannot be read, and sending it again would lose them")
            return False
        try:
            await self._link.publish(outgoing_replay(letter), timeout=PUBLISH_TIMEOUT)
        except BrokerError as error:
            if isinstance(error, BrokerUnavailable | PublishUnconfirmed):
                self._fatal = self._fatal or error
            self._stay(letter, str(error))
            return False
        try:
            held.remove()
        except BrokerError as error:
            self._fatal = self._fatal or error
            self._stay(letter, f"it was sent back, but may still be here as well: {error}")
            return False
        self._report.replayed += 1
        self._report.ids.append(letter.id)
        self._on_progress(self._report)
        return True

    def _stay(self, letter: DeadLetter, why: str) -> None:
        self._report.stayed += 1
        if len(self._report.errors) < MAX_NAMED:
            self._report.errors.append((letter.id, why))
        self._on_progress(self._report)


def outgoing_replay(letter: DeadLetter) -> Outgoing:
    """The message that goes to the letter's work queue itself, past every exchange that siblings listen to."""
    return Outgoing("", letter.queue, letter.body, replay_properties(letter))
