"""A few connections to PostgreSQL, each lent to one call at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from psycopg import AsyncConnection

__all__ = ["Sessions"]

T = TypeVar("T")


class Sessions:
    """Connections in autocommit mode, made when they are needed and kept for the next call."""

    def __init__(self, url: str, *, most: int, options: dict[str, Any], lock_timeout_ms: int) -> None:
        """``most``: connections at once; more calls wait. ``options``: of psycopg, beside the URL's."""
        self._url = url
        self._options = options
        self._lock_timeout_ms = lock_timeout_ms
        self._idle: list[AsyncConnection[Any]] = []
        self._room = asyncio.Semaphore(most)

    async def run(self, call: "Callable[[AsyncConnection[Any]], Awaitable[T]]") -> T:
        """The call's result; a call that finds its connection broken is made again on another one.

        Raises :class:`psycopg.Error`.
        """
        import psycopg  # noqa: PLC0415 - an extra, and the store has seen that it is there

        async with self._room:
            while self._idle:
                connection = self._idle.pop()
                try:
                    return await self._use(connection, call)
                except psycopg.OperationalError:
                    # the server was restarted meanwhile, or a firewall forgot the connection
                    if not connection.closed:
                        raise
            connection = await psycopg.AsyncConnection.connect(self._url, autocommit=True, **self._options)
            await connection.execute(f"SET lock_timeout = {self._lock_timeout_ms}".encode())
            return await self._use(connection, call)

    async def close(self) -> None:
        """Close what is idle."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.close()

    async def _use(
        self, connection: "AsyncConnection[Any]", call: "Callable[[AsyncConnection[Any]], Awaitable[T]]"
    ) -> T:
        from psycopg.pq import TransactionStatus  # noqa: PLC0415 - see above

        try:
            return await call(connection)
        finally:
            # a call that was cancelled may have left it in the middle of something
            if connection.info.transaction_status == TransactionStatus.IDLE:
                self._idle.append(connection)
            else:
                await connection.close()
