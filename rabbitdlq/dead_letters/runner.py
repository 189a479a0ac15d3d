"""Carrying out a plan: every letter of it is done once, whatever it takes, and the rest of the queue is left alone."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import timedelta

from rabbitdlq.broker import ConsumingChannel, Outgoing, PublishLink
from rabbitdlq.broker.stream import PublishStream
from rabbitdlq.dead_letters.archive import ArchiveWriter
from rabbitdlq.dead_letters.batches import Batches
from rabbitdlq.dead_letters.browse import Browser, Held
from rabbitdlq.dead_letters.report import RunReport
from rabbitdlq.dead_letters.traits import Traits
from rabbitdlq.errors import BrokerError, BrokerUnavailable, PublishUnconfirmed

__all__ = ["PUBLISH_TIMEOUT", "WINDOW", "Known", "Runner"]

PUBLISH_TIMEOUT = timedelta(seconds=30)
#: publishes in flight
WINDOW = 1_000
#: letters are given back and read anew after so long: the broker's consumer timeout is half an hour by default
ROUND_SECONDS = 600.0
#: rounds in vain, while there are letters that were not seen
MORE_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a run that is gone on with."""

    #: keys of letters that were done: still in the queue, they are only to be taken out
    done: Counter[str] = field(default_factory=Counter)
    #: keys of letters that were in flight when it ended
    in_flight: frozenset[str] = frozenset()
    #: whether the journal has heard of a letter's next lap: then it was sent
    overtaken: Callable[[Traits], bool] = lambda _: False
    #: whether the broker may not have heard of all that was taken out: not if the run ended well before
    leftovers: bool = True


