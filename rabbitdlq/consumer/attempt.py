"""One run of the handler."""

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rabbitdlq.consumer.classify import Classifier, Rule
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.failure import Failure
from rabbitdlq.message import Message

__all__ = ["Attempt", "Completed", "Failed", "Handler", "Interrupted", "Result"]

#: ``async def handler(message)`` or a plain function, which runs in a thread; what it returns is ignored
Handler = Callable[[Message], Any]


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
    #: it took too long
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The consumer is shutting down and took the handler's time away; no attempt was spent."""

    duration_ms: float


Result = Completed | Failed | Interrupted


def is_async(handler: Handler) -> bool:
    """Whether the handler is to be awaited; raises :class:`ConfigurationError` for what cannot be called."""
    if not callable(handler):
        raise ConfigurationError(f"handler: {handler!r} cannot be called")
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


class Attempt:
    """Runs one handler, again and again."""

    def __init__(self, handler: Handler, classifier: Classifier) -> None:
        """Raises :class:`ConfigurationError` for a handler that cannot be called."""
        self._handler = handler
        self._classifier = classifier
        #: whether it can be cancelled
        self.is_async = is_async(handler)

    async def run(self, message: Message) -> Result:
        """Run the handler once and say how that went. Nothing it raises gets past here.

        When the task that runs this is cancelled, so is the handler; a thread cannot be stopped and is left to itself.
        """
        started = time.perf_counter()
        try:
            if self.is_async:
                await self._handler(message)
            else:
                await _call_in_thread(self._handler, message)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return Interrupted(_since(started))
            return self._failed(error, started)
        except BaseException as error:
            return self._failed(error, started)
        return Completed(_since(started))

    def _failed(self, error: BaseException, started: float) -> Failed:
        _cut(error)
        return Failed(Failure.of(error), self._classifier.rule_of(error), datetime.now(UTC), _since(started))


def _cut(error: BaseException) -> None:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # how we called the handler tells nobody anything
    error.__traceback__ = frames


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


async def _call_in_thread(handler: Handler, message: Message) -> None:
    """Run a plain function in a thread of its own, one that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((result, error))

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(handler, message)
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name=f"rabbitdlq-handler-{message.id[:20]}", daemon=True).start()
    result, error = await future
    if error is not None:
        raise error
    if inspect.isawaitable(result):
        # a plain function around an async one, as a decorator without functools.wraps makes it: the work is still to do
        await result
    elif inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError("the handler is a generator: nothing of it has run; return instead of yield")
