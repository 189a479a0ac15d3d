"""A TCP proxy in front of the broker: cuts, refuses, freezes and thaws, all lines or chosen ones.

A line is known by the first bytes its client sends: ``line.name`` is the client's ``connection_name``, for instance
``rabbitdlq park orders …``. Freezing keeps the sockets open and forwards nothing: what was sent waits in the proxy, and
is gone when the line is cut. So a confirm or an ack can be held back for as long as a test needs.
"""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from yarl import URL

__all__ = ["Line", "Proxy", "consuming", "parking"]

Towards = Literal["broker", "client"]
BOTH: tuple[Towards, ...] = ("broker", "client")

#: a client introduces itself within its first bytes
_SEEN = 8_192
_NAME = b"\x0fconnection_nameS"
#: a confirm, and the number of the publish
_ACK = re.compile(rb"\x00\x3c\x00\x50(.{8})", re.DOTALL)
#: close with a reset, and forget what was not sent yet
_RESET = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Line:
    """One connection from a client through the proxy to the broker."""

    client: asyncio.StreamWriter
    broker: asyncio.StreamWriter
    #: the first bytes the client sent
    seen: bytearray = field(default_factory=bytearray)
    open: dict[Towards, asyncio.Event] = field(default_factory=lambda: {way: asyncio.Event() for way in BOTH})
    #: whether it was let in, or refused, once its name was known
    judged: bool = False
    #: the highest number of a publish whose confirm went on to the client
    confirmed: int = 0

    @property
    def name(self) -> str:
        """The client's connection name; empty until it has told."""
        _, found, rest = bytes(self.seen).partition(_NAME)
        if not found or len(rest) < 4:
            return ""
        return rest[4 : 4 + int.from_bytes(rest[:4], "big")].decode()

    def reset(self) -> None:
        """End it with a TCP reset on both sides."""
        for writer in (self.client, self.broker):
            with contextlib.suppress(OSError):  # the other side was faster
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


Which = Callable[[Line], bool]


def consuming(line: Line) -> bool:
    """A consumer's connection for taking work, acks and the journal's reading."""
    return line.name.startswith("rabbitdlq consume ")


def parking(line: Line) -> bool:
    """A consumer's connection for parks and the journal's writing."""
    return line.name.startswith("rabbitdlq park ")


def _all(_: Line) -> bool:
    return True


class Proxy:
    """Listens on a free port of 127.0.0.1; ``url`` is the broker's, through the proxy."""

    def __init__(self, broker_url: str, *, heartbeat: int | None = None) -> None:
        self._target = URL(broker_url)
        self._heartbeat = heartbeat
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._frozen: list[tuple[Which, Towards]] = []
        self._refusing: Which | None = None
        self.lines: list[Line] = []
        self.url = ""
        #: connections that came, and those of them that were refused
        self.accepted = 0
        self.refused = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        url = self._target.with_host("127.0.0.1").with_port(port)
        self.url = str(url if self._heartbeat is None else url.update_query(heartbeat=self._heartbeat))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    # --- what a network does

    def cut(self, which: Which = _all) -> int:
        """Reset the lines that are there now; gives their number."""
        chosen = [line for line in self.lines if which(line)]
        for line in chosen:
            line.reset()
        return len(chosen)

    def refuse(self, which: Which = _all) -> None:
        """Reset new connections, as soon as it is known which they are; those that are there stay."""
        self._refusing = which

    def accept(self) -> None:
        """Take connections again."""
        self._refusing = None

    def freeze(self, which: Which = _all, towards: tuple[Towards, ...] = BOTH) -> None:
        """Forward nothing more on these lines, nor on new ones like them, in these directions."""
        self._frozen += [(which, way) for way in towards]
        for line in self.lines:
            self._set_valves(line)

    def thaw(self) -> None:
        """Forward everything again, what waited first."""
        self._frozen.clear()
        for line in self.lines:
            self._set_valves(line)

    def _set_valves(self, line: Line) -> None:
        for way in BOTH:
            if any(frozen == way and which(line) for which, frozen in self._frozen):
                line.open[way].clear()
            else:
                line.open[way].set()

    # --- the work

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        line: Line | None = None
        try:
            self.accepted += 1
            if self._refusing is _all:
                self.refused += 1
                return
            from_broker, to_broker = await asyncio.open_connection(self._target.host, self._target.port)
            line = Line(to_client, to_broker)
            self.lines.append(line)
            self._set_valves(line)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(line, "broker", from_client, to_broker))
                group.create_task(self._pump(line, "client", from_broker, to_client))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # one side is gone, or the test is over: the other side goes too
        finally:
            self._tasks.discard(task)
            if line is not None:
                self.lines.remove(line)
                line.reset()
            to_client.transport.abort()

    async def _pump(self, line: Line, way: Towards, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            if way == "broker" and not line.judged and len(line.seen) < _SEEN:
                line.seen += data
                self._judge(line)
            await line.open[way].wait()
            sink.write(data)
            if way == "client":
                line.confirmed = max(line.confirmed, *(int.from_bytes(tag, "big") for tag in _ACK.findall(data)), 0)
            await sink.drain()
        raise ConnectionResetError  # ends the other direction as well

    def _judge(self, line: Line) -> None:
        """A name decides who is frozen and who is refused."""
        if not line.name:
            return
        line.judged = True
        self._set_valves(line)
        if self._refusing is not None and self._refusing(line):
            self.refused += 1
            raise ConnectionResetError
