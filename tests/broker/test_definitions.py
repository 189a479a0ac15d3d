"""Definitions on a real broker: over HTTP they become the topology, and each account can do its part and no more."""

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from rabbitdlq import Connection, Producer, Topology, WorkBinding
from rabbitdlq.broker import Channel, close_channel
from rabbitdlq.local_broker import BrokerAddress
from tests.acceptance.cli import Shell, handler_failing, open_shell

ROOT = Path(__file__).parents[2]
DEMO = ("--topology", str(ROOT / "rabbitdlq" / "demo" / "orders.toml"))


@dataclass
class Place:
    """A fresh virtual host, and a shell in it."""

    shell: Shell
    management: httpx.AsyncClient
    vhost: str

    async def load(self, definitions: dict[str, Any]) -> None:
        """As the management UI's import does."""
        answer = await self.management.post("/api/definitions", json=definitions)
        assert answer.is_success, answer.text


@pytest.fixture
async def place(broker: BrokerAddress, tmp_path: Path) -> AsyncIterator[Place]:
    """A virtual host of the test's own; accounts that it makes begin with the virtual host's name."""
    vhost = f"d-{uuid.uuid4().hex[:8]}"
    async with httpx.AsyncClient(base_url=broker.management_url, timeout=30) as management:
        (await management.put(f"/api/vhosts/{vhost}")).raise_for_status()
        try:
            address = replace(broker, url=str(URL(broker.url).with_path(f"/{vhost}")))
            async with open_shell(address, tmp_path) as shell:
                yield Place(shell, management, vhost)
        finally:
            users = (await management.get("/api/users")).json()
            for user in users:
                if user["name"].startswith(vhost):
                    await management.delete(f"/api/users/{quote(user['name'], safe='')}")
            await management.delete(f"/api/vhosts/{vhost}")


def renamed(definitions: dict[str, Any], vhost: str) -> dict[str, Any]:
    """The same in another virtual host, and its accounts under other names: those are the whole broker's."""

    def name(user: str) -> str:
        return user.replace("rabbitdlq-", f"{vhost}-")

    result = {
        kind: [each | {"vhost": vhost} for each in definitions[kind]]
        for kind in ("permissions", "exchanges", "queues", "bindings")
    }
    for permission in result["permissions"]:
        permission["user"] = name(permission["user"])
    result["users"] = [each | {"name": name(each["name"])} for each in definitions["users"]]
    return {"vhosts": [{"name": vhost}], **result}


def written_for(connection: Connection) -> tuple[str, str]:
    """The file for this broker, and the one for the other line of versions."""
    if connection.version[:2] in {(3, 12), (3, 13)}:
        pytest.skip("the project has no definitions for this version")
    files = ("orders.json", "orders-3.x.json")
    return files if connection.version >= (4, 0) else files[::-1]


async def test_the_definitions_imported_over_http_are_the_topology_of_the_demo(place: Place) -> None:
    ours, _ = written_for(place.shell.raw.connection)
    await place.load(renamed(json.loads((ROOT / "definitions" / ours).read_text()), place.vhost))

    checked = await place.shell(*DEMO, "topology", "check")

    assert (checked.code, checked.out) == (0, "orders: as it should be\n"), checked.out
    # the queues go with the virtual host
    assert await place.shell.exists("orders.dlq")


async def test_the_definitions_of_another_line_of_versions_are_noticed(place: Place) -> None:
    """Below 4.0 a limit of -1 is accepted and deletes on the first requeue; from 4.0 on its absence means 20."""
    _, foreign = written_for(place.shell.raw.connection)
    await place.load(renamed(json.loads((ROOT / "definitions" / foreign).read_text()), place.vhost))

    checked = await place.shell(*DEMO, "topology", "check", "--json")

    assert checked.code == 1
    (report,) = checked.json
    assert {finding["argument"] for finding in report["findings"]} == {"x-delivery-limit"}
    assert {finding["name"] for finding in report["findings"]} == {
        "orders",
        "orders.dlq",
        "orders.retry.1.1s",
        "orders.retry.2.3s",
    }


# --- accounts


@dataclass
class Accounts:
    """A topology that is there, and the URLs of the three accounts that may use it."""

    topology: Topology
    exchange: str
    producer: str
    consumer: str
    operator: str


@pytest.fixture
async def accounts(place: Place) -> Accounts:
    """The accounts of ``topology definitions --users``, imported."""
    shell = place.shell
    exchange = f"{shell.queue}.shop"
    topology = shell.write_topology(
        more=f'bindings = [{{ exchange = "{exchange}", key = "order.*" }}]\n',
        bindings=[WorkBinding(exchange, "order.*")],
    )
    version = ".".join(str(number) for number in shell.raw.connection.version)
    words = ("topology", "definitions", "--users", "--broker", version, "--vhost", place.vhost)
    roles = ("producer", "consumer", "operator")
    env = {f"RABBITDLQ_{role.upper()}_PASSWORD": f"{role}/secret" for role in roles}
    written = await shell(*words, env=env)
    assert (written.code, written.err) == (0, "")
    await place.load(renamed(json.loads(written.out), place.vhost))
    urls = (str(URL(shell.url).with_user(f"{place.vhost}-{role}").with_password(f"{role}/secret")) for role in roles)
    return Accounts(topology, exchange, *urls)


