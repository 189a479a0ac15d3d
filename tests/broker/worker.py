"""A consumer in a process of its own, for tests that need several or kill one: ``python -m tests.broker.worker JSON``.

What to do with a message is in its payload, see :class:`Order`. Every run of the handler, and its end, is a line in
the worker's log, written before the delivery is settled.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog

from rabbitdlq import Consumer, Message, Topology
from rabbitdlq.idempotency import SQLiteStore
from tests.broker.kit import until

__all__ = ["Order", "Run", "WorkerProcess", "worker_process"]


@dataclass(frozen=True)
class Order:
    """A payload, and what the worker does with it."""

    n: int
    #: attempts that fail; 99 is "always"
    failures: int = 0
    #: seconds before that
    takes: float = 0.0
    #: the handler's process dies in this attempt, unless the worker was told to be careful
    deadly: int = 0
    #: the handler waits in this attempt for the test's word, unless the worker was told to be careful
    held: int = 0


@dataclass(frozen=True)
class Run:
    """One line of a worker's log."""

    worker: str
    n: int
    attempt: int
    #: started, succeeded or failed
    what: str


@dataclass(frozen=True)
class Job:
    """What the subprocess is told."""

    url: str
    topology: dict[str, Any]
    worker: str
    log: str
    concurrency: int = 10
    drain: bool = False
    #: ignores ``deadly`` and ``held``
    careful: bool = False
    #: a file that claims are kept in, each for a second and a half
    store: str = ""


class WorkerProcess:
    """A running worker, seen from the test."""

    def __init__(self, job: Job, process: asyncio.subprocess.Process) -> None:
        self.name = job.worker
        self._log = Path(job.log)
        self._process = process

    @property
    def runs(self) -> list[Run]:
        """What its log says by now."""
        text = self._log.read_text().rpartition("\n")[0] if self._log.exists() else ""
        return [Run(**json.loads(line)) for line in text.splitlines()]

    def count(self, what: str) -> int:
        """Lines of that kind; cheap enough to be asked again and again."""
        return self._log.read_text().count(f'"what": "{what}"')

    def go(self) -> None:
        """Let the handlers that are held go on, and those that come."""
        _word(self._log).touch()

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def kill(self) -> None:
        """SIGKILL: no goodbye, no acks."""
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def terminate(self) -> int:
        """SIGTERM, and its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def ended(self, deadline: float = 60) -> int:
        """Its exit code; where that is not 0, what it said before is printed."""
        code = await asyncio.wait_for(self._process.wait(), deadline)
        if code:
            print(self._log.with_suffix(".err").read_text())
        return code


@asynccontextmanager
async def worker_process(
    url: str, topology: Topology, log: Path, worker: str, **options: Any
) -> AsyncIterator[WorkerProcess]:
    """A worker of this topology that has started to consume; it is killed at the end of the block if it still runs."""
    settings = {
        "name": topology.name,
        "delays": [delay.total_seconds() for delay in topology.delays],
        "queue_type": topology.queue_type,
        "journal": topology.journal,
        "crash_limit": topology.crash_limit,
    }
    job = Job(url, settings, worker, str(log), **options)
    with log.with_suffix(".err").open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.broker.worker", json.dumps(asdict(job)), stderr=errors
        )
    running = WorkerProcess(job, process)
    try:
        await until(lambda: log.exists() or not running.running, f"worker {worker} consumes")
        yield running
    finally:
        if running.running:
            await running.kill()


def _word(log: Path) -> Path:
    """The file that lets held handlers go on."""
    return log.with_suffix(".go")


async def _run(job: Job) -> None:
    settings = dict(job.topology)
    delays = [timedelta(seconds=seconds) for seconds in settings.pop("delays")]
    topology = Topology(settings.pop("name"), delays, **settings)
    log = Path(job.log)

    def note(order: Order, message: Message, what: str) -> None:
        with log.open("a") as file:
            file.write(json.dumps(asdict(Run(job.worker, order.n, message.attempt, what))) + "\n")

    async def handler(message: Message) -> None:
        order = Order(**message.payload)
        note(order, message, "started")
        await asyncio.sleep(order.takes)
        while order.held == message.attempt and not (job.careful or _word(log).exists()):
            await asyncio.sleep(0.01)
        if order.deadly == message.attempt and not job.careful:
            os.kill(os.getpid(), signal.SIGKILL)
        if message.attempt <= order.failures:
            note(order, message, "failed")
            raise RuntimeError(f"order {order.n}, attempt {message.attempt}")
        note(order, message, "succeeded")

    once: dict[str, Any] = {}
    if job.store:
        once = {
            "idempotency": SQLiteStore(job.store),
            "hard_timeout": timedelta(seconds=1),
            "soft_timeout": timedelta(seconds=1),
            "lease": timedelta(seconds=1.5),
        }
    consumer = Consumer(
        topology, handler, url=job.url, worker=job.worker, concurrency=job.concurrency, drain=job.drain, **once
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)

    def on_event(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if event["event"] == "consumer_started":
            log.touch()
        raise structlog.DropEvent

    structlog.configure(processors=[on_event])
    await consumer.run()


if __name__ == "__main__":
    asyncio.run(_run(Job(**json.loads(sys.argv[1]))))
