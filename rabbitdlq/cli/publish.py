"""``rabbitdlq publish``: JSON Lines into a work queue."""

import asyncio
import codecs
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Annotated, Any

import typer

from rabbitdlq.cli.faults import Faults
from rabbitdlq.cli.options import options_of, run, say, stop_on_signals
from rabbitdlq.cli.progress import Reporter
from rabbitdlq.errors import BrokerUnavailable, ConfigurationError, PublishUnconfirmed
from rabbitdlq.producer import Producer

__all__ = ["publish"]

READ_BYTES = 1 << 18


def publish(
    context: typer.Context,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="The work queue.")],
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="JSON Lines, one payload a line; - is stdin.")] = "-",
    exchange: Annotated[str, typer.Option(help="Publish through this exchange instead of to the queue itself.")] = "",
    routing_key: Annotated[
        str | None, typer.Option(help="With --exchange: the routing key; the queue's name unless given.")
    ] = None,
    window: Annotated[int, typer.Option(min=1, max=100_000, help="Publishes in flight at once.")] = 500,
) -> None:
    """Publish payloads: persistent, mandatory, confirmed. Bad lines are named, the others go on (exit code 3).

    Ctrl-C: no more lines are sent, those in flight are waited for, and the last line sent is named.
    """
    options = options_of(context)
    options.check_writable("publish")
    work = _Publishing(queue, exchange, routing_key)
    with _opened(file) as descriptor:
        run(work.run(options.url, descriptor, window))
    raise typer.Exit(work.exit_code())


@contextlib.contextmanager
def _opened(file: str) -> Iterator[int]:
    if file == "-":
        if sys.stdin.isatty():
            say("one payload a line; Ctrl-D ends the input")
        yield sys.stdin.fileno()
        return
    try:
        descriptor = os.open(file, os.O_RDONLY)
        os.read(descriptor, 0)  # a directory can be opened
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def _read(descriptor: int) -> bytes:
    """The next bytes, none at the end. In a thread that does not keep the process alive: a pipe may stay silent."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bytes] = loop.create_future()

    def finish(data: bytes, error: OSError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(data)
        else:
            future.set_exception(error)

    def read() -> None:
        data, error = b"", None
        try:
            data = os.read(descriptor, READ_BYTES)
        except OSError as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the command has ended meanwhile
            loop.call_soon_threadsafe(finish, data, error)

    threading.Thread(target=read, name="rabbitdlq-publish-input", daemon=True).start()
    return await future


class _Publishing:
    """One run of the command: the lines it read, and what became of each."""

    def __init__(self, queue: str, exchange: str, routing_key: str | None) -> None:
        self._queue = queue
        self._route = {"exchange": exchange, "routing_key": routing_key}
        #: line numbers by the producer's count, of what is in flight
        self._numbers: dict[int, int] = {}
        self._places = 0
        self._line = 0
        self._stop = asyncio.Event()
        self._ended = False
        self.published = 0
        self._faults = Faults()

    async def run(self, url: str, descriptor: int, window: int) -> None:
        """Publish all lines; stops reading where the broker is gone or on Ctrl-C, and says where."""
        with stop_on_signals(self._stop), Reporter(f"publishing to {self._queue}") as reporter:
            async with Producer(url, window=window) as producer:
                sending = producer.send_all(
                    self._queue, self._payloads(descriptor), content_type="application/json", **self._route
                )
                async with contextlib.aclosing(sending) as reports:
                    async for report in reports:
                        line = self._numbers.pop(report.place)
                        if report.error is None:
                            self.published += 1
                        else:
                            self._fail(line, str(report.error))
                            if isinstance(report.error, BrokerUnavailable | PublishUnconfirmed):
                                self._stop.set()
                        reporter.at(self.published + self._faults.count)
        self._tell()

    async def _payloads(self, descriptor: int) -> AsyncIterator[bytes]:
        async for line in self._lines(descriptor):
            if self._stop.is_set():
                return
            payload = self._checked(line.removesuffix(b"\r"))
            if payload is not None:
                self._places += 1
                self._numbers[self._places] = self._line
                yield payload
        self._ended = not self._stop.is_set()

    async def _lines(self, descriptor: int) -> AsyncIterator[bytes]:
        """The input's lines to its end, or until it is time to stop."""
        start: list[bytes] = []
        while (data := await self._unless_stopped(_read(descriptor))) is not None:
            first, *more = data.split(b"\n")
            start.append(first)
            for following in more:
                yield b"".join(start)
                start = [following]
            if not data:
                if last := b"".join(start):
                    yield last
                return

    async def _unless_stopped(self, reading: Coroutine[Any, Any, bytes]) -> bytes | None:
        read, stopped = asyncio.create_task(reading), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([read, stopped], return_when=asyncio.FIRST_COMPLETED)
            return None if self._stop.is_set() else await read
        finally:
            read.cancel()
            stopped.cancel()

    def _checked(self, line: bytes) -> bytes | None:
        self._line += 1
        if self._line == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # some editors begin a file with it; in a body it is an error
        if not line.strip():
            return None
        try:
            json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            self._fail(self._line, f"not valid JSON: {error}")
            return None
        return line

    def _fail(self, line: int, why: str) -> None:
        if told := self._faults.add(line, why):
            say(told)

    def _tell(self) -> None:
        for told in self._faults.rest():
            say(told)
        words = f"published {self.published:,}, failed {self._faults.count:,}"
        say(words if self._ended else f"{words}; stopped after line {self._line:,}, the rest was not sent")

    def exit_code(self) -> int:
        """0 all, 3 some, 1 none."""
        if not self._faults.count and self._ended:
            return 0
        return 3 if self.published else 1
