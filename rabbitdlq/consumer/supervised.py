"""The end of the line in a process that a supervisor started: it reports there, and is told to stop from there.

Line and protocol are between these two files, `supervisor` and `supervised`, and nobody else's: the supervisor gives
each process one end of a socket pair, its number in the environment. Options would show in ``--help`` and in the
process list, where they mean nothing to anybody.

- From the process to the supervisor: JSON lines. ``{"began": true}`` before the first delivery can come,
  ``{"summary": {...}}`` with the numbers so far, ``{"failed": "why", "exit_code": 1}`` and ``{"finished": true}`` at
  the end. Only what was said so is believed: an exit code alone may be a handler's ``os._exit``.
- From the supervisor to the process: any byte ends the grace time, the end of the line (the supervisor is dead, even
  by SIGKILL) is a SIGTERM.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol

import structlog

from rabbitdlq.consumer.leaving import leave
from rabbitdlq.consumer.summary import ConsumerSummary
from rabbitdlq.errors import ConfigurationError, RabbitDLQError

__all__ = ["LINE_VARIABLE", "NUMBER_VARIABLE", "Supervisable", "SupervisorLink"]

log = structlog.stdlib.get_logger(__name__)

#: the number of the inherited socket
LINE_VARIABLE = "RABBITDLQ_SUPERVISOR_LINE"
#: which process it is, the same through all its lives
NUMBER_VARIABLE = "RABBITDLQ_PROCESS_NUMBER"
#: what SIGKILL may take of the numbers
REPORT_SECONDS = 1.0


class Supervisable(Protocol):
    """A consumer, or a group of them."""

    @property
    def queue(self) -> str:
        """What it consumes."""

    @property
    def worker(self) -> str:
        """Its name."""

    @property
    def summary(self) -> ConsumerSummary:
        """Its numbers so far."""

    def stop(self) -> None:
        """Ask it to stop, or not to wait any longer."""

    async def run(self) -> ConsumerSummary:
        """Run it to its end."""


class SupervisorLink:
    """The line of this process to the :class:`Supervisor` that started it; does nothing in any other process.

    ::

        with SupervisorLink() as link:
            asyncio.run(link.run(Consumer(topology, handler, url=url)))

    A :class:`RabbitDLQError` that leaves the block of a supervised process is told to the supervisor, which shows it
    once for all its processes, and ends this process with 2 for a :class:`ConfigurationError` and 1 for others.
    """

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        """Take the line out of the environment, so that programs which a handler starts do not take it for theirs.
        ``environment``: this process's own unless given.

        Raises :class:`ConfigurationError` where the variable is there and the line is not.
        """
        self._socket: socket.socket | None = None
        self._stops = 0
        # no default: help() shows those, and passwords are in it
        environment = os.environ if environment is None else environment
        #: which of the supervisor's processes this is, from 1 on; 1 without a supervisor
        self.number = _number_of(environment.pop(NUMBER_VARIABLE, "1"))
        number = environment.pop(LINE_VARIABLE, None)
        if number is None:
            return
        try:
            self._socket = socket.socket(fileno=int(number))
        except (ValueError, OSError) as error:
            raise ConfigurationError(f"{LINE_VARIABLE}: {number!r} is no supervisor's; do not set it") from error
        self._socket.set_inheritable(False)
        # numbers are for people: a supervisor that does not read must not hold up the work
        self._socket.setblocking(False)

    @property
    def supervised(self) -> bool:
        """Whether a supervisor started this process."""
        return self._socket is not None

    def __enter__(self) -> "SupervisorLink":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._socket is None:
            return
        with self._socket:
            if isinstance(error, RabbitDLQError):
                self._tell_failed(error)
                raise SystemExit(error.exit_code) from None

    async def run(self, consumer: Supervisable) -> ConsumerSummary:
        """Run the consumer or the group, as :meth:`Consumer.run` does and with its errors.

        In a supervised process SIGTERM and SIGINT stop it, and so does the supervisor's end. Further signals to this
        process change nothing: service managers signal a whole group, supervisor and processes, and the supervisor
        passes it on; only the supervisor's second word ends the grace time. After it the process is to end: threads
        that handlers left behind are waited for no longer than five seconds.
        """
        if self._socket is None:
            return await consumer.run()
        async with self._listening(self._socket, consumer):
            reporting = asyncio.create_task(self._report(consumer))
            try:
                summary = await consumer.run()
            except RabbitDLQError as error:
                self._tell_failed(error)  # here, too: the block may not come to its end
                leave(error.exit_code, queue=consumer.queue)
                raise
            finally:
                reporting.cancel()
                self._tell(summary=asdict(consumer.summary))
            self._tell(finished=True)
            leave(0, queue=consumer.queue)
            return summary

    @asynccontextmanager
    async def _listening(self, line: socket.socket, consumer: Supervisable) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def stop(level: int) -> None:
            for _ in range(self._stops, level):
                consumer.stop()
            self._stops = max(self._stops, level)

        def heard() -> None:
            try:
                word = line.recv(16)
            except BlockingIOError:
                return
            except OSError:
                word = b""
            if not word:
                loop.remove_reader(line)
                log.warning("supervisor_lost", queue=consumer.queue, worker=consumer.worker)
            stop(2 if word else 1)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, 1)
        loop.add_reader(line, heard)
        try:
            # signals are heeded from here on: one that comes earlier ends a process that has nothing in hand
            self._tell(began=True)
            yield
        finally:
            loop.remove_reader(line)

    async def _report(self, consumer: Supervisable) -> None:
        told = ConsumerSummary()
        while True:
            if consumer.summary != told:
                told = copy(consumer.summary)
                self._tell(summary=asdict(told))
            await asyncio.sleep(REPORT_SECONDS)

    def _tell_failed(self, error: RabbitDLQError) -> None:
        self._tell(failed=str(error), exit_code=error.exit_code)

    def _tell(self, **words: Any) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the supervisor is gone or does not read: see above
                self._socket.send(json.dumps(words).encode() + b"\n")


def _number_of(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigurationError(f"{NUMBER_VARIABLE}: {text!r} is no supervisor's; do not set it")
    return int(text)
