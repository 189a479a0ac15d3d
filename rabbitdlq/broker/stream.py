"""Publishing a long stream: a window of publishes in flight, no task for any of them, a report for each."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rabbitdlq.broker.link import PublishLink
from rabbitdlq.broker.publisher import Deadline, Outgoing, Publisher
from rabbitdlq.errors import RabbitDLQError

__all__ = ["PublishReport", "PublishStream"]

#: bodies in flight; beside the window, which counts messages whatever their size
WINDOW_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PublishReport:
    """One message of a stream: its place in the input, and what became of it."""

    #: counted from 1
    place: int
    message_id: str
    #: None where the broker confirmed it
    error: RabbitDLQError | None = None


@dataclass(slots=True)
class _InFlight:
    place: int
    outgoing: Outgoing
    confirm: "asyncio.Future[None]"
    publisher: Publisher
    deadline: Deadline


class PublishStream:
    """Publishes one stream of payloads; used once."""

    def __init__(self, link: PublishLink, window: int, timeout: timedelta) -> None:
        self._link = link
        self._window = window
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._in_flight: dict[int, _InFlight] = {}
        self._bytes = 0
        #: what could not be written at once, or was answered with an error: these few have a task each
        self._slow: set[asyncio.Task[None]] = set()
        self._reports: deque[PublishReport] = deque()
        self._begun = False
        self._over = False
        #: an error that is no word of ours: it ends the stream
        self._fault: Exception | None = None
        #: what the reading of reports, and the beginning of publishes, wait for
        self._told: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    async def run(
        self, payloads: AsyncIterator[Any], outgoing_of: Callable[[Any], Outgoing]
    ) -> AsyncGenerator[PublishReport, None]:
        """A report for each payload, as the confirms come; see :meth:`Producer.send_all`."""
        beginning = asyncio.create_task(self._begin_all(payloads, outgoing_of))
        try:
            while True:
                while self._reports:
                    report = self._reports.popleft()
                    self._wake()
                    yield report
                if self._fault is not None:
                    raise self._fault
                if self._begun and not self._in_flight and not self._slow:
                    break
                self._told = self._loop.create_future()
                await self._told
            await beginning
        finally:
            self._over = True
            for task in (beginning, *self._slow):
                task.cancel()
            for each in self._in_flight.values():
                each.confirm.cancel()
            await asyncio.gather(beginning, *self._slow, return_exceptions=True)

    async def _begin_all(self, payloads: AsyncIterator[Any], outgoing_of: Callable[[Any], Outgoing]) -> None:
        place = 0
        try:
            async for payload in payloads:
                while self._is_full():
                    self._room = self._loop.create_future()
                    await self._room
                await self._until_ready()
                place += 1
                try:
                    self._begin(place, outgoing_of(payload))
                except RabbitDLQError as error:
                    self._report(PublishReport(place, "", error))
        finally:
            self._begun = True
            self._wake()

    async def _until_ready(self) -> None:
        """Wait until a publish can be written at once, for as long as one may take: then their order is kept."""
        publisher = self._link.current
        with contextlib.suppress(RabbitDLQError, TimeoutError):  # each publish tells it
            if publisher is None or not publisher.is_ready:
                await self._link.publisher(self._timeout)
            elif publisher.is_clogged:
                async with asyncio.timeout(self._timeout.total_seconds()):
                    await publisher.drained()

    def _is_full(self) -> bool:
        """Reports that nobody has read yet count, too: a slow reader must not have all of the input in memory."""
        under_way = len(self._in_flight) + len(self._slow) + len(self._reports)
        return under_way >= self._window or self._bytes >= WINDOW_BYTES

    def _begin(self, place: int, outgoing: Outgoing) -> None:
        publisher, deadline = self._link.current, Deadline.after(self._timeout)
        confirm = None if publisher is None else publisher.begin(outgoing, deadline)
        self._bytes += len(outgoing.body)
        if publisher is None or confirm is None:
            self._slowly(place, outgoing, self._link.publish(outgoing, timeout=self._timeout))
            return
        each = self._in_flight[place] = _InFlight(place, outgoing, confirm, publisher, deadline)
        confirm.add_done_callback(lambda _: self._ended(each))

    def _ended(self, each: _InFlight) -> None:
        if self._over or each.confirm.cancelled():
            return  # nobody reads any more
        del self._in_flight[each.place]
        error = each.confirm.exception()
        if error is None:
            self._report(PublishReport(each.place, each.outgoing.id), each.outgoing)
        else:
            self._slowly(each.place, each.outgoing, each.publisher.failed(error, each.outgoing, each.deadline))

    def _slowly(self, place: int, outgoing: Outgoing, ending: Coroutine[Any, Any, None]) -> None:
        async def end() -> None:
            error: RabbitDLQError | None = None
            try:
                await ending
            except RabbitDLQError as raised:
                error = raised
            except Exception as fault:
                self._fault = fault
            self._report(PublishReport(place, outgoing.id, error), outgoing)

        task = asyncio.create_task(end())
        self._slow.add(task)
        task.add_done_callback(self._slow.discard)
        task.add_done_callback(lambda _: self._wake())

    def _report(self, report: PublishReport, outgoing: Outgoing | None = None) -> None:
        if outgoing is not None:
            self._bytes -= len(outgoing.body)
        self._reports.append(report)
        self._wake()

    def _wake(self) -> None:
        """Whoever waits for a report, or for room; once it has been woken, nobody is until it waits again."""
        for waiting in (self._told, self._room):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
