"""Child processes that run a handler: as many as are at work at the same time, each on its own.

Each child has a :class:`pebble.ProcessPool` of one process. Nothing is shared between two of them, no pipe and no lock:
the end of a child, at whatever moment, is no other's business. pebble starts the process, takes tasks there and
results back, and tells how a process ended. A child that died is thrown away with its pool, and another one is started
when the next handler is to run.

What is pickled on the way are our own values, see :mod:`rabbitdlq.consumer.child`; never what a message contains.
"""

import asyncio
import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import Any

import structlog
from pebble import ProcessExpired, ProcessPool

from rabbitdlq import names
from rabbitdlq.consumer import child
from rabbitdlq.consumer.attempt import CLEANUP_SECONDS, Attempt, Failed, Handler, Interrupted, Result
from rabbitdlq.consumer.classify import UNKNOWN, Classes, Classifier, Rule
from rabbitdlq.consumer.deadlines import Running, Timeouts
from rabbitdlq.errors import ConfigurationError, External
from rabbitdlq.failure import Failure, fingerprint
from rabbitdlq.message import Message

__all__ = ["Child", "ChildAttempt", "HandlerDied"]

log = structlog.stdlib.get_logger(__name__)

#: for a child to start and to import the handler's module
START_SECONDS = 60.0
#: for a child that is to be killed to say where it is
LAST_WORDS_SECONDS = 1.0
_MOST_WORDS = 12_000
#: what pebble tells then
_NEVER_BEGAN = (BrokenProcessPool, EOFError, ConnectionError)
_GUARD = (
    "a process for handlers imports the program's own file first, where what starts the consumer has to stand under "
    '`if __name__ == "__main__":`'
)
_FUNCTION = re.compile(r'^  File "[^"\n]*", line \d+ in (\S+)', re.MULTILINE)


class HandlerDied(Exception):
    """What is told of an attempt whose process ended."""


class ChildNotStarted(Exception):
    """No process could be started for the handler, or it cannot load it."""


def _context() -> Any:
    # a fork of this very process would copy its threads' locks and its connections
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:  # the program has no list of its own
        # children are there in 20 ms instead of 600
        context.set_forkserver_preload(["__main__", "pebble", child.__name__])
    return context


