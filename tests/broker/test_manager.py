"""The operator's other tools: push, pop, drop, purge, one by one, the summary, the journal; and bare dead letters."""

from datetime import UTC, datetime, timedelta

import pytest

from rabbitdlq import (
    ConfigurationError,
    DeadLetter,
    DeadLetterNotFound,
    DLQManager,
    EntityNotFound,
    Message,
    Selection,
    WorkBinding,
    names,
)
from rabbitdlq.local_broker import BrokerAddress
from rabbitdlq.wire import Properties
from tests.broker.kit import Bench, until
from tests.broker.looks import rests
from tests.broker.operator_kit import (
    Management,
    account,
    events_of,
    letter_for,
    letters_left,
    nack_away,
    park,
    words,
)

quorum_only = pytest.mark.parametrize("queue_type", ["quorum"])


# --- changing


@quorum_only
async def test_a_payload_can_be_parked_by_hand(bench: Bench) -> None:
    topology = await bench.declared()

    async with DLQManager(topology, url=bench.url, who="ann@desk") as dlq:
        pushed = await dlq.push({"order": 17}, "not before Monday", headers={"tenant": "acme"})
        named = await dlq.push(b"\x00\xff", ValueError("odd"), message_id="mine")
        letters = await dlq.peek_all()

    assert ([letter.id for letter in letters], named) == ([pushed, "mine"], "mine")
    shown = letters[0].as_json()
    assert (shown["payload"], shown["headers"]) == ({"order": 17}, {"tenant": "acme"})
    assert (shown["reason"], shown["error"]["message"]) == ("pushed", "not before Monday")
    assert (shown["attempts"], shown["retry_count"], shown["error_history"]) == (0, 0, [])
    assert shown["created_at"] is not None
    assert (letters[1].body, letters[1].error and letters[1].error.type) == (b"\x00\xff", "ValueError")


