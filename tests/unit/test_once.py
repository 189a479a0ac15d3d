"""What becomes of a claim on a message's key when its handler has run."""

from datetime import UTC, datetime, timedelta

import pytest
from structlog.testing import capture_logs

from rabbitdlq import names
from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.consumer.once import Once
from rabbitdlq.consumer.outcome import Dropped, Outcome, Park, Postponed, Released, Retry, Succeeded
from rabbitdlq.deaths import Arrival
from rabbitdlq.failure import Failure
from rabbitdlq.idempotency import Claim, MemoryStore
from rabbitdlq.message import Message, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties

ORDERS = Topology("orders", ["5s"])
KEY, MINUTE = "orders:17", timedelta(minutes=1)
NO, NOW = Failure("E", "no"), datetime.now(UTC)


async def begun(store: MemoryStore) -> tuple[Once, Message, Claim]:
    """A message whose key is claimed, as its handler gets it."""
    await store.open()
    once = Once(store, None, None, Timeouts())
    way = Arrival(0, 0, "", "orders")
    result = await once.begin(message_of(ORDERS, b"{}", Properties(message_id="17"), way, failures=0))
    assert isinstance(result, tuple)
    message, claim = result
    assert claim is not None
    return once, message, claim


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Succeeded(1.0), "done"),
        (Dropped(NO, 1.0), "done"),
        (Retry(NO, NOW, ORDERS.rungs[0], 1.0), "new"),
        (Park(NO, NOW, names.PERMANENT, 1.0), "new"),
        (Postponed("breaker", 1.0, NO), "new"),
        (Released(1.0), "new"),
        # it was given up, and may come to its end while others would work beside it
        (None, "busy"),
    ],
    ids=["succeeded", "dropped", "retried", "parked", "postponed", "released", "given up"],
)
async def test_what_is_done_with_stays_claimed_and_what_runs_on_until_its_lease_ends(
    outcome: Outcome | None, state: str
) -> None:
    store = MemoryStore()
    once, message, claim = await begun(store)
    await once.end(message, claim, outcome)
    assert (await store.claim(KEY, MINUTE)).state == state


async def test_a_claim_that_somebody_else_has_got_since_is_told_and_stays_theirs() -> None:
    now = datetime(2024, 1, 1, tzinfo=UTC)
    store = MemoryStore(clock=lambda: now)
    once, message, claim = await begun(store)
    now += once.lease
    other = await store.claim(KEY, MINUTE)
    assert other.state == "new"
    with capture_logs() as logs:
        await once.end(message, claim, Succeeded(1.0))
        await once.end(message, claim, Released(1.0))
    assert [line["event"] for line in logs] == ["idempotency_lease_lost"]
    assert (await store.claim(KEY, MINUTE)).state == "busy"
