"""Whatever a handler raises is one failed attempt: the worker lives, and the message climbs."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rabbitdlq import Message
from tests.broker.kit import Bench, until
from tests.broker.looks import is_told, rests


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class _DeadlyWords(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class _Basic(BaseException):
    """Not an Exception: ``except Exception`` does not see it."""


#: what is raised, and what the dead letter says of it
RAISED: dict[str, tuple[Callable[[], BaseException], str, str]] = {
    "SystemExit": (lambda: SystemExit(1), "SystemExit", "1"),
    "KeyboardInterrupt": (KeyboardInterrupt, "KeyboardInterrupt", ""),
    "CancelledError": (asyncio.CancelledError, "asyncio.exceptions.CancelledError", ""),
    "GeneratorExit": (GeneratorExit, "GeneratorExit", ""),
    "StopIteration": (StopIteration, "RuntimeError", ""),
    "basic": (lambda: _Basic("low"), "_Basic", "low"),
    "group": (lambda: BaseExceptionGroup("both", [KeyError("a"), SystemExit(2)]), "BaseExceptionGroup", "both"),
    "unspeakable": (_Unspeakable, "_Unspeakable", "(its text failed: RuntimeError)"),
    "deadly words": (_DeadlyWords, "_DeadlyWords", "(its text failed: SystemExit)"),
    "surrogates": (lambda: ValueError("half a pair: \ud800"), "ValueError", r"half a pair: \ud800"),
}


@pytest.mark.parametrize("in_thread", [False, True], ids=["async def", "def"])
@pytest.mark.parametrize("queue_type", ["quorum"])
async def test_nothing_that_a_handler_raises_ends_the_worker(bench: Bench, in_thread: bool) -> None:
    topology = await bench.declared(["100ms"])

    def plain(message: Message) -> None:
        if message.payload != "works":
            raise RAISED[message.payload][0]()

    async def asynchronous(message: Message) -> None:
        await asyncio.sleep(0)
        plain(message)

    handler: Any = plain if in_thread else asynchronous
    # one worker: had it died of one of them, the next would not be handled
    async with bench.running(topology, handler, concurrency=1) as consumer:
        await bench.send(topology, *RAISED)
        await rests(bench, topology.dlq, len(RAISED))
        await bench.send(topology, "works")
        await until(lambda: consumer.summary.succeeded == 1, "the worker works")
    assert (consumer.summary.retried, consumer.summary.parked) == (len(RAISED), len(RAISED))
    async with bench.dlq(topology) as dlq:
        letters = {letter.payload: letter for letter in await dlq.peek_all()}
    for name, (_, kind, text) in RAISED.items():
        letter = letters[name]
        is_told(letter, 2)
        assert letter.reason == "exhausted"
        assert letter.error is not None
        assert letter.error.type.removeprefix(f"{__name__}.") == kind
        assert text in letter.error.message
