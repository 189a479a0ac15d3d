"""A process that claims, works and completes, to be raced or killed: ``python -m tests.stores.worker ...``.

``race URL NAMESPACE COUNT``: says ``ready``; at a line on its stdin claims so many keys, and says which ones it got.
``work URL NAMESPACE LEASE_MS POINT``: claims ``orders:1`` and works on it up to the point, says so and waits for ever.
"""

import asyncio
import random
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psycopg

from rabbitdlq.idempotency import record, store_of
from tests.stores.kit import HOUR

__all__ = ["POINTS", "WorkerProcess", "worker_process"]

KEY = "orders:1"
#: where a worker can die; without a database of the user's, work and mark are two things
POINTS = {
    "sqlite": ("claimed", "worked", "committed", "completed"),
    "postgresql": ("claimed", "worked", "committed", "completed"),
    "redis": ("claimed", "worked", "completed"),
}


async def _race(url: str, namespace: str, count: str) -> None:
    keys = [f"orders:{n}" for n in range(int(count))]
    # half of all meet in the same order, head-on; the others cross it
    if random.random() < 0.5:
        random.shuffle(keys)
    async with store_of(url, namespace=namespace) as store:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for start in range(0, len(keys), 10):
            group = keys[start : start + 10]
            claims = await asyncio.gather(*(store.claim(key, HOUR) for key in group))
            for key, claim in zip(group, claims, strict=True):
                if claim.state == "new":
                    print(key, flush=True)
                    assert await store.complete(key, claim.token)


async def _work(url: str, namespace: str, lease_ms: str, point: str) -> None:
    async with store_of(url, namespace=namespace) as store:
        claim = await store.claim(KEY, timedelta(milliseconds=int(lease_ms)))
        assert claim.state == "new"
        _reach("claimed", point)
        kind = url.partition(":")[0]
        if kind == "sqlite":
            _work_in_sqlite(Path(url.partition(":")[2]), namespace, point)
        elif kind == "postgresql":
            await _work_in_postgres(url, namespace, point)
        else:
            _reach("worked", point)
        assert await store.complete(KEY, claim.token)
        _reach("completed", point)


def _work_in_sqlite(path: Path, namespace: str, point: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        record(connection, KEY, namespace=namespace)
        connection.execute("INSERT INTO payments VALUES (?)", (namespace,))
        _reach("worked", point)
    _reach("committed", point)
    connection.close()


async def _work_in_postgres(url: str, namespace: str, point: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await record(connection, KEY, namespace=namespace)
        await connection.execute("INSERT INTO payments VALUES (%s)", (namespace,))
        _reach("worked", point)
    _reach("committed", point)


def _reach(here: str, point: str) -> None:
    if here == point:
        print(here, flush=True)
        signal.pause()


@dataclass
class WorkerProcess:
    """A worker from outside."""

    process: asyncio.subprocess.Process

    async def line(self) -> str:
        """What it says next; empty at its end."""
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), 30)).decode().strip()

    async def go(self) -> list[str]:
        """Let a race begin; the keys it got."""
        output, _ = await asyncio.wait_for(self.process.communicate(b"go\n"), 60)
        assert self.process.returncode == 0
        return output.decode().split()

    async def kill(self) -> None:
        """End it at once, without a chance to clean up."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def worker_process(*words: str) -> AsyncIterator[WorkerProcess]:
    """Run a worker; it is killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.stores.worker", *words,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield WorkerProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    task, *words = sys.argv[1:]
    asyncio.run(_race(*words) if task == "race" else _work(*words))
