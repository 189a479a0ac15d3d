"""Accounts and addresses that do not work: one clear error of the right class, and no password in it."""

import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from yarl import URL

from rabbitdlq import (
    AccessDenied,
    BrokerUnavailable,
    ConfigurationError,
    Connection,
    DLQManager,
    Producer,
    RabbitDLQError,
    Topology,
)
from rabbitdlq.consumer import Consumer
from rabbitdlq.local_broker import BrokerAddress
from rabbitdlq.message import Message
from tests.broker.kit import Bench
from tests.broker.operator_kit import Management, account, letters_left, park

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])

PASSWORD = "s3cret-and-more"

#: how the broker's URL is spoilt, the error's class, what its text says
WRONG: dict[str, tuple[Callable[[URL], URL | str], type[RabbitDLQError], str]] = {
    "password": (lambda url: url.with_password(PASSWORD), AccessDenied, "check user, password and virtual host"),
    "user": (lambda url: url.with_user("nobody").with_password(PASSWORD), AccessDenied, "check user, password"),
    "vhost": (lambda url: url.with_path("/nowhere"), AccessDenied, "nowhere"),
    "scheme": (
        lambda url: str(url.with_password(PASSWORD)).replace("amqp:", "https:"),
        ConfigurationError,
        "is not amqp:// or amqps://",
    ),
    "no URL at all": (lambda url: f"amqp://user:{PASSWORD}@host:port/", ConfigurationError, "broker URL"),
    "closed port": (lambda url: url.with_password(PASSWORD).with_port(_closed_port()), BrokerUnavailable, "refused"),
    "TLS on a plain port": (lambda url: url.with_password(PASSWORD).with_scheme("amqps"), BrokerUnavailable, "TLS"),
    "host": (
        lambda url: url.with_password(PASSWORD).with_host("no.such.host.invalid"),
        BrokerUnavailable,
        "no.such.host",
    ),
}


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _connect(url: str, _: Topology) -> None:
    await Connection.open(url)


async def _send(url: str, topology: Topology) -> None:
    async with Producer(url) as producer:
        await producer.send(topology.name, {})


async def _peek(url: str, topology: Topology) -> None:
    async with DLQManager(topology, url=url) as dlq:
        await dlq.peek()


async def _consume(url: str, topology: Topology) -> None:
    async def handler(_: Message) -> None: ...

    await Consumer(topology, handler, url=url).run()


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_url_that_does_not_work_is_one_clear_error_at_every_door(bench: Bench, wrong: str) -> None:
    spoil, kind, words = WRONG[wrong]
    topology = bench.topology()
    doors: list[Callable[[str, Topology], Awaitable[None]]] = [_connect, _send, _peek, _consume]
    for door in doors if wrong in {"password", "closed port"} else doors[:1]:
        url = str(spoil(URL(bench.url)))
        with pytest.raises(kind) as caught:
            await door(url, topology)
        text, error = str(caught.value), caught.value
        assert type(error) is kind
        assert words in text
        assert PASSWORD not in text
        assert PASSWORD not in "".join(traceback.format_exception(error)), "nor in what caused it"
        assert "\n" not in text


@pytest.fixture
async def management(broker: BrokerAddress) -> AsyncIterator[Management]:
    async with Management.of(broker) as client:
        yield client


async def test_an_operator_needs_the_right_on_the_lock_and_is_told_so(bench: Bench, management: Management) -> None:
    """C52: a right that is missing is named."""
    topology = await bench.declared()
    ids = await park(bench, topology, b"a", b"b")

    async with account(management, f"{topology.name}-o", configure="^$") as url, DLQManager(topology, url=url) as dlq:
        for attempt in (dlq.peek, dlq.replay_all, lambda: dlq.purge(archive=None)):
            with pytest.raises(
                AccessDenied, match=rf"access to queue '{topology.lock_queue}'.*refused.*grant the permi"
            ):
                await attempt()
    lock = rf"^{topology.lock_queue}$"
    rights = {"configure": lock, "write": rf"^(amq\.default|{topology.name}.*)$", "read": rf"^{topology.name}\."}
    async with account(management, f"{topology.name}-p", **rights) as url, DLQManager(topology, url=url) as dlq:
        assert [letter.id for letter in await dlq.peek()] == ids
        assert (await dlq.replay_all()).done == 2
    assert await letters_left(bench, topology.name) == ids


async def test_an_operator_who_may_not_publish_moves_nothing(bench: Bench, management: Management) -> None:
    topology = await bench.declared()
    ids = await park(bench, topology, b"a", b"b")

    async with account(management, f"{topology.name}-o", write="^$") as url, DLQManager(topology, url=url) as dlq:
        report = await dlq.replay_all()
        assert (report.done, report.stayed) == (0, 2)
        assert all("access to exchange" in why and "refused" in why for _, why in report.errors)
    assert await letters_left(bench, topology.dlq) == ids


async def test_a_producer_without_the_default_exchange_is_told_so(bench: Bench, management: Management) -> None:
    topology = await bench.declared()
    async with account(management, f"{topology.name}-w", write=rf"^{topology.name}") as url, Producer(url) as producer:
        with pytest.raises(AccessDenied, match=r"publishing to the default exchange .*access to exchange .*refused"):
            await producer.send(topology.name, {})