class Child:
    """One process, in which one handler at a time runs."""

    def __init__(self, pool: ProcessPool, words: Connection) -> None:
        """See :meth:`start`."""
        self._pool = pool
        self._listening = words
        self._words = b""
        self._ended = False
        self._begun = False
        self._work: asyncio.Future[child.Reply] | None = None
        self.pid = 0
        os.set_blocking(words.fileno(), False)

    @classmethod
    async def start(cls, work: bytes) -> "Child":
        """A child that is ready; raises :class:`ChildNotStarted`."""
        context = _context()
        words, childs_end = context.Pipe(duplex=False)
        try:
            pool = ProcessPool(1, context=context, initializer=child.begin, initargs=(work, childs_end))
            started = cls(pool, words)
            try:
                # in a thread: the first one starts the fork server, which takes a while
                task = asyncio.wrap_future(await asyncio.to_thread(pool.schedule, child.ready))
                ready: child.Ready = await asyncio.wait_for(task, START_SECONDS)
            except BaseException as error:
                await started.close()
                if isinstance(error, _NEVER_BEGAN):
                    raise ChildNotStarted("ended before it could begin") from error
                if isinstance(error, Exception):
                    raise ChildNotStarted(f"{_how_it_ended(error)}") from error
                raise
        finally:
            # now the child alone has it: its end is the child's, and pebble cannot start another one in its place
            childs_end.close()
        started.pid = ready.pid
        if ready.problem is not None:
            await started.close()
            raise ChildNotStarted(ready.problem)
        return started

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        self._listen()
        return not self._ended

    def run(self, message: Message) -> "asyncio.Future[child.Reply]":
        """Have the handler run; raises :class:`RuntimeError` where pebble knows that the process is gone."""
        self._begun = False
        self._work = asyncio.wrap_future(self._pool.schedule(child.attempt, args=(message,)))
        return self._work

    @property
    def begun(self) -> bool:
        """Whether the handler of the last :meth:`run` has begun."""
        self._listen()
        return self._begun

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        if self.pid and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self, *, at_work: bool) -> None:
        """Kill it, and when it is at work the programs that its handler has started: they would go on beside a retry.

        What an earlier handler has left running is killed with them, unless it has a session of its own.
        """
        if at_work and self.pid and self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.send(signal.SIGKILL)

    async def where(self) -> str | None:
        """Where its Python is now, innermost first; None where it does not say."""
        heard = len(self._words)
        self.send(child.WHERE)
        end = time.monotonic() + LAST_WORDS_SECONDS
        while self.alive and len(self._words) == heard and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return self.last_words

    @property
    def last_words(self) -> str | None:
        """What it wrote when it crashed or was asked, at any time."""
        self._listen()
        return self._words[:_MOST_WORDS].decode("utf-8", "replace") or None

    async def close(self, *, at_work: bool = False) -> None:
        """Kill it and clear away what belongs to it."""
        self.kill(at_work=at_work)
        await asyncio.to_thread(self._clear)
        if self._work is not None:
            self._work.cancel()  # pebble forgets what it had in hand when it is stopped

    def _clear(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()
        self._ended = True
        self._listening.close()

    def _listen(self) -> None:
        if self._ended:
            return
        try:
            while data := os.read(self._listening.fileno(), 65_536):
                self._begun = self._begun or child.BEGUN in data
                self._words += data.replace(child.BEGUN, b"")
            self._ended = True  # the other end is closed
        except BlockingIOError:
            pass


class ChildAttempt(Attempt):
    """Runs one handler in child processes.

    The first child is started before the first message, so that what is wrong with the handler shows at once; others
    when more handlers run at a time than there are children.
    """

    def __init__(
        self,
        handler: Handler,
        classes: Classes,
        timeouts: Timeouts,
        max_memory: int | None = None,
        setup: Callable[[], Any] | None = None,
        *,
        decodes: bool = True,
    ) -> None:
        """``max_memory`` in bytes, of each child. ``setup``: called in each child before anything else. ``decodes``:
        the payload is decoded there from the body, and not sent. All of it has to be what can be pickled by its name.
        """
        super().__init__(handler, Classifier(classes))
        #: the child sees to the soft timeout itself: our clock is the hard one's
        self.is_async = False
        self._work = pickle.dumps(child.Work(handler, dict(classes), timeouts.soft, max_memory, setup, decodes))
        self._decodes = decodes
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._clearing: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the first child; raises :class:`ConfigurationError` where it cannot load the handler or work."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ConfigurationError(f"isolation: this process is one for handlers, and no consumer; {_GUARD}")
        atexit.register(self._kill)
        try:
            self._idle.append(await self._started())
        except ChildNotStarted as error:
            await self.close()
            told = str(error) + (f"; {_GUARD}" if isinstance(error.__cause__, _NEVER_BEGAN) else "")
            what = "" if told.startswith("max_memory: ") else "isolation: the handler's process could not start: "
            raise ConfigurationError(f"{what}{told}") from error

    async def close(self) -> None:
        """Kill every child."""
        self._closed = True
        atexit.unregister(self._kill)
        self._kill()
        for each in list(self._all):
            self._drop(each)
        while self._clearing:
            await asyncio.wait(self._clearing)

    async def run(self, message: Message, running: Running | None = None) -> Result:
        """Run the handler once in a child and say how that went.

        When the task that runs this is cancelled: at the hard timeout the child is killed; at the consumer's end the
        handler is cancelled and may clean up for a little while.
        """
        began = time.perf_counter()
        if self._decodes:
            message = replace(message, payload=None)
        if running is not None:
            running.frames = list  # its frames are elsewhere
            running.began = float("inf")  # a child that starts is not the handler's doing
        worker: Child | None = None
        work: asyncio.Future[child.Reply] | None = None
        try:
            for last in (False, False, True):
                worker = await self._take()
                try:
                    work = worker.run(message)
                except RuntimeError:  # pebble knows that it is gone
                    self._drop(worker)
                    continue
                began = time.perf_counter()
                if running is not None:
                    running.began = began
                await asyncio.wait([work])
                if last or worker.begun or worker.alive:
                    break
                # it ended while it had nothing to do, and was taken for alive: no attempt was begun
                work.add_done_callback(_heard)
                self._drop(worker)
        except asyncio.CancelledError:
            if worker is None or work is None or not await self._told_to_end(worker, work, running):
                if worker is not None:
                    self._drop(worker, at_work=work is not None)
                if work is not None:
                    work.add_done_callback(_heard)
                return Interrupted((time.perf_counter() - began) * 1000)
        except ChildNotStarted as error:
            # how it is with processes here says nothing of the message
            died = self._died(f"no process for the handler: {error}", None, began)
            return replace(died, rule=Rule(External), begun=False)
        if worker is None or work is None:
            return self._died("no process for the handler: each ended before it began", None, began)
        return await self._result(worker, work, began)

    async def _told_to_end(self, worker: Child, work: "asyncio.Future[child.Reply]", running: Running | None) -> bool:
        """Whether the handler has come to an end of its own; a second cancellation does not wait for it."""
        try:
            if running is None or not running.cancelled:
                worker.send(child.INTERRUPT)
                await asyncio.wait([work], timeout=CLEANUP_SECONDS)
                return work.done()
            place = await worker.where()
        except asyncio.CancelledError:
            return False
        if running.told is not None and place is not None:
            running.told = replace(running.told, traceback=f"It was here, the innermost first:\n{place}")
        return False

    async def _result(self, worker: Child, work: "asyncio.Future[child.Reply]", began: float) -> Result:
        if work.cancelled() or (self._closed and work.exception() is not None):  # all children are being killed
            return Interrupted((time.perf_counter() - began) * 1000)
        error = work.exception()
        if error is None:
            reply = work.result()
            if reply.worn_out:
                self._drop(worker)
            else:
                self._give_back(worker)
            return reply.result
        if isinstance(error, ProcessExpired | BrokenProcessPool):
            words = worker.last_words
            self._drop(worker)
            return self._died(f"the process of the handler {_how_it_ended(error)}", words, began)
        self._give_back(worker)
        return self.result_of(error, began)  # the message could not be sent, or the answer not be read

    def _died(self, text: str, words: str | None, began: float) -> Failed:
        place = _FUNCTION.search(words or "")
        kind = HandlerDied.__name__
        failure = Failure(kind, text, words, fingerprint(kind, text, place[1] if place else ""))
        took = (time.perf_counter() - began) * 1000
        return Failed(failure, UNKNOWN, datetime.now(UTC), took, reason=names.CRASHED)

    # --- children

    async def _take(self) -> Child:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._drop(worker)
        starting = asyncio.create_task(self._started())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._not_wanted)
            raise

    async def _started(self) -> Child:
        worker = await Child.start(self._work)
        self._all.add(worker)
        if self._closed:
            self._drop(worker)
            raise ChildNotStarted("the consumer has ended")
        return worker

    def _not_wanted(self, starting: "asyncio.Task[Child]") -> None:
        if not starting.cancelled() and starting.exception() is None:
            self._give_back(starting.result())

    def _give_back(self, worker: Child) -> None:
        if self._closed:
            self._drop(worker)
        else:
            self._idle.append(worker)

    def _drop(self, worker: Child, *, at_work: bool = False) -> None:
        if worker not in self._all:
            return
        self._all.discard(worker)
        with contextlib.suppress(ValueError):
            self._idle.remove(worker)
        clearing = asyncio.create_task(worker.close(at_work=at_work))
        self._clearing.add(clearing)
        clearing.add_done_callback(self._clearing.discard)

    def _kill(self) -> None:
        for worker in self._all:
            worker.kill(at_work=worker not in self._idle)


def _how_it_ended(error: BaseException) -> str:
    """``ended with SIGSEGV``, ``ended with exit code 3``."""
    if isinstance(error, BrokenProcessPool):  # pebble takes no notice of a process that ends with 0
        return "ended with exit code 0"
    if not isinstance(error, ProcessExpired):
        return f"failed: {type(error).__name__}: {error}"
    code = error.exitcode
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"ended with {name}" + (" (from outside: maybe for lack of memory)" if -code == signal.SIGKILL else "")


def _heard(work: "asyncio.Future[child.Reply]") -> None:
    """How it ended is of no interest any more, and is not told as an error that nobody took notice of."""
    if not work.cancelled():
        work.exception()
