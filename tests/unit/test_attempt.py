"""One run of the handler: whatever it is and does, there is a result."""

import asyncio
import contextvars
import functools
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from rabbitdlq.consumer.attempt import Attempt, Completed, Failed, Handler, Interrupted, Result, is_async
from rabbitdlq.consumer.classify import Classifier
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import ConfigurationError, Permanent, Transient
from rabbitdlq.message import Message, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties

MESSAGE = message_of(
    Topology("orders", ["5s"]), b"{}", Properties(message_id="17"), Arrival(0, 0, "", "orders"), failures=0
)


async def run(handler: Handler) -> Result:
    return await asyncio.wait_for(Attempt(handler, Classifier()).run(MESSAGE), 10)


async def succeed(message: Message) -> str:
    await asyncio.sleep(0)
    return message.id


def plain(function: Callable[[Message], Any]) -> Callable[[Message], Any]:
    """A decorator without functools.wraps, as there are many: what it gives is no coroutine function any more."""

    def wrapper(message: Message) -> Any:
        return function(message)

    return wrapper


def takes_nothing() -> None: ...


def takes_more(message: Message, database: object) -> None: ...


class Taken:
    def __init__(self, message: Message) -> None: ...


class Callable_:
    async def __call__(self, message: Message) -> None:
        await asyncio.sleep(0)


class TestReturns:
    @pytest.mark.parametrize("handler", [succeed, lambda message: message.id, functools.partial(succeed), Callable_()])
    async def test_a_handler_that_returns_has_completed_whatever_it_returns(self, handler: Handler) -> None:
        result = await run(handler)

        assert isinstance(result, Completed)
        assert result.duration_ms >= 0

    async def test_a_plain_function_runs_in_a_thread_with_the_context_of_the_consumer(self) -> None:
        variable = contextvars.ContextVar[str]("variable")
        variable.set("here")
        seen: list[object] = []

        await run(lambda message: seen.extend([variable.get(), threading.current_thread().daemon, message]))

        assert seen == ["here", True, MESSAGE]
        assert threading.current_thread() is threading.main_thread()

    async def test_an_async_handler_behind_a_plain_decorator_is_run_to_its_end(self) -> None:
        """It was called and never awaited: the message was acknowledged, and nothing had been done."""
        done: list[str] = []

        async def handler(message: Message) -> None:
            await asyncio.sleep(0)
            done.append(message.id)

        assert not is_async(plain(handler))
        assert isinstance(await run(plain(handler)), Completed)
        assert done == ["17"]

    async def test_and_its_failure_is_a_failure(self) -> None:
        async def handler(_: Message) -> None:
            await asyncio.sleep(0)
            raise Permanent("no")

        result = await run(plain(handler))

        assert isinstance(result, Failed)
        assert (result.rule.kind, result.failure.message) == (Permanent, "no")

    async def test_a_generator_has_not_run_and_is_a_failure(self) -> None:
        def generator(_: Message) -> Iterator[int]:
            yield 1

        async def async_generator(_: Message) -> AsyncIterator[int]:
            yield 1

        for handler in (generator, async_generator):
            result = await run(handler)
            assert isinstance(result, Failed)
            assert result.failure.message.startswith("the handler is a generator: nothing of it has run")

    @pytest.mark.parametrize("handler", [None, 5, "module:function"])
    def test_what_cannot_be_called_is_refused_before_any_message(self, handler: Any) -> None:
        with pytest.raises(ConfigurationError, match="cannot be called"):
            is_async(handler)

    @pytest.mark.parametrize(
        ("handler", "reason"),
        [
            (takes_nothing, "handler: takes_nothing .*: too many positional arguments"),
            (takes_more, "handler: takes_more .*: missing a required argument: 'database'"),
            (lambda *, message: None, "handler: .*<lambda> .*: "),
            (Callable_.__call__, "handler: Callable_.__call__ .*: missing a required argument: 'message'"),
            (functools.partial(takes_nothing), r"handler: functools.partial\(.*: too many positional arguments"),
        ],
    )
    def test_one_that_every_message_would_fail_in_is_told_when_it_is_given(self, handler: Any, reason: str) -> None:
        """It was taken, and every message was parked with a TypeError."""
        with pytest.raises(ConfigurationError, match=reason) as told:
            is_async(handler)
        assert "cannot be called with one argument, the message" in str(told.value)

    @pytest.mark.parametrize(
        "handler",
        [
            functools.partial(takes_more, database=None),
            functools.partial(takes_more, MESSAGE),
            functools.wraps(takes_more)(lambda message: takes_more(message, None)),
            lambda *args: None,
            lambda message, retries=3, **more: None,
            lambda anything: None,
            Callable_(),
            Callable_().__call__,
            Taken,
            print,
            [].append,
            {}.update,
            {}.keys,
            math.sqrt,
            dict,
        ],
    )
    def test_whatever_can_be_called_with_a_message_is_taken(self, handler: Any) -> None:
        is_async(handler)


class Odd(BaseException):
    pass


class TestRaises:
    @pytest.mark.parametrize(
        "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3), StopIteration(), Odd("no"), TimeoutError()]
    )
    @pytest.mark.parametrize("kind", ["async", "thread"])
    async def test_nothing_it_raises_gets_past(self, kind: str, error: BaseException) -> None:
        async def in_loop(_: Message) -> None:
            await asyncio.sleep(0)
            raise error

        def in_thread(_: Message) -> None:
            raise error

        result = await run(in_loop if kind == "async" else in_thread)

        assert isinstance(result, Failed)
        assert result.rule.kind is Transient
        assert result.at.tzinfo is not None

    @pytest.mark.parametrize("kind", ["async", "thread"])
    async def test_the_traceback_begins_in_the_handler(self, kind: str) -> None:
        async def in_loop(_: Message) -> None:
            raise ValueError("here")

        def in_thread(_: Message) -> None:
            raise ValueError("here")

        result = await run(in_loop if kind == "async" else in_thread)

        assert isinstance(result, Failed)
        assert result.failure.traceback is not None
        assert f"in in_{'loop' if kind == 'async' else 'thread'}" in result.failure.traceback
        assert "consumer/attempt.py" not in result.failure.traceback

    async def test_a_permanent_error_is_one_also_where_it_is_a_child_of_it(self) -> None:
        class Unpayable(Permanent):
            pass

        def handler(_: Message) -> None:
            raise Unpayable("no")

        result = await run(handler)

        assert isinstance(result, Failed)
        assert result.rule.kind is Permanent

    async def test_a_cancellation_of_the_handlers_own_making_is_a_failure(self) -> None:
        async def handler(_: Message) -> None:
            raise asyncio.CancelledError("mine")

        assert isinstance(await run(handler), Failed)


class TestInterruption:
    async def test_a_handler_whose_task_is_cancelled_was_interrupted(self) -> None:
        started = asyncio.Event()

        async def handler(_: Message) -> None:
            started.set()
            await asyncio.Event().wait()

        assert isinstance(await self.interrupted(handler, started.wait()), Interrupted)

    async def test_a_thread_is_left_to_itself(self) -> None:
        started, release = threading.Event(), threading.Event()

        def handler(_: Message) -> None:
            started.set()
            release.wait(10)

        result = await self.interrupted(handler, asyncio.to_thread(started.wait, 10))

        release.set()
        assert isinstance(result, Interrupted)

    async def interrupted(self, handler: Handler, begun: Awaitable[Any]) -> Result:
        task = asyncio.create_task(Attempt(handler, Classifier()).run(MESSAGE))
        await asyncio.wait_for(begun, 10)
        task.cancel()
        return await asyncio.wait_for(task, 10)
