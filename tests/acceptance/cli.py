"""``rabbitdlq`` as people run it: a process in a directory with a topology file and handlers, on a real broker.

A start costs more than half a second, so a test asks one process as much as it can, and starts those that do not
depend on each other together.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from aiormq.exceptions import ChannelNotFoundEntity
from yarl import URL

from rabbitdlq import Connection, Topology, apply_topology
from rabbitdlq.broker import close_channel
from rabbitdlq.local_broker import BrokerAddress
from tests.broker.kit import Bench, Raw, until

__all__ = ["HANDLERS", "Done", "Running", "Shell", "handler_failing", "open_shell"]

#: what a handler module is made of; each notes who came, so that a test can ask for it
HANDLERS = """
import asyncio, time
from pathlib import Path
from rabbitdlq import Message, Permanent

def note(message, what):
    with open("noted", "a") as file:
        file.write(f"{what} {message.id} {message.attempt}\\n")
"""
PROGRAM = (sys.executable, "-m", "rabbitdlq")
#: runs commands one after the other, each in a process of its own; loading, most of what one takes, is done only once
FORKING = """
import json, os, sys, tempfile
from rabbitdlq.cli import main, program
done = []
for words in json.loads(sys.argv[1]):
    files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
    child = os.fork()
    if not child:
        for number, file in enumerate((open(os.devnull, "rb"), *files)):
            os.dup2(file.fileno(), number)
        sys.argv = ["rabbitdlq", *words]
        main()
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    done.append([code, *(file.read().decode() for file in files)])
print(json.dumps(done))
"""
PATIENCE = 60.0


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code, its data and its words."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The words, line by line."""
        return self.err.splitlines()

    @property
    def json(self) -> list[Any]:
        """The data of ``--json``: one document a line."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass
class Running:
    """A command that runs beside the test."""

    process: asyncio.subprocess.Process
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    _reading: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for stream, kept in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            if stream is not None:
                self._reading.append(asyncio.create_task(self._read(stream, kept)))

    @staticmethod
    async def _read(stream: asyncio.StreamReader, kept: bytearray) -> None:
        while data := await stream.read(65_536):
            kept += data

    async def says(self, text: str, *, deadline: float = PATIENCE) -> None:
        """Return once the command has said it, on stdout or stderr."""

        def told() -> bool:
            if text.encode() in self.out + self.err:
                return True
            assert self.process.returncode is None, f"ended without {text!r}: {(self.out + self.err).decode()}"
            return False

        await until(told, f"{text!r} in {(self.out + self.err).decode()!r}", deadline)

    async def feed(self, data: str | bytes) -> None:
        """Write to its stdin, which stays open."""
        assert self.process.stdin is not None
        self.process.stdin.write(data.encode() if isinstance(data, str) else data)
        await self.process.stdin.drain()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def end(self, *, deadline: float = PATIENCE) -> Done:
        """Close its stdin, wait for its end, and give what it left."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        async with asyncio.timeout(deadline):
            code = await self.process.wait()
            await asyncio.gather(*self._reading)
        done = Done(code, self.out.decode(), self.err.decode())
        assert "Traceback" not in done.err, done.err
        assert "error when creating transport" not in done.err, "the client library's own log shows"
        return done

    async def kill(self) -> None:
        """End it, whatever it does."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await asyncio.gather(*self._reading)


class Shell:
    """A directory to run ``rabbitdlq`` in. Calling it runs a command to its end."""

    def __init__(self, bench: Bench, address: BrokerAddress, folder: Path) -> None:
        self.bench = bench
        self.url = address.url
        self.management_url = address.management_url
        self.folder = folder
        #: the queue of the topology file
        self.queue = f"c-{uuid.uuid4().hex[:10]}"
        self.running: list[Running] = []
        self.topology = self.write_topology()

    @property
    def raw(self) -> Raw:
        """A plain AMQP client."""
        return self.bench.raw

    def write_topology(self, delays: Sequence[str] = ("100ms", "150ms"), *, more: str = "", **options: Any) -> Topology:
        """Write ``rabbitdlq.toml`` with the shell's queue; what of it was declared is deleted at the test's end."""
        self.topology = self.bench.topology(delays, name=self.queue, **options)
        self.write(
            "rabbitdlq.toml",
            f'[queues."{self.queue}"]\n'
            f"delays = {json.dumps(list(delays))}\n"
            f'queue_type = "{self.topology.queue_type}"\n{more}',
        )
        return self.topology

    async def declare(self) -> Topology:
        """Declare the topology without a command."""
        await apply_topology(self.raw.connection, self.topology)
        return self.topology

    def write(self, name: str, text: str | bytes) -> Path:
        """Write a file."""
        path = self.folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def noted(self) -> list[tuple[str, str, int]]:
        """What the handlers noted: what, message id, attempt."""
        path = self.folder / "noted"
        text = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be on its way
        return [(what, id, int(attempt)) for what, id, attempt in (line.split(" ") for line in text.splitlines())]

    async def exists(self, queue: str) -> bool:
        """Whether there is a queue of that name."""
        try:
            await self.raw.count(queue)
        except ChannelNotFoundEntity:
            return False
        return True

    async def consumers(self) -> int | None:
        """How many consume the queue; None where there is no such queue."""
        channel = await self.raw.channel()
        try:
            return (await channel.queue_declare(self.queue, passive=True)).consumer_count
        except ChannelNotFoundEntity:
            return None
        finally:
            await close_channel(channel)

    def environment(self, url: str | None, more: Mapping[str, str] | None) -> dict[str, str]:
        """The test's own, without what it knows of brokers, and with the shell's."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith("RABBITDLQ_")}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)  # modules that are compiled once make each start a fifth faster
        return {**kept, "RABBITDLQ_URL": url or self.url, "COLUMNS": "200", "NO_COLOR": "1", **(more or {})}

    async def start(
        self,
        *words: str,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        script: str | None = None,
        command: Sequence[str] | None = None,
        stdin: int = asyncio.subprocess.DEVNULL,
        stdout: int = asyncio.subprocess.PIPE,
    ) -> Running:
        """Start a command of ours, another ``command``, or a shell ``script`` where ``$rabbitdlq`` is the program."""
        if command is None:
            command = (*PROGRAM, *words) if script is None else ("/bin/bash", "-c", script)
        surroundings = self.environment(url, env) | ({"rabbitdlq": " ".join(PROGRAM)} if script else {})
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.folder,
            env=surroundings,
            stdin=stdin,
            stdout=stdout,
            stderr=asyncio.subprocess.PIPE,
        )
        running = Running(process)
        self.running.append(running)
        return running

    async def open(self, *words: str, **options: Any) -> Running:
        """Start a command whose stdin the test writes."""
        return await self.start(*words, stdin=asyncio.subprocess.PIPE, **options)

    async def __call__(self, *words: str, stdin: str | bytes | None = None, **options: Any) -> Done:
        """Run a command to its end."""
        if stdin is None:
            return await (await self.start(*words, **options)).end()
        running = await self.open(*words, **options)
        with contextlib.suppress(ConnectionError):  # it may end without having read all
            await running.feed(stdin)
        return await running.end()

    async def on_terminal(self, *words: str, columns: int) -> Done:
        """Run a command to its end whose stdout is a terminal of so many columns."""
        ours, theirs = pty.openpty()
        with open(ours, "rb", buffering=0) as screen:
            with open(theirs, "rb", buffering=0):
                fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
                running = await self.start(*words, env={"COLUMNS": str(columns)}, stdout=theirs)
            shown = asyncio.create_task(asyncio.to_thread(_read_to_end, screen))
            done = await running.end()
            return Done(done.code, (await shown).decode().replace("\r\n", "\n"), done.err)

    async def script(self, text: str) -> Done:
        """Run a shell script in which ``$rabbitdlq`` is the program."""
        return await (await self.start(script=text)).end()

    async def one_by_one(self, *commands: Sequence[str], **options: Any) -> list[Done]:
        """Run commands that would be in each other's way; many of them take little longer than one."""
        whole = await (await self.start(command=(sys.executable, "-c", FORKING, json.dumps(commands)), **options)).end()
        assert (whole.code, whole.err) == (0, ""), whole
        found = [Done(*each) for each in whole.json[0]]
        for done in found:
            assert "Traceback" not in done.err, done.err
        return found

    async def together(self, *commands: Sequence[str], **options: Any) -> list[Done]:
        """Run commands that do not depend on each other, as many at a time as there are processors for."""
        slots = asyncio.Semaphore(os.cpu_count() or 1)

        async def one(words: Sequence[str]) -> Done:
            async with slots:
                return await self(*words, **options)

        return await asyncio.gather(*(one(words) for words in commands))

    def with_url(self, **changes: str | int) -> str:
        """The broker's URL with another user, password, host, port, scheme or path."""
        url = URL(self.url)
        for part, value in changes.items():
            url = getattr(url, f"with_{part}")(value)
        return str(url)


def _read_to_end(screen: BinaryIO) -> bytes:
    """What a terminal was sent until everybody closed it, which Linux tells by an error."""
    shown = b""
    with contextlib.suppress(OSError):
        while data := screen.read(65_536):
            shown += data
    return shown


@asynccontextmanager
async def open_shell(address: BrokerAddress, folder: Path, queue_type: str = "quorum") -> AsyncIterator[Shell]:
    """A shell with a fresh queue; processes that still run at the end are killed, and what was declared is deleted."""
    async with await Connection.open(address.url, "rabbitdlq tests") as connection:
        shell = Shell(Bench(address.url, Raw(connection), queue_type), address, folder)
        try:
            yield shell
        finally:
            for running in shell.running:
                await running.kill()
            await shell.raw.delete_everything()


def handler_failing(condition: str, *, error: str = "RuntimeError(f'boom {message.attempt}')") -> str:
    """A handler module that notes every run, and fails where the condition about ``order`` (the payload) holds."""
    return f"""{HANDLERS}
async def handle(message: Message) -> None:
    order = message.payload
    if {condition}:
        note(message, "failed")
        raise {error}
    note(message, "succeeded")
"""
