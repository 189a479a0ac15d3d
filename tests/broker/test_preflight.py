"""What is said before letters are sent, of a real broker: each finding as it is, and nothing changed by asking."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from yarl import URL

from rabbitdlq import Connection, Topology
from rabbitdlq.dead_letters.facts import LetterFacts
from rabbitdlq.dead_letters.preflight import Finding, preflight
from rabbitdlq.dead_letters.replay import Target
from rabbitdlq.local_broker import BrokerAddress
from rabbitdlq.management import ManagementApi
from tests.broker.kit import Bench, until
from tests.broker.operator_kit import Management, account, park, policy_known

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])

Found = dict[str, tuple[str, str]]
TEN = LetterFacts(count=10, total_bytes=1_000, largest_bytes=100)


@pytest.fixture
async def management(broker: BrokerAddress) -> AsyncIterator[Management]:
    async with Management.of(broker) as client:
        yield client


async def look(
    url: str, topology: Topology, target: Target | None = None, *, ask: str | None = None, letters: LetterFacts = TEN
) -> Found:
    """By check: the worst level, and the text."""
    async with await Connection.open(url) as connection:
        findings = await preflight(connection, topology, target or Target.of_queue(topology.name), letters, ask)
        assert connection.is_open
    worst: dict[str, Finding] = {}
    for each in sorted(findings, key=lambda found: ("ok", "unknown", "warning", "error").index(found.level)):
        worst[each.check] = each
    return {check: (each.level, each.text) for check, each in worst.items()}


async def counted(address: BrokerAddress, queue: str) -> None:
    """Wait until the management API has figures of the queue; it gathers them every five seconds."""

    async def known() -> bool:
        async with ManagementApi(address.management_url) as api:
            state = await api.queue("/", queue)
        return state is not None and None not in (state.policy, state.consumers, state.messages)

    await until(known, f"figures of {queue}")


async def test_a_target_that_is_ready_has_no_warning(bench: Bench, broker: BrokerAddress) -> None:
    topology = await bench.declared()
    await park(bench, topology, b"a", b"b")
    letters = LetterFacts()
    async with bench.dlq(topology) as dlq:
        for letter in await dlq.peek_all():
            letters.add(letter)

    async def nothing(_: Any) -> None:
        pass

    async with bench.running(topology, nothing):
        await until(lambda: _consumed(bench, topology), "a consumer")
        await counted(broker, topology.name)
        found = await look(bench.url, topology, ask=broker.management_url, letters=letters)

    assert {level for level, _ in found.values()} == {"ok"}, found
    assert set(found) == {"target", "consumers", "write", "size", "alarm", "room"}
    assert found["target"][1] == f"queue {topology.name!r} is there, with 0 messages waiting"
    assert await bench.raw.count(topology.dlq) == 2


async def _consumed(bench: Bench, topology: Topology) -> bool:
    found = await look(bench.url, topology)
    return found["consumers"][0] == "ok"


async def test_without_the_management_api_what_is_not_known_is_said_once(bench: Bench) -> None:
    topology = await bench.declared()
    found = await look(bench.url, topology)

    assert found["management"][0] == "unknown"
    assert "RABBITDLQ_MANAGEMENT_URL" in found["management"][1]
    assert [check for check, (level, _) in found.items() if level == "unknown"] == ["management"]
    assert found["consumers"] == (
        "warning",
        f"queue {topology.name!r} has no consumer: the letters would wait there",
    )


@pytest.mark.parametrize("name", ["missing", "größe", "x" * 300, ""])
async def test_a_target_that_is_missing_is_an_error_and_no_failure(
    bench: Bench, broker: BrokerAddress, name: str
) -> None:
    topology = bench.topology()
    for target in (Target.of_queue(name), Target(name or "missing", "key")):
        found = await look(bench.url, topology, target, ask=broker.management_url)
        assert found["target"][0] == "error"


async def test_an_account_that_may_not_write_is_told_so(bench: Bench, management: Management) -> None:
    topology = await bench.declared()
    exchange = await bench.raw.exchange(f"{topology.name}-shop")
    async with account(management, f"{topology.name}-o", write=rf"^{topology.name}$") as url:
        for target in (Target.of_queue(topology.name), Target(exchange, "order")):
            level, text = (await look(url, topology, target))["write"]
            assert level == "error"
            assert "this account may not send there: " in text
            assert "refused" in text
            assert "s3cret" not in text
    async with account(management, f"{topology.name}-o") as url:
        for target in (Target.of_queue(topology.name), Target(exchange, "order")):
            assert (await look(url, topology, target))["write"][0] == "ok"


async def test_an_account_without_any_right_on_the_queue_learns_what_it_can(
    bench: Bench, management: Management
) -> None:
    """From 4.3 on nobody sees a queue on which they have no right."""
    topology = await bench.declared()
    async with account(management, f"{topology.name}-o", configure="^$", write=r"^amq\.default$", read="^$") as url:
        found = await look(url, topology)
    assert found["target"][0] == ("unknown" if bench.raw.connection.version >= (4, 3) else "ok")
    assert found["write"][0] == "ok"


async def test_an_internal_exchange_is_told(bench: Bench, management: Management) -> None:
    topology = await bench.declared()
    name = f"{topology.name}-inside"
    await management.put(f"exchanges/{{v}}/{name}", type="fanout", internal=True, durable=True)
    bench.raw.extra_exchanges.append(name)

    level, text = (await look(bench.url, topology, Target(name, "")))["write"]
    assert level == "error"
    assert "internal exchange" in text


async def test_asking_sends_nothing_anywhere(bench: Bench, broker: BrokerAddress) -> None:
    topology = await bench.declared()
    exchange = await bench.raw.exchange(f"{topology.name}-all", "fanout")
    await bench.raw.bind(topology.name, exchange, "")
    for target in (Target.of_queue(topology.name), Target(exchange, "k")):
        assert (await look(bench.url, topology, target, ask=broker.management_url))["write"][0] == "ok"

    assert await bench.raw.count(topology.name) == 0


async def test_a_full_queue_that_refuses_lets_letters_stay(
    bench: Bench, broker: BrokerAddress, management: Management
) -> None:
    topology = await bench.declared()
    queue = await bench.raw.queue(f"{topology.name}-full")
    async with management.policy(queue, max_length=4, overflow="reject-publish"):
        await policy_known(broker, queue, "max-length")
        for _ in range(3):
            await bench.raw.publish(queue)
        await until(lambda: _room_is(bench, broker, topology, queue, "room for 1 of"), "fresh figures")
        level, text = (await look(bench.url, topology, Target.of_queue(queue), ask=broker.management_url))["room"]
    assert level == "warning"
    assert text == (
        f"queue {queue!r} takes 4 messages, and has room for 1 of these 10 letters: 9 would stay, "
        "unless consumers make room meanwhile"
    )


async def _room_is(bench: Bench, broker: BrokerAddress, topology: Topology, queue: str, words: str) -> bool:
    found = await look(bench.url, topology, Target.of_queue(queue), ask=broker.management_url)
    return words in found["room"][1]


async def test_a_full_queue_that_drops_loses_messages(bench: Bench, broker: BrokerAddress) -> None:
    topology = await bench.declared()
    queue = await bench.raw.queue(f"{topology.name}-drops", x_max_length=4, x_message_ttl=60_000)
    await counted(broker, queue)
    await until(lambda: _room_is(bench, broker, topology, queue, "would be LOST"), "fresh figures")
    found = await look(bench.url, topology, Target.of_queue(queue), ask=broker.management_url)

    assert found["room"][0] == "error"
    assert "6 of its oldest messages would be LOST" in found["room"][1]
    assert found["return"] == ("error", f"in queue {queue!r} what waits for 1m expires and is lost")


async def test_a_policy_that_limits_deliveries_is_told(
    bench: Bench, broker: BrokerAddress, management: Management
) -> None:
    topology = await bench.declared()
    queue = await bench.raw.queue(f"{topology.name}-poison", x_queue_type="quorum")
    async with management.policy(queue, delivery_limit=2):
        await policy_known(broker, queue, "delivery-limit")
        found = await look(bench.url, topology, Target.of_queue(queue), ask=broker.management_url)

    assert found["return"] == ("warning", f"a policy gives what is in queue {queue!r} no more than 2 deliveries")


async def test_the_dead_letter_queue_is_no_target(bench: Bench, broker: BrokerAddress) -> None:
    topology = await bench.declared()
    exchange = await bench.raw.exchange(f"{topology.name}-round", "topic")
    await bench.raw.bind(topology.dlq, exchange, "#.dead")
    for target in (Target.of_queue(topology.dlq), Target(topology.dlx, ""), Target(exchange, "a.dead")):
        found = await look(bench.url, topology, target, ask=broker.management_url)
        assert found["return"][0] == "error"


async def test_where_a_named_exchange_leads_to_is_told(
    bench: Bench, broker: BrokerAddress, management: Management
) -> None:
    topology = await bench.declared()
    exchange = await bench.raw.exchange(f"{topology.name}-topic")
    headers = await bench.raw.exchange(f"{topology.name}-headers", "headers")
    await bench.raw.bind(topology.name, exchange, "order.*")
    await bench.raw.bind(topology.rungs[0].queue, exchange, "#.both")

    async def route(name: str, key: str, ask: str | None = broker.management_url) -> tuple[str, str]:
        found = await look(bench.url, topology, Target(name, key), ask=ask)
        return found.get("route") or found["management"]

    assert await route(exchange, "order.created") == (
        "ok",
        f"exchange {exchange!r}, key 'order.created' leads to queue {topology.name!r}",
    )
    assert (await route(exchange, "order.both"))[0] == "warning"
    assert (await route(exchange, "order")) == (
        "error",
        f"exchange {exchange!r}, key 'order' leads to no queue: all letters would stay",
    )
    assert (await route(headers, "order"))[0] == "unknown"
    assert (await route(exchange, "order", None))[0] == "unknown"
    assert await bench.raw.count(topology.name) == 0


async def test_a_management_account_that_may_not_look_is_one_unknown(
    bench: Bench, broker: BrokerAddress, management: Management
) -> None:
    topology = await bench.declared()
    async with account(management, f"{topology.name}-o"):
        forbidden = str(URL(broker.management_url).with_user(f"{topology.name}-o").with_password("s3cret"))
        nobody = "http://ann:s3cret@127.0.0.1:9"
        for ask in (forbidden, nobody, "nonsense", str(URL(bench.url).with_scheme("http").with_password("s3cret"))):
            found = await look(bench.url, topology, ask=ask)
            assert found["management"][0] == "unknown"
            assert "s3cret" not in str(found)
            assert found["target"][0] == "ok"


async def test_another_virtual_host_with_an_odd_name(
    bench: Bench, broker: BrokerAddress, management: Management
) -> None:
    topology = bench.topology()
    vhost = f"{topology.name} a/b%20#?"
    path = f"vhosts/{URL.build(path='/' + vhost).raw_path[1:].replace('/', '%2F')}"
    await management.put(path)
    try:
        await management.put(path.replace("vhosts", "permissions") + "/guest", configure=".*", write=".*", read=".*")
        url = str(URL(broker.url).with_path("/")) + path.removeprefix("vhosts/")
        async with await Connection.open(url) as connection:
            assert connection.vhost == vhost
            channel = await connection.channel()
            await channel.queue_declare(topology.name, durable=True, arguments={"x-max-length": 3})

            async def room() -> str:
                ask = broker.management_url
                found = await preflight(connection, topology, Target.of_queue(topology.name), TEN, ask)
                return next(each.level for each in found if each.check == "room")

            async def known() -> bool:
                return await room() == "error"

            await until(known, "the queue's limit")
    finally:
        with contextlib.suppress(Exception):
            await management.delete(path)
