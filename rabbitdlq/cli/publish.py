"""``rabbitdlq publish``: JSON Lines into a work queue."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from rabbitdlq.cli.options import options_of, run, say, stop_on_signals
from rabbitdlq.cli.progress import Reporter
from rabbitdlq.errors import BrokerUnavailable, ConfigurationError, PublishUnconfirmed
from rabbitdlq.producer import Producer

__all__ = ["publish"]

READ_BYTES = 1 << 16


def publish(
    context: typer.Context,
    queue: Annotated[str, typer.Argument(help="The work queue.")],
    file: Annotated[str, typer.Argument(metavar="[FILE|-]", help="JSON Lines, one payload a line; - is stdin.")] = "-",
    exchange: Annotated[str, typer.Option(help="Publish through this exchange instead of to the queue itself.")] = "",
    routing_key: Annotated[
        str | None, typer.Option(help="With --exchange: the routing key; the queue's name unless given.")
    ] = None,
    window: Annotated[int, typer.Option(min=1, max=100_000, help="Publishes in flight at once.")] = 500,
) -> None:
    """Publish payloads: persistent, mandatory, confirmed. Bad lines are named, the others go on (exit code 3)."""
    work = _Publishing(queue, exchange, routing_key)
    with _opened(file) as stream:
        run(work.run(options_of(context).url, stream, window))
    raise typer.Exit(work.exit_code())


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(file).open("rb")  # noqa: SIM115 - only opening it may fail as wrong use
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from error
    with stream:
        yield stream


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
        self.failed = 0

    async def run(self, url: str, stream: BinaryIO, window: int) -> None:
        """Publish all lines; stops reading where the broker is gone or on Ctrl-C, and says where."""
        with stop_on_signals(self._stop), Reporter(f"publishing to {self._queue}") as reporter:
            async with Producer(url, window=window) as producer:
                reports = producer.send_all(
                    self._queue, self._payloads(stream), content_type="application/json", **self._route
                )
                async for report in reports:
                    line = self._numbers.pop(report.place)
                    if report.error is None:
                        self.published += 1
                    else:
                        self._fail(line, str(report.error))
                        if isinstance(report.error, BrokerUnavailable | PublishUnconfirmed):
                            self._stop.set()
                    reporter.at(self.published + self.failed)
        self._tell()

    async def _payloads(self, stream: BinaryIO) -> AsyncIterator[bytes]:
        rest = b""
        read1 = getattr(stream, "read1", stream.read)
        while not self._stop.is_set():
            data = await asyncio.to_thread(read1, READ_BYTES)
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            if not data and rest:
                lines, rest = [rest], b""
            for line in lines:
                if self._stop.is_set():
                    return
                payload = self._checked(line.removesuffix(b"\r"))
                if payload is not None:
                    self._places += 1
                    self._numbers[self._places] = self._line
                    yield payload
            if not data:
                self._ended = True
                return

    def _checked(self, line: bytes) -> bytes | None:
        self._line += 1
        if not line.strip():
            return None
        try:
            json.loads(line)
        except (ValueError, RecursionError) as error:
            self._fail(self._line, f"not valid JSON: {error}")
            return None
        return line

    def _fail(self, line: int, why: str) -> None:
        self.failed += 1
        say(f"line {line}: {why}")

    def _tell(self) -> None:
        words = f"published {self.published:,}, failed {self.failed:,}"
        say(words if self._ended else f"{words}; stopped after line {self._line:,}, the rest was not sent")

    def exit_code(self) -> int:
        """0 all, 3 some, 1 none."""
        if not self.failed and self._ended:
            return 0
        return 3 if self.published else 1
