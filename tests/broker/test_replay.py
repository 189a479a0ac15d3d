"""Sending dead letters back: what cannot go stays, what is stopped is whole, and everybody else is left in peace."""

import asyncio

import pytest

from rabbitdlq import AmbiguousDeadLetter, DLQManager, Message, Permanent, Topology, WorkBinding, apply_topology
from rabbitdlq.consumer import Handler
from rabbitdlq.local_broker import BrokerAddress
from rabbitdlq.wire import Headers, Properties
from tests.broker.kit import Bench, until
from tests.broker.looks import rests
from tests.broker.operator_kit import Management, account, events_of, letter_for, letters_left, nack_away, park, words

quorum_only = pytest.mark.parametrize("queue_type", ["quorum"])
classic_only = pytest.mark.parametrize("queue_type", ["classic"])


async def _fails(_: Message) -> None:
    raise OSError("still broken")


async def _let_die(bench: Bench, topology: Topology, count: int, handler: Handler = _fails) -> None:
    """Run a consumer until so many dead letters are there."""
    async with bench.running(topology, handler, concurrency=1):
        await rests(bench, topology.dlq, count)


# --- what cannot go stays


@quorum_only
async def test_letters_whose_work_queue_is_gone_stay_and_the_report_says_why(bench: Bench) -> None:
    """C1: a publish that reaches no queue was taken for a success, and the source acknowledged."""
    topology = await bench.declared()
    await park(bench, topology, b"a")
    await bench.raw.republish(letter_for(topology, b"lost", Properties(message_id="foreign"), queue="gone"))
    await park(bench, topology, b"c", first=1)

    async with bench.dlq(topology) as dlq:
        report = await dlq.replay_all()
        assert (report.found, report.done, report.stayed, report.ids) == (3, 2, 1, ["m0", "m1"])
        assert report.errors[0][0] == "foreign"
        assert "no queue took the message" in report.errors[0][1]
        assert "'gone'" in report.errors[0][1]
        assert await letters_left(bench, topology.name) == ["m0", "m1"]
        await park(bench, topology, b"d", first=2)
        channel = await bench.raw.channel()
        await channel.queue_delete(topology.name)
        await channel.close()

        report = await dlq.replay_all()
        assert (report.found, report.done, report.stayed) == (2, 0, 2)
        assert await words(dlq.each()) == ["foreign", "m2"]
        await apply_topology(bench.raw.connection, topology)
        assert (await dlq.replay("m2")).done == 1


@quorum_only
async def test_an_empty_body_that_no_queue_takes_stays_too(bench: Bench) -> None:
    """C47: a client waited for ever for the body of a returned publish that has none."""
    topology = await bench.declared()
    await bench.raw.republish(letter_for(topology, b"", Properties(message_id="empty"), queue="gone"))

    async with bench.dlq(topology) as dlq:
        report = await asyncio.wait_for(dlq.replay_all(), 10)
        assert (report.done, report.stayed) == (0, 1)
        assert await words(dlq.each()) == ["empty"]


async def test_an_empty_body_goes_through_failure_dead_letter_queue_and_replay(bench: Bench) -> None:
    """C48: a body of zero bytes has no body frame."""
    topology = await bench.declared(["50ms"])
    await bench.raw.publish(topology.name, b"", content_type="application/octet-stream", message_id="empty")
    bodies: list[bytes] = []

    async def handler(message: Message) -> None:
        bodies.append(message.payload)
        if message.lap == 1:
            raise OSError("no")

    await _let_die(bench, topology, 1, handler)
    async with bench.dlq(topology) as dlq:
        assert (await dlq.get("empty")).body == b""
        assert (await dlq.replay_all()).done == 1
    async with bench.running(topology, handler):
        await until(lambda: len(bodies) == 3, "the handler had it again")

    assert bodies == [b"", b"", b""]


async def test_a_full_work_queue_takes_what_it_has_room_for_and_the_rest_stays(
    bench: Bench, broker: BrokerAddress
) -> None:
    """C40: a refused publish is a failure, and the letter is still there."""
    topology = bench.topology()
    async with (
        Management.of(broker) as management,
        management.policy(topology.name, max_length=1, overflow="reject-publish"),
        bench.dlq(topology) as dlq,
    ):
        await apply_topology(bench.raw.connection, topology)
        await park(bench, topology, b"a", b"b", b"c")
        reports = [await dlq.replay_one() for _ in range(3)]
        # a quorum queue takes one more before it has noticed that it is full
        took = await bench.raw.count(topology.name)
        assert took == 1 or (bench.queue_type == "quorum" and took == 2)
        assert sum(report.done for report in reports) == took
        assert sum(report.stayed for report in reports) == 3 - took
        report = await dlq.replay_all()
        assert (report.done, report.stayed) == (0, 3 - took)
        assert all("refused the message; is the queue full" in why for _, why in report.errors)
        assert len(await words(dlq.each())) == 3 - took


