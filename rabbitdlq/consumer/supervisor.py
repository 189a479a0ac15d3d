"""Several consumer processes: started, restarted when they die, told to stop, and their numbers added up."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal

import structlog

from rabbitdlq.consumer.summary import ConsumerSummary
from rabbitdlq.consumer.supervised import LINE_VARIABLE, NUMBER_VARIABLE
from rabbitdlq.errors import BrokerError, ConfigurationError, RabbitDLQError
from rabbitdlq.limits import checked_duration

__all__ = ["Backoff", "Ending", "Supervisor", "SupervisorReport", "Verdict", "added_up", "judged"]

log = structlog.stdlib.get_logger(__name__)

FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=1), timedelta(seconds=30)
#: a process that lived this long was a good one: the next start waits no longer than the first
LASTING = timedelta(seconds=30)
#: and this long, it has consumed: connecting and reading the journal have shorter deadlines
SURELY_CONSUMING = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class SupervisorReport:
    """What all processes did together."""

    summary: ConsumerSummary
    #: starts beyond the first of each process
    restarts: int
    #: processes that did not end with 0 after they had been told to stop, or had drained the queue
    failed: int


@dataclass(slots=True)
class Backoff:
    """How long to wait before the next start: longer each time, from the beginning after a process that lasted.

    >>> backoff = Backoff(longest=timedelta(seconds=4))
    >>> [backoff.after(timedelta(seconds=lived)).total_seconds() for lived in (0, 0, 0, 0, 60, 0)]
    [1.0, 2.0, 4.0, 4.0, 1.0, 2.0]
    """

    first: timedelta = FIRST_WAIT
    longest: timedelta = LONGEST_WAIT
    _last: timedelta = field(default=timedelta(), init=False)

    def after(self, lived: timedelta) -> timedelta:
        """The wait after a process that lived so long."""
        grown = self.first if lived >= LASTING else max(self.first, self._last * 2)
        self._last = min(grown, self.longest)
        return self._last


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: what the system says, and what it said itself."""

    #: negative for a signal; None where it could not even be started
    exit_code: int | None
    #: it may have run handlers: its exit code may be one of theirs
    began: bool = False
    #: it has settled a message, or lived long enough to
    worked: bool = False
    #: its consumer returned
    finished: bool = False
    #: why its consumer gave up
    error: str | None = None

    @property
    def words(self) -> dict[str, Any]:
        """For log lines."""
        words: dict[str, Any] = {}
        if self.exit_code is not None and self.exit_code < 0:
            known = {each.value: each.name for each in signal.Signals}  # real-time signals have no names
            words["signal"] = known.get(-self.exit_code, str(-self.exit_code))
        elif self.exit_code is not None:
            words["exit_code"] = self.exit_code
        return words if self.error is None else {**words, "error": self.error}


Verdict = Literal["done", "failed", "restart", "give up"]


def judged(ending: Ending, *, first: bool, stopping: bool, drain: bool) -> Verdict:
    """What a process's end means: ``first`` is its first start, ``stopping`` that it had been told to stop.

    Nothing is restarted after a stop. What would not work the next time either is given up: wrong use at any time, and
    a first start that does not come to work. All else is restarted, before all a process that a handler ended, with
    whatever exit code. With ``drain`` a process that finished is done.
    """
    if stopping or (drain and ending.finished):
        early = not ending.began and ending.exit_code == -signal.SIGTERM
        return "done" if early or (ending.finished and ending.exit_code == 0) else "failed"
    if ending.finished:
        return "restart"
    if ending.error is not None:
        return "give up" if ending.exit_code == 2 or (first and not ending.worked) else "restart"
    # Python could not load it, or the command is no consumer; a signal is somebody's, and may not come again
    hopeless = not ending.began and ending.exit_code is not None and ending.exit_code >= 0
    return "give up" if first and hopeless else "restart"


def added_up(summaries: Iterable[ConsumerSummary]) -> ConsumerSummary:
    """The sum of all numbers."""
    total = ConsumerSummary()
    for summary in summaries:
        for each in fields(ConsumerSummary):
            setattr(total, each.name, getattr(total, each.name) + getattr(summary, each.name))
    return total


