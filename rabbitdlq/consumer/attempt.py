"""One run of the handler."""

import asyncio
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from rabbitdlq.consumer.classify import Classifier, Rule, asked_wait
from rabbitdlq.consumer.deadlines import Running
from rabbitdlq.consumer.threads import ThreadCall, check_called
from rabbitdlq.errors import AlreadyDone, ConfigurationError
from rabbitdlq.failure import Failure
from rabbitdlq.message import Message

__all__ = ["Attempt", "Completed", "Failed", "Handler", "Interrupted", "Result", "check_takes_message"]

#: ``async def handler(message)`` or a plain function, which runs in a thread; what it returns is ignored
Handler = Callable[[Message], Any]

#: for a handler that is cancelled because the consumer ends
CLEANUP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Completed:
    """The handler returned."""

    duration_ms: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised."""

    failure: Failure
    rule: Rule
    at: datetime
    duration_ms: float
    #: the least that it asked to wait
    retry_after: timedelta | None = None
    #: why the message is parked when this was the last attempt; exhausted where nothing is said
    reason: str | None = None
    #: False where the handler was kept from beginning by something that is not the message's doing
    begun: bool = True


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The consumer is shutting down and took the handler's time away; no attempt was spent."""

    duration_ms: float


Result = Completed | Failed | Interrupted


def is_async(handler: Handler) -> bool:
    """Whether the handler is to be awaited.

    Raises :class:`ConfigurationError` for what cannot be called, or not with a message.
    """
    if not callable(handler):
        raise ConfigurationError(f"handler: {handler!r} cannot be called")
    name = getattr(handler, "__qualname__", None)
    check_takes_message(f"handler: {handler!r}" if name is None else f"handler: {name}", handler)
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def check_takes_message(what: str, handler: Handler) -> None:
    """Refuse a handler that every message would fail in, with ``what`` in front: it is not to be called with one."""
    try:
        # of a decorated one what is called itself: it may give the function inside more than the message
        signature = inspect.signature(handler, follow_wrapped=False)
    except (TypeError, ValueError):  # functions in C need not tell
        return
    try:
        signature.bind(object())
    except TypeError as error:
        raise ConfigurationError(f"{what} cannot be called with one argument, the message: {error}") from error


class Attempt:
    """Runs one handler, again and again, in this process."""

    def __init__(self, handler: Handler, classifier: Classifier, *, always_thread: bool = False) -> None:
        """``always_thread``: async handlers, too, run in a thread, on an event loop of their own.

        Raises :class:`ConfigurationError` for a handler that cannot be called with a message.
        """
        self._handler = handler
        self._classifier = classifier
        #: whether it can be cancelled
        self.is_async = is_async(handler)
        self._in_loop = self.is_async and not always_thread
        #: threads that run on though nobody waits for them any longer
        self.left: set[ThreadCall] = set()

    async def start(self) -> None:
        """Make ready what handlers run in; raises :class:`ConfigurationError` where they could not run."""

    async def close(self) -> None:
        """Clear away what handlers ran in."""

    async def run(self, message: Message, running: Running | None = None) -> Result:
        """Run the handler once and say how that went. Nothing it raises gets past here.

        When the task that runs this is cancelled, so is the handler; a plain function in a thread cannot be stopped
        and is left to itself. ``running``: what the clock knows of it.
        """
        started = time.perf_counter()
        try:
            if self._in_loop:
                await self._handler(message)
            else:
                await self._in_thread(message, running)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return Interrupted(_since(started))
            return self.result_of(error, started)
        except BaseException as error:
            return self.result_of(error, started)
        return Completed(_since(started))

    async def _in_thread(self, message: Message, running: Running | None) -> None:
        call = ThreadCall(self._handler, message, own_loop=self.is_async)
        if running is not None:
            running.frames = call.frames
        call.start()
        try:
            result, error = await (asyncio.shield(call.future) if self.is_async else call.future)
        except asyncio.CancelledError:
            try:
                if call.cancel():
                    # it may clean up: at the soft timeout until the clock gives it up, at the consumer's end not for
                    # long; a second cancellation does not wait
                    late = running is not None and running.cancelled
                    await asyncio.wait([call.future], timeout=None if late else CLEANUP_SECONDS)
            finally:
                if ended := call.future.done() and not call.future.cancelled():
                    result, error = call.future.result()
                else:
                    self._leave(call, running)
            if not ended:
                raise
        if error is not None:
            raise error
        await check_called(result)

    def _leave(self, call: ThreadCall, running: Running | None) -> None:
        """It runs on, and nobody waits for it."""
        self.left.add(call)
        call.on_end = self.left.discard
        if running is not None:
            running.runs_on = True

    def result_of(self, error: BaseException, started: float) -> Result:
        """What an exception of the handler means; ``started`` by :func:`time.perf_counter`."""
        errors = self._classifier.inside(error)
        if all(isinstance(each, AlreadyDone) for each in errors):
            return Completed(_since(started))
        _cut(error)
        return Failed(
            Failure.of(error, errors[0] if len(errors) == 1 else error),
            self._classifier.rule_of(error),
            datetime.now(UTC),
            _since(started),
            retry_after=asked_wait(errors),
        )


def _cut(error: BaseException) -> None:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("rabbitdlq.consumer."):
        frames = frames.tb_next  # how we called the handler tells nobody anything
    error.__traceback__ = frames


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
