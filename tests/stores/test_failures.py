"""Stores that cannot be reached, or refuse: one clear error, without a password, and back to work afterwards."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis.asyncio as aioredis

from rabbitdlq.errors import ConfigurationError, IdempotencyError
from rabbitdlq.idempotency import PostgresStore, RedisStore, SQLiteStore, store_of
from tests.stores.kit import HOUR, SHORT, Place, until
from tests.stores.servers import PASSWORD, Server, postgres, redis_server


def chain_of(error: BaseException | None) -> str:
    """All that a traceback would show of it."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)


def assert_shows_no_password(error: BaseException) -> None:
    for part in (PASSWORD, "not%3A", "to/be", "to%2F", "shown"):
        assert part not in chain_of(error)


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
async def test_a_server_that_goes_and_comes_back(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kind)  # skips where there is none
    # servers of this test's own: other tests must not miss theirs
    with redis_server() if kind == "redis" else postgres() as server:
        async with store_of(server.url) as store:
            claims = [await store.claim(f"orders:{n}", HOUR) for n in range(3)]
            server.stop()
            with pytest.raises(IdempotencyError, match=rf"{kind}://.*{server.port}") as caught:
                await store.claim("orders:9", HOUR)
            assert_shows_no_password(caught.value)

            server.start()
            await until(lambda: _answers(store))
            assert await store.complete("orders:0", claims[0].token)
            assert (await store.claim("orders:0", HOUR)).state == "done"
            assert (await store.claim("orders:1", HOUR)).state == "busy"

            # all its connections are broken, and one call finds them so
            await asyncio.gather(*(store.claim(f"more:{n}", HOUR) for n in range(8)))
            server.stop()
            server.start()
            await until(lambda: _takes_connections(server))
            assert (await store.claim("orders:2", HOUR)).state == "busy"


async def _answers(store: Any) -> bool:
    try:
        await store.claim("ready", HOUR)
    except IdempotencyError:
        return False
    return True


async def _takes_connections(server: Server) -> bool:
    try:
        async with store_of(server.url):
            return True
    except IdempotencyError:
        return False


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
async def test_a_wrong_password_is_said_and_not_shown(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    url = server.url.replace("not%3Ato", "another%3Ato")
    with pytest.raises(IdempotencyError, match=r"(?i)password") as caught:
        await store_of(url).open()
    assert_shows_no_password(caught.value)


@pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:1/0", "postgresql://me:secret@127.0.0.1:1/orders"])
async def test_nobody_is_there(url: str) -> None:
    started = time.monotonic()
    with pytest.raises(IdempotencyError, match=r"127\.0\.0\.1") as caught:
        await store_of(url).open()
    assert "secret" not in chain_of(caught.value)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
async def test_a_server_that_takes_connections_and_says_nothing(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rabbitdlq.idempotency.redis._SECONDS", 0.1)
    monkeypatch.setattr("rabbitdlq.idempotency.postgres._SECONDS", 0.3)
    callers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: callers.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    try:
        with pytest.raises(IdempotencyError, match=f"{scheme}://127.0.0.1:{port}/0: .+"):
            await store_of(f"{scheme}://127.0.0.1:{port}/0").open()
    finally:
        silent.close()
        for caller in callers:
            caller.close()
            with contextlib.suppress(OSError):
                await caller.wait_closed()
    assert callers


@pytest.mark.parametrize("option", ["?password=secret&nonsense=1", "?socket_timeout=secret"])
async def test_options_that_are_none_are_refused_without_showing_them(redis: Server, option: str) -> None:
    with pytest.raises(ConfigurationError, match="option in the URL's query") as caught:
        await RedisStore(redis.url + option).open()
    assert "secret" not in chain_of(caught.value)
    assert_shows_no_password(caught.value)


async def test_a_redis_key_of_another_kind_is_a_clear_error(redis: Server) -> None:
    async with aioredis.Redis.from_url(redis.url) as client:
        await client.rpush("other-kind:orders:1", "x")
    async with RedisStore(redis.url, namespace="other-kind") as store:
        with pytest.raises(IdempotencyError, match="WRONGTYPE"):
            await store.claim("orders:1", HOUR)


async def test_redis_forgets_by_itself(redis: Server) -> None:
    async with RedisStore(redis.url, namespace="forgets", keep=SHORT) as store:
        claim = await store.claim("orders:1", SHORT)
        await store.complete("orders:1", claim.token)
        await store.claim("orders:2", SHORT)
    async with aioredis.Redis.from_url(redis.url) as client:

        async def is_empty() -> bool:
            return not await client.keys("forgets:*")

        await until(is_empty)


@pytest.fixture
async def owner(postgresql: Server) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    connection = await psycopg.AsyncConnection.connect(postgresql.url, autocommit=True)
    yield connection
    await connection.close()


async def test_who_may_not_make_the_table_gets_the_statements_for_it(
    postgresql: Server, owner: psycopg.AsyncConnection[Any]
) -> None:
    url = postgresql.url.replace("owner:not%3A", "worker:not%3A").replace("/postgres", "/bare")
    await owner.execute("CREATE DATABASE bare")
    await owner.execute(f"CREATE ROLE worker LOGIN PASSWORD '{PASSWORD}'".encode())
    store = PostgresStore(url)
    try:
        with pytest.raises(IdempotencyError, match="may not make it: permission denied") as caught:
            await store.open()
        assert_shows_no_password(caught.value)
        statements = str(caught.value).partition("as its owner:\n")[2]
        assert statements.startswith("CREATE TABLE")

        # what it says is what helps
        create, grant = statements.rsplit("\n", 1)
        bare = await psycopg.AsyncConnection.connect(postgresql.url.replace("/postgres", "/bare"), autocommit=True)
        async with bare:
            await bare.execute(create.encode())
            with pytest.raises(IdempotencyError, match=r"may not use the table.*\nGRANT"):
                await store.open()
            await bare.execute(grant.replace("the_account", "worker").encode())
            async with store:
                assert (await store.claim("orders:1", HOUR)).state == "new"
            await bare.execute(b"ALTER TABLE rabbitdlq_idempotency RENAME COLUMN ends TO until")
            with pytest.raises(IdempotencyError, match=r"none of this version.*ends"):
                await store.open()
    finally:
        await owner.execute("DROP DATABASE bare WITH (FORCE)")
        await owner.execute("DROP ROLE worker")


async def test_postgres_sweeps_what_is_over_a_bounded_number_at_a_time(
    postgresql: Server, owner: psycopg.AsyncConnection[Any]
) -> None:
    async with PostgresStore(postgresql.url, namespace="sweeps") as store:
        await owner.execute(
            "INSERT INTO rabbitdlq_idempotency SELECT 'swept', n::text, '', true, now() - interval '1 day' "
            "FROM generate_series(1, 300) AS n"
        )
        for n in range(64):
            await store.claim(f"orders:{n}", HOUR)
        left = await (
            await owner.execute("SELECT namespace, count(*) FROM rabbitdlq_idempotency GROUP BY 1")
        ).fetchall()

    counts = dict(left)
    assert 44 <= counts["swept"] < 300, "256 at most are swept at a time"
    assert counts["sweeps"] == 64
    await owner.execute("DELETE FROM rabbitdlq_idempotency WHERE namespace = 'swept'")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("missing/claims.db", "unable to open.*there is no directory .*missing, make it first"),
        (".", "unable to open.*it is a directory, name a file"),
        ("text.db", "file is not a database; name another file"),
        ("/proc/claims.db", "unable to open.*must be writable for this user"),
    ],
)
async def test_files_that_cannot_be_a_store(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "text.db").write_text("this is no database, but a text of some length\n" * 50)
    with pytest.raises(IdempotencyError, match=rf"idempotency store sqlite:.*: {says}"):
        await SQLiteStore(tmp_path / path if path != "." else tmp_path).open()
    assert (tmp_path / "text.db").read_text().startswith("this is no database")


