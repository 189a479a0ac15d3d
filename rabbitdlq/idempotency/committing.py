"""A thread that owns a SQLite connection. What is asked for while it works is written in one transaction."""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Committer", "Operation"]

T = TypeVar("T")
#: what is done with the connection inside a transaction; it begins and ends none itself
Operation = Callable[[sqlite3.Connection], T]
#: a bound on how long a transaction keeps other processes waiting: a few milliseconds
_LARGEST_GROUP = 200


@dataclass(frozen=True, slots=True)
class _Asked:
    operation: Operation[Any]
    future: asyncio.Future[Any]


class Committer:
    """Runs operations on a connection of its own, in the order they came, off the event loop.

    The result of an operation is given after its transaction is committed. A group of operations fails as a whole.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        """``connect`` runs in the thread; its connection leaves transactions to us (``isolation_level=None``)."""
        self._connect = connect
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        # a program that never closes its store must still be able to end
        self._thread = threading.Thread(target=self._serve, name="rabbitdlq-idempotency", daemon=True)

    async def start(self) -> None:
        """Connect; raises what connecting raises."""
        self._thread.start()
        await self._opened

    async def run(self, operation: Operation[T]) -> T:
        """The operation's result, once it is committed. Raises :class:`sqlite3.Error`."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._asked.put(_Asked(operation, future))
        return await future

    async def stop(self) -> None:
        """Finish what was asked for, and close the connection."""
        self._asked.put(None)
        await asyncio.shield(self._closed)

    def _serve(self) -> None:
        try:
            connection = self._connect()
        except BaseException as error:  # it is raised where it is waited for
            self._tell([(self._opened, None, error)])
            return
        self._tell([(self._opened, None, None)])
        group, more = self._next_group()
        while group:
            self._tell(_in_one_transaction(connection, group))
            if not more:
                break
            group, more = self._next_group()
        with suppress(sqlite3.Error):
            connection.close()
        self._tell([(self._closed, None, None)])

    def _next_group(self) -> tuple[list[_Asked], bool]:
        """What is waiting, or the first that comes; and whether more may come."""
        group: list[_Asked] = []
        with suppress(queue.Empty):
            while len(group) < _LARGEST_GROUP:
                asked = self._asked.get(block=not group)
                if asked is None:
                    return group, False
                group.append(asked)
        return group, True

    def _tell(self, results: "list[_Result]") -> None:
        # the loop may be gone: then nobody waits any more
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_settle, results)


_Result = tuple[asyncio.Future[Any], Any, BaseException | None]


def _in_one_transaction(connection: sqlite3.Connection, group: list[_Asked]) -> list[_Result]:
    try:
        connection.execute("BEGIN IMMEDIATE")
        results: list[_Result] = [(asked.future, asked.operation(connection), None) for asked in group]
        connection.execute("COMMIT")
    except Exception as error:  # each that waits has to hear of it
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        return [(asked.future, None, error) for asked in group]
    return results


def _settle(results: list[_Result]) -> None:
    for future, result, error in results:
        if future.done():  # who waited was cancelled
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
