"""Noticing that the event loop stands still: a handler that blocks it stops all others, and the heartbeats.

A thread looks whether the loop still beats. While it does not, no heartbeat is sent, and the broker closes the
connection after about two of its intervals: everything unsettled is delivered again.
"""

import sys
import threading
import time
import traceback

import structlog

__all__ = ["Pulse"]

log = structlog.stdlib.get_logger(__name__)

#: seconds without a beat that are told of
BLOCKED_SECONDS = 2.0


class Pulse:
    """Watches the event loop of the thread that makes it, from :meth:`start` to :meth:`stop`."""

    def __init__(self, queue: str, every: float, heartbeat: float, blocked: float = BLOCKED_SECONDS) -> None:
        """``every``: seconds between two beats of a loop that is well; ``heartbeat``: seconds after which a broker that
        hears nothing may hang up."""
        self._heartbeat = heartbeat
        self._queue = queue
        self._limit = every + blocked
        self._thread_id = threading.get_ident()
        self._beat = time.monotonic()
        self._told_of: float | None = None
        #: when it stood still last for so long that the broker may have hung up, by :func:`time.perf_counter`
        self.stood_still_at = -1.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"rabbitdlq-pulse-{queue[:20]}", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._beat = time.monotonic()
        self._thread.start()

    def beat(self) -> None:
        """The event loop is alive; called from it."""
        now, before = time.monotonic(), self._beat
        self._beat = now
        if self._told_of == before:
            log.warning("event_loop_freed", queue=self._queue, blocked_s=round(now - before, 1))

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._limit / 8):
            beat = self._beat
            still = time.monotonic() - beat
            if still >= self._heartbeat:
                self.stood_still_at = time.perf_counter()
            if still < self._limit or self._told_of == beat:
                continue
            self._told_of = beat
            frame = sys._current_frames().get(self._thread_id)
            stack = "" if frame is None else "".join(traceback.format_stack(frame)[-8:])
            log.error(
                "event_loop_blocked",
                queue=self._queue,
                blocked_s=round(still, 1),
                stack=stack,
                consequence="no handler goes on and no heartbeat is sent: the broker closes the connection soon, and "
                "delivers again what is not settled; use a plain function, which runs in a thread",
            )
