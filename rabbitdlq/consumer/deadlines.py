"""How long a handler may take: it is cancelled at the soft timeout, and given up at the hard one."""

import asyncio
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from rabbitdlq.broker import Delivery
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.failure import Failure, fingerprint
from rabbitdlq.message import Message

__all__ = [
    "HARD_TIMEOUT",
    "SOFT_TIMEOUT",
    "HandlerInterrupted",
    "HandlerTimeout",
    "Running",
    "Timeouts",
    "failure_at",
    "frames_of",
]

SOFT_TIMEOUT, HARD_TIMEOUT = timedelta(minutes=10), timedelta(minutes=15)


class HandlerTimeout(BaseException):
    """What is told of an attempt that took too long.

    In a process a plain function has it raised inside it at the soft timeout. Like a cancellation it is no
    :class:`Exception`, so that a handler that catches those does not catch this one by mistake.
    """


class HandlerInterrupted(BaseException):
    """Raised inside a plain function in a process when the consumer ends; its message goes back, no attempt spent."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """For one attempt."""

    #: the handler is cancelled, and may clean up; a plain function, which cannot be cancelled, goes on
    soft: timedelta = SOFT_TIMEOUT
    #: nobody waits for it any longer
    hard: timedelta = HARD_TIMEOUT

    def __post_init__(self) -> None:
        """Raises :class:`ConfigurationError` unless 0 < soft <= hard."""
        for name, value in (("hard_timeout", self.hard), ("soft_timeout", self.soft)):
            if value <= timedelta():
                raise ConfigurationError(f"{name}: {value.total_seconds():g} s is not above zero")
        if self.soft > self.hard:
            raise ConfigurationError(
                f"soft_timeout: {self.soft.total_seconds():g} s is above hard_timeout, {self.hard.total_seconds():g} s"
            )

    @property
    def look_every(self) -> float:
        """Seconds between two looks at the clock, for all handlers together: a timer each would cost more."""
        return min(1.0, max(0.01, self.soft.total_seconds() / 20))


@dataclass(slots=True, eq=False)
class Running:
    """A handler at work."""

    task: "asyncio.Task[object]"
    delivery: Delivery
    message: Message
    #: by :func:`time.perf_counter`
    began: float
    #: it was told to end
    cancelled: bool = False
    #: where it was then
    told: Failure | None = None
    #: its message was settled without it
    given_up: bool = False
    #: though nobody waits for it any longer, it may run on
    runs_on: bool = False
    #: where it is now, where its task does not tell
    frames: Callable[[], list[FrameType]] | None = None

    def failure(self, limit: timedelta) -> Failure:
        """What is told of it, with the place where it is now."""
        return failure_at(frames_of(self.task.get_coro()) if self.frames is None else self.frames(), limit)


def failure_at(frames: Iterable[FrameType], limit: timedelta) -> Failure:
    """What is told of a handler that took longer, with the place where it is; the frames from itself inwards."""
    frames = list(frames)
    text = f"the handler took longer than {limit.total_seconds():g} s"
    where = f"{frames[-1].f_globals.get('__name__')}.{frames[-1].f_code.co_qualname}" if frames else ""
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return Failure(
        HandlerTimeout.__name__,
        text,
        "".join(["It was here:\n", *summary.format()]) if frames else None,
        fingerprint(HandlerTimeout.__name__, "", where),
    )


def frames_of(waiting: Any) -> list[FrameType]:
    """The frames of what a coroutine waits in, from the handler inwards; a task tells its outermost only."""
    frames: list[FrameType] = []
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        # how we called the handler tells nobody anything
        if frame is not None and not frame.f_globals.get("__name__", "").startswith("rabbitdlq.consumer."):
            frames.append(frame)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return frames
