"""The end of the consumer: a handler that does not listen is not waited for longer than it takes to clean up."""

import asyncio
from pathlib import Path

import pytest

from rabbitdlq.consumer import attempt as in_threads
from rabbitdlq.consumer import pool
from rabbitdlq.consumer.attempt import Interrupted, Result
from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.consumer.isolation import Isolation
from rabbitdlq.message import Message
from tests.unit.test_isolation import Deaf, children, gone, message, none_left, noted


async def interrupted(task: "asyncio.Task[Result]") -> Result:
    """What it gives when it is cancelled; not by :func:`asyncio.wait_for`, which would cancel it once more."""
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=3)
    assert done, "it waits for its handler"
    return task.result()


async def test_one_in_a_thread_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_threads, "CLEANUP_SECONDS", 0.05)
    deaf = Deaf()
    attempt = Isolation("thread").attempt(deaf, {}, None, Timeouts())
    task = asyncio.create_task(attempt.run(message("x")))
    try:
        await asyncio.to_thread(deaf.began.wait, 10)
        assert isinstance(await interrupted(task), Interrupted)
        assert len(attempt.left) == 1
    finally:
        deaf.release.set()
    await none_left(attempt)


async def test_one_in_a_process_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool, "CLEANUP_SECONDS", 0.05)
    path = tmp_path / "noted"
    async with children() as attempt:
        task = asyncio.create_task(attempt.run(message("deaf", path=str(path))))
        (began,) = await noted(path, 1)
        assert isinstance(await interrupted(task), Interrupted)
        async with asyncio.timeout(5):
            while not gone(int(began.split()[1])):
                await asyncio.sleep(0.01)


async def test_one_that_is_an_object_with_an_async_call_hears_it_as_any_coroutine_function_does() -> None:
    class Handler:
        def __init__(self) -> None:
            self.began = asyncio.Event()
            self.heard = False

        async def __call__(self, _: Message) -> None:
            self.began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.heard = True
                raise

    handler = Handler()
    attempt = Isolation("async").attempt(handler, {}, None, Timeouts())
    assert attempt.is_async, "the soft timeout is for those that can be cancelled"
    task = asyncio.create_task(attempt.run(message("x")))
    await asyncio.wait_for(handler.began.wait(), 5)
    assert isinstance(await interrupted(task), Interrupted)
    assert handler.heard