async def refused(url: str, **calls: Callable[[Channel], Awaitable[object]]) -> None:
    """Assert that the account may do none of it."""
    async with await Connection.open(url, "rabbitdlq tests") as connection:
        allowed = set(calls)
        for what, call in calls.items():
            channel = await connection.channel(confirms=True)
            try:
                await call(channel)
            except ChannelAccessRefused:
                allowed.discard(what)
            await close_channel(channel)
    assert not allowed


def publishes(exchange: str, key: str = "") -> Callable[[Channel], Awaitable[object]]:
    return lambda channel: channel.basic_publish(b"{}", exchange=exchange, routing_key=key)


def reads(queue: str) -> Callable[[Channel], Awaitable[object]]:
    return lambda channel: channel.basic_get(queue, no_ack=True)


def deletes(queue: str) -> Callable[[Channel], Awaitable[object]]:
    return lambda channel: channel.queue_delete(queue)


def declares(queue: str) -> Callable[[Channel], Awaitable[object]]:
    return lambda channel: channel.queue_declare(queue, durable=True)


async def test_each_account_can_do_its_part_and_nothing_else(place: Place, accounts: Accounts) -> None:
    """C52: accounts without the configure permission, the consumer's without the default exchange, too."""
    shell, topology = place.shell, accounts.topology

    async with Producer(accounts.producer) as producer:
        await producer.send(topology.name, 1)
        await producer.send(topology.name, 2, exchange=accounts.exchange, routing_key="order.created")
    assert await shell.raw.count(topology.name) == 2
    await refused(
        accounts.producer,
        reads_work=reads(topology.name),
        reads_dead=reads(topology.dlq),
        parks=publishes(topology.dlx),
        writes_journal=publishes(topology.journal_exchange, "failed"),
        declares=declares(f"{topology.name}.more"),
        deletes=deletes(topology.name),
    )

    shell.write("shop.py", handler_failing("True"))
    consumed = await shell(
        "consume", topology.name, "--handler", "shop:handle", "--drain", "--log-level", "warning", url=accounts.consumer
    )
    assert (consumed.code, consumed.lines[-1]) == (0, "0 succeeded, 4 retried, 2 parked"), consumed.err
    logged = [json.loads(line)["event"] for line in consumed.lines[:-1]]
    assert sorted(set(logged)) == ["message_parked", "retry_scheduled"]
    await refused(
        accounts.consumer,
        publishes_work=publishes("", topology.name),
        publishes_application=publishes(accounts.exchange, "order.created"),
        reads_dead=reads(topology.dlq),
        declares=declares(topology.name),
        deletes=deletes(topology.dlq),
    )

    listed = await shell("dlq", "list", topology.name, "--json", url=accounts.operator)
    assert (listed.code, listed.err) == (0, "")
    assert [len(letter["error_history"]) for letter in listed.json] == [3, 3]
    ids = [letter["id"] for letter in listed.json]
    replayed = await shell("dlq", "replay", topology.name, ids[0], url=accounts.operator)
    assert (replayed.code, replayed.lines[-1]) == (0, "replayed 1, stayed 0")
    dropped = await shell("dlq", "drop", topology.name, ids[1], "--yes", url=accounts.operator)
    assert (dropped.code, dropped.lines[0]) == (0, "dropped 1, stayed 0")
    await shell.bench.drain(topology, _refuse)
    shown = await shell("dlq", "show", topology.name, ids[0], url=accounts.operator)
    assert (shown.code, shown.err) == (0, "")
    assert "lap           2" in shown.out
    purged = await shell("dlq", "purge", topology.name, "--yes", "--no-archive", url=accounts.operator)
    assert (purged.code, purged.lines) == (0, ["dropped 1, stayed 0"])
    told = await shell("journal", topology.name, "--json", url=accounts.operator)
    actions = [
        (event["event"], event["amqp_user"]) for event in told.json if "ids" in event or event["event"] == "purged"
    ]
    operator = f"{place.vhost}-operator"
    assert actions == [("replayed", operator), ("dropped", operator), ("purged", operator)]
    await refused(
        accounts.operator,
        reads_work=reads(topology.name),
        publishes_application=publishes(accounts.exchange, "order.created"),
        declares=declares(f"{topology.name}.more"),
        deletes=deletes(topology.dlq),
    )


async def test_without_configure_a_check_says_that_it_saw_existence_only(place: Place, accounts: Accounts) -> None:
    name = accounts.topology.name
    there = await place.shell("topology", "check", url=accounts.consumer)
    channel = await place.shell.raw.channel()
    await channel.queue_delete(accounts.topology.rungs[1].queue)
    place.shell.write("shop.py", handler_failing("False"))

    missing, refused_work = await place.shell.together(
        ("topology", "check"), ("consume", name, "--handler", "shop:handle", "--drain"), url=accounts.consumer
    )

    assert there.code == 0
    head, *more = there.out.splitlines()
    assert head == f"{name}: as it should be (existence only: comparing needs the configure permission)"
    assert bool(more) == (place.shell.raw.connection.version >= (4, 3)), "from 4.3 on some of it cannot be seen"
    assert all("not visible to this account" in line for line in more)
    assert missing.code == 1
    assert f"  queue '{accounts.topology.rungs[1].queue}' is missing" in missing.out
    assert refused_work.code == 1
    assert "missing, and this account may not declare" in refused_work.lines[-1]


async def _refuse(_: object) -> None:
    raise RuntimeError("no")
