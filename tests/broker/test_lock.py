"""The operator's lock: one at a time, the second is told who holds it, and nothing is left of it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta

import aiormq.exceptions
import pytest

from rabbitdlq import Connection, DeadLettersInUse, DLQManager, Topology
from rabbitdlq.broker import close_channel
from rabbitdlq.dead_letters import lock
from rabbitdlq.dead_letters.browse import Browser
from rabbitdlq.dead_letters.lock import Holder, release_lock, take_lock
from rabbitdlq.definitions import accounts
from rabbitdlq.local_broker import BrokerAddress
from tests.broker.kit import Bench, until
from tests.broker.operator_kit import Management, account, letters_left, park
from tests.broker.proxy import Proxy

pytestmark = pytest.mark.parametrize("queue_type", ["quorum"])

UNTOLD = "another operator is looking at, replaying or dropping its messages"


@pytest.fixture
async def management(broker: BrokerAddress) -> AsyncIterator[Management]:
    async with Management.of(broker) as client:
        yield client


@asynccontextmanager
async def locked(url: str, topology: Topology, who: str = "ann@desk", doing: str = "looking") -> AsyncIterator[Browser]:
    """The lock is held for the length of a block, on a connection of its own."""
    async with await Connection.open(url) as connection, Browser(connection, topology, who, doing=doing) as browser:
        yield browser


async def refusal(url: str, topology: Topology) -> str:
    """What the second operator is told."""
    with pytest.raises(DeadLettersInUse) as caught:
        async with locked(url, topology, "second"):
            pass
    return str(caught.value)


async def exchange_is_there(bench: Bench, topology: Topology) -> bool:
    channel = await bench.raw.channel()
    try:
        await channel.exchange_declare(topology.lock_exchange, passive=True)
    except aiormq.exceptions.ChannelNotFoundEntity:
        return False
    finally:
        await close_channel(channel)
    return True


async def left_by_a_dead_holder(bench: Bench, topology: Topology, holder: Holder) -> None:
    """What stays of one that died after it had made the exchange and before it had bound it."""
    channel = await bench.raw.channel()
    await channel.exchange_declare(
        topology.lock_exchange,
        exchange_type="fanout",
        auto_delete=True,
        arguments={"alternate-exchange": holder.encode()},
    )
    await channel.close()


async def test_the_second_operator_is_told_who_has_it_what_for_and_since_when(bench: Bench) -> None:
    topology = await bench.declared()
    before = datetime.now(UTC).replace(microsecond=0)
    async with locked(bench.url, topology, "ann@desk", "replaying"):
        said = await refusal(bench.url, topology)

    start = f"'{topology.dlq}' is in use: another operator has it: ann@desk is replaying since "
    assert said.startswith(start)
    since = datetime.fromisoformat(said.removeprefix(start).split()[0])
    assert since.tzinfo is not None
    assert before <= since <= datetime.now(UTC)
    async with locked(bench.url, topology, "bob"):  # it is free again
        assert "bob is looking since" in await refusal(bench.url, topology)


async def test_looking_while_another_replays_gives_the_clear_answer(bench: Bench) -> None:
    topology = await bench.declared()
    await park(bench, topology, b"a", b"b")
    one, two = DLQManager(topology, url=bench.url, who="ann@desk"), bench.dlq(topology)

    async with one, two, aclosing(one.each()) as letters:
        await anext(letters)
        for attempt in (two.peek, two.replay_all, lambda: two.purge(archive=None)):
            with pytest.raises(DeadLettersInUse, match=r"ann@desk is .* since"):
                await attempt()
    assert await letters_left(bench, topology.dlq) == ["m0", "m1"]


@pytest.mark.parametrize(
    ("who", "shown"),
    [
        ("größe 'o' \"x\" 100%@desk", "größe 'o' \"x\" 100%@desk is"),
        ("a\x1b[31mred\n", "a?[31mred? is"),
        ("\udcff", "\\xff is"),
        ("x" * 300, "xxxxxxxxxx… is"),
        ("", UNTOLD),
    ],
)
async def test_odd_names_are_told_as_far_as_they_can_be(
    bench: Bench, who: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0)
    topology = await bench.declared()
    async with locked(bench.url, topology, who):
        assert shown in await refusal(bench.url, topology)


async def test_the_holder_is_told_for_queues_with_long_names_too(bench: Bench) -> None:
    topology = bench.topology(name="t-" + "x" * 100)
    channel = await bench.raw.channel()
    await channel.queue_declare(topology.dlq, durable=True)
    async with locked(bench.url, topology, "ann.longname@build-17"):
        assert "ann.longname@build-17 is looking since" in await refusal(bench.url, topology)


async def test_a_holder_whose_line_is_cut_frees_it(bench: Bench) -> None:
    topology = await bench.declared()
    async with Proxy(bench.url) as proxy:
        connection = await Connection.open(proxy.url)
        await take_lock(connection, topology, "ann", "looking")
        assert "ann is" in await refusal(bench.url, topology)
        proxy.cut()
        await until(lambda: _free(bench, topology), "the lock is free")
        await connection.close()
    assert not await exchange_is_there(bench, topology)


async def _free(bench: Bench, topology: Topology) -> bool:
    try:
        async with locked(bench.url, topology, "second"):
            return True
    except DeadLettersInUse:
        return False


HOLD = """
import asyncio, sys
from rabbitdlq import Connection, Topology
from rabbitdlq.dead_letters.lock import take_lock

