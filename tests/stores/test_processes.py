"""Several processes at one store, and processes that are killed at any moment."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from tests.stores.kit import HOUR, Place, until
from tests.stores.userdb import UserDatabase
from tests.stores.worker import POINTS, worker_process

KEYS = 200
#: of a lease that has to end in the test; what is busy is asked with a long one
LEASE_MS = 200


async def test_of_several_processes_exactly_one_gets_each_key(shared_place: Place) -> None:
    words = ("race", shared_place.url, shared_place.namespace, str(KEYS))
    async with AsyncExitStack() as stack:
        # they also open the store at the same time, and make what is missing there
        workers = [await stack.enter_async_context(worker_process(*words)) for _ in range(4)]
        for worker in workers:
            assert await worker.line() == "ready"
        won = await asyncio.gather(*(worker.go() for worker in workers))

    assert Counter(key for keys in won for key in keys) == Counter(f"orders:{n}" for n in range(KEYS))
    async with shared_place.opened() as store:
        claims = await asyncio.gather(*(store.claim(f"orders:{n}", HOUR) for n in range(KEYS)))
    assert {claim.state for claim in claims} == {"done"}


def kind_of(place: Place) -> str:
    return place.url.partition(":")[0]


@pytest.fixture
async def payments(shared_place: Place) -> UserDatabase | None:
    kind = kind_of(shared_place)
    if kind == "redis":
        return None
    database = UserDatabase("sqlite" if kind == "sqlite" else "psycopg async", shared_place)
    await database.prepare()
    return database


@pytest.mark.parametrize(
    ("point", "lease", "told"),
    [
        ("claimed", "long", "busy"),
        ("claimed", "over", "new"),
        ("worked", "over", "new"),
        ("committed", "over", "done"),
        ("completed", "over", "done"),
    ],
)
async def test_what_the_next_one_is_told_after_a_kill(
    shared_place: Place, payments: UserDatabase | None, point: str, lease: str, told: str
) -> None:
    if point not in POINTS[kind_of(shared_place)]:
        pytest.skip("there is no such moment: Redis has no part in the user's transactions")
    lease_ms = LEASE_MS if lease == "over" else 3_600_000
    async with worker_process("work", shared_place.url, shared_place.namespace, str(lease_ms), point) as worker:
        assert await worker.line() == point
        await worker.kill()

    async with shared_place.opened() as store:

        async def comes_to_it() -> bool:
            return (await store.claim("orders:1", HOUR)).state == told

        if told == "new":  # when its lease is over
            await until(comes_to_it)
        else:
            assert await comes_to_it()
    if payments is not None:
        assert await payments.paid() == int(told == "done"), "work and mark commit together or not at all"
