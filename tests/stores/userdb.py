"""A user's own database, where a handler does its work: SQLite, and PostgreSQL with either kind of connection."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from rabbitdlq.idempotency import record
from tests.stores.kit import Place

__all__ = ["KINDS", "UserDatabase", "Work"]

KINDS = ("sqlite", "psycopg", "psycopg async")


class _TakenBackError(Exception):
    pass


@dataclass
class Work:
    """An open transaction of the user's."""

    connection: Any
    namespace: str

    async def record(self, key: str) -> None:
        """Write the key down as done."""
        if isinstance(self.connection, psycopg.AsyncConnection):
            await record(self.connection, key, namespace=self.namespace)
        else:
            record(self.connection, key, namespace=self.namespace)

    async def pay(self) -> None:
        """Do the work."""
        await self.execute(f"INSERT INTO payments VALUES ('{self.namespace}')")

    async def execute(self, statement: str) -> list[Any]:
        """Run any statement; its rows."""
        cursor = self.connection.execute(statement)
        if isinstance(self.connection, psycopg.AsyncConnection):
            cursor = await cursor
            return list(await cursor.fetchall()) if cursor.description else []
        return list(cursor.fetchall()) if cursor.description else []


@dataclass
class UserDatabase:
    """The database, which has the store's table as well as the user's ``payments``."""

    kind: str
    place: Place

    @property
    def target(self) -> str:
        """What its driver connects to."""
        return self.place.url.removeprefix("sqlite:")

    @asynccontextmanager
    async def connected(self, **options: Any) -> AsyncIterator[Work]:
        """A connection whose transactions the caller ends."""
        if self.kind == "psycopg async":
            asynchronous = await psycopg.AsyncConnection.connect(self.target, **options)
            try:
                yield Work(asynchronous, self.place.namespace)
            finally:
                await asynchronous.close()
            return
        connection: Any = (
            sqlite3.connect(self.target, **options)
            if self.kind == "sqlite"
            else psycopg.connect(self.target, **options)
        )
        try:
            yield Work(connection, self.place.namespace)
        finally:
            connection.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Work]:
        """A transaction that is committed at the end, or rolled back where an error goes through."""
        async with self.connected() as work:
            if self.kind == "psycopg async":
                async with work.connection.transaction():
                    yield work
            elif self.kind == "psycopg":
                with work.connection.transaction():
                    yield work
            else:
                with work.connection:
                    yield work

    @asynccontextmanager
    async def taken_back(self) -> AsyncIterator[Work]:
        """A transaction that is rolled back at the end, as by an error."""
        with suppress(_TakenBackError):
            async with self.transaction() as work:
                yield work
                raise _TakenBackError

    async def prepare(self) -> None:
        """Make the user's table and the store's."""
        async with self.place.opened(), self.transaction() as work:
            if self.kind != "sqlite":  # all tests share the database, and may do this at the same time
                await work.execute("SELECT pg_advisory_xact_lock(1)")
            await work.execute("CREATE TABLE IF NOT EXISTS payments (who TEXT)")

    async def paid(self) -> int:
        """How often the work was done."""
        async with self.transaction() as work:
            rows = await work.execute(f"SELECT count(*) FROM payments WHERE who = '{self.place.namespace}'")
        return int(rows[0][0])
