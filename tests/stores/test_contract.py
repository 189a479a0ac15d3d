"""What every store promises, asked of each: memory, SQLite, Redis and PostgreSQL."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import pytest

from rabbitdlq.errors import ConfigurationError, IdempotencyError
from rabbitdlq.idempotency import Claim, IdempotencyStore
from tests.stores.kit import HOUR, SHORT, Place


async def test_a_key_is_new_once_then_busy_then_done(store: IdempotencyStore, place: Place) -> None:
    now = place.clock() if place.clock else datetime.now(UTC)
    first = await store.claim("orders:1", HOUR)
    second = await store.claim("orders:1", HOUR)

    assert first.state == "new"
    assert first.token
    assert second.state == "busy"
    assert not second.token
    assert second.until is not None
    assert abs(second.until - (now + HOUR)) < timedelta(seconds=30)
    assert await store.complete("orders:1", first.token)
    assert await store.claim("orders:1", HOUR) == Claim("done")


async def test_a_released_key_is_new_for_the_next_one(store: IdempotencyStore) -> None:
    first = await store.claim("orders:1", HOUR)
    await store.release("orders:1", first.token)
    second = await store.claim("orders:1", HOUR)

    assert second.state == "new"
    assert second.token != first.token


async def test_keys_do_not_know_each_other(store: IdempotencyStore) -> None:
    one = await store.claim("orders:1", HOUR)
    other = await store.claim("orders:2", HOUR)

    assert (one.state, other.state) == ("new", "new")
    assert not await store.complete("orders:1", other.token)
    assert await store.complete("orders:2", other.token)
    assert (await store.claim("orders:1", HOUR)).state == "busy"


async def test_a_lease_ends_by_itself_and_the_late_holder_has_no_say_then(
    store: IdempotencyStore, place: Place
) -> None:
    late = await store.claim("orders:1", SHORT)
    await place.go_by(SHORT)
    next_one = await store.claim("orders:1", HOUR)

    assert next_one.state == "new"
    await store.release("orders:1", late.token)
    assert (await store.claim("orders:1", HOUR)).state == "busy"
    assert not await store.complete("orders:1", late.token)
    assert (await store.claim("orders:1", HOUR)).state == "busy"
    assert await store.complete("orders:1", next_one.token)
    assert not await store.complete("orders:1", late.token)
    assert (await store.claim("orders:1", HOUR)).state == "done"


async def test_a_late_holder_completes_where_nobody_took_the_key(store: IdempotencyStore, place: Place) -> None:
    late = await store.claim("orders:1", SHORT)
    await place.go_by(SHORT)

    assert await store.complete("orders:1", late.token)
    assert (await store.claim("orders:1", HOUR)).state == "done"


async def test_a_late_holder_completes_where_the_next_ones_lease_ended_too(
    store: IdempotencyStore, place: Place
) -> None:
    late = await store.claim("orders:1", SHORT)
    await place.go_by(SHORT)
    next_one = await store.claim("orders:1", SHORT)
    await place.go_by(SHORT)

    assert await store.complete("orders:1", late.token)
    assert not await store.complete("orders:1", next_one.token)
    assert (await store.claim("orders:1", HOUR)).state == "done"


async def test_a_late_holder_completes_where_the_next_one_gave_the_key_back(
    store: IdempotencyStore, place: Place
) -> None:
    late = await store.claim("orders:1", SHORT)
    await place.go_by(SHORT)
    next_one = await store.claim("orders:1", HOUR)
    await store.release("orders:1", next_one.token)

    assert await store.complete("orders:1", late.token)
    assert (await store.claim("orders:1", HOUR)).state == "done"


async def test_what_is_done_can_be_said_twice_and_not_taken_back(store: IdempotencyStore) -> None:
    claim = await store.claim("orders:1", HOUR)

    assert await store.complete("orders:1", claim.token)
    assert await store.complete("orders:1", claim.token)
    await store.release("orders:1", claim.token)
    assert (await store.claim("orders:1", HOUR)).state == "done"


async def test_to_give_back_what_nobody_holds_is_no_error(store: IdempotencyStore) -> None:
    await store.release("orders:1", "somebody")

    assert (await store.claim("orders:1", HOUR)).state == "new"


async def test_a_done_key_is_forgotten_after_a_while(place: Place) -> None:
    async with place.opened(keep=SHORT) as store:
        claim = await store.claim("orders:1", HOUR)
        await store.complete("orders:1", claim.token)
        await place.go_by(SHORT)

        again = await store.claim("orders:1", HOUR)
        assert again.state == "new"
        assert (await store.claim("orders:1", HOUR)).state == "busy"
        assert await store.complete("orders:1", again.token)


async def test_namespaces_do_not_know_each_other(place: Place) -> None:
    if place.url == "memory:":
        pytest.skip("each store in memory is a world of its own")
    async with place.opened() as store, place.opened(namespace=f"{place.namespace}.other") as other:
        assert (await store.claim("orders:1", HOUR)).state == "new"
        assert (await other.claim("orders:1", HOUR)).state == "new"


ODD_KEYS = [
    "orders:" + "x" * 10_000,
    "orders:" + "x" * 9_999 + "y",
    "orders:Größe",
    "orders:Gro\u0308ße",
    "orders:\0",
    "orders:\0\0",
    "orders:\ud800",
    "orders:%s {} '\" \\ ; --",
    "orders:\n",
    " ",
    "  ",
    "ORDERS:1",
    "orders:1",
    "sha256:" + "0" * 64,
]


async def test_any_text_is_a_key_of_its_own(store: IdempotencyStore) -> None:
    claims = {key: await store.claim(key, HOUR) for key in ODD_KEYS}

    assert {claim.state for claim in claims.values()} == {"new"}
    for key, claim in claims.items():
        assert await store.complete(key, claim.token)
    assert {(await store.claim(key, HOUR)).state for key in ODD_KEYS} == {"done"}


async def test_one_of_many_at_the_same_time_gets_the_key(place: Place) -> None:
    async with place.opened() as one, place.opened() as other:
        stores = [one] if place.url == "memory:" else [one, other]
        claims = await asyncio.gather(*(store.claim("orders:1", HOUR) for _ in range(20) for store in stores))

        assert sorted(claim.state for claim in claims) == ["busy"] * (len(claims) - 1) + ["new"]


async def test_one_of_many_at_the_same_time_takes_over_what_a_dead_one_held(place: Place) -> None:
    async with place.opened() as one, place.opened() as other:
        stores = [one] if place.url == "memory:" else [one, other]
        for store in stores[:1]:
            await store.claim("orders:1", SHORT)
        await place.go_by(SHORT)
        claims = await asyncio.gather(*(store.claim("orders:1", HOUR) for _ in range(20) for store in stores))

        assert sorted(claim.state for claim in claims) == ["busy"] * (len(claims) - 1) + ["new"]


async def test_who_is_cancelled_does_no_harm_to_the_others(store: IdempotencyStore) -> None:
    cancelled = [asyncio.create_task(store.claim(f"cancelled:{n}", HOUR)) for n in range(20)]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)

    claims = await asyncio.gather(*(store.claim(f"orders:{n}", HOUR) for n in range(20)))
    assert {claim.state for claim in claims} == {"new"}


async def test_a_store_that_is_not_open_says_so(place: Place) -> None:
    store = place.store()
    with pytest.raises(IdempotencyError, match="not open"):
        await store.claim("orders:1", HOUR)

    async with store:
        await store.open()  # once more does no harm
        await store.claim("orders:1", HOUR)
    await store.close()
    for call in (store.complete("orders:1", "token"), store.release("orders:1", "token")):
        with pytest.raises(IdempotencyError, match="not open"):
            await call


async def test_a_store_can_be_opened_again_and_still_knows(place: Place) -> None:
    store = place.store()
    async with store:
        await store.claim("orders:1", HOUR)
    async with store:
        assert (await store.claim("orders:1", HOUR)).state == "busy"


@pytest.mark.parametrize("lease", [timedelta(), timedelta(seconds=-1), timedelta.max])
async def test_a_lease_that_cannot_be_is_refused(store: IdempotencyStore, lease: timedelta) -> None:
    with pytest.raises(ConfigurationError, match="lease"):
        await store.claim("orders:1", lease)


async def test_an_empty_key_is_refused(store: IdempotencyStore) -> None:
    with pytest.raises(ConfigurationError, match="empty"):
        await store.claim("", HOUR)


async def test_several_consumers_may_open_one_at_the_same_time(place: Place) -> None:
    """A group shares its store; what only the last one knew of would never be closed."""
    before = set(threading.enumerate())
    store = place.store()
    claims = await asyncio.gather(*(_opened_and_claimed(store, f"orders:{n}") for n in range(5)))
    assert {claim.state for claim in claims} == {"new"}
    await store.close()
    left = [thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio_")]
    for thread in left:
        thread.join(5)  # one that is closed says so before its very end
    assert not any(thread.is_alive() for thread in left)


async def _opened_and_claimed(store: IdempotencyStore, key: str) -> Claim:
    await store.open()
    return await store.claim(key, HOUR)
