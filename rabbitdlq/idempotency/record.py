"""Writing a key down as done in the user's own transaction."""

import sqlite3
from collections.abc import Awaitable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.idempotency.keys import DEFAULT_KEEP, DEFAULT_NAMESPACE, checked_namespace
from rabbitdlq.idempotency.postgres import record_in_postgres, record_in_postgres_async
from rabbitdlq.idempotency.sqlite import record_in_sqlite
from rabbitdlq.limits import check_kind

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection

__all__ = ["record"]


@overload
def record(
    connection: "sqlite3.Connection | Connection[Any]",
    key: str | None,
    *,
    namespace: str = ...,
    keep: timedelta | str = ...,
) -> None: ...


@overload
def record(
    connection: "AsyncConnection[Any]", key: str | None, *, namespace: str = ..., keep: timedelta | str = ...
) -> Awaitable[None]: ...


def record(
    connection: "sqlite3.Connection | Connection[Any] | AsyncConnection[Any]",
    key: str | None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    keep: timedelta | str = DEFAULT_KEEP,
) -> Awaitable[None] | None:
    """Write ``key`` down as done in the open transaction of ``connection``: it commits with the work, or not at all.

    A handler calls it with the key that its consumer claimed, and on a connection to the database where the
    consumer's store keeps its claims: a :class:`sqlite3.Connection`, a psycopg ``Connection``, or an
    ``AsyncConnection``, for which it has to be awaited. Call it first in the transaction: a repeat then does no work,
    and SQLite cannot refuse the write because of what was read before. It may wait for another transaction with the
    same key, so a driver that blocks belongs into a handler off the event loop. ``namespace`` and ``keep`` are the
    store's.

    Nothing is committed here. If the process dies after the commit and before the message is acknowledged, the message
    comes again, and is found to be done.

    Raises :class:`AlreadyDone` where the key is done: roll back, and let the error leave the handler. Raises
    :class:`ConfigurationError` for another kind of connection, for one that would commit the mark by itself, and where
    the message has no key, :class:`IdempotencyError` where that database has no table for it, and else what the driver
    raises.
    """
    if key is None:
        raise ConfigurationError(
            "record: the message has no key: its consumer has no idempotency store (idempotency=..., --idempotency), "
            "or the message no id, and then idempotency_key=... has to make one of it"
        )
    check_kind("record: key", key, str, "message.idempotency_key")
    checked_namespace(namespace)
    if isinstance(connection, sqlite3.Connection):
        record_in_sqlite(connection, key, namespace, keep)
        return None
    try:
        import psycopg  # noqa: PLC0415 - an extra, which who uses SQLite goes without
    except ImportError:
        pass
    else:
        if isinstance(connection, psycopg.Connection):
            record_in_postgres(connection, key, namespace, keep)
            return None
        if isinstance(connection, psycopg.AsyncConnection):
            return record_in_postgres_async(connection, key, namespace, keep)
    raise ConfigurationError(
        f"record: {type(connection).__module__}.{type(connection).__qualname__} is none of sqlite3.Connection, "
        "psycopg.Connection and psycopg.AsyncConnection"
    )
