"""A handler in a thread of its own: a plain function, or an async one with an event loop of its own."""

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from rabbitdlq.consumer.deadlines import frames_of
from rabbitdlq.message import Message

__all__ = ["ThreadCall", "check_called"]


class ThreadCall:
    """One run of a handler in a daemon thread: one that does not keep the process alive. A thread cannot be stopped."""

    def __init__(self, handler: Callable[[Message], Any], message: Message, *, own_loop: bool) -> None:
        """``own_loop``: the handler is async, and runs on an event loop of the thread."""
        self._handler = handler
        self._message = message
        self._own_loop = own_loop
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._cancelled = False
        #: the handler's own loop, and its task there
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        #: what it returned and raised; never fails itself
        self.future: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        #: called on the consumer's loop when the thread has ended
        self.on_end: Callable[[ThreadCall], None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"rabbitdlq-handler-{message.id[:20]}", daemon=True)

    def start(self) -> None:
        """Let it run."""
        self._thread.start()

    def cancel(self) -> bool:
        """Cancel the handler; False for a plain function, which cannot be."""
        if not self._own_loop:
            return False
        with self._lock:
            self._cancelled = True
            if self._inner is not None:
                loop, task = self._inner
                with contextlib.suppress(RuntimeError):  # its loop is closed: it has just ended
                    loop.call_soon_threadsafe(task.cancel)
        return True

    def frames(self) -> list[FrameType]:
        """Where the handler is now, from itself inwards; empty where that is not to be seen."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        found: list[FrameType] = []
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("rabbitdlq.consumer."):
            found.insert(0, frame)
            frame = frame.f_back
        if self._inner is not None and (not found or found[0].f_globals.get("__name__", "").startswith("asyncio.")):
            return frames_of(self._inner[1].get_coro())  # its loop waits: the handler does, too
        return found if frame is not None else []

    def _run(self) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            if self._own_loop:
                with asyncio.Runner() as runner:
                    result, error = runner.run(self._awaited(), context=self._context)
            else:
                result = self._context.run(self._handler, self._message)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the consumer's loop is closed: nobody wants to know any more
            self._loop.call_soon_threadsafe(self._finish, result, error)

    async def _awaited(self) -> tuple[Any, BaseException | None]:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._inner = (asyncio.get_running_loop(), task)
            if self._cancelled:
                task.cancel()
        try:
            return await self._handler(self._message), None
        except BaseException as error:  # a SystemExit would not get through a task as it is
            return None, error

    def _finish(self, result: Any, error: BaseException | None) -> None:
        if not self.future.done():
            self.future.set_result((result, error))
        if self.on_end is not None:
            self.on_end(self)


async def check_called(result: Any) -> None:
    """Finish what a plain function only began; raises :class:`TypeError` for a generator, of which nothing has run."""
    if inspect.isawaitable(result):
        # a plain function around an async one, as a decorator without functools.wraps makes it: the work is still to do
        await result
    elif inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError("the handler is a generator: nothing of it has run; return instead of yield")