async def main():
    connection = await Connection.open(sys.argv[1])
    await take_lock(connection, Topology(sys.argv[2], ["1s"]), "ann", "replaying")
    print("held", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_process_that_is_killed_frees_it_and_is_not_named_any_more(bench: Bench) -> None:
    topology = await bench.declared()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, bench.url, topology.name, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 30) == b"held\n"
        assert f"ann is replaying since {datetime.now(UTC):%Y}" in (said := await refusal(bench.url, topology))
        assert f"(process {process.pid})" in said
    finally:
        process.kill()
        await process.wait()
    await until(lambda: _free(bench, topology), "the lock is free")
    assert not await exchange_is_there(bench, topology)
    async with locked(bench.url, topology, "bob"):
        assert "bob is looking" in await refusal(bench.url, topology)


async def test_a_name_that_a_dead_holder_left_is_never_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died between two steps; then somebody took the lock who has not told its name yet."""
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0)
    topology = await bench.declared()
    dead = Holder("dead", "replaying", datetime.now(UTC) - timedelta(days=1), 1)
    await left_by_a_dead_holder(bench, topology, dead)
    async with await Connection.open(bench.url) as connection:
        channel = await connection.channel()
        await channel.queue_declare(topology.lock_queue, exclusive=True)

        said = await refusal(bench.url, topology)

        assert UNTOLD in said
        assert "dead " not in said
        assert not await exchange_is_there(bench, topology), "it is tidied up"


async def test_a_new_holder_takes_the_place_of_a_dead_ones_name(bench: Bench) -> None:
    topology = await bench.declared()
    await left_by_a_dead_holder(bench, topology, Holder("dead", "replaying", datetime.now(UTC), 1))
    async with locked(bench.url, topology, "ann"):
        assert "ann is looking" in await refusal(bench.url, topology)
    assert not await exchange_is_there(bench, topology)


async def test_the_second_waits_for_the_name_of_a_holder_who_is_just_telling_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 60)
    topology = await bench.declared()
    async with await Connection.open(bench.url) as connection:
        channel = await connection.channel()
        await channel.queue_declare(topology.lock_queue, exclusive=True)
        asked = asyncio.create_task(refusal(bench.url, topology))
        await asyncio.sleep(0.2)  # as long as it likes: it waits, or it is told at once
        await lock._tell(connection, topology, Holder.here("slow", "dropping"))

        assert "slow is dropping" in await asked


async def test_the_second_gets_it_where_the_first_is_just_giving_it_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 60)
    topology = await bench.declared()
    async with await Connection.open(bench.url) as one, await Connection.open(bench.url) as two:
        channel = await one.channel()
        await channel.queue_declare(topology.lock_queue, exclusive=True)
        waiting = asyncio.create_task(take_lock(two, topology, "second", "looking"))
        await asyncio.sleep(0.2)
        await release_lock(channel, topology)
        await waiting

        assert "second is looking" in await refusal(bench.url, topology)


async def test_operators_who_come_at_once_get_it_one_after_the_other(bench: Bench) -> None:
    """Nobody is told a wrong name, and no two have it at once."""
    topology = await bench.declared()
    names = [f"op{number}" for number in range(6)]
    inside: set[str] = set()
    refused: list[tuple[str, str]] = []
    served = 0

    async def operate(name: str) -> None:
        nonlocal served
        async with await Connection.open(bench.url) as connection:
            had = 0
            while had < 2:
                try:
                    async with Browser(connection, topology, name):
                        inside.add(name)
                        assert inside == {name}
                        served, had = served + 1, had + 1
                        await asyncio.sleep(0.01)
                        inside.remove(name)
                except DeadLettersInUse as error:
                    refused.append((name, str(error)))

    await asyncio.wait_for(asyncio.gather(*(operate(name) for name in names)), 60)
    for name, said in refused:
        assert UNTOLD in said or any(f"{other} is looking since" in said for other in names if other != name)
    assert served == 2 * len(names)
    assert not await exchange_is_there(bench, topology)


async def test_the_least_privileged_operator_tells_and_is_told(bench: Bench, management: Management) -> None:
    topology = await bench.declared()
    (rights,) = [each for each in accounts([topology]) if each.role == "operator"]
    ids = await park(bench, topology, b"a")
    allowed = {"configure": rights.configure, "write": rights.write, "read": rights.read}
    async with account(management, f"{topology.name}-o", **allowed) as url:
        async with locked(url, topology, "least"):
            assert "least is looking" in await refusal(bench.url, topology)
            assert "least is looking" in await refusal(url, topology)
        async with DLQManager(topology, url=url) as dlq:
            assert (await dlq.replay_all()).ids == ids
    assert not await exchange_is_there(bench, topology)


@pytest.mark.parametrize("lacking", ["configure", "write", "read"])
async def test_without_a_right_on_the_name_the_lock_works_all_the_same(
    bench: Bench, management: Management, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0)
    topology = await bench.declared(name=f"t-{'x' * 40}-{lacking}")  # so long that lock and exchange differ in name
    rights = {
        "configure": rf"^({topology.lock_queue}|{topology.lock_exchange})$",
        "write": r"^(amq\.default|t-.*|dlq-lock .*)$",
        "read": rf"^({topology.name}.*|{topology.lock_exchange})$",
    }
    rights[lacking] = rights[lacking].replace(topology.lock_exchange, "x").replace("|dlq-lock .*", "")
    async with account(management, topology.name, **rights) as url, locked(url, topology, "ann"):
        said = await refusal(bench.url, topology)
    assert UNTOLD in said
    assert f"arguments of queue {topology.lock_queue!r} in the management UI" in said
    async with locked(bench.url, topology, "bob"):
        pass


async def test_a_hundred_rounds_leave_nothing_behind(bench: Bench, management: Management) -> None:
    topology = await bench.declared()
    before = {queue["name"] for queue in await management.get("queues/{v}")}
    async with await Connection.open(bench.url) as connection:
        for _ in range(100):
            async with Browser(connection, topology, "ann"):
                pass
        assert not await exchange_is_there(bench, topology)
        assert topology.lock_queue not in {queue["name"] for queue in await management.get("queues/{v}")} - before


async def test_whoever_gives_up_waiting_for_it_leaves_no_lock_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = await bench.declared()
    reached = asyncio.Event()

    async def slow(*_: object) -> None:
        reached.set()
        await asyncio.sleep(600)

    async with await Connection.open(bench.url) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(lock, "_tell", slow)
            taking = asyncio.create_task(take_lock(connection, topology, "ann", "looking"))
            await reached.wait()
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
        async with locked(bench.url, topology, "bob"):
            pass
