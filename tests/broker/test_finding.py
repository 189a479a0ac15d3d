"""Finding dead letters: groups, selections and the whole story of one, on a real broker."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rabbitdlq import (
    ConfigurationError,
    DeadLetterNotFound,
    Message,
    NumberRange,
    Permanent,
    Selection,
    Topology,
    Where,
)
from rabbitdlq.broker import PublishLink
from rabbitdlq.journal import JournalWriter, operated
from rabbitdlq.wire import Properties
from tests.broker.kit import Bench, until
from tests.broker.looks import rests
from tests.broker.operator_kit import letter_for, letters_left, park, words

quorum_only = pytest.mark.parametrize("queue_type", ["quorum"])


def handle(message: Message) -> None:
    """Three bugs, by the kind of order."""
    order = message.payload
    match order["kind"]:
        case "late":
            raise TimeoutError(f"warehouse-{order['n']}.internal did not answer within {order['n']} seconds")
        case "unknown":
            raise KeyError(f"customer {order['n']}")
        case _:
            raise Permanent("no such kind")


def orders(**counts: int) -> Iterator[dict[str, Any]]:
    for kind, count in counts.items():
        yield from ({"kind": kind, "n": number, "customer": {"id": number}} for number in range(1, count + 1))


async def parked(bench: Bench, **counts: int) -> Topology:
    """Letters of the bugs, parked by a consumer."""
    topology = await bench.declared(["20ms", "30ms"])
    await bench.send(topology, *orders(**counts), headers={"tenant": "acme"})
    await bench.drain(topology, handle, breaker=None)
    return topology


async def bare(bench: Bench, topology: Topology) -> str:
    """One that the broker parked at the delivery limit, and that came without an id (C13); gives the id it has now."""
    await bench.raw.publish(topology.name, b'{"kind": "deadly"}', content_type="application/json")
    before = await bench.raw.count(topology.dlq)

    async def crash() -> bool:
        channel = await bench.raw.channel()
        await channel.basic_get(topology.name)
        await channel.close()
        return await bench.raw.count(topology.dlq) > before

    await until(crash, "the broker's limit is reached")
    async with bench.dlq(topology) as dlq:
        (letter,) = [letter for letter in await dlq.peek_all() if letter.bare]
    return letter.id


async def test_each_bug_is_one_group_whatever_its_ids_and_numbers(bench: Bench) -> None:
    topology = await parked(bench, late=5, unknown=3, strange=1)
    started = datetime.now(UTC) - timedelta(minutes=1)

    async with bench.dlq(topology) as dlq:
        told: list[tuple[int, int]] = []
        before = await words(dlq.each())
        late, unknown, strange = await dlq.groups(on_progress=lambda done, total: told.append((done, total)))
        by_reason = await dlq.groups(by="reason")
        some = await dlq.groups(selection=Selection(error="KeyError*"))
        with pytest.raises(ConfigurationError, match="cannot be grouped by 'colour'"):
            await dlq.groups(by="colour")
        letters = {letter.id: letter for letter in await dlq.peek_all()}

    assert [(group.count, round(group.share, 3)) for group in (late, unknown, strange)] == [
        (5, 0.556),
        (3, 0.333),
        (1, 0.111),
    ]
    assert late.signature.startswith("TimeoutError: warehouse-")
    assert unknown.signature.startswith("KeyError: 'customer ")
    for group in (late, unknown, strange):
        example = letters[group.example_id]
        assert example.error is not None
        assert example.error.fingerprint == group.key
        assert group.last_parked == example.moved_to_dlq_at
        assert group.first_parked is not None
        assert group.last_parked is not None
        assert started < group.first_parked <= group.last_parked
        assert (group.state, group.came_back, group.max_lap) == (None, 0, 1)
    assert {(group.key, group.count) for group in by_reason} == {("exhausted", 8), ("permanent", 1)}
    assert [(group.key, group.count, group.share) for group in some] == [(unknown.key, 3, 1.0)]
    assert told[-1] == (9, 9)
    assert await letters_left(bench, topology.dlq) == before


@quorum_only
async def test_since_then_a_bug_is_new_growing_regressed_or_quiet(bench: Bench) -> None:
    topology = await parked(bench, late=3, unknown=2, strange=1)
    async with bench.dlq(topology) as dlq:
        keys = {group.signature.split(":")[0]: group.key for group in await dlq.groups()}
        late = next(letter for letter in await dlq.peek_all() if letter.error and letter.error.type == "TimeoutError")
        then = datetime.now(UTC)
        await dlq.replay(late.id)
    await bench.send(topology, {"kind": "strange", "n": 9}, {"kind": "late", "n": 9})
    await bench.drain(topology, handle)

    async with bench.dlq(topology) as dlq:
        await dlq.push({}, "found by hand")
        found = {group.key: group for group in await dlq.groups(since=then)}

    states = {name: found[key].state for name, key in keys.items()}
    assert states["KeyError"] == "quiet"
    assert states["TimeoutError"] == "regressed"
    assert states["Permanent"] == "growing"
    assert [group.state for group in found.values() if group.signature == "Error: found by hand"] == ["new"]
    regressed = found[keys["TimeoutError"]]
    assert (regressed.count, regressed.came_back, regressed.max_lap) == (4, 1, 2)


@quorum_only
async def test_when_a_bugs_letters_were_sent_back_last_is_in_the_journal(bench: Bench) -> None:
    topology = await parked(bench, late=2, unknown=1)
    link = PublishLink(bench.url, "rabbitdlq tests")
    async with bench.dlq(topology) as dlq:
        late, unknown = await dlq.groups()
        for _ in range(2):
            event = operated(
                "replayed", topology.name, who="ann", amqp_user="guest", ids=["x"], count=1, fingerprints={late.key: 1}
            )
            await JournalWriter(topology, link).append(event)
        await link.close()

        late, unknown = await dlq.groups(since=datetime(2000, 1, 1, tzinfo=UTC))
        by_type = await dlq.groups(by="type")

    assert late.last_replayed == event.at
    assert (late.state, unknown.state, unknown.last_replayed) == ("new", "new", None), "parked before it was sent back"
    assert [group.last_replayed for group in by_type] == [None, None], "the journal tells of fingerprints"


@quorum_only
async def test_a_selection_finds_what_belongs_to_it_and_the_limit_counts_those(bench: Bench) -> None:
    topology = await parked(bench, late=4, unknown=3, strange=2)
    typo = Where("payload.custmer.id == 2")

    async with bench.dlq(topology) as dlq:
        everything = await dlq.peek_all()
        ids = [letter.id for letter in everything]

        async def found(most: int | None = None, **filters: Any) -> list[str]:
            return await words(dlq.each(most, Selection(**filters)))

        def those(kind: str) -> list[str]:
            return [letter.id for letter in everything if letter.payload["kind"] == kind]

        assert await found() == ids
        assert await found(reasons=frozenset({"permanent"})) == those("strange")
        assert await found(error="TimeoutError: warehouse-*") == those("late")
        assert await found(2, error="KeyError") == those("unknown")[:2]
        assert await found(error="KeyError", limit=1) == those("unknown")[:1]
        assert await found(3, error="KeyError", limit=1) == those("unknown")[:1]
        assert await found(0, error="KeyError") == []
        assert await found(where=Where("payload.customer.id == 2 and headers.tenant == 'acme'")) == [
            letter.id for letter in everything if letter.payload["n"] == 2
        ]
        assert await found(attempts=NumberRange.parse(">=3"), newer_than=datetime.now(UTC)) == []
        assert await found(ids=frozenset({ids[4], everything[2].park_id})) == [ids[2], ids[4]]
        assert await found(where=typo) == []
        assert (typo.tally.failures, typo.tally.first_failure) == (9, "no key 'custmer'")
        assert [letter.id for letter in await dlq.peek(1, Selection(routing_key="*"))] == ids[:1]

    assert await letters_left(bench, topology.dlq) == ids


@quorum_only
async def test_a_letter_that_the_broker_parked_is_found_by_what_is_known_of_it(bench: Bench) -> None:
    if bench.raw.connection.version < (3, 13):
        pytest.skip("below 3.13 the topology sets no delivery limit")
    topology = await bench.declared(["20ms"], crash_limit=1)
    await park(bench, topology, b"{}")
    id = await bare(bench, topology)

    async with bench.dlq(topology) as dlq:
        ours, theirs = sorted(await dlq.groups(), key=lambda group: group.signature, reverse=True)
        of_reason = await words(dlq.each(selection=Selection(reasons=frozenset({"delivery-limit"}))))
        of_error = await words(dlq.each(selection=Selection(error="*")))
        of_id = await words(dlq.each(selection=Selection(ids=frozenset({id}))))
        of_payload = await words(
            dlq.each(selection=Selection(where=Where("error is null and payload.kind == 'deadly'")))
        )
        story = await dlq.story(id)

    assert id.startswith("derived-")
    assert (ours.signature, theirs.key, theirs.signature) == (
        "Error: the warehouse is closed",
        "",
        "(no error recorded)",
    )
    assert theirs.example_id == id
    assert of_reason == of_id == of_payload == [id]
    assert of_error == ["m0"]
    assert (story.letter.id, story.letter.reason, story.actions, story.journal_read) == (id, "delivery-limit", (), True)


@quorum_only
async def test_second_copies_of_one_letter_are_counted_once(bench: Bench) -> None:
    topology = await bench.declared()
    first, again = (
        letter_for(topology, b"{}", Properties(message_id="a", delivery_mode=2), repeated=repeated)
        for repeated in (False, True)
    )
    for each in (first, again):
        await bench.raw.republish(each)
    await park(bench, topology, b"b", first=1)

    async with bench.dlq(topology) as dlq:
        (group,) = await dlq.groups()
        listed = await words(dlq.each(selection=Selection(error="*closed*")))

    assert group.count == 2
    assert listed == ["a", "m1"]
    assert await bench.raw.count(topology.dlq) == 3


@quorum_only
async def test_the_story_tells_of_all_laps_and_of_what_operators_did(bench: Bench) -> None:
    topology = await bench.declared(["20ms", "200ms"])
    (id, other) = await bench.send(topology, {"kind": "late", "n": 1}, {"kind": "late", "n": 2})
    await bench.drain(topology, handle)
    async with bench.dlq(topology) as dlq:
        await dlq.replay(id)
        await rests(bench, topology.name, 1)
    await bench.drain(topology, handle)
    async with bench.dlq(topology) as dlq:
        await dlq.replay_all()
    await bench.drain(topology, handle)

    async with bench.dlq(topology) as dlq:
        story = await dlq.story(id)
        theirs = await dlq.story(other)
        plain = await dlq.get(id)
        with pytest.raises(DeadLetterNotFound, match="no dead letter 'nobody'"):
            await dlq.story("nobody")

    assert story.letter.history == plain.history
    assert [(lap.number, lap.reason, [record.attempt for record in lap.attempts]) for lap in story.laps] == [
        (number, "exhausted", [1, 2, 3]) for number in (1, 2, 3)
    ]
    ends = [lap.parked_at for lap in story.laps]
    assert None not in ends
    assert ends == sorted(ends, key=str)
    assert [(action.event, action.named) for action in story.actions] == [("replayed", True), ("replayed", True)]
    assert [action.count for action in story.actions] == [1, 2]
    assert all(action.who == dlq.who and action.amqp_user for action in story.actions)
    assert [len(theirs.laps), len(theirs.actions)] == [2, 1]
    assert story.journal_read
    shown = story.as_json()
    assert [lap["lap"] for lap in shown["laps"]] == [1, 2, 3]
    assert {action["event"] for action in shown["operator_actions"]} == {"replayed"}
    assert shown["id"] == id


@quorum_only
async def test_an_operation_that_names_not_all_of_its_letters_may_have_been_of_this_one(bench: Bench) -> None:
    topology = await bench.declared(["20ms", "30ms"])
    (id,) = await bench.send(topology, {"kind": "late", "n": 1})
    await bench.drain(topology, handle)
    async with bench.dlq(topology) as dlq:
        await dlq.replay(id)
    await bench.drain(topology, handle)
    link = PublishLink(bench.url, "rabbitdlq tests")
    for event in ("replayed", "purged"):
        written = operated(event, topology.name, who="ann", amqp_user="guest", ids=["x"], count=700)
        await JournalWriter(topology, link).append(written)
    await link.close()

    async with bench.dlq(topology) as dlq:
        story = await dlq.story(id)

    assert [(action.event, action.count, action.named) for action in story.actions] == [
        ("replayed", 1, True),
        ("replayed", 700, False),
    ]


@quorum_only
async def test_without_a_journal_the_story_says_so_and_tells_the_rest(bench: Bench) -> None:
    topology = await parked(bench, late=1)
    channel = await bench.raw.channel()
    await channel.queue_delete(topology.journal_queue)

    async with bench.dlq(topology) as dlq:
        (letter,) = await dlq.peek_all()
        story = await dlq.story(letter.id)
        (group,) = await dlq.groups()

    assert not story.journal_read
    assert len(story.laps) == 1
    assert story.laps[0].attempts == letter.history
    assert group.last_replayed is None


@quorum_only
async def test_finding_uses_up_nothing_and_leaves_everything_in_its_place(bench: Bench) -> None:
    """C25: looking must not spend a delivery limit; and a search that ends early gives back all it took."""
    topology = await bench.declared()
    ids = await park(bench, topology, *(b'{"n": %d}' % number for number in range(30)))

    async with bench.dlq(topology) as dlq:
        for _ in range(8):
            assert (await dlq.groups())[0].count == 30
            assert await words(dlq.each(1, Selection(where=Where("payload.n == 17")))) == ["m17"]
            assert (await dlq.story("m5")).letter.id == "m5"
        await rests(bench, topology.dlq, 30)

    assert await letters_left(bench, topology.dlq) == ids
