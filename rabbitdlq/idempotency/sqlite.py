"""Claims in a SQLite file: for all processes of one host, without a server."""

import os
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rabbitdlq.errors import ConfigurationError, IdempotencyError
from rabbitdlq.idempotency.committing import Committer, Operation, T
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
from rabbitdlq.idempotency.store import Claim, IdempotencyStore

__all__ = ["SQLiteStore", "record_in_sqlite"]

DEFAULT_TIMEOUT = timedelta(seconds=10)
SCHEMA_VERSION = 1

#: ``PRAGMA user_version`` is the user's, whose file this may be
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS rabbitdlq_idempotency (
        namespace TEXT NOT NULL,
        key TEXT NOT NULL,
        token TEXT NOT NULL,   -- of the holder, or of who completed it; empty: recorded by a transaction
        done INTEGER NOT NULL,
        ends INTEGER NOT NULL, -- milliseconds since 1970: the end of the lease, or of how long a done key is kept
        PRIMARY KEY (namespace, key)
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS rabbitdlq_idempotency_ends ON rabbitdlq_idempotency (ends)",
    "CREATE TABLE IF NOT EXISTS rabbitdlq_idempotency_schema (version INTEGER NOT NULL)",
)
_SET_VERSION = """INSERT INTO rabbitdlq_idempotency_schema
    SELECT ? WHERE NOT EXISTS (SELECT 1 FROM rabbitdlq_idempotency_schema)"""
_VERSION = "SELECT max(version) FROM rabbitdlq_idempotency_schema"
_FIND = "SELECT token, done, ends FROM rabbitdlq_idempotency WHERE namespace = ? AND key = ?"
_PUT = "INSERT OR REPLACE INTO rabbitdlq_idempotency (namespace, key, token, done, ends) VALUES (?, ?, ?, ?, ?)"
_RELEASE = "DELETE FROM rabbitdlq_idempotency WHERE namespace = ? AND key = ? AND token = ? AND done = 0"
_SWEEP = """DELETE FROM rabbitdlq_idempotency WHERE (namespace, key) IN
    (SELECT namespace, key FROM rabbitdlq_idempotency WHERE ends <= ? ORDER BY ends LIMIT ?)"""
#: the holder's token stays: it may still say that it is done
_RECORD = """INSERT INTO rabbitdlq_idempotency (namespace, key, token, done, ends) VALUES (?, ?, '', 1, ?)
    ON CONFLICT (namespace, key) DO UPDATE SET done = 1, ends = excluded.ends WHERE done = 0 OR ends <= ?"""

#: every so many claims at most so many rows are swept: more than claims can add
_SWEEP_EVERY = 64
_SWEEP_AT_MOST = 256