async def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "claims.db"
    async with SQLiteStore(path):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE rabbitdlq_idempotency_schema SET version = 2")
    connection.close()

    with pytest.raises(IdempotencyError, match="its tables are of version 2, and this rabbitdlq knows version 1"):
        await SQLiteStore(path).open()


async def test_the_users_own_database_keeps_its_own_version(tmp_path: Path) -> None:
    path = tmp_path / "own.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 42")
    async with SQLiteStore(path) as store:
        await store.claim("orders:1", HOUR)

    assert connection.execute("PRAGMA user_version").fetchone() == (42,)
    connection.close()


async def test_a_file_that_breaks_under_way_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "claims.db"
    async with SQLiteStore(path, timeout=timedelta(seconds=1)) as store:
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TABLE rabbitdlq_idempotency")
        connection.close()
        with pytest.raises(IdempotencyError, match="no such table"):
            await store.claim("orders:1", HOUR)


async def test_many_open_one_new_file_at_the_same_time(tmp_path: Path) -> None:
    place = Place(f"sqlite:{tmp_path / 'claims.db'}", "together")
    stores = [place.store() for _ in range(8)]
    await asyncio.gather(*(store.open() for store in stores))
    claims = await asyncio.gather(*(store.claim("orders:1", HOUR) for store in stores))

    assert sorted(claim.state for claim in claims) == ["busy"] * 7 + ["new"]
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_database_in_use_is_switched_to_wal_when_its_writer_is_done(tmp_path: Path) -> None:
    own = sqlite3.connect(tmp_path / "own.db", isolation_level=None)
    own.execute("CREATE TABLE payments (who TEXT)")
    own.execute("BEGIN IMMEDIATE")
    own.execute("INSERT INTO payments VALUES ('me')")
    with pytest.raises(IdempotencyError, match="locked; a transaction that writes"):
        await SQLiteStore(tmp_path / "own.db", timeout=SHORT).open()

    store = SQLiteStore(tmp_path / "own.db")
    opening = asyncio.create_task(store.open())
    # SQLite refuses this switch at once, whatever its timeout; it has to be asked again
    await asyncio.wait([opening], timeout=0.1)
    assert not opening.done()
    own.execute("COMMIT")
    own.close()
    await opening
    await store.close()