async def test_a_handler_can_push_the_message_it_was_given(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.send(topology, {"order": 1}, headers={"tenant": "acme"}, message_id="a")

    async with bench.dlq(topology) as dlq:

        async def handler(message: Message) -> None:
            await dlq.push(message, "suspicious")

        async with bench.running(topology, handler):
            await rests(bench, topology.dlq, 1)
        letter = await dlq.get("a")
    assert (letter.payload, letter.reason, letter.attempts, dict(letter.properties.table)) == (
        {"order": 1},
        "pushed",
        1,
        {"tenant": "acme"},
    )


@quorum_only
async def test_letters_are_taken_sent_and_deleted_one_by_one(bench: Bench) -> None:
    topology = await bench.declared()
    await park(bench, topology, b"a", b"b", b"c", b"d", b"e")

    async with bench.dlq(topology) as dlq:
        assert (await dlq.pop("m3")).body == b"d"
        by_park_id = (await dlq.peek(2))[1].park_id
        assert (await dlq.drop(by_park_id, archive=None)).ids == ["m1"]
        assert await words(dlq.each()) == ["m0", "m2", "m4"]
        report = await dlq.replay_one()
        assert (report.found, report.done, report.ids) == (3, 1, ["m0"])
        assert (await dlq.replay((await dlq.get("m4")).park_id)).ids == ["m4"]
        assert await words(dlq.each()) == ["m2"]
        assert (await dlq.purge(archive=None)).done == 1
        assert (await dlq.count(), (await dlq.replay_one()).found) == (0, 0)
        for gone in (dlq.pop, lambda id: dlq.drop(id, archive=None), dlq.get, dlq.replay):
            with pytest.raises(DeadLetterNotFound, match=f"no dead letter 'm3' in '{topology.dlq}'"):
                await gone("m3")
    assert await letters_left(bench, topology.name) == ["m0", "m4"]


@quorum_only
async def test_one_text_where_a_list_is_meant_deletes_nothing(bench: Bench) -> None:
    """ "12" was taken for the letters "1" and "2", a reason for whatever is a part of it."""
    topology = await bench.declared()
    for id in ("1", "2", "12"):
        await bench.raw.republish(letter_for(topology, b"x", Properties(message_id=id)))

    async with bench.dlq(topology) as dlq:
        for made in (lambda: Selection(ids="12"), lambda: Selection(reasons="not-exhausted"), lambda: ["12"]):
            with pytest.raises(ConfigurationError, match=r"is one text; write a list|give an id, a plan"):
                await dlq.drop(made(), archive=None)  # type: ignore[arg-type]
        assert await words(dlq.each()) == ["1", "2", "12"]
        assert (await dlq.drop(Selection(ids=["12", "2"], newer_than="1h"), archive=None)).ids == ["2", "12"]
        assert (await dlq.groups(since="1h"))[0].state == "new"
        assert await words(dlq.each()) == ["1"]


@quorum_only
async def test_dropping_a_letter_that_was_parked_twice_drops_both_copies(bench: Bench) -> None:
    topology = await bench.declared()
    for repeated in (False, True):
        await bench.raw.republish(letter_for(topology, b"twice", Properties(message_id="a"), repeated=repeated))

    async with bench.dlq(topology) as dlq:
        await dlq.drop("a", archive=None)
        assert await dlq.count() == 0


@quorum_only
async def test_the_journal_tells_who_did_what_with_which_account(bench: Bench, broker: BrokerAddress) -> None:
    topology = await bench.declared()
    await park(bench, topology, *(b"x" for _ in range(6)))
    started = datetime.now(UTC) - timedelta(seconds=1)

    async with (
        Management.of(broker) as management,
        account(management, f"{topology.name}-op") as url,
        DLQManager(topology, url=url, who="ann@desk") as dlq,
    ):
        await dlq.push({}, "by hand", message_id="pushed")
        await dlq.pop("m0")
        await dlq.drop("m1", archive=None)
        await dlq.replay("m2")
        await dlq.replay_one()
        await dlq.replay_all()
        await dlq.push({}, "by hand", message_id="last")
        await dlq.purge(archive=None)
        await dlq.replay_all()  # nothing there, nothing to tell
        await dlq.peek_all()

    kinds = (names.PUSHED, names.POPPED, names.DROPPED, names.REPLAYED, names.PURGED)
    events = await events_of(bench, topology, *kinds)
    assert [(event.event, event.count, sorted(event.ids)) for event in events] == [
        ("pushed", 1, ["pushed"]),
        ("popped", 1, ["m0"]),
        ("dropped", 1, ["m1"]),
        ("replayed", 1, ["m2"]),
        ("replayed", 1, ["m3"]),
        ("replayed", 3, ["m4", "m5", "pushed"]),
        ("pushed", 1, ["last"]),
        ("purged", 1, []),
    ]
    assert {(event.who, event.amqp_user, event.queue) for event in events} == {
        ("ann@desk", f"{topology.name}-op", topology.name)
    }
    assert all(started <= event.at <= datetime.now(UTC) for event in events)


@quorum_only
async def test_the_summary_counts_every_place_and_says_which_is_missing(bench: Bench) -> None:
    topology, missing = await bench.declared(["1m", "2m"]), bench.topology(["1s"])
    await bench.send(topology, 1, 2, 3, 4)
    await park(bench, topology, b"a")
    await nack_away(bench, topology.name)
    first, second = (rung.queue for rung in topology.rungs)
    await rests(bench, first, 1)

    async with bench.dlq(topology) as dlq:
        one, other = await dlq.summary([topology, missing])
        assert [one] == await dlq.summary()
    assert one.as_json() == {
        "queue": topology.name,
        "waiting": 3,
        "on_ladder": {first: 1, second: 0},
        "dead": 1,
        "consumers": 0,
        "in_use": False,
        "held_by": None,
    }
    assert (other.waiting, other.dead, other.consumers) == (None, None, None)
    assert list(other.on_ladder.values()) == [None]


@quorum_only
async def test_a_dead_letter_queue_that_is_missing_is_named(bench: Bench) -> None:
    topology = bench.topology()
    async with bench.dlq(topology) as dlq:
        for ask in (dlq.peek, dlq.count, dlq.replay_all, lambda: dlq.purge(archive=None)):
            with pytest.raises(EntityNotFound, match=f"no queue '{topology.dlq}'.*topology apply"):
                await ask()


# --- what the broker parked by itself


async def _bare(bench: Bench, dlq: DLQManager, id: str) -> DeadLetter:
    await rests(bench, dlq.topology.dlq, 1)
    (letter,) = await dlq.peek_all()
    assert (letter.id, letter.bare, letter.body) == (id, True, b"{}")
    return letter


async def test_a_message_that_others_nacked_up_the_ladder_is_shown_with_what_the_broker_knows(bench: Bench) -> None:
    exchange = await bench.raw.exchange(f"shop-{bench.queue_type}-{id(bench)}")
    topology = await bench.declared(["20ms", "30ms"], bindings=[WorkBinding(exchange, "order.*")])
    await bench.raw.publish("order.created", b"{}", exchange=exchange, message_id="a", content_type="application/json")
    await nack_away(bench, topology.name, times=3)

    async with bench.dlq(topology) as dlq:
        letter = await _bare(bench, dlq, "a")
    assert (letter.reason, letter.attempts, letter.queue) == ("exhausted", 3, topology.name)
    assert (letter.exchange, letter.routing_key) == (exchange, "order.created")
    assert (letter.payload, letter.history, letter.history_partial, letter.lap) == ({}, (), True, 1)
    assert letter.moved_to_dlq_at is not None
    assert datetime.now(UTC) - letter.moved_to_dlq_at < timedelta(minutes=1)


async def test_a_bare_letter_gets_its_story_from_the_journal(bench: Bench) -> None:
    topology = await bench.declared(["20ms", "1s"])
    await bench.raw.publish(topology.name, b"{}", message_id="a")

    async def handler(message: Message) -> None:
        if message.attempt == 2:
            consumer.stop()  # by whoever waits for the failure it would be stopped too late
        raise OSError(f"no stock at attempt {message.attempt}")

    async with bench.running(topology, handler, worker="w1") as consumer:
        await until(lambda: consumer.summary.retried == 2, "two attempts have failed")
    # this one has no journal
    await nack_away(bench, topology.name)

    async with bench.dlq(topology) as dlq:
        letter = await _bare(bench, dlq, "a")
        assert (letter.error, letter.history) == (None, ())
        letter = await dlq.get("a")
    assert (letter.attempts, letter.max_attempts, letter.history_partial) == (3, 3, True)
    assert [(record.attempt, record.error_message, record.worker) for record in letter.history] == [
        (1, "no stock at attempt 1", "w1"),
        (2, "no stock at attempt 2", "w1"),
    ]
    assert letter.error is not None
    assert (letter.error.type, letter.error.message) == ("OSError", "no stock at attempt 2")
    assert "in handler" in (letter.error.traceback or "")


@quorum_only
async def test_a_message_whose_consumers_die_is_parked_by_the_brokers_limit(bench: Bench) -> None:
    """C34: what kills its consumer never gets to count its attempts."""
    if bench.raw.connection.version < (3, 13):
        pytest.skip("below 3.13 the topology sets no delivery limit")
    topology = await bench.declared(["20ms"], crash_limit=1)
    await bench.raw.publish(topology.name, b"{}", message_id="a")

    async def crash() -> bool:
        channel = await bench.raw.channel()
        await channel.basic_get(topology.name)
        await channel.close()
        return await bench.raw.count(topology.dlq) == 1

    await until(crash, "the broker's limit is reached")

    async with bench.dlq(topology) as dlq:
        letter = await _bare(bench, dlq, "a")
        assert (letter.reason, letter.attempts, letter.routing_key) == ("delivery-limit", 0, topology.name)
        assert (await dlq.replay_all()).done == 1
    assert await letters_left(bench, topology.name) == ["a"]


async def test_a_message_that_expired_in_the_work_queue_is_shown_as_that(bench: Bench) -> None:
    topology = await bench.declared()
    await bench.raw.publish(topology.name, b"{}", message_id="a", expiration="20")

    async with bench.dlq(topology) as dlq:
        letter = await _bare(bench, dlq, "a")
        assert (letter.reason, letter.attempts, letter.routing_key) == ("expired", 0, topology.name)
        assert (await dlq.replay_all()).done == 1
    (back,) = await bench.raw.take_all(topology.name)
    assert (back[1].message_id, back[1].expiration) == ("a", None)
