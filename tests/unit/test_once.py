"""What becomes of a claim on a message's key when its handler has run."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from rabbitdlq import Consumer, handler, names
from rabbitdlq.consumer.attempt import Failed
from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.consumer.once import Once
from rabbitdlq.consumer.outcome import Dropped, Outcome, Park, Postponed, Released, Retry, Succeeded
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.failure import Failure
from rabbitdlq.idempotency import Claim, MemoryStore
from rabbitdlq.message import Message, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties

ORDERS = Topology("orders", ["5s"])
KEY, MINUTE = "orders:17", timedelta(minutes=1)
NO, NOW = Failure("E", "no"), datetime.now(UTC)


def one(topology: Topology = ORDERS) -> Message:
    way = Arrival(0, 0, "", topology.name)
    return message_of(topology, b"{}", Properties(message_id="17"), way, failures=0)


async def begun(store: MemoryStore) -> tuple[Once, Message, Claim]:
    """A message whose key is claimed, as its handler gets it."""
    await store.open()
    once = Once(store, None, None, Timeouts())
    result = await once.begin(one())
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


async def test_a_store_may_be_shared_by_queues_whose_key_functions_make_the_same_key() -> None:
    """One event, two queues: what the one's handler had done the other's never ran for."""
    store = MemoryStore()
    await store.open()
    once = Once(store, lambda _: "order-17", None, Timeouts())
    for queue in ("orders", "invoices"):
        result = await once.begin(one(Topology(queue, ["5s"])))
        assert isinstance(result, tuple)
        message, claim = result
        assert claim is not None
        assert (message.idempotency_key, claim.state) == (f"{queue}:order-17", "new")
        await once.end(message, claim, Succeeded(1.0))
        assert (await store.claim(f"{queue}:order-17", MINUTE)).state == "done", "what record() is given is the same"


async def late(_: Message) -> str:
    return "17"


def unawaited(message: Message) -> object:
    return late(message)


@pytest.mark.parametrize(
    ("key_of", "told"),
    [
        (lambda _: 7, "7, an int"),
        (lambda _: b"17", "b'17', a bytes"),
        (lambda _: "", "'', an empty text"),
        (unawaited, "<coroutine object late at 0x.*>, a coroutine"),
    ],
    ids=["number", "bytes", "nothing", "coroutine"],
)
async def test_what_is_no_key_is_a_failed_attempt_that_says_so(key_of: Callable[[Message], Any], told: str) -> None:
    store = MemoryStore()
    await store.open()

    failed = await Once(store, key_of, None, Timeouts()).begin(one())

    assert isinstance(failed, Failed)
    with pytest.raises(ConfigurationError, match=f"^idempotency_key gave {told}; a text or None is expected$"):
        raise ConfigurationError(failed.failure.message)
    assert "File" not in (failed.failure.traceback or ""), "our own files tell nobody anything"


class Late:
    async def __call__(self, message: Message) -> str:
        return message.id


@pytest.mark.parametrize(
    ("key_of", "reason"),
    [
        (late, "is async; give a plain function of the message"),
        (Late(), "is async; give a plain function of the message"),
        ("id", "cannot be called; give a function of the message"),
    ],
    ids=["async", "async object", "text"],
)
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "given"])
def test_what_can_tell_no_keys_is_refused_before_any_message(key_of: Any, reason: str, marked: bool) -> None:
    def told() -> object:
        if marked:
            return handler(idempotency_key=key_of)
        return Consumer(ORDERS, print, url="amqp://127.0.0.1:1/", idempotency="memory:", idempotency_key=key_of)

    with pytest.raises(ConfigurationError, match=f"^idempotency_key: .* {reason}$"):
        told()


@pytest.mark.parametrize(
    "given", [{"lease": "1h"}, {"idempotency_key": lambda message: message.id}], ids=["lease", "key"]
)
def test_what_a_store_would_be_needed_for_is_refused_without_one(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"^{next(iter(given))}: there is no store .* give idempotency, too"):
        Consumer(ORDERS, print, url="amqp://127.0.0.1:1/", **given)
