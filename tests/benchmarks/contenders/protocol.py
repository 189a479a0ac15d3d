"""What every contender is: ``python -m tests.benchmarks.contenders.NAME SCENARIO JOB`` prints one line of JSON.

The clock starts with the first call of the handler and stops with the N-th (``failing``: when the bench has seen the
N-th dead letter and says so on stdin; ``publish``: from the first publish to the last confirm). Imports, connecting
and closing cost nothing. CPU is taken at the same two moments, of the process and, where it has any, its children.
"""

import asyncio
import contextlib
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["HandlerFailed", "Job", "Meter", "cpu_seconds", "main", "payload"]

#: after so many messages the memory scenario looks for the first time
FIRST_LOOK = 100_000


class HandlerFailed(Exception):
    """What the handler of the failing path raises."""


@dataclass(frozen=True)
class Job:
    """What one run is to do; travels as JSON."""

    scenario: str
    url: str
    queue: str
    messages: int
    prefetch: int = 200
    #: handlers at a time, threads or processes, as the contender understands it
    concurrency: int = 200
    #: the ladder of the failing path
    delays: list[str] = field(default_factory=lambda: ["100ms", "100ms"])
    loop: str = "asyncio"
    #: which of the contender's ways
    way: str = ""
    #: the broker's process, where it can be seen
    broker_pid: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Meter:
    """Counts handler calls; says when the last one is through."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.count = 0
        self.began = self.ended = 0.0
        self.cpu = 0.0
        #: that of the broker's process; none where it cannot be seen
        self.broker_cpu: float | None = None
        self._broker_before: float | None = None
        #: how many messages went through while the clock ran, if not all: of a program that is looked at from here
        self.timed = 0
        self.latencies: list[float] = []
        self.first_rss = self.last_rss = 0.0
        self._done = threading.Event()
        self._callback: Callable[[], object] | None = None
        #: what a handler calls with the payload
        self.take: Callable[[Any], None] = {
            "failing": self._fail,
            "latency": self._take_late,
            "memory": self._take_and_look,
        }.get(job.scenario, self._take)

    def _take(self, payload: Any) -> None:
        if not payload:
            raise ValueError("a message without its payload")
        if not self.began:
            self.begin()
        self.count += 1
        if self.count == self.job.messages:
            self.end()

    def _take_late(self, payload: Any) -> None:
        self.latencies.append((time.monotonic_ns() - payload["sent"]) / 1e6)
        self._take(payload)

    def _take_and_look(self, payload: Any) -> None:
        self._take(payload)
        if self.count == FIRST_LOOK:
            self.first_rss = rss_mb()
        if self.count == self.job.messages:
            self.last_rss = rss_mb()

    def _fail(self, payload: Any) -> None:
        if not self.began:
            self.begin()
        self.count += 1
        raise HandlerFailed(f"payment service: connection refused for {payload['place']}")

    def begin(self) -> None:
        """Start the clock."""
        self.cpu = -cpu_seconds()
        self._broker_before = process_cpu(self.job.broker_pid)
        self.began = time.monotonic()

    def end(self) -> None:
        """Stop the clock, and tell whoever waits."""
        self.ended = time.monotonic()
        self.cpu += cpu_seconds()
        broker_after = process_cpu(self.job.broker_pid)
        if self._broker_before is not None and broker_after is not None:
            self.broker_cpu = broker_after - self._broker_before
        self._done.set()
        if self._callback:
            self._callback()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call this when the clock stops, from whichever thread that is."""
        self._callback = callback
        if self._done.is_set():
            callback()

    def wait(self) -> None:
        """Block until the clock has stopped."""
        self._done.wait()

    async def until_end(self) -> None:
        """Wait on the event loop until the clock has stopped."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self.on_end(lambda: loop.call_soon_threadsafe(ended.set))
        await ended.wait()

    def report(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "seconds": self.ended - self.began,
            "began": self.began,
            "messages": self.count or self.job.messages,
            "timed": self.timed or self.job.messages,
            "cpu": self.cpu,
            "broker_cpu": self.broker_cpu,
            "rss_mb": 0.0 if self.timed else most_rss_mb(),
        }
        if self.latencies:
            cuts = statistics.quantiles(self.latencies, n=100)
            told |= {"p50_ms": cuts[49], "p99_ms": cuts[98]}
        if self.first_rss:
            told |= {"first_rss_mb": self.first_rss, "last_rss_mb": self.last_rss}
        return told


def payload(place: int) -> dict[str, Any]:
    """The message of the bench: about 200 bytes as JSON."""
    return {
        "place": place,
        "customer": "Ada Lovelace",
        "address": "12 St James's Square, London SW1Y 4JH",
        "total": 31.5,
        "items": [{"sku": "A-1843", "count": 2}, {"sku": "B-1815", "count": 1}],
        "note": "leave it at the door, please",
    }


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def process_cpu(pid: int | None) -> float | None:
    """User and system time of another process so far; none where it cannot be seen."""
    if pid is None:
        return None
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def most_rss_mb() -> float:
    """The most resident memory so far; not ``ru_maxrss``, which a process has from the one that started it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmHWM:"))


def rss_mb() -> float:
    """Resident memory now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


Way = Callable[[Job, Meter], Awaitable[None] | None]


def main(ways: Mapping[str, Way]) -> None:
    """Run the scenario that the arguments name and print the report; one without a way of its own is ``consume``."""
    scenario, text = sys.argv[1:]
    job = Job(**json.loads(text))
    meter = Meter(job)
    with _stdout_kept() as answer:
        threading.Thread(target=_end_when_told, args=(meter,), daemon=True).start()
        running = (ways.get(scenario) or ways["consume"])(job, meter)
        if running is not None:
            _run_on_loop(job.loop, running)
        print(json.dumps(meter.report()), file=answer, flush=True)


def _end_when_told(meter: Meter) -> None:
    # not by sys.stdin: its lock, held here, would be held for ever in a child that is forked meanwhile
    if os.read(0, 16) == b"end\n":
        meter.end()


def _run_on_loop(loop: str, running: Awaitable[None]) -> None:
    async def run() -> None:
        await running

    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if loop == "uvloop":
        import uvloop  # noqa: PLC0415 - most contenders run without it

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


@contextlib.contextmanager
def _stdout_kept() -> Iterator[Any]:
    """Keep stdout for the report; what a library prints goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        yield answer
