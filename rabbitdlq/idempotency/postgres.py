"""Claims in PostgreSQL: for consumers on many hosts, with marks that commit with the work itself."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, LiteralString, TypeVar

from rabbitdlq.errors import ConfigurationError, IdempotencyError
from rabbitdlq.idempotency.address import needs_extra, server_name
from rabbitdlq.idempotency.keys import (
    DEFAULT_KEEP,
    DEFAULT_NAMESPACE,
    NO_TRANSACTION,
    check_recorded,
    new_token,
    span,
    stored_key,
)
from rabbitdlq.idempotency.memory import utc_now
from rabbitdlq.idempotency.sessions import Sessions
from rabbitdlq.idempotency.store import Claim, IdempotencyStore

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection

__all__ = ["DDL", "PostgresStore", "record_in_postgres", "record_in_postgres_async"]

T = TypeVar("T")
_FORM = "postgresql://user:password@host:5432/database"
_SCHEMES = ("postgresql", "postgres")
_CONNECTIONS = 4
_SECONDS = 10
#: how long a call waits for a transaction of somebody else that has the key in it
_LOCK_SECONDS = 3
_LOOKS = 3
#: any number, as long as it is the same for all who make the table
_MAKING = 5_672_202_611

#: what makes the table; for a database where the store's account may not
DDL = """\
CREATE TABLE IF NOT EXISTS rabbitdlq_idempotency (
    namespace text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    token text NOT NULL,       -- of the holder, or of who completed it; empty: recorded by a transaction
    done boolean NOT NULL,
    ends timestamptz NOT NULL, -- of the lease, or of how long a done key is kept
    PRIMARY KEY (namespace, key)
);
CREATE INDEX IF NOT EXISTS rabbitdlq_idempotency_ends ON rabbitdlq_idempotency (ends);"""

_GRANT = "GRANT SELECT, INSERT, UPDATE, DELETE ON rabbitdlq_idempotency TO the_account;"
_NO_TABLE = (
    "record: the database of this connection has no table rabbitdlq_idempotency; the consumer's store has to be a "
    "PostgresStore on the same database and schema"
)

_THERE = "SELECT to_regclass('rabbitdlq_idempotency') IS NOT NULL"
_USABLE = """SELECT bool_and(has_table_privilege('rabbitdlq_idempotency', right_to))
    FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS right_to"""
_COLUMNS = "SELECT namespace, key, token, done, ends FROM rabbitdlq_idempotency LIMIT 0"

#: Looks first and writes only where nothing is: an insert beside a row that somebody's transaction has in hand would
#: wait for that transaction. No row comes back where another claim was quicker.
_CLAIM = """
WITH seen AS (
    SELECT token, done, ends FROM rabbitdlq_idempotency WHERE namespace = %(namespace)s AND key = %(key)s
), added AS (
    INSERT INTO rabbitdlq_idempotency (namespace, key, token, done, ends)
    SELECT %(namespace)s, %(key)s, %(token)s, false, clock_timestamp() + %(lease)s::float8 * interval '1 millisecond'
    WHERE NOT EXISTS (SELECT FROM seen)
    ON CONFLICT DO NOTHING RETURNING 1
)
SELECT 'new', 0 FROM added
UNION ALL
SELECT
    CASE WHEN ends <= clock_timestamp() THEN 'over' WHEN done THEN 'done' WHEN token = %(token)s THEN 'new'
    ELSE 'busy' END,
    extract(epoch FROM ends - clock_timestamp())::float8
FROM seen"""
#: A row whose lease is over but which a transaction has in hand (the old holder's, with its work not yet committed) is
#: left to it.
_TAKE_OVER = """
UPDATE rabbitdlq_idempotency SET token = %(token)s, done = false,
    ends = clock_timestamp() + %(lease)s::float8 * interval '1 millisecond'