# --- what goes, goes well


@quorum_only
async def test_another_accounts_user_id_and_a_direct_reply_to_do_not_stop_the_others(
    bench: Bench, broker: BrokerAddress
) -> None:
    """C2: the broker closes the channel over a foreign user id, and over a direct reply-to."""
    topology = await bench.declared(["20ms"])
    await bench.raw.publish(topology.name, b"1", message_id="a", user_id="guest")
    await bench.raw.publish(topology.name, b"2", message_id="b", reply_to="amq.rabbitmq.reply-to.g1h2.x==")
    await bench.raw.publish(topology.name, b"3", message_id="c", reply_to="answers")
    await _let_die(bench, topology, 3)
    # and one that the broker parks with everything on it
    await bench.raw.publish(topology.name, b"4", message_id="bare", user_id="guest")
    await nack_away(bench, topology.name, times=2)
    await rests(bench, topology.dlq, 4)

    async with (
        Management.of(broker) as management,
        account(management, f"{topology.name}-b") as url,
        DLQManager(topology, url=url) as dlq,
    ):
        assert (await dlq.get("a")).original["user_id"] == "guest"
        report = await dlq.replay_all()
    assert (report.done, report.stayed) == (4, 0)
    back = {wire.message_id: wire for _, wire, _ in await bench.raw.take_all(topology.name)}
    assert {id: wire.user_id for id, wire in back.items()} == dict.fromkeys(["a", "b", "c", "bare"])
    assert {id: wire.reply_to for id, wire in back.items()} == {"a": None, "b": None, "c": "answers", "bare": None}


async def test_a_replayed_message_has_all_its_attempts_again(bench: Bench) -> None:
    """C6: a message that came back with its old counters was dead at its first failure."""
    exchange = await bench.raw.exchange(f"shop-{bench.queue_type}-{id(bench)}")
    topology = await bench.declared(bindings=[WorkBinding(exchange, "order.*")], delays=["30ms", "30ms"])
    await bench.raw.publish("order.created", b"{}", exchange=exchange, message_id="a")
    runs: list[tuple[int, int, str, str]] = []

    async def handler(message: Message) -> None:
        runs.append((message.lap, message.attempt, message.exchange, message.routing_key))
        if message.lap == 1 or message.attempt == 1:
            raise OSError(f"lap {message.lap}, attempt {message.attempt}")

    await _let_die(bench, topology, 1, handler)
    async with bench.dlq(topology) as dlq:
        assert (await dlq.replay_all()).done == 1
    async with bench.running(topology, handler):
        await until(lambda: len(runs) == 5, "it has failed once more, and recovered")

    origin = (exchange, "order.created")
    assert runs == [(1, 1, *origin), (1, 2, *origin), (1, 3, *origin), (2, 1, *origin), (2, 2, *origin)]
    assert [event.lap for event in await events_of(bench, topology, "recovered")] == [2]
    assert await bench.raw.count(topology.dlq) == 0


async def test_a_run_over_a_handler_that_is_still_broken_ends(bench: Bench) -> None:
    """C7: the run picked up what had failed again meanwhile, and went round for ever."""
    topology = await bench.declared(["1ms"])
    await park(bench, topology, *(b"{}" for _ in range(5)))

    async with bench.running(topology, _fails), bench.dlq(topology) as dlq:
        report = await asyncio.wait_for(dlq.replay_all(), 20)
        assert (report.found, report.done, report.stayed) == (5, 5, 0)
        await rests(bench, topology.dlq, 5)
        letters = await dlq.peek_all()
    assert {(letter.id, letter.lap, letter.attempts) for letter in letters} == {(f"m{n}", 2, 2) for n in range(5)}


async def test_an_expiration_stays_behind(bench: Bench) -> None:
    """C31: a message that was given back with its expiration vanished again, or died of it."""
    topology = await bench.declared(["20ms"])
    await bench.raw.publish(topology.name, b"{}", message_id="ours", expiration="60000")

    async def hopeless(_: Message) -> None:
        raise Permanent("no such customer")

    await _let_die(bench, topology, 1, hopeless)
    await bench.raw.publish(topology.name, b"{}", message_id="bare", expiration="60000")
    await nack_away(bench, topology.name, times=2)
    await rests(bench, topology.dlq, 2)

    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
        assert [(letter.id, letter.wire.expiration) for letter in letters] == [("ours", None), ("bare", None)]
        assert letters[0].original["expiration"] == "60000"
        assert (await dlq.replay_all()).done == 2
    back = await bench.raw.take_all(topology.name)
    assert {(wire.message_id, wire.expiration) for _, wire, _ in back} == {("ours", None), ("bare", None)}


