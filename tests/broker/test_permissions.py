"""C52: accounts that may not declare anything work with what is there, and a right that is missing is named."""

import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

import httpx
import pytest
import structlog
from yarl import URL

from rabbitdlq import AccessDenied, EntityNotFound, Message, Producer, RetryAfter
from rabbitdlq.definitions import accounts
from rabbitdlq.idempotency import MemoryStore
from rabbitdlq.local_broker import BrokerAddress
from tests.broker.kit import Bench, until
from tests.broker.looks import all_empty, is_told, rests

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])

#: makes an account with these permissions and gives its URL
Account = Callable[[str, str, str], Awaitable[str]]


@pytest.fixture
async def account(broker: BrokerAddress) -> AsyncIterator[Account]:
    management = URL(broker.management_url)
    name = f"t-{uuid.uuid4().hex[:10]}"
    async with httpx.AsyncClient(
        base_url=str(management.with_user(None)),
        auth=(management.user or "", management.password or ""),
        timeout=30,
    ) as client:

        async def make(configure: str, write: str, read: str) -> str:
            answer = await client.put(f"/api/users/{name}", json={"password": "secret", "tags": ""})
            answer.raise_for_status()
            rights = {"configure": configure, "write": write, "read": read}
            answer = await client.put(f"/api/permissions/%2F/{name}", json=rights)
            answer.raise_for_status()
            return str(URL(broker.url).with_user(name).with_password("secret"))

        yield make
        await client.delete(f"/api/users/{name}")


async def _fail(message: Message) -> None:
    raise RuntimeError(f"attempt {message.attempt}")


async def test_an_account_with_the_least_rights_consumes_retries_and_parks(bench: Bench, account: Account) -> None:
    topology = await bench.declared()
    (rights,) = [each for each in accounts([topology]) if each.role == "consumer"]
    url = await account(rights.configure, rights.write, rights.read)
    await bench.send(topology, {"order": 1})
    async with bench.running(topology, _fail, url=url) as consumer:
        await rests(bench, topology.dlq, 1)
    assert (consumer.summary.retried, consumer.summary.parked) == (2, 1)
    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
    is_told(letter, 3)


async def test_it_lets_messages_wait_as_long_as_handlers_ask_and_postpones_what_is_claimed(
    bench: Bench, account: Account
) -> None:
    """Both are publishes into a rung; the right to write into any queue there is would be too much for that."""
    topology = await bench.declared()
    (rights,) = [each for each in accounts([topology]) if each.role == "consumer"]
    url = await account(rights.configure, rights.write, rights.read)
    store = MemoryStore()
    await store.open()
    claim = await store.claim(f"{topology.name}:claimed", timedelta(minutes=1))
    attempts: list[tuple[str, int]] = []

    async def handler(message: Message) -> None:
        attempts.append((message.id, message.attempt))
        if message.id == "later" and message.attempt == 1:
            raise RetryAfter(0.12)

    await bench.send(topology, 1, message_id="later")
    await bench.send(topology, 2, message_id="claimed")
    with structlog.testing.capture_logs() as logs:
        async with bench.running(topology, handler, url=url, idempotency=store) as consumer:
            await until(lambda: consumer.summary.postponed and consumer.summary.succeeded, "both wait in rungs")
            await store.release(f"{topology.name}:claimed", claim.token)
            await until(lambda: consumer.summary.succeeded == 2, "both are handled")
    assert sorted(attempts) == [("claimed", 1), ("later", 1), ("later", 2)]
    assert "rung_unreachable" not in {line["event"] for line in logs}


async def test_without_the_right_to_declare_what_is_missing_is_named(bench: Bench, account: Account) -> None:
    topology = await bench.declared()
    url = await account("^$", ".*", ".*")
    channel = await bench.raw.channel()
    await channel.queue_delete(topology.rungs[1].queue)
    await channel.close()
    with pytest.raises(EntityNotFound, match=f"queue {topology.rungs[1].queue!r}: missing, and this account may not"):
        await bench.consumer(topology, _fail, url=url).run()


async def test_without_the_right_to_read_the_work_queue_it_is_named(bench: Bench, account: Account) -> None:
    topology = await bench.declared()
    url = await account("^$", ".*", r"\.journal$")
    with pytest.raises(AccessDenied, match=rf"consuming '{topology.name}': .*access to queue '{topology.name}'"):
        await bench.consumer(topology, _fail, url=url).run()


async def test_without_the_right_to_park_the_log_names_it_and_the_broker_parks(bench: Bench, account: Account) -> None:
    topology = await bench.declared()
    url = await account("^$", r"\.journal$", ".*")
    (sent,) = await bench.send(topology, {"order": 1})
    with structlog.testing.capture_logs() as logs:
        async with bench.running(topology, _fail, url=url):
            await rests(bench, topology.dlq, 1)
    (failed,) = [line for line in logs if line["event"] == "park_failed"]
    assert re.search(f"access to exchange '{topology.dlx}' .*refused", failed["error"])
    assert await all_empty(bench, topology)
    async with bench.dlq(topology) as dlq:
        letter = await dlq.get(sent)
    assert letter.bare
    is_told(letter, 3)


async def test_without_the_right_to_write_the_journal_the_log_names_it_and_the_work_goes_on(
    bench: Bench, account: Account
) -> None:
    topology = await bench.declared()
    url = await account("^$", r"\.dlx$", ".*")
    await bench.send(topology, *range(10))
    with structlog.testing.capture_logs() as logs:
        async with bench.running(topology, _fail, url=url) as consumer:
            await rests(bench, topology.dlq, 10)
    assert (consumer.summary.retried, consumer.summary.parked) == (20, 10)
    lines = [line["error"] for line in logs if line["event"] == "journal_unwritable"]
    assert any(f"access to exchange '{topology.journal_exchange}'" in line for line in lines)
    async with bench.dlq(topology) as dlq:
        for letter in await dlq.peek_all():
            is_told(letter, 3)


async def test_without_the_right_to_publish_the_exchange_is_named(bench: Bench, account: Account) -> None:
    topology = await bench.declared()
    url = await account("^$", "^$", "^$")
    async with Producer(url) as producer:
        with pytest.raises(AccessDenied, match=r"access to exchange .*refused"):
            await producer.send(topology.name, {"order": 1})


async def test_draining_without_a_right_on_the_rungs_works_or_names_the_right_and_does_not_wait_for_ever(
    bench: Bench, account: Account
) -> None:
    """From 4.3 on nobody counts the messages of a queue on which they have no right."""
    topology = await bench.declared()
    url = await account("^$", r"\.(dlx|journal)$", rf"^{topology.name}(\.journal)?$")
    if bench.raw.connection.version < (4, 3):
        await bench.drain(topology, _fail, url=url)
        return
    with pytest.raises(AccessDenied, match=rf"counting .*'{topology.rungs[0].queue}'"):
        await bench.drain(topology, _fail, url=url)
