"""Keys, options and URLs of stores; what memory and SQLite forget; SQLite's groups. The promises: tests/stores."""

import asyncio
import doctest
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import AlreadyDone, ConfigurationError
from rabbitdlq.idempotency import (
    IdempotencyStore,
    MemoryStore,
    PostgresStore,
    RedisStore,
    SQLiteStore,
    keys,
    record,
    store_of,
)
from rabbitdlq.idempotency.committing import Committer
from rabbitdlq.idempotency.keys import MAX_KEY_LENGTH, span, stored_key
from rabbitdlq.message import message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties
from tests.acceptance.test_readme import blocks
from tests.unit.strategies import quick

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


class Clock:
    """A clock that is put forward by hand."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def test_the_examples_are_true() -> None:
    assert doctest.testmod(keys) == (0, 2)


@settings(quick, max_examples=100)
@given(st.text(st.characters(exclude_categories=[]), min_size=1, max_size=220), st.text(min_size=1, max_size=9))
def test_every_key_is_stored_as_short_plain_text_of_its_own(one: str, other: str) -> None:
    stored = stored_key(one)

    assert stored.isascii()
    assert stored.isprintable()
    assert 0 < len(stored) <= MAX_KEY_LENGTH
    assert (stored == stored_key(other)) == (one == other)


def test_what_is_stored_can_pass_for_no_other_key() -> None:
    long = "x" * (MAX_KEY_LENGTH + 1)

    assert stored_key(long).startswith("sha256:")
    assert stored_key(stored_key(long)) != stored_key(long)
    assert stored_key("x" * MAX_KEY_LENGTH) == "x" * MAX_KEY_LENGTH


def test_a_fraction_of_a_millisecond_counts_as_a_whole_one() -> None:
    assert span("lease", timedelta(microseconds=1)) == 1
    assert span("lease", timedelta(seconds=1)) == 1000
    assert span("lease", timedelta(microseconds=1001)) == 2


@pytest.mark.parametrize("namespace", ["", "a:b", "a b", "ä", "x" * 65, "a\n"])
def test_a_namespace_that_cannot_be_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="namespace"):
        MemoryStore(namespace=namespace)


@pytest.mark.parametrize("keep", [timedelta(), timedelta.max, -HOUR])
def test_a_keep_that_cannot_be_is_refused(keep: timedelta) -> None:
    with pytest.raises(ConfigurationError, match="keep"):
        MemoryStore(keep=keep)


@pytest.mark.parametrize(
    ("url", "kind", "name"),
    [
        ("memory:", MemoryStore, "memory"),
        ("sqlite:claims.db", SQLiteStore, "sqlite:claims.db"),
        ("sqlite:/var/lib/claims.db", SQLiteStore, "sqlite:/var/lib/claims.db"),
        ("sqlite:///claims.db", SQLiteStore, "sqlite:claims.db"),
        ("sqlite:////var/lib/claims.db", SQLiteStore, "sqlite:/var/lib/claims.db"),
        ("redis://host", RedisStore, "redis://host"),
        ("redis://me:secret@host:6380/1?socket_timeout=1", RedisStore, "redis://me@host:6380/1"),
        ("rediss://:secret@[::1]:6380", RedisStore, "rediss://[::1]:6380"),
        ("postgresql://me:se%40cret@host:5433/orders", PostgresStore, "postgresql://me@host:5433/orders"),
        ("postgres://host/orders?password=secret", PostgresStore, "postgres://host/orders"),
    ],
)
def test_a_url_names_a_store(url: str, kind: type[IdempotencyStore], name: str) -> None:
    store = store_of(url, namespace="shop", keep=DAY)

    assert type(store) is kind
    assert store.name == name
    assert (store.namespace, store.keep) == ("shop", DAY)


@pytest.mark.parametrize(
    "url",
    [
        "",
        ":",
        "memory",
        "memory:x",
        "sqlite:",
        "sqlite:///",
        "sqlite::memory:",
        "sqlite:file:x?mode=memory",
        "claims.db",
        "mysql://me:secret@host/orders",
        "Redis//me:secret@host",
        "redis://me:sec/ret@host/0",
        "redis://me:sec#ret@host/0",
        "redis://me:sec@ret@host/0",
        "redis://host:secret/0",
        "redis://:secret@host/orders",
        "redis://[secret",
        "postgresql://me:sec/ret@host/orders",
        "postgresql://me:sec@ret@host/orders",
        "postgresql://me:sec%zzret@host/orders",
        "postgresql://me:secret@host/orders?nonsense=secret",
        "postgresql://host:secret/orders",
    ],
)
def test_what_names_no_store_is_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="idempotency: ") as caught:
        store_of(url)
    assert not {word for word in ("secret", "sec", "ret@", "ret") if f" {word}" in f" {caught.value}"}
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("name", "module", "kind"), [("redis", "redis", RedisStore), ("postgres", "psycopg", PostgresStore)]
)
def test_a_store_without_its_packages_says_how_to_get_them(
    name: str, module: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [*(loaded for loaded in sys.modules if loaded.startswith(f"{module}.")), module]:
        monkeypatch.setitem(sys.modules, loaded, None)
    with pytest.raises(ConfigurationError, match=rf"pip install rabbitdlq\[{name}\]"):
        kind("redis://host" if name == "redis" else "postgresql://host")


def test_the_package_is_there_without_the_extras() -> None:
    code = "import sys; sys.modules |= {'redis': None, 'psycopg': None}; import rabbitdlq.idempotency as i; "
    code += "import sqlite3\ntry: i.record(5, 'x')\nexcept Exception as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "builtins.int is none of" in done.stdout


async def test_memory_knows_no_more_than_it_may() -> None:
    clock = Clock()
    async with MemoryStore(max_keys=10, clock=clock) as store:
        for n in range(100):
            claim = await store.claim(f"orders:{n}", HOUR)
            await store.complete(f"orders:{n}", claim.token)
            assert len(store) <= 10

        assert (await store.claim("orders:90", HOUR)).state == "done"
        assert (await store.claim("orders:89", HOUR)).state == "new", "the oldest is forgotten first"


async def test_memory_never_forgets_who_is_working() -> None:
    async with MemoryStore(max_keys=1, clock=Clock()) as store:
        for n in range(50):
            await store.claim(f"orders:{n}", HOUR)

        assert {(await store.claim(f"orders:{n}", HOUR)).state for n in range(50)} == {"busy"}


async def test_memory_forgets_what_is_over() -> None:
    clock = Clock()
    async with MemoryStore(keep=DAY, clock=clock) as store:
        await store.claim("a long one", 30 * DAY)
        for n in range(100):
            claim = await store.claim(f"done:{n}", HOUR)
            await store.complete(f"done:{n}", claim.token)
            await store.claim(f"abandoned:{n}", HOUR)
        clock.now += 2 * DAY
        for _ in range(100):
            claim = await store.claim("one more", HOUR)
            await store.release("one more", claim.token)

        assert len(store) == 1
        assert (await store.claim("a long one", HOUR)).state == "busy"


def test_memory_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_keys"):
        MemoryStore(max_keys=0)


async def test_sqlite_sweeps_what_is_over(tmp_path: Path) -> None:
    clock = Clock()
    async with SQLiteStore(tmp_path / "claims.db", keep=DAY, clock=clock) as store:
        for n in range(300):
            claim = await store.claim(f"done:{n}", HOUR)
            await store.complete(f"done:{n}", claim.token)
        clock.now += 2 * DAY
        for n in range(200):
            await store.claim(f"held:{n}", HOUR)

    rows = sqlite3.connect(tmp_path / "claims.db")
    assert rows.execute("SELECT count(*) FROM rabbitdlq_idempotency WHERE done").fetchone() == (0,)
    assert rows.execute("SELECT count(*) FROM rabbitdlq_idempotency").fetchone() == (200,)
    plan = rows.execute(
        "EXPLAIN QUERY PLAN SELECT key FROM rabbitdlq_idempotency WHERE ends <= 5 ORDER BY ends LIMIT 9"
    )
    assert "USING COVERING INDEX rabbitdlq_idempotency_ends" in str(plan.fetchall())
    rows.close()


@pytest.fixture
async def slow_committer() -> Any:
    """A committer whose first operation waits for an event; what it was told to execute is listed."""
    said: list[str] = []

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.set_trace_callback(said.append)
        return connection

    committer, gate = Committer(connect), threading.Event()
    await committer.start()
    first = asyncio.create_task(committer.run(lambda _: gate.wait(10)))
    await asyncio.sleep(0)
    yield committer, gate, first, said
    gate.set()
    await committer.stop()


async def test_what_is_asked_for_meanwhile_is_one_transaction(slow_committer: Any) -> None:
    committer, gate, first, said = slow_committer
    others = [asyncio.create_task(committer.run(lambda c, n=n: c.execute(f"SELECT {n}").fetchone())) for n in range(3)]
    await asyncio.sleep(0)
    assert not first.done()
    gate.set()

    assert await asyncio.gather(*others) == [(0,), (1,), (2,)]
    assert said[-5:] == ["BEGIN IMMEDIATE", "SELECT 0", "SELECT 1", "SELECT 2", "COMMIT"]


async def test_a_group_fails_as_a_whole_and_the_next_one_works(slow_committer: Any) -> None:
    committer, gate, _, said = slow_committer
    statements = ("CREATE TABLE t (n)", "nonsense", "SELECT 1")
    group = [asyncio.create_task(committer.run(lambda c, s=s: c.execute(s).fetchone())) for s in statements]
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*group, return_exceptions=True)

    assert {type(result) for result in results} == {sqlite3.OperationalError}
    assert said[-1] == "ROLLBACK"
    assert await committer.run(lambda c: c.execute("SELECT count(*) FROM sqlite_master").fetchone()) == (0,)


async def test_the_event_loop_goes_on_while_sqlite_waits(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "claims.db") as store:
        other = sqlite3.connect(tmp_path / "claims.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.claim("orders:1", HOUR))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        other.execute("COMMIT")
        other.close()

        assert (await waiting).state == "new"


class TestRecord:
    def test_a_message_without_a_key_is_told_to_have_none(self) -> None:
        """It was "expected string or bytes-like object", which says nothing to who forgot the store."""
        with closing(sqlite3.connect(":memory:")) as database:
            with pytest.raises(
                ConfigurationError, match=r"^record: the message has no key: its consumer has no idempote"
            ):
                record(database, None)
            with pytest.raises(
                ConfigurationError, match=r"^record: key: 5 cannot be used; give message.idempotency_key"
            ):
                record(database, 5)  # type: ignore[call-overload]

    async def test_the_handler_of_the_readme_commits_its_work_and_the_mark_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (program,) = [block for block in blocks("python") if "record(" in block]
        names_in_it: dict[str, Any] = {}
        exec(program, names_in_it)
        monkeypatch.chdir(tmp_path)
        arrival = Arrival(0, 0, "", "orders")
        bare = message_of(Topology("orders", ["5s"]), b"", Properties(message_id="17"), arrival, failures=0)
        message = replace(bare, payload={"address": "London"}, idempotency_key="orders:17")

        async with SQLiteStore("shop.db") as store:
            with closing(sqlite3.connect("shop.db")) as database:
                database.execute("CREATE TABLE shipped (address NOT NULL)")
                with pytest.raises(KeyError):  # the work fails: no mark either
                    names_in_it["handle"](replace(message, payload={}))
                names_in_it["handle"](message)
                with pytest.raises(AlreadyDone):
                    names_in_it["handle"](message)
                assert database.execute("SELECT address FROM shipped").fetchall() == [("London",)]
            assert (await store.claim("orders:17", HOUR)).state == "done"