WHERE (namespace, key) IN (
    SELECT namespace, key FROM rabbitdlq_idempotency
    WHERE namespace = %(namespace)s AND key = %(key)s AND ends <= clock_timestamp() FOR UPDATE SKIP LOCKED
) AND ends <= clock_timestamp()"""
_COMPLETE = """
INSERT INTO rabbitdlq_idempotency AS found (namespace, key, token, done, ends)
VALUES (%(namespace)s, %(key)s, %(token)s, true, clock_timestamp() + %(keep)s::float8 * interval '1 millisecond')
ON CONFLICT (namespace, key) DO UPDATE SET token = excluded.token, done = true, ends = excluded.ends
WHERE found.token IN (excluded.token, '') OR found.ends <= clock_timestamp()"""
_RELEASE = """
DELETE FROM rabbitdlq_idempotency
WHERE namespace = %(namespace)s AND key = %(key)s AND token = %(token)s AND NOT done"""
_SWEEP = """
DELETE FROM rabbitdlq_idempotency WHERE (namespace, key) IN (
    SELECT namespace, key FROM rabbitdlq_idempotency WHERE ends <= clock_timestamp()
    ORDER BY ends LIMIT %(limit)s FOR UPDATE SKIP LOCKED)"""
#: the holder's token stays: it may still say that it is done
_RECORD = """
INSERT INTO rabbitdlq_idempotency AS found (namespace, key, token, done, ends)
VALUES (%(namespace)s, %(key)s, '', true, clock_timestamp() + %(keep)s::float8 * interval '1 millisecond')
ON CONFLICT (namespace, key) DO UPDATE SET done = true, ends = excluded.ends
WHERE NOT found.done OR found.ends <= clock_timestamp()"""

#: every so many claims at most so many rows are swept: more than claims can add
_SWEEP_EVERY = 64
_SWEEP_AT_MOST = 256


class PostgresStore(IdempotencyStore):
    """A store in a table of PostgreSQL, 12 or later. Leases run by the server's clock.

    What was answered is as safe as any commit of that server: safe on disk, with the server's defaults. With
    :func:`record` in the transaction of the work, work and mark commit together or not at all. A key whose record is
    not yet committed is busy, even when its lease has ended.
    """

    def __init__(self, url: str, *, namespace: str = DEFAULT_NAMESPACE, keep: timedelta | str = DEFAULT_KEEP) -> None:
        """``url``: ``postgresql://user:password@host:5432/database``; options of libpq in its query.

        Raises :class:`ConfigurationError` for a URL that cannot be read, or where psycopg is not installed.
        """
        super().__init__(namespace=namespace, keep=keep)
        self._name = server_name(url, _FORM, _SCHEMES)
        try:
            import psycopg  # noqa: PLC0415 - an extra, which who uses another store goes without
        except ImportError as error:
            raise needs_extra("postgres") from error
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error:
            # its text shows the URL, and with it the password
            raise ConfigurationError(
                f"idempotency: {self._name}: the URL or an option in its query cannot be read; write {_FORM}"
            ) from None
        self._url = url
        self._options: dict[str, Any] = {} if "connect_timeout" in given else {"connect_timeout": _SECONDS // 2}
        self._sessions: Sessions | None = None
        self._claims = 0

    @property
    def name(self) -> str:
        """What and where it is, for messages to people."""
        return self._name

    async def open(self) -> None:
        """Connect, and make the table if it is missing.

        Raises :class:`IdempotencyError` with the statements for it where the account may not make or use it.
        """
        async with self._opening:
            if self._sessions is not None:
                return
            self._sessions = Sessions(
                self._url, most=_CONNECTIONS, options=self._options, lock_timeout_ms=1000 * _LOCK_SECONDS
            )
            try:
                await self._run(self._prepare)
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """Let go of connections."""
        if self._sessions is not None:
            sessions, self._sessions = self._sessions, None
            await sessions.close()

    async def claim(self, key: str, lease: timedelta) -> Claim:
        """New, done, or busy."""
        values = self._values(key, new_token(), lease=span("lease", lease))
        claim = await self._run(lambda connection: _claim(connection, values))
        if claim.state == "new":
            self._claims += 1
            if self._claims % _SWEEP_EVERY == 0:
                await self._run(lambda connection: connection.execute(_SWEEP, {"limit": _SWEEP_AT_MOST}))
        return claim

    async def complete(self, key: str, token: str) -> bool:
        """Write down that the work is done; False where somebody else has got the claim since."""
        values = self._values(key, token, keep=self._keep_ms)
        return (await self._run(lambda connection: connection.execute(_COMPLETE, values))).rowcount == 1

    async def release(self, key: str, token: str) -> None:
        """Give the key back; nothing happens where it is done, or is no longer held."""
        values = self._values(key, token)
        await self._run(lambda connection: connection.execute(_RELEASE, values))

    def _values(self, key: str, token: str, **more: int) -> dict[str, Any]:
        return {"namespace": self.namespace, "key": stored_key(key), "token": token, **more}

    async def _run(self, call: "Callable[[AsyncConnection[Any]], Awaitable[T]]") -> T:
        import psycopg  # noqa: PLC0415 - an extra, see above

        if self._sessions is None:
            raise self._not_open()
        try:
            async with asyncio.timeout(_SECONDS):
                return await self._sessions.run(call)
        except TimeoutError as error:
            raise self._error(f"no answer within {_SECONDS} s") from error
        except psycopg.errors.LockNotAvailable as error:
            raise self._error(f"a transaction has had the key in hand for more than {_LOCK_SECONDS} s") from error
        except psycopg.Error as error:
            raise self._error(" ".join(str(error).split()) or type(error).__name__) from error

    async def _prepare(self, connection: "AsyncConnection[Any]") -> None:
        import psycopg  # noqa: PLC0415 - an extra, see above

        if not await _answer(connection, _THERE):
            try:
                async with connection.transaction():
                    # two that make one table at the same time get in each other's way
                    await connection.execute(b"SELECT pg_advisory_xact_lock(%s)", [_MAKING])
                    await connection.execute(DDL.encode())
            except psycopg.errors.InsufficientPrivilege as error:
                reason = f"there is no table rabbitdlq_idempotency, and this account may not make it: {error}"
                raise self._error(f"{reason}; have this run as its owner:\n{DDL}\n{_GRANT}") from error
        if not await _answer(connection, _USABLE):
            raise self._error(f"this account may not use the table; have this run as its owner:\n{_GRANT}")
        try:
            await connection.execute(_COLUMNS)
        except psycopg.errors.UndefinedColumn as error:
            raise self._error(f"the table rabbitdlq_idempotency is none of this version: {error}") from error


async def _answer(connection: "AsyncConnection[Any]", question: LiteralString) -> bool:
    row = await (await connection.execute(question)).fetchone()
    return row is not None and bool(row[0])


async def _claim(connection: "AsyncConnection[Any]", values: dict[str, Any]) -> Claim:
    import psycopg  # noqa: PLC0415 - an extra, see above

    try:
        # what is seen may be gone in the next moment; so often in a row it is not
        for _ in range(_LOOKS):
            row = await (await connection.execute(_CLAIM, values)).fetchone()
            match row:
                case None:
                    continue
                case ["new", _]:
                    return Claim("new", values["token"])
                case ["done", _]:
                    return Claim("done")
                case ["busy", seconds]:
                    return Claim("busy", until=utc_now() + timedelta(seconds=seconds))
            if (await connection.execute(_TAKE_OVER, values)).rowcount == 1:
                return Claim("new", values["token"])
    except psycopg.errors.LockNotAvailable:
        # somebody's transaction has recorded a key that nobody had claimed, and is not yet committed
        pass
    return Claim("busy")


def record_in_postgres(connection: "Connection[Any]", key: str, namespace: str, keep: timedelta | str) -> None:
    """Write the key down as done in the connection's transaction; see :func:`rabbitdlq.idempotency.record`."""
    import psycopg  # noqa: PLC0415 - an extra, see above

    _check_transaction(connection)
    try:
        count = connection.execute(_RECORD, _mark(key, namespace, keep)).rowcount
    except psycopg.errors.UndefinedTable as error:
        raise IdempotencyError(_NO_TABLE) from error
    check_recorded(key, count)


async def record_in_postgres_async(
    connection: "AsyncConnection[Any]", key: str, namespace: str, keep: timedelta | str
) -> None:
    """Write the key down as done in the connection's transaction; see :func:`rabbitdlq.idempotency.record`."""
    import psycopg  # noqa: PLC0415 - an extra, see above

    _check_transaction(connection)
    try:
        count = (await connection.execute(_RECORD, _mark(key, namespace, keep))).rowcount
    except psycopg.errors.UndefinedTable as error:
        raise IdempotencyError(_NO_TABLE) from error
    check_recorded(key, count)


def _mark(key: str, namespace: str, keep: timedelta | str) -> dict[str, Any]:
    return {"namespace": namespace, "key": stored_key(key), "keep": span("keep", keep)}


def _check_transaction(connection: "Connection[Any] | AsyncConnection[Any]") -> None:
    from psycopg.pq import TransactionStatus  # noqa: PLC0415 - an extra, see above

    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        raise ConfigurationError(NO_TRANSACTION)
