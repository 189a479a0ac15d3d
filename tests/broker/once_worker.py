"""A consumer with a store in a process of its own that dies at a point it is told: ``python -m ... JSON``."""

import asyncio
import json
import os
import signal
import sqlite3
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rabbitdlq import Consumer, Message, Topology
from rabbitdlq.idempotency import Claim, SQLiteStore, record

#: in the order in which a message passes them
POINTS = ("claimed", "worked", "committed", "completed")


@dataclass(frozen=True)
class Job:
    """What the process is told."""

    url: str
    topology: dict[str, Any]
    database: str
    #: one of POINTS, or nothing
    die_at: str = ""
    #: the work and the mark are one transaction
    recorded: bool = True


def prepare(database: Path) -> None:
    """The table that the work is done in."""
    with sqlite3.connect(database) as connection:
        connection.execute("create table work (n integer, id text)")
    connection.close()


def done(database: Path) -> list[int]:
    """What was worked, as often as it was."""
    connection = sqlite3.connect(database)
    try:
        return [n for (n,) in connection.execute("select n from work order by n")]
    finally:
        connection.close()


async def run(job: Job) -> int:
    """Run it; gives the exit code: -9 where it died as told."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.broker.once_worker", json.dumps(asdict(job))
    )
    return await asyncio.wait_for(process.wait(), 60)


def _die(job: Job, point: str) -> None:
    if job.die_at == point:
        os.kill(os.getpid(), signal.SIGKILL)


class _Store(SQLiteStore):
    def __init__(self, job: Job) -> None:
        super().__init__(job.database)
        self._job = job

    async def complete(self, key: str, token: str) -> bool:
        known = await super().complete(key, token)
        _die(self._job, "completed")
        return known

    async def claim(self, key: str, lease: timedelta) -> Claim:
        claim = await super().claim(key, lease)
        _die(self._job, "claimed")
        return claim


async def _main(job: Job) -> None:
    def handler(message: Message) -> None:
        connection = sqlite3.connect(job.database, isolation_level=None, timeout=10)
        connection.execute("begin immediate")
        if job.recorded:
            assert message.idempotency_key is not None
            record(connection, message.idempotency_key)
        connection.execute("insert into work values (?, ?)", (message.payload["n"], message.id))
        _die(job, "worked")
        connection.execute("commit")
        _die(job, "committed")
        connection.close()

    settings = dict(job.topology)
    delays = [timedelta(seconds=delay) for delay in settings.pop("delays")]
    topology = Topology(settings.pop("name"), delays, **settings)
    consumer = Consumer(
        topology,
        handler,
        url=job.url,
        drain=True,
        hard_timeout=timedelta(seconds=1),
        lease=timedelta(seconds=1.5),
        idempotency=_Store(job),
    )
    await consumer.run()


if __name__ == "__main__":
    asyncio.run(_main(Job(**json.loads(sys.argv[1]))))
