"""Putting archived letters back into the dead-letter queue."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from rabbitdlq.broker.stream import PublishStream
from rabbitdlq.dead_letters.archive import ArchivedLetter, ArchiveReader, restored
from rabbitdlq.dead_letters.batches import Batches, Pace
from rabbitdlq.dead_letters.browse import Browser
from rabbitdlq.dead_letters.operation import Operation, new_run_id
from rabbitdlq.dead_letters.report import RunReport
from rabbitdlq.dead_letters.run_log import RunLog
from rabbitdlq.dead_letters.runner import PUBLISH_TIMEOUT, WINDOW
from rabbitdlq.dead_letters.traits import traits_of
from rabbitdlq.errors import BrokerUnavailable, ConfigurationError, PublishUnconfirmed, RabbitDLQError

__all__ = ["Restoring"]


#: letters of a file that are read before the event loop gets its turn
BREATHE_EVERY = 100


@dataclass(slots=True)
class _Line:
    key: str
    letter: ArchivedLetter


class Restoring:
    """Puts the letters of one archive back; those that are in the queue already are left out."""

    def __init__(self, operation: Operation, archive: ArchiveReader) -> None:
        self._operation = operation
        self._archive = archive
        self._report = RunReport("restore", archive=str(archive.path))
        self._fatal: RabbitDLQError | None = None
        #: keys of letters that get another one by being put back: they had no id, or something that is moved out
        self._renamed: dict[str, str] = {}

    async def run(self, browser: Browser) -> RunReport:
        """Do it; the browser holds the lock. Raises as :meth:`Operation.run` does."""
        operation, desk, report = self._operation, self._operation.desk, self._report
        queue = desk.topology.name
        keys: list[str] = []
        for letter in self._archive:
            keys.append(self._key_of(letter))
            if len(keys) % BREATHE_EVERY == 0:
                await asyncio.sleep(0)  # a large file takes longer than the broker waits for a heartbeat
        state = operation.resumed
        if state is not None and state.planned != keys:
            raise ConfigurationError(
                f"archive {str(self._archive.path)!r} is not the one that run {state.info().id!r} puts back"
            )
        present: Counter[str] = Counter()
        async with aclosing(browser.read()) as letters:
            async for held in letters:
                present[held.traits.key] += 1
        await browser.give_back()
        report.run = new_run_id() if state is None else state.info().id
        report.found, report.planned = browser.count, len(keys)
        if self._archive.cut:
            report.note("", self._archive.cut)
        if not keys:
            return report
        done = Counter(state.done) if state else Counter[str]()
        in_flight = frozenset(state.in_flight) if state else frozenset[str]()
        report.in_flight.extend(state.named if state else ())
        log = RunLog(desk.writer, queue, report.run, "restore", state, report.in_flight)
        # whoever goes on may be in another directory
        path = str(self._archive.path.absolute())
        told = {"who": desk.who, "amqp_user": desk.connection.user, "archive": path}
        await (log.start(keys, **told) if state is None else log.go_on(**told))
        outcome = "failed"
        try:
            await self._send(self._missing(keys, present, done, in_flight), log)
            if self._fatal is not None:
                raise self._fatal
            report.interrupted = operation.stop.is_set() and bool(report.left)
            outcome = report.outcome
        finally:
            await log.end(
                who=desk.who,
                amqp_user=desk.connection.user,
                ids=report.ids,
                count=report.done,
                outcome=outcome,
                counts=report.counts(),
                archive=path,
            )
            report.journaled = log.written
        return report

    def _key_of(self, letter: ArchivedLetter) -> str:
        """What it is called; and what it will be called when it has been put back, if that is something else."""
        topology = self._operation.desk.topology
        key = traits_of(topology.name, letter.body, letter.wire.encode()).key
        if key != letter.park_id:
            properties = restored(letter, topology.dlq).properties
            self._renamed[key] = traits_of(topology.name, letter.body, properties.encode()).key
        return key

    async def _missing(
        self, keys: list[str], present: Counter[str], done: Counter[str], in_flight: frozenset[str]
    ) -> AsyncIterator[_Line]:
        """The letters that are not there; the file is read again, because memory may not hold it."""
        for place, (key, letter) in enumerate(zip(keys, self._archive, strict=False)):
            if place % BREATHE_EVERY == 0:
                await asyncio.sleep(0)
            if self._operation.stop.is_set() or self._fatal is not None:
                return
            there = key if present[key] > 0 else self._renamed.get(key, key)
            if present[there] > 0 or done[key] > 0:
                present[there] -= 1
                done[key] -= 1
                self._report.before += 1
                continue
            if key in in_flight and letter.id not in self._report.in_flight:
                self._report.in_flight.append(letter.id)
            yield _Line(key, letter)

    async def _send(self, lines: AsyncIterator[_Line], log: RunLog) -> None:
        operation, report = self._operation, self._report
        dlq = operation.desk.topology.dlq
        pace = Pace(operation.rate, operation.stop)
        batches = Batches[_Line](log, pace, lambda line: line.key, lambda _: None, lambda: self._fatal is not None)
        stream = PublishStream(operation.desk.link, WINDOW, PUBLISH_TIMEOUT)
        opened = batches.open(lines)
        async with aclosing(stream.run(opened, lambda line: restored(line.letter, dlq))) as reports:
            async for told in reports:
                letter = batches.at(told.place).letter
                if told.error is None:
                    report.done += 1
                    report.ids.append(letter.id)
                    batches.ended(told.place, done=True)
                else:
                    lost = isinstance(told.error, BrokerUnavailable | PublishUnconfirmed)
                    self._fatal = self._fatal or (told.error if lost else None)
                    report.stay(letter.id, f"line {letter.line}: {told.error}")
                    batches.ended(told.place, done=False, certain=not lost)
                operation.on_progress(report)
