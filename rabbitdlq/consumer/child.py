"""What runs in a child process: one handler, in the process's main thread, again and again.

The parent's side is :mod:`rabbitdlq.consumer.pool`. What is passed between the two is pickled: by us, of values that we
made, through a pipe that nobody else has an end of. What a message contains is never unpickled: it goes through as
bytes.
"""

import asyncio
import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import structlog

from rabbitdlq import names
from rabbitdlq.consumer.attempt import Attempt, Completed, Failed, Handler, Interrupted, Result
from rabbitdlq.consumer.classify import Classifier, Kind, Rule
from rabbitdlq.consumer.deadlines import HandlerInterrupted, HandlerTimeout, failure_at, frames_of
from rabbitdlq.consumer.sizes import format_size
from rabbitdlq.consumer.threads import check_called
from rabbitdlq.errors import Transient
from rabbitdlq.failure import Failure, inside
from rabbitdlq.message import Message, decode_payload

__all__ = ["BEGUN", "INTERRUPT", "WHERE", "Ready", "Reply", "Work", "attempt", "begin", "ready"]

#: signals to the child: end what you do now; say where you are
INTERRUPT, WHERE = signal.SIGUSR1, signal.SIGUSR2
#: signals that are the parent's business
_PARENTS = (signal.SIGINT, signal.SIGTERM)
#: among the last words: what was before this is of an earlier handler. A child that dies without has begun nothing
BEGUN = b"\0"
#: what a handler has at least, beyond what the process takes before it does anything
LEAST_ROOM = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Work:
    """What a child does, for all its life."""

    handler: Handler
    classes: Mapping[type[BaseException], Kind | Rule]
    soft_timeout: timedelta
    max_memory: int | None
    #: called once, before anything else
    setup: Callable[[], Any] | None
    #: the payload is not sent, but decoded from the body
    decodes: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The child can work, or says why it cannot."""

    pid: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """How the handler's run went."""

    result: Result
    #: memory ran out: the heap is full of holes, and what the handler left half done is still there
    worn_out: bool = False


class _Child:
    """The process's state."""

    def __init__(self, work: bytes, words: Connection) -> None:
        self._work = work
        #: where the last words go; open for as long as the process lives, which the parent sees by it
        self.words = words
        self.runner: _Runner | None = None


_child: _Child | None = None


def begin(work: bytes, words: Connection) -> None:
    """Before the child's first task. Never fails: a child that failed here would be started again and again."""
    global _child  # noqa: PLW0603 - a process has one
    _child = _Child(work, words)
    # the programs that a handler starts are of this session, and can be killed with it
    with contextlib.suppress(PermissionError):  # it has one
        os.setsid()
    # service managers signal every process: the parent says when it is over. Not ignored, which programs that the
    # handler starts would inherit
    for number in _PARENTS:
        signal.signal(number, _left_to_the_parent)
        signal.siginterrupt(number, False)
    os.register_at_fork(
        # what comes before a forked process has its own way with them is not lost
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS),
        after_in_child=_forked,
    )


def _left_to_the_parent(number: int, _: FrameType | None) -> None:
    pass