class Runner:
    """Does one thing with the letters of one plan."""

    def __init__(
        self,
        browser: Browser,
        report: RunReport,
        keys: Iterable[str],
        stop: asyncio.Event,
        on_progress: Callable[[RunReport], None],
        known: Known | None = None,
    ) -> None:
        self._browser = browser
        self._report = report
        self._stop = stop
        self._on_progress = on_progress
        self._known = known or Known()
        #: letters of the plan that have not been begun, by key
        self._left = Counter(keys)
        self._left.subtract(self._known.done)
        self._left = +self._left
        #: known to be done, and still in the queue perhaps
        self._gone = Counter(self._known.done if self._known.leftovers else ())
        self._done_keys: set[str] = set(self._known.done)
        self._copies: list[Held] = []
        self._most: int | None = None
        self._round_began = asyncio.get_running_loop().time()
        self._begun = 0
        #: letters that this round has done something with, and has seen at all
        self._met = self._seen = 0
        self._looks_left = MORE_LOOKS
        self.fatal: BrokerError | None = None

    def put_back(self, held: Held) -> None:
        """It was not begun after all."""
        self._left[held.traits.key] += 1
        self._begun -= 1

    @property
    def is_halted(self) -> bool:
        """Whether no further letter is to be begun."""
        return self._stop.is_set() or self.fatal is not None

    async def run(
        self,
        act: Callable[[AsyncIterator[Held]], Awaitable[None]],
        kept: list[Held] | None = None,
        most: int | None = None,
    ) -> None:
        """Give the letters of the plan to ``act``, those that are ``kept`` without reading again; at most ``most``.

        Raises what ended it: :class:`BrokerUnavailable` where the broker went away.
        """
        self._most = None if most is None else self._begun + most
        letters: AsyncIterator[Held] | None = None if kept is None else _each(kept)
        while self._wants_more():
            self._met = self._seen = 0
            if letters is None:
                self._round_began = asyncio.get_running_loop().time()
                letters = self._browser.read(acting=True)
            async with aclosing(letters) as reading, aclosing(self._chosen(reading)) as chosen:  # type: ignore[type-var]
                await self._to_the_end(act(chosen))
            await self._remove_copies()
            letters = None
            if not self._wants_more():
                break
            await self._browser.give_back()
            if not self._met and not self._more_came():
                break
        if self.fatal is not None:
            raise self.fatal

    async def _to_the_end(self, work: Awaitable[None]) -> None:
        """A cancellation begins no further letter, and waits for those in flight: else they would be there twice."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                self._stop.set()
                await task
            raise

    def finish(self) -> None:
        """Tell of letters that were planned and not found again; none is left after it but where it was stopped."""
        if self.is_halted or self._report.aborted:
            return
        for key, count in (+self._left).items():
            if key in self._known.in_flight:
                # it was taken out of the queue, which is done only after the confirm
                self._report.before += count
            else:
                self._report.stayed += count
                self._report.note(key, "it is no longer in the queue: somebody else has taken it")

    def _wants_more(self) -> bool:
        return not self.is_halted and (bool(+self._left) or bool(+self._gone)) and not self._has_enough()

    def _more_came(self) -> bool:
        """Whether there are letters that were not seen: what a killed tool held may be back a moment after its lock."""
        self._looks_left -= 1
        return self._looks_left >= 0 and self._browser.count > self._seen

    def _has_enough(self) -> bool:
        return self._most is not None and self._begun >= self._most

    async def _chosen(self, letters: AsyncIterator[Held]) -> AsyncIterator[Held]:
        """Those of the plan that are to be sent."""
        clock = asyncio.get_running_loop().time
        async for held in letters:
            if self.is_halted or self._has_enough():
                return
            if self._met and clock() - self._round_began > ROUND_SECONDS:
                return
            traits = held.traits
            key = traits.key
            self._seen += 1
            # of equal letters one that was not done comes first: to take it for the other one would lose it
            if self._left[key] > 0:
                self._left[key] -= 1
                self._met += 1
                if key in self._known.in_flight:
                    if self._known.overtaken(traits):
                        self._report.before += 1
                        self._done_keys.add(key)
                        await self._take_out(held)
                        continue
                    if traits.id not in self._report.in_flight:
                        self._report.in_flight.append(traits.id)
                if not traits.readable:
                    self._report.stay(traits.id, "its properties cannot be read, and sending it would lose them")
                    continue
                self._begun += 1
                yield held
            elif self._gone[key] > 0:
                self._gone[key] -= 1
                self._met += 1
                await self._take_out(held)
            elif traits.repeated and (key in self._done_keys or key in self._left):
                self._copies.append(held)

    async def _take_out(self, held: Held) -> None:
        try:
            held.remove()
        except BrokerError as error:
            self.fatal = self.fatal or error

    async def _remove_copies(self) -> None:
        """Second copies go where the first one went, or stay where it stayed."""
        copies, self._copies = self._copies, []
        for held in copies:
            if held.traits.key not in self._done_keys:
                continue
            await self._take_out(held)
            if self.fatal is None:
                self._report.duplicates += 1

    # --- what can be done with them

    async def send(
        self,
        letters: AsyncIterator[Held],
        batches: Batches[Held],
        link: PublishLink,
        outgoing: Callable[[Held], Outgoing],
        on_stayed: Callable[[Held], None],
    ) -> None:
        """Publish each, and take it out of the queue when the broker has confirmed it; one that it refused stays."""
        stream = PublishStream(link, WINDOW, PUBLISH_TIMEOUT)
        channels: dict[ConsumingChannel, None] = {}
        async with aclosing(batches.open(letters)) as opened, aclosing(stream.run(opened, outgoing)) as reports:  # type: ignore[type-var]
            async for told in reports:
                held = batches.at(told.place)
                if told.error is None:
                    channels[held.channel] = None
                    self._sent(held)
                    batches.ended(told.place, done=True)
                else:
                    lost = isinstance(told.error, BrokerUnavailable | PublishUnconfirmed)
                    if lost:
                        self.fatal = self.fatal or told.error  # type: ignore[assignment]
                    self._report.stay(held.traits.id, str(told.error))
                    on_stayed(held)
                    batches.ended(told.place, done=False, certain=not lost)
                self._on_progress(self._report)
        if self.fatal is None:
            await self._removed(channels)

    async def _removed(self, channels: Iterable[ConsumingChannel]) -> None:
        """An acknowledgement has no answer: a line that was lost just now may have swallowed some."""
        try:
            for channel in channels:
                await channel.arrived()
        except BrokerError as error:
            self.fatal = error
            self._report.note("", f"some of those sent may still be here as well: {error}")

    def _sent(self, held: Held) -> None:
        try:
            held.remove()
        except BrokerError as error:
            self.fatal = self.fatal or error
            self._report.note(held.traits.id, f"it was sent, but may still be here as well: {error}")
        self._note_done(held)

    def _note_done(self, held: Held) -> None:
        traits = held.traits
        self._done_keys.add(traits.key)
        self._report.done += 1
        self._report.ids.append(traits.id)
        if traits.fingerprint:
            self._report.fingerprints[traits.fingerprint] += 1

    async def destroy(
        self, letters: AsyncIterator[Held], batches: Batches[Held], archive: ArchiveWriter | None
    ) -> None:
        """Write each to the archive, and take it out of the queue when it is on the disk."""
        gathered: list[Held] = []
        place = first = 0
        async with aclosing(batches.open(letters)) as opened:  # type: ignore[type-var]
            async for held in opened:
                place += 1
                gathered.append(held)
                if len(gathered) >= batches.size:
                    await self._destroyed(gathered, batches, archive, first)
                    gathered, first = [], place
        if gathered:
            await self._destroyed(gathered, batches, archive, first)

    async def _destroyed(
        self, letters: list[Held], batches: Batches[Held], archive: ArchiveWriter | None, before: int
    ) -> None:
        if archive is not None:
            for held in letters:
                archive.write(held.letter)
                held.forget()
            await asyncio.to_thread(archive.sync)
        for held in letters:
            held.remove()
            self._note_done(held)
        for channel in {held.channel: None for held in letters}:
            await channel.arrived()
        for at in range(len(letters)):
            batches.ended(before + at + 1, done=True)
        self._on_progress(self._report)


async def _each(letters: list[Held]) -> AsyncIterator[Held]:
    for held in letters:
        yield held