async def test_replay_of_one_in_the_middle_leaves_the_others_in_their_order(bench: Bench) -> None:
    """C56: the rest came back shuffled, and counted as failed once more."""
    topology = await bench.declared()
    await park(bench, topology, b"a", b"b", b"c")

    async with bench.dlq(topology) as dlq:
        before = {letter.id: letter.as_json() for letter in await dlq.peek_all()}
        report = await dlq.replay("m1")
        assert (report.done, report.ids) == (1, ["m1"])
        after = await dlq.peek_all()
    assert [letter.id for letter in after] == ["m0", "m2"]
    assert [letter.as_json() for letter in after] == [before["m0"], before["m2"]]
    assert await letters_left(bench, topology.dlq) == ["m0", "m2"]
    assert await letters_left(bench, topology.name) == ["m1"]


@classic_only
async def test_priority_and_headers_go_back_as_the_publisher_set_them(bench: Bench) -> None:
    """C55: a replayed message had lost its priority."""
    topology = await bench.declared()
    headers = Headers({"tenant": "acme", "ratio": 0.1, "seen": None, "tags": ["a", {"b": 1}]})
    await park(bench, topology, b"low", priority=0, headers=headers, type="order", app_id="shop")
    await park(bench, topology, b"high", first=1, priority=5, headers=headers, type="order", app_id="shop")

    async with bench.dlq(topology) as dlq:
        assert (await dlq.replay_all()).done == 2
    back = {wire.message_id: wire for _, wire, _ in await bench.raw.take_all(topology.name)}
    assert {id: wire.priority for id, wire in back.items()} == {"m0": 0, "m1": 5}
    for wire in back.values():
        assert (wire.type, wire.app_id, wire.delivery_mode) == ("order", "shop", 2)
        assert {name: wire.table[name] for name in headers} == dict(headers)
        assert not [name for name in wire.table if name.startswith("x-")]


# --- which is which


@quorum_only
async def test_two_equal_messages_without_ids_are_two_letters(bench: Bench) -> None:
    """C13: without an id, two messages may be equal to the last byte and still be two."""
    topology = await bench.declared(["20ms"])
    for _ in range(2):
        await bench.raw.publish(topology.name, b'{"order": 1}')
    seen: list[str] = []

    async def handler(message: Message) -> None:
        seen.append(message.id)
        if message.lap == 1:
            raise OSError("no")

    await _let_die(bench, topology, 2, handler)
    async with bench.dlq(topology) as dlq:
        letters = await dlq.peek_all()
        assert [(letter.id, letter.id_derived) for letter in letters] == [(seen[0], True)] * 2
        assert seen[0].startswith("derived-")
        with pytest.raises(AmbiguousDeadLetter, match=f"2 dead letters .*{letters[0].park_id}, {letters[1].park_id}"):
            await dlq.replay(seen[0])
        report = await dlq.replay(letters[1].park_id)
        assert (report.done, report.stayed, report.duplicates) == (1, 0, 0)
        assert [letter.park_id for letter in await dlq.peek_all()] == [letters[0].park_id]
        assert (await dlq.replay(seen[0])).done == 1, "alone, the id is enough"
    async with bench.running(topology, handler):
        await until(lambda: len(seen) == 6, "both were handled")

    assert seen == [seen[0]] * 6, "the derived id is the same on every attempt and after a replay"


async def test_a_letter_that_a_crash_parked_twice_is_one(bench: Bench) -> None:
    """C8: a crash between confirm and ack parks twice; the second time the consumer knows that it may be so."""
    topology = await bench.declared()
    first = letter_for(topology, b"twice", Properties(message_id="a", delivery_mode=2))
    again = letter_for(topology, b"twice", Properties(message_id="a", delivery_mode=2), repeated=True)
    for outgoing in (first, letter_for(topology, b"once", Properties(message_id="b")), again):
        await bench.raw.republish(outgoing)

    async with bench.dlq(topology) as dlq:
        assert await words(dlq.each()) == ["a", "b"]
        assert (await dlq.get("a")).body == b"twice"
        report = await dlq.replay_all()
        assert (report.found, report.done, report.duplicates, report.stayed) == (3, 2, 1, 0)
    assert sorted(body for body, _, _ in await bench.raw.take_all(topology.name)) == [b"once", b"twice"]
    assert await bench.raw.count(topology.dlq) == 0