class SQLiteStore(IdempotencyStore):
    """A store in a file. Processes of one host share it; a network file system will not do.

    The file may be the user's own database: then :func:`record` writes a key down in the transaction of the work. It
    is put into WAL mode. SQLite has one writer at a time: while a transaction that writes is open anywhere, claims
    wait for it, at most ``timeout``.

    A process that is killed loses nothing that was answered. When the machine itself goes down, the last moments may
    be lost, but the file stays sound (``synchronous=NORMAL``): what was done then may be done once more.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        timeout: timedelta = DEFAULT_TIMEOUT,
        namespace: str = DEFAULT_NAMESPACE,
        keep: timedelta | str = DEFAULT_KEEP,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        """``path``: is made if it is missing, its directory is not. ``clock``: gives aware datetimes."""
        super().__init__(namespace=namespace, keep=keep)
        self._path = Path(path)
        if str(path).strip() in {"", "."} or str(path).startswith((":memory:", "file:")):
            raise ConfigurationError(f"idempotency: {str(path)!r} is not the path of a file")
        self._timeout = timeout
        self._timeout_ms = span("timeout", timeout)
        self._clock = clock
        self._committer: Committer | None = None
        self._claims = 0

    @property
    def name(self) -> str:
        """What and where it is, for messages to people."""
        return f"sqlite:{self._path}"

    async def open(self) -> None:
        """Open the file, and make it and its tables if they are missing."""
        async with self._opening:
            if self._committer is not None:
                return
            committer = Committer(self._connect)
            try:
                await committer.start()
            except sqlite3.Error as error:
                raise self._translated(error) from error
            self._committer = committer

    async def close(self) -> None:
        """Close the file, after what was asked for is written."""
        if self._committer is not None:
            committer, self._committer = self._committer, None
            await committer.stop()

    async def claim(self, key: str, lease: timedelta) -> Claim:
        """New, done, or busy."""
        key, lease_ms = stored_key(key), span("lease", lease)

        def operation(connection: sqlite3.Connection) -> Claim:
            now = self._now_ms()
            row = connection.execute(_FIND, (self.namespace, key)).fetchone()
            if row is not None and row[2] > now:
                return Claim("done") if row[1] else Claim("busy", until=datetime.fromtimestamp(row[2] / 1000, UTC))
            token = new_token()
            connection.execute(_PUT, (self.namespace, key, token, 0, now + lease_ms))
            self._claims += 1
            if self._claims % _SWEEP_EVERY == 0:
                connection.execute(_SWEEP, (now, _SWEEP_AT_MOST))
            return Claim("new", token)

        return await self._run(operation)

    async def complete(self, key: str, token: str) -> bool:
        """Write down that the work is done; False where somebody else has got the claim since."""
        key = stored_key(key)

        def operation(connection: sqlite3.Connection) -> bool:
            now = self._now_ms()
            row = connection.execute(_FIND, (self.namespace, key)).fetchone()
            if row is not None and row[0] not in {token, ""} and row[2] > now:
                return False
            connection.execute(_PUT, (self.namespace, key, token, 1, now + self._keep_ms))
            return True

        return await self._run(operation)

    async def release(self, key: str, token: str) -> None:
        """Give the key back; nothing happens where it is done, or is no longer held."""
        key = stored_key(key)
        await self._run(lambda connection: connection.execute(_RELEASE, (self.namespace, key, token)).rowcount)

    async def _run(self, operation: Operation[T]) -> T:
        if self._committer is None:
            raise self._not_open()
        try:
            return await self._committer.run(operation)
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def _now_ms(self) -> int:
        return int(self._clock().timestamp() * 1000)

    def _connect(self) -> sqlite3.Connection:
        # transactions are begun and ended by the committer, not by the driver
        connection = sqlite3.connect(self._path, timeout=self._timeout_ms / 1000, isolation_level=None)
        try:
            _set_wal(connection, self._timeout)
            connection.execute("PRAGMA synchronous=NORMAL")
            _make_tables(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _translated(self, error: sqlite3.Error) -> IdempotencyError:
        return self._error(f"{error}{_advice(error, self._path, self._timeout)}")


def record_in_sqlite(connection: sqlite3.Connection, key: str, namespace: str, keep: timedelta | str) -> None:
    """Write the key down as done in the connection's transaction; see :func:`rabbitdlq.idempotency.record`."""
    driver_begins = connection.isolation_level is not None and getattr(connection, "autocommit", -1) is not True
    if not connection.in_transaction and not driver_begins:
        raise ConfigurationError(NO_TRANSACTION)
    now = int(time.time() * 1000)
    try:
        cursor = connection.execute(_RECORD, (namespace, stored_key(key), now + span("keep", keep), now))
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise  # of the user's own database, and of a kind that the user knows
        raise IdempotencyError(
            "record: the database of this connection has no table rabbitdlq_idempotency; the consumer's store has to "
            "be a SQLiteStore on the same file"
        ) from error
    check_recorded(key, cursor.rowcount)


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA:
        connection.execute(statement)
    connection.execute(_SET_VERSION, (SCHEMA_VERSION,))
    found = connection.execute(_VERSION).fetchone()[0]
    connection.execute("COMMIT")
    if found != SCHEMA_VERSION:
        raise sqlite3.DatabaseError(
            f"its tables are of version {found}, and this rabbitdlq knows version {SCHEMA_VERSION}"
        )


def _set_wal(connection: sqlite3.Connection, timeout: timedelta) -> None:
    """Switch to WAL. While others do the same or write, SQLite refuses at once instead of waiting."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
            continue
        if mode != "wal":
            raise sqlite3.DatabaseError(f"cannot be put into WAL mode (it stays in mode {mode})")
        return


def _advice(error: sqlite3.Error, path: Path, timeout: timedelta) -> str:
    """What to do about it, where that is known."""
    # errors that we raise ourselves have no code
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_CANTOPEN and path.is_dir():
        return "; it is a directory, name a file"
    if code == sqlite3.SQLITE_CANTOPEN and not path.parent.is_dir():
        return f"; there is no directory {path.parent}, make it first"
    return _ADVICE.get(code, "").format(seconds=timeout.total_seconds())


_WRITABLE = "; the file and its directory must be writable for this user"
_ADVICE = {
    sqlite3.SQLITE_CANTOPEN: _WRITABLE,
    sqlite3.SQLITE_READONLY: _WRITABLE,
    sqlite3.SQLITE_PERM: _WRITABLE,
    sqlite3.SQLITE_NOTADB: "; name another file, this one is left as it is",
    sqlite3.SQLITE_BUSY: "; a transaction that writes was open for more than {seconds:g} s",
    sqlite3.SQLITE_FULL: "; make room on the disk",
}
