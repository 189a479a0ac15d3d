"""The mark in the user's own transaction: it commits with the work, or not at all."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from rabbitdlq.errors import AlreadyDone, ConfigurationError, IdempotencyError
from rabbitdlq.idempotency import Claim, IdempotencyStore, SQLiteStore, postgres, record
from tests.stores.conftest import place_of
from tests.stores.kit import HOUR, SHORT, Place
from tests.stores.servers import Server
from tests.stores.userdb import KINDS, UserDatabase

BY_HAND: dict[str, dict[str, Any]] = {
    "sqlite": {"isolation_level": None},
    "psycopg": {"autocommit": True},
    "psycopg async": {"autocommit": True},
}


@pytest.fixture(params=KINDS)
async def payments(request: pytest.FixtureRequest, tmp_path: Path) -> UserDatabase:
    place = place_of("sqlite" if request.param == "sqlite" else "postgresql", request, tmp_path)
    database = UserDatabase(request.param, place)
    await database.prepare()
    return database


@pytest.fixture
async def store(payments: UserDatabase) -> AsyncIterator[IdempotencyStore]:
    async with payments.place.opened() as opened:
        yield opened


async def test_work_and_mark_commit_together(store: IdempotencyStore, payments: UserDatabase) -> None:
    claim = await store.claim("orders:1", HOUR)
    async with payments.transaction() as work:
        await work.record("orders:1")
        await work.pay()

    assert (await store.claim("orders:1", HOUR)).state == "done"
    assert await store.complete("orders:1", claim.token)
    assert (await store.claim("orders:1", HOUR)).state == "done"
    assert await payments.paid() == 1


async def test_work_and_mark_are_rolled_back_together(store: IdempotencyStore, payments: UserDatabase) -> None:
    claim = await store.claim("orders:1", HOUR)
    async with payments.taken_back() as work:
        await work.record("orders:1")
        await work.pay()

    assert (await store.claim("orders:1", HOUR)).state == "busy"
    await store.release("orders:1", claim.token)
    assert (await store.claim("orders:1", HOUR)).state == "new"
    assert await payments.paid() == 0


async def test_a_handler_that_fails_after_its_commit_does_not_undo_the_mark(
    store: IdempotencyStore, payments: UserDatabase
) -> None:
    claim = await store.claim("orders:1", HOUR)
    async with payments.transaction() as work:
        await work.record("orders:1")
    await store.release("orders:1", claim.token)

    assert (await store.claim("orders:1", HOUR)).state == "done"


async def test_the_work_is_done_once_even_where_the_lease_ended_while_it_ran(
    store: IdempotencyStore, payments: UserDatabase
) -> None:
    slow = await store.claim("orders:1", SHORT)
    await payments.place.go_by(SHORT)
    claim = await store.claim("orders:1", HOUR)
    assert claim.state == "new"
    async with payments.transaction() as work:
        await work.record("orders:1")
        await work.pay()
    assert not await store.complete("orders:1", slow.token)

    async def repeat() -> None:
        async with payments.transaction() as work:
            await work.pay()
            await work.record("orders:1")

    with pytest.raises(AlreadyDone, match="orders:1"):
        await repeat()
    assert await store.complete("orders:1", claim.token), "it may say that it is done: it is"
    assert await payments.paid() == 1


async def test_a_mark_needs_no_claim(store: IdempotencyStore, payments: UserDatabase) -> None:
    async with payments.transaction() as work:
        await work.record("orders:1")
    with pytest.raises(AlreadyDone):
        async with payments.transaction() as work:
            await work.record("orders:1")

    assert (await store.claim("orders:1", HOUR)).state == "done"
    assert await store.complete("orders:1", "a holder whose claim was swept meanwhile")


async def test_a_mark_that_would_commit_by_itself_is_refused(store: IdempotencyStore, payments: UserDatabase) -> None:
    async with payments.connected(**BY_HAND[payments.kind]) as work:
        with pytest.raises(ConfigurationError, match="no transaction is open"):
            await work.record("orders:1")
        assert (await store.claim("orders:1", HOUR)).state == "new"

        await work.execute("BEGIN")
        await work.record("orders:1")
        await work.execute("COMMIT")
        assert (await store.claim("orders:1", HOUR)).state == "done"


async def test_rows_may_have_any_shape(store: IdempotencyStore, payments: UserDatabase) -> None:
    async with payments.connected() as work:
        work.connection.row_factory = sqlite3.Row if payments.kind == "sqlite" else psycopg.rows.dict_row
        await work.record("orders:1")
        with pytest.raises(AlreadyDone):
            await work.record("orders:1")


async def test_another_database_is_told_what_is_missing(
    payments: UserDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if payments.kind == "sqlite":
        payments.place.url = f"sqlite:{tmp_path / 'another.db'}"
    else:
        monkeypatch.setenv("PGOPTIONS", "-csearch_path=nowhere")
    async with payments.connected() as work:
        with pytest.raises(IdempotencyError, match=r"no table rabbitdlq_idempotency.*on the same"):
            await work.record("orders:1")


def test_another_kind_of_connection_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"builtins\.int is none of sqlite3\.Connection"):
        record(cast(Any, 5), "orders:1")


async def test_while_work_is_not_committed_its_key_is_busy_and_the_others_go_on(postgresql: Server) -> None:
    payments = UserDatabase("psycopg async", Place(postgresql.url, "open-work"))
    await payments.prepare()
    async with payments.place.opened() as store:
        claim = await store.claim("orders:1", SHORT)
        async with payments.transaction() as work:
            await work.record("orders:1")
            await payments.place.go_by(SHORT)

            started = time.monotonic()
            assert await store.claim("orders:1", HOUR) == Claim("busy"), "its lease is over, but not its work"
            assert (await store.claim("orders:2", HOUR)).state == "new"
            assert time.monotonic() - started < 2, "nobody waits for the transaction"
        assert (await store.claim("orders:1", HOUR)).state == "done"
        assert await store.complete("orders:1", claim.token)

        await store.claim("orders:3", SHORT)
        async with payments.taken_back() as work:
            await work.record("orders:3")
            await payments.place.go_by(SHORT)
        assert (await store.claim("orders:3", HOUR)).state == "new"


async def test_a_key_that_nobody_claimed_is_busy_while_its_mark_is_not_committed(
    postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_LOCK_SECONDS", 0.2)
    payments = UserDatabase("psycopg async", Place(postgresql.url, "unclaimed"))
    await payments.prepare()
    async with payments.place.opened() as store:
        async with payments.transaction() as work:
            await work.record("orders:1")
            assert await store.claim("orders:1", HOUR) == Claim("busy")
            with pytest.raises(IdempotencyError, match="a transaction has had the key in hand"):
                await store.complete("orders:1", "a holder whose claim was swept meanwhile")
        assert (await store.claim("orders:1", HOUR)).state == "done"


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
async def test_two_transactions_with_one_key_do_its_work_once(postgresql: Server, level: str) -> None:
    payments = UserDatabase("psycopg async", Place(postgresql.url, f"two-{level.replace(' ', '-')}"))
    await payments.prepare()
    both_began = asyncio.Barrier(2)

    async def work_on_it() -> str:
        async with payments.transaction() as work:
            await work.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            await work.pay()
            await both_began.wait()
            await work.record("orders:1")
        return "did it"

    async with payments.place.opened() as store:
        await store.claim("orders:1", HOUR)
        results = await asyncio.gather(work_on_it(), work_on_it(), return_exceptions=True)
        assert (await store.claim("orders:1", HOUR)).state == "done"

    assert results.count("did it") == 1
    other = next(result for result in results if result != "did it")
    # with a snapshot of its own the second one cannot see that it is done, but is not let through either
    assert isinstance(other, AlreadyDone if level == "READ COMMITTED" else psycopg.errors.SerializationFailure)
    assert await payments.paid() == 1


async def test_claims_wait_for_a_transaction_that_writes_to_the_file(tmp_path: Path) -> None:
    payments = UserDatabase("sqlite", Place(f"sqlite:{tmp_path / 'own.db'}", "waiting"))
    await payments.prepare()
    async with payments.place.opened() as store:
        async with payments.transaction() as work:
            await work.record("orders:1")
            waiting = asyncio.create_task(store.claim("orders:1", HOUR))
            impatient = SQLiteStore(payments.target, timeout=timedelta(milliseconds=50), namespace="waiting")
            with pytest.raises(
                IdempotencyError, match=r"locked; a transaction that writes was open for more than 0.05"
            ):
                await impatient.open()
            assert not waiting.done()
        assert (await waiting).state == "done"
