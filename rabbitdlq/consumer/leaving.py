"""The end of a consumer's process, also where threads that its handlers began never end.

At its end Python waits for every thread that is no daemon: asyncio for those of ``asyncio.to_thread()`` (before Python
3.12 without a limit), then the interpreter for all. A call that hangs in one of them, cancelled long ago, would keep a
process alive that consumes nothing, and a supervisor from starting it anew.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures.thread import _worker  # where its threads wait for work
from types import FrameType

import structlog

__all__ = ["leave"]

log = structlog.stdlib.get_logger(__name__)

#: seconds in which threads may end, and what runs at an interpreter's exit may run
PATIENCE = 5.0


def leave(exit_code: int, *, queue: str, last_words: str | None = None, patience: float = PATIENCE) -> None:
    """This process is to end: should threads keep it after so many seconds, end it with ``exit_code`` all the same.

    ``last_words``: for stderr, which nobody else will come to say then. Call it when all is settled, in a process that
    has nothing else to do.
    """
    arguments = (exit_code, queue, last_words, patience)
    threading.Thread(target=_watch, args=arguments, name="rabbitdlq-leaving", daemon=True).start()


def _watch(exit_code: int, queue: str, last_words: str | None, patience: float) -> None:
    time.sleep(patience)
    held_by = {each: frame for each in threading.enumerate() if (frame := _at_work(each)) is not None}
    if not held_by:
        return  # what is left are the exit handlers of others
    with contextlib.suppress(Exception):  # nobody may be there to read it
        _tell(queue, held_by, last_words)
    os._exit(exit_code)


def _at_work(thread: threading.Thread) -> FrameType | None:
    """Where a thread is that is waited for; None for others, and for one of an executor that has nothing to do."""
    if thread.daemon or thread is threading.main_thread() or thread.name.endswith("(_do_shutdown)"):  # asyncio's own
        return None
    frame = sys._current_frames().get(thread.ident or 0)
    return None if frame is None or frame.f_code is _worker.__code__ else frame


def _own(frame: FrameType) -> list[traceback.FrameSummary]:
    """The places of a stack, without those of the standard library's threads."""
    stack = traceback.extract_stack(frame)
    return [each for each in stack if not each.filename.endswith(("threading.py", "concurrent/futures/thread.py"))]


def _tell(queue: str, held_by: Mapping[threading.Thread, FrameType], last_words: str | None) -> None:
    log.error(
        "threads_left_behind",
        queue=queue,
        threads=[each.name for each in held_by],
        stack="".join(traceback.format_list(_own(next(iter(held_by.values())))[-6:])),
        hint="calls in asyncio.to_thread() cannot be cancelled: give them timeouts of their own, or make the handler "
        "a plain function, or use isolation 'process'",
    )
    if last_words is not None:
        print(last_words, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