class _Process:
    """One life of one process."""

    def __init__(self, process: asyncio.subprocess.Process, line: socket.socket) -> None:
        self.summary = ConsumerSummary()
        self.pid = process.pid
        self._process = process
        self._line = line
        self._heard = bytearray()
        self._began = self._finished = False
        self._error: str | None = None
        self._started_at = asyncio.get_running_loop().time()
        asyncio.get_running_loop().add_reader(line, self._listen)

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> "_Process":
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                env={**environment, LINE_VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                # Ctrl-C goes to the terminal's whole group; they get it from us, once
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours)

    async def ended(self) -> Ending:
        """Wait for its end, and take in its last words."""
        code = await self._process.wait()
        # not until the end of the line: a program that a handler left running may hold it open
        self._listen()
        worked = self.summary != ConsumerSummary() or self.lived >= SURELY_CONSUMING
        return Ending(code, self._began, worked, self._finished, self._error)

    @property
    def lived(self) -> timedelta:
        """For how long, up to now."""
        return timedelta(seconds=asyncio.get_running_loop().time() - self._started_at)

    def close(self) -> None:
        """Hang up."""
        asyncio.get_running_loop().remove_reader(self._line)
        self._line.close()

    def stop(self, times: int) -> None:
        """Ask it to stop (1), to do so at once (2), or make it (3)."""
        with contextlib.suppress(OSError):  # it may be ending by itself
            if times == 1:
                self._process.terminate()
            elif times == 2:
                self._line.send(b"!")
            else:
                self._process.kill()

    def _listen(self) -> None:
        while True:
            try:
                data = self._line.recv(65_536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                asyncio.get_running_loop().remove_reader(self._line)
                return
            *lines, rest = bytes(self._heard + data).split(b"\n")
            self._heard = bytearray(rest)
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            words = json.loads(line)
        except ValueError:
            return  # torn by a line that was full: the next one tells all again
        self._began = self._began or "began" in words
        self._finished = self._finished or "finished" in words
        self._error = words.get("failed", self._error)
        if "summary" in words:
            # a restarted process may be a newer version with numbers that we do not know
            known = {each.name for each in fields(ConsumerSummary)}
            self.summary = ConsumerSummary(**{name: n for name, n in words["summary"].items() if name in known})


class Supervisor:
    """Keeps ``processes`` consumer processes running, each of them ``command``.

    The command has to be ``rabbitdlq consume ...`` or a program of your own that runs its consumer by
    :class:`SupervisorLink`. A process that dies, by a handler's ``os._exit`` or by SIGKILL, is restarted after a wait
    that grows; its messages were never acknowledged, so the broker gives them to others. Should the supervisor die,
    the processes stop as on SIGTERM.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        *,
        drain: bool = False,
        environment: Mapping[str, str] | None = None,
        first_wait: timedelta | str = FIRST_WAIT,
        longest_wait: timedelta | str = LONGEST_WAIT,
    ) -> None:
        """``drain``: a process that finished is not restarted, and the supervisor ends with the last one.
        ``environment``: of the processes, this one's unless given; the place for a broker URL, whose password would
        be seen by everybody in a command.
        """
        if processes < 1:
            raise ConfigurationError(f"processes: {processes} is below 1")
        if not command:
            raise ConfigurationError("command: there is none")
        self.restarts = 0
        self._command = list(command)
        self._count = processes
        self._drain = drain
        self._environment = os.environ if environment is None else environment
        self._waits = (checked_duration("first_wait", first_wait), checked_duration("longest_wait", longest_wait))
        self._stopping = asyncio.Event()
        self._stops = 0
        self._running: set[_Process] = set()
        self._past = ConsumerSummary()
        self._failed = 0
        self._error: RabbitDLQError | None = None

    @property
    def summary(self) -> ConsumerSummary:
        """The numbers of all processes, living and dead. SIGKILL takes about a second of a process's numbers."""
        return added_up([self._past, *(process.summary for process in self._running)])

    def stop(self) -> None:
        """Let the processes finish within their grace time. A second call ends it; a third one kills them."""
        self._stops += 1
        self._stopping.set()
        for process in self._running:
            process.stop(self._stops)

    async def run(self) -> SupervisorReport:
        """Run until :meth:`stop`, or with ``drain`` until every process has finished.

        Raises what a process gave up for, when the others have stopped: :class:`ConfigurationError` at any time,
        :class:`BrokerError` where it was its first start. Cancelled, it kills the processes; the broker gives their
        messages to others.
        """
        keepers = [asyncio.create_task(self._keep(number)) for number in range(1, self._count + 1)]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_EXCEPTION)
            for keeper in done:
                keeper.result()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)
        if self._error is not None:
            raise self._error
        return SupervisorReport(self.summary, self.restarts, self._failed)

    async def _keep(self, number: int) -> None:
        """See to one of the processes, through all its lives."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(*self._waits)
        first = True
        while not self._stopping.is_set():
            begun = loop.time()
            ending = await self._life(number)
            match judged(ending, first=first, stopping=self._stopping.is_set(), drain=self._drain):
                case "restart":
                    wait = backoff.after(timedelta(seconds=loop.time() - begun)).total_seconds()
                    log.warning("process_died", process=number, **ending.words, next_start_in_s=wait)
                    first = False
                    await self._pause(wait)
                    self.restarts += not self._stopping.is_set()
                case "give up":
                    self._give_up(ending)
                case "failed":
                    self._failed += 1
                    if self._error is None:  # else it says the same as the one that is told
                        log.error("process_failed", process=number, **ending.words)
                    return
                case "done":
                    log.info("process_finished", process=number, **ending.words)
                    return

    async def _life(self, number: int) -> Ending:
        try:
            process = await _Process.start(self._command, {**self._environment, NUMBER_VARIABLE: str(number)})
        except OSError as error:
            return Ending(None, error=f"{self._command[0]} cannot be started: {error.strerror}")
        self._running.add(process)
        log.info("process_started", process=number, pid=process.pid)
        try:
            if self._stops:  # the word came while it was being started
                process.stop(self._stops)
            return await process.ended()
        except asyncio.CancelledError:
            process.stop(3)
            await process.ended()
            raise
        finally:
            process.close()
            self._running.discard(process)
            self._past = added_up([self._past, process.summary])

    def _give_up(self, ending: Ending) -> None:
        reason = ending.error or f"a process ended with exit code {ending.exit_code} before it began to consume"
        self._error = ConfigurationError(reason) if ending.exit_code == 2 else BrokerError(reason)
        self.stop()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
