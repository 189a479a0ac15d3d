"""``rabbitdlq consume --drain`` as a program, with ``--processes N`` where N is more than one.

The clock runs from the first look that finds a consumer of every process on the queue, for the messages that wait then,
to the first that finds none waiting: how long a program takes to start is not asked. CPU is that of the program and its
processes from their start.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.broker import Broker
from tests.benchmarks.contenders.protocol import Job, Meter, cpu_seconds, main


async def handle(message: Any) -> None:
    """What the program runs; it gets the decoded payload and does nothing with it."""
    assert message.payload


async def work(message: Any) -> None:
    """The same with half a millisecond's work: processes are for handlers that need a processor."""
    assert message.payload
    end = time.thread_time() + 0.0005
    while time.thread_time() < end:
        pass


def processes(job: Job, meter: Meter) -> None:
    broker = Broker(job.url)
    handler, _, number = job.way.partition(" ")
    count = int(number)
    with tempfile.TemporaryDirectory() as directory:
        topology = Path(directory) / "rabbitdlq.toml"
        topology.write_text(f'[queues."{job.queue}"]\ndelays = {job.delays}\n')
        command = [sys.executable, "-m", "rabbitdlq", "--url", job.url, "--topology", str(topology)]
        command += ["consume", job.queue, "--handler", f"{__package__}.ours_cli:{handler}", "--drain"]
        command += ["--concurrency", str(job.concurrency), "--prefetch", str(job.prefetch)]
        command += ["--processes", str(count)] if count > 1 else []
        program = subprocess.Popen(command)
        waiting, consumers = job.messages, 0
        while waiting and program.poll() is None:
            time.sleep(0.01)
            waiting, consumers = broker.look(job.queue)
            if consumers == count and not meter.began:
                meter.begin()
                meter.timed = waiting
        meter.end()
        code = program.wait(60)
        if code or waiting or not meter.timed:
            raise SystemExit(f"exit code {code}, {waiting} messages wait, {consumers} consumers")
    meter.cpu = cpu_seconds()
    broker.close()


if __name__ == "__main__":
    main({"processes": processes})