def _forked() -> None:
    """In what the handler forks, which is to end when it is told to: nothing resets that there."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is _left_to_the_parent:
            signal.signal(number, usual)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS)


def ready() -> Ready:
    """Load the handler and set the process up for it."""
    assert _child is not None
    _die_with_parent()
    for number in (INTERRUPT, signal.SIGALRM):
        signal.signal(number, _told)
    # a segmentation fault can only be told of by code that needs no Python any more
    faulthandler.enable(_child.words.fileno(), all_threads=False)
    faulthandler.register(WHERE, _child.words.fileno(), all_threads=False)
    try:
        work: Work = pickle.loads(_child._work)  # noqa: S301 - our own, see above
        if work.setup is not None:
            work.setup()
        if work.max_memory is not None:
            _limit_memory(work.max_memory)
        _child.runner = _Runner(work)
    except BaseException as error:  # whatever the handler's module raises when it is imported
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if isinstance(error, _TooSmall) else f" ({last.filename}, line {last.lineno})"
        told = str(error) if isinstance(error, _TooSmall) else f"{type(error).__name__}: {error}"
        return Ready(os.getpid(), f"{told}{place}")
    return Ready(os.getpid())


def attempt(message: Message) -> Reply:
    """Run the handler once."""
    assert _child is not None
    assert _child.runner is not None
    os.write(_child.words.fileno(), BEGUN)
    _to_be_killed_with_parent(-os.getpid())
    try:
        return _child.runner.run(message)
    finally:
        _to_be_killed_with_parent(os.getpid())


class _Runner:
    def __init__(self, work: Work) -> None:
        self._attempt = Attempt(work.handler, Classifier(work.classes))
        self._handler = work.handler
        self._soft = work.soft_timeout
        self._decodes = work.decodes
        # one for the process's life: what a handler keeps open belongs to a loop
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._task: asyncio.Task[Any] | None = None
        self.at_work = False
        #: by which signal, and where the handler was then
        self._told: tuple[int, Failure | None] | None = None

    def run(self, message: Message) -> Reply:
        """Run it, and say how that went."""
        started, error = time.perf_counter(), None
        self._told = None
        try:
            if self._decodes:
                message = replace(message, payload=decode_payload(message.body, message.properties))
            structlog.contextvars.clear_contextvars()
            structlog.contextvars.bind_contextvars(message_id=message.id, queue=message.queue, attempt=message.attempt)
            self.at_work = True
            signal.setitimer(signal.ITIMER_REAL, self._soft.total_seconds())
            error = self._call(message)
        except BaseException as raised:
            error = raised
        finally:
            self.at_work = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        if error is None:
            return Reply(Completed((time.perf_counter() - started) * 1000))
        worn_out = _out_of_memory(error)
        if worn_out:
            _lift_memory_limit()  # to tell of it takes some, too
        return Reply(self._result(error, started), worn_out)

    def _call(self, message: Message) -> BaseException | None:
        if self._attempt.is_async:
            return self._finish(self._handler(message))
        result = self._handler(message)
        return self._finish(check_called(result)) if result is not None else None

    def _finish(self, work: Any) -> BaseException | None:
        self._task = self._loop.create_task(_ended(work))
        try:
            error: BaseException | None = self._loop.run_until_complete(self._task)
        finally:
            self._task = None
        return error

    def told(self, number: int) -> None:
        """A signal has come: the soft timeout, or the parent's word that the consumer ends."""
        if not self.at_work or self._told is not None:
            return
        if self._task is None:
            self._told = (number, None)
            raise HandlerInterrupted if number == INTERRUPT else HandlerTimeout(self._text())
        # where it is, also when it is in the middle of something and does not wait
        self._told = (number, failure_at(frames_of(self._task.get_coro()), self._soft))
        self._loop.call_soon_threadsafe(self._task.cancel)

    def _text(self) -> str:
        return f"the handler took longer than {self._soft.total_seconds():g} s"

    def _result(self, error: BaseException, started: float) -> Result:
        result = self._attempt.result_of(error, started)
        if self._told is None:
            return result
        number, failure = self._told
        ours = (asyncio.CancelledError, HandlerTimeout, HandlerInterrupted)
        ended = all(isinstance(each, ours) for each in inside(error))
        if number == INTERRUPT and ended:
            return Interrupted(result.duration_ms)
        if number == INTERRUPT or not isinstance(result, Failed):
            return result
        if ended:
            # its class is ours, not the handler's: no module in front of its name, and nobody's class for it
            told = failure or replace(result.failure, type=HandlerTimeout.__name__)
            result = replace(result, failure=told, rule=Rule(Transient), retry_after=None)
        return replace(result, reason=names.TIMEOUT)


async def _ended(work: Any) -> BaseException | None:
    try:
        await work
    except BaseException as error:  # a SystemExit would not get through a task as it is
        return error
    return None


def _told(number: int, _: FrameType | None) -> None:
    if _child is not None and _child.runner is not None:
        _child.runner.told(number)


def _out_of_memory(error: BaseException) -> bool:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, MemoryError):
            return True
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return False


def _die_with_parent() -> None:
    """No child outlives the process that gives it work, also where that is killed.

    The fork server is no help: it lives as long as one of its children does.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a child"
    if sys.platform == "linux":
        # the kernel kills us when the parent's end of this pipe closes, also while code in C lets no thread run
        _to_be_killed_with_parent(os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    else:

        def watch() -> None:
            parent.join()
            if _child is not None and _child.runner is not None and _child.runner.at_work:
                os.killpg(0, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="rabbitdlq-parent", daemon=True).start()
    if not parent.is_alive():
        os._exit(1)


def _to_be_killed_with_parent(whom: int) -> None:
    """Who dies with the parent: this process, or by a negative number its group, with the programs of a handler."""
    if sys.platform == "linux":
        parent = multiprocessing.parent_process()
        assert parent is not None, "this is a child"
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, whom)


class _TooSmall(Exception):
    """The limit is below what the process needs."""


def _limit_memory(size: int) -> None:
    """From here on whoever asks for more gets a :class:`MemoryError`.

    RLIMIT_DATA counts what can be written and is the process's own: heap, large objects, stacks of threads. RLIMIT_AS
    would count address space, too, of which threads reserve 64 MiB each without using it.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    if size < used + LEAST_ROOM:
        raise _TooSmall(
            f"max_memory: {format_size(size)} is too little: the process takes {format_size(used)} with nothing but "
            f"the handler's module loaded, and {format_size(LEAST_ROOM)} have to be left"
        )
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if most == resource.RLIM_INFINITY else min(size, most), most))


def _lift_memory_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
