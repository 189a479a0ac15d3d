"""One run: a fresh queue, filled, one contender on it in a process of its own, and a look at what it left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rabbitdlq import Connection, Topology, apply_topology
from tests.benchmarks.broker import Broker, BrokerRefused, pid_listening
from tests.benchmarks.contenders.protocol import Job, payload
from tests.benchmarks.scenarios import Contender, Scenario

__all__ = ["WEBHOOKS", "Run", "RunFailed", "Track"]

ROOT = Path(__file__).parents[2]
WEBHOOKS = ROOT.parent / "shared" / "data" / "webhooks.jsonl"
DELAYS = ["100ms", "100ms"]
LATENCY_RATE = 500.0
#: for one run
RUN_DEADLINE = 120.0
#: the memory scenario feeds while the consumer works: so much at a time, so much waiting
FEED, FEED_BELOW = 20_000, 10_000


class RunFailed(Exception):
    """A run that gives no number: it says why."""


@dataclass(frozen=True)
class Run:
    """What one run of one contender gave."""

    contender: str
    scenario: str
    round: int
    #: that went through while the clock ran
    messages: int = 0
    seconds: float = 0.0
    #: CPU seconds for 10,000 messages
    client_cpu: float | None = None
    broker_cpu: float | None = None
    rss_mb: float = 0.0
    #: of the latency and the memory scenario
    extra: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds if self.seconds else 0.0


class Track:
    """The broker as all runs share it."""

    def __init__(self, url: str, logs: Path) -> None:
        self.url = url
        self.logs = logs
        self.broker = Broker(url)
        self.pid = pid_listening(self.broker.port) if self.broker.host in ("127.0.0.1", "localhost", "::1") else None

    def run(self, scenario: Scenario, contender: Contender, round_: int, messages: int) -> Run:
        """One run; an error becomes part of the answer."""
        try:
            return self._run(scenario, contender, round_, max(1, round(messages * contender.share)))
        except (RunFailed, BrokerRefused, OSError) as error:
            return Run(contender.label, scenario.name, round_, error=str(error))

    def _run(self, scenario: Scenario, contender: Contender, round_: int, messages: int) -> Run:
        with self._queue(contender) as queue:
            job = Job(
                scenario.name,
                self.url,
                queue,
                messages,
                concurrency=contender.concurrency,
                delays=DELAYS,
                loop=contender.loop,
                way=contender.way,
                broker_pid=self.pid,
            )
            self._fill(contender, job)
            told = self._measure(contender, job)
            self._check(contender, job, told)
        timed = told.get("timed", messages)
        return Run(
            contender.label,
            scenario.name,
            round_,
            timed,
            told["seconds"],
            told["cpu"] * 10_000 / messages,
            None if told["broker_cpu"] is None else told["broker_cpu"] * 10_000 / timed,
            told["rss_mb"],
            {name: told[name] for name in ("p50_ms", "p99_ms", "first_rss_mb", "last_rss_mb") if name in told},
        )

    # --- before

    @contextmanager
    def _queue(self, contender: Contender) -> Iterator[str]:
        """A queue of a name of its own, with the ladder behind it; cleared away afterwards."""
        name = f"rabbitdlq-bench-{uuid.uuid4().hex[:12]}"
        queues, exchanges = [name], [name]
        if contender.own_format:
            queues += [name + suffix for suffix in contender.own_queues]
        else:
            topology = Topology(name, DELAYS)
            asyncio.run(_declare(self.url, topology))
            entities = topology.entities(self.broker.version)
            queues = [queue.name for queue in entities.queues]
            exchanges = [exchange.name for exchange in entities.exchanges]
        try:
            yield name
        finally:
            self.broker.delete(queues, exchanges)

    def _fill(self, contender: Contender, job: Job) -> None:
        if job.scenario in ("publish", "replay", "latency", "memory"):
            return
        if contender.own_format:
            with _process(contender, "fill", job, self.logs) as process:
                _answer(process, self.logs, contender)
        else:
            self.broker.fill(job.queue, _bodies(job))
        deadline = time.monotonic() + 10
        while (waiting := self.broker.ready(job.queue)) != job.messages:
            if time.monotonic() > deadline:
                raise RunFailed(f"filled {job.messages:,}, but {waiting:,} wait")
            time.sleep(0.05)

    # --- the run

    def _measure(self, contender: Contender, job: Job) -> dict[str, Any]:
        with _process(contender, job.scenario, job, self.logs) as process:
            ended = None
            if job.scenario == "failing":
                self._until(lambda: self.broker.ready(job.queue + contender.dead) >= job.messages, process)
                ended = time.monotonic()
                assert process.stdin is not None
                process.stdin.write("end\n")
                process.stdin.flush()
            elif job.scenario == "latency":
                self._until(lambda: self.broker.look(job.queue)[1] > 0, process)
                self.broker.feed(job.queue, _stamped, job.messages, LATENCY_RATE)
            elif job.scenario == "memory":
                for _ in range(0, job.messages, FEED):
                    self._until(lambda: self.broker.ready(job.queue) < FEED_BELOW, process)
                    self.broker.fill(job.queue, (json.dumps(payload(place)).encode() for place in range(FEED)))
            told = _answer(process, self.logs, contender)
        if ended is not None:
            told["seconds"] = ended - told["began"]
        return told

    def _until(self, true: Any, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + RUN_DEADLINE
        while not true():
            if process.poll() is not None:
                return  # its answer says why
            if time.monotonic() > deadline:
                raise RunFailed(f"not done within {RUN_DEADLINE:g} s")
            time.sleep(0.02)

    # --- after

    def _check(self, contender: Contender, job: Job, told: dict[str, Any]) -> None:
        """Nothing may be lost, nothing may be left: whoever acknowledges later than it says is no faster."""
        attempts = 3 if job.scenario == "failing" else 1
        if told["messages"] != job.messages * attempts:
            raise RunFailed(f"{told['messages']:,} handler calls for {job.messages:,} messages")
        expected = {job.queue: job.messages if job.scenario in ("publish", "replay") else 0}
        if job.scenario in ("failing", "replay"):
            expected[job.queue + contender.dead] = job.messages if job.scenario == "failing" else 0
        for queue, count in expected.items():
            deadline = time.monotonic() + 5
            while (ready := self.broker.ready(queue)) != count:
                if time.monotonic() > deadline:
                    raise RunFailed(f"{ready:,} messages are in {queue.replace(job.queue, 'the queue')}, not {count:,}")
                time.sleep(0.05)


async def _declare(url: str, topology: Topology) -> None:
    async with await Connection.open(url, "rabbitdlq bench") as connection:
        await apply_topology(connection, topology)


def _bodies(job: Job) -> Iterator[bytes]:
    if job.scenario == "webhooks":
        lines = WEBHOOKS.read_bytes().splitlines()
        yield from (lines[place % len(lines)] for place in range(job.messages))
    elif job.scenario == "large":
        body = json.dumps({"data": "x" * 1_000_000}).encode()
        yield from (body for _ in range(job.messages))
    else:
        yield from (json.dumps(payload(place)).encode() for place in range(job.messages))


def _stamped(place: int) -> bytes:
    return json.dumps(payload(place) | {"sent": time.monotonic_ns()}).encode()


@contextmanager
def _process(contender: Contender, scenario: str, job: Job, logs: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", f"tests.benchmarks.contenders.{contender.module}", scenario, job.to_json()]
    with (logs / f"{contender.module}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # children of the contender's own, too
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _answer(process: subprocess.Popen[str], logs: Path, contender: Contender) -> dict[str, Any]:
    """The line that the contender prints at its end."""
    try:
        process.wait(RUN_DEADLINE)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"not done within {RUN_DEADLINE:g} s") from None
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    if process.returncode or not lines:
        words = (logs / f"{contender.module}.log").read_text().strip().splitlines()
        raise RunFailed(f"exit code {process.returncode}: {words[-1][:200] if words else 'no word'}")
    told: dict[str, Any] = json.loads(lines[-1])
    return told
