"""Sending dead letters back: the set is frozen, a pace is kept, and what is not sent is where it was."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from rabbitdlq import ConfigurationError, Message, Permanent, Selection, Topology, WorkBinding, names
from rabbitdlq.dead_letters import Canary, RunReport, Target, plan, runner
from rabbitdlq.dead_letters.watch import Outcomes
from rabbitdlq.journal import JournalEvent
from rabbitdlq.wire import Headers, Properties
from tests.broker.kit import Bench, until
from tests.broker.looks import rests
from tests.broker.operator_kit import events_of, letter_for, letters_left, park, words

quorum_only = pytest.mark.parametrize("queue_type", ["quorum"])


def balanced(report: RunReport) -> bool:
    """Whether every letter of the plan is in one of the counts."""
    return report.planned == report.done + report.before + report.stayed + report.left


def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters are never kept, and given back after each one."""
    monkeypatch.setattr(plan, "KEPT_BYTES", 0)
    monkeypatch.setattr(runner, "ROUND_SECONDS", 0.0)


async def succeeds(_: Message) -> None:
    pass


async def fails(_: Message) -> None:
    raise OSError("still broken")


async def park_each(bench: Bench, topology: Topology, **queues: str) -> None:
    """A letter of each of these ids, that says it failed in that queue."""
    for id, queue in queues.items():
        await bench.raw.republish(letter_for(topology, b"{}", Properties(message_id=id), queue=queue))


# --- which letters


@pytest.mark.parametrize("rounds", [False, True])
async def test_a_large_set_goes_once_and_in_order(bench: Bench, monkeypatch: pytest.MonkeyPatch, rounds: bool) -> None:
    """What memory cannot keep was not sent at all: somebody else was said to have taken it."""
    if rounds:
        small_memory(monkeypatch)
    monkeypatch.setattr(plan, "KEPT_BYTES", 0)
    topology = await bench.declared()
    ids = await park(bench, topology, *(b"%d" % number for number in range(12 if rounds else 300)))
    half = len(ids) // 2

    async with bench.dlq(topology) as dlq:
        report = await dlq.replay(Selection(ids=frozenset(ids[1::2])))
        assert (report.planned, report.done, report.stayed, report.errors) == (half, half, 0, [])
        assert await words(dlq.each()) == ids[::2]
        moved = await dlq.move(Selection(limit=2), topology.name)
        assert (moved.done, moved.left, moved.stayed) == (2, 0, 0)
        dropped = await dlq.drop(Selection(), archive=None)
        assert (dropped.done, dropped.stayed) == (half - 2, 0)
    assert await letters_left(bench, topology.name) == [*ids[1::2], ids[0], ids[2]]
    assert await bench.raw.count(topology.dlq) == 0


async def test_what_fails_again_meanwhile_is_not_picked_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7, and in rounds: the queue is read anew, and what came back lies there among the others."""
    small_memory(monkeypatch)
    topology = await bench.declared(["1ms"])
    await park(bench, topology, *(b"{}" for _ in range(7)))

    async with bench.running(topology, fails), bench.dlq(topology) as dlq:
        made = await dlq.plan()
        await bench.raw.take(topology.dlq)  # m0 is looked for to the end, among those that came back
        report = await asyncio.wait_for(dlq.replay(made, rate=20), 30)
        assert (report.planned, report.done, report.stayed) == (7, 6, 1)
        await rests(bench, topology.dlq, 6)
        back = sorted((letter.id, letter.lap) for letter in await dlq.peek_all())
        assert back == [(f"m{number}", 2) for number in range(1, 7)]


async def test_a_plan_is_carried_out_on_its_letters_whatever_came_since(bench: Bench) -> None:
    topology = await bench.declared()
    ids = await park(bench, topology, *(b"{}" for _ in range(4)))

    async with bench.dlq(topology) as dlq:
        made = await dlq.plan()
        await bench.raw.take(topology.dlq)  # m0, by somebody else
        late = await park(bench, topology, b"{}", b"{}", first=4)
        report = await dlq.replay(made)
        assert (report.found, report.planned, report.done, report.stayed, report.left) == (5, 4, 3, 1, 0)
        assert [(id, "somebody else has taken it" in why) for id, why in report.errors] == [(made.keys[0], True)]
        assert await words(dlq.each()) == late
        made = await dlq.plan()
        await park(bench, topology, b"{}", first=6)
        assert (await dlq.drop(made, archive=None)).ids == late
        assert await words(dlq.each()) == ["m6"]
        other = bench.topology()
        async with bench.dlq(other) as theirs:
            with pytest.raises(
                ConfigurationError, match=f"of dead letters of '{topology.name}', not of '{other.name}'"
            ):
                await theirs.replay(made)
    assert await letters_left(bench, topology.name) == ids[1:]


async def test_only_what_was_chosen_goes_and_the_rest_does_not_count_as_failed(bench: Bench) -> None:
    """C56: the rest came back shuffled, and counted as failed once more."""
    topology = await bench.declared()
    await park(bench, topology, *(b'{"n": %d}' % number for number in range(5)))
    await park(bench, topology, b"first", b"second", first=1)  # m1 and m2 again: their ids name two each

    async with bench.dlq(topology) as dlq:
        before = [letter.as_json() for letter in await dlq.peek_all()]
        named = Selection(ids=frozenset({"m0", "m1", "m4", "nope", before[2]["park_id"]}))
        report = await dlq.replay(named)
        assert (report.planned, report.done, report.stayed, report.left) == (5, 3, 2, 0)
        assert [id for id, _ in report.errors] == ["m1", "nope"]
        assert report.errors[0][1].startswith(f"2 dead letters in '{topology.dlq}' have the id 'm1'; name one by")
        after = await dlq.peek_all()
        assert [letter.as_json() for letter in after] == [before[place] for place in (1, 3, 5, 6)]
        assert not any(letter.repeated for letter in after)

        filtered = await dlq.replay(Selection(ids=frozenset({"m3"}), reasons=frozenset({"permanent"})))
        assert (filtered.done, filtered.stayed) == (0, 1)
        assert "no dead letter 'm3' in" in filtered.errors[0][1]
        assert "that the other filters match" in filtered.errors[0][1]
    assert await letters_left(bench, topology.name) == ["m0", "m2", "m4"]
    assert await letters_left(bench, topology.dlq) == ["m1", "m3", "m1", "m2"]


@quorum_only
async def test_what_keeps_coming_back_is_held(bench: Bench) -> None:
    topology = await bench.declared(["10ms"], max_laps=2)
    await park(bench, topology, b"{}")
    async with bench.dlq(topology) as dlq:
        assert (await dlq.replay_all()).done == 1
        await bench.drain(topology, fails)  # back for the second time
        await park(bench, topology, b"{}", first=1)
        await bench.raw.republish(letter_for(topology, b"{}", Properties(message_id="m1")))

        made = await dlq.plan(Selection(reasons=frozenset({"exhausted"})))
        assert (made.count, made.held) == (2, 1)
        bulk = await dlq.replay_all()
        assert (bulk.planned, bulk.done, bulk.held) == (2, 2, 1)
        assert [(letter.id, letter.lap) for letter in await dlq.peek_all()] == [("m0", 2)]
        by_id = await dlq.replay("m0")
        assert (by_id.done, by_id.held) == (1, 0)
        await bench.drain(topology, fails)
        too = await dlq.replay(Selection(held=True))
        assert (too.done, too.held) == (3, 0)


# --- how fast, and until when


@quorum_only
@pytest.mark.parametrize(("rate", "seconds"), [(40.0, 1.2), (1_500.0, 0.4)])
async def test_a_rate_holds_and_a_stop_leaves_the_rest(bench: Bench, rate: float, seconds: float) -> None:
    topology = await bench.declared()
    ids = await park(bench, topology, *(b"%d" % number for number in range(int(rate * seconds * 3))))
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    began = ended = 0.0
    seen: list[int] = []

    def watch(report: RunReport) -> None:
        nonlocal began, ended
        began, ended = began or loop.time(), loop.time()
        if ended - began > seconds:
            stop.set()
        assert balanced(report)
        seen.append(report.looked_at)

    async with bench.dlq(topology) as dlq:
        report = await dlq.replay(Selection(), rate=rate, stop=stop, on_progress=watch)

        # none goes before its time; how late a busy machine is, is not the pace's doing
        assert 0 < report.done <= rate * (ended - began) + 1, f"{report.done} in {ended - began:.2f} s"
        assert report.interrupted
        assert (report.planned, report.left) == (len(ids), len(ids) - report.done)
        assert seen == sorted(seen)
        assert await words(dlq.each()) == ids[report.done :]
    assert report.ids == ids[: report.done]
    assert await bench.raw.count(topology.name) == report.done


# --- the canary, and what becomes of them


async def canaried(
    bench: Bench, topology: Topology, *, first: int = 4, wait: float = 20.0, abort_above: float = 0.25
) -> RunReport:
    async with bench.dlq(topology) as dlq:
        canary = Canary(first, timedelta(seconds=wait), abort_above)
        report = await asyncio.wait_for(dlq.replay(Selection(), canary=canary), 30)
        assert balanced(report)
        return report


async def test_a_canary_that_lives_lets_the_others_go(bench: Bench) -> None:
    topology = await bench.declared(["10ms"])
    ids = await park(bench, topology, *(b"%d" % number for number in range(8)))
    (fresh,) = await bench.send(topology, "fresh")

    async def one_fails(message: Message) -> None:
        if message.id == "m0":
            raise Permanent("no such customer")

    async with bench.running(topology, one_fails):
        report = await canaried(bench, topology)

        told = report.outcomes or {}
        assert (report.done, report.aborted, sum(told.values()), told["recovered"]) == (8, "", 4, 3)
        await until(lambda: _told(bench, topology, ids[1:]), "each success of a replayed message")
    heard = await events_of(bench, topology, names.SUCCEEDED)
    assert fresh not in {event.message_id for event in heard}, "a first success is nobody's business"
    assert await letters_left(bench, topology.dlq) == ["m0"]


async def _told(bench: Bench, topology: Topology, ids: Sequence[str]) -> bool:
    told = await events_of(bench, topology, names.SUCCEEDED)
    return sorted(str(event.message_id) for event in told) == sorted(ids)


async def test_a_canary_that_fails_stops_the_run(bench: Bench) -> None:
    topology = await bench.declared(["10ms", "60s"])
    ids = await park(bench, topology, *(b"%d" % number for number in range(8)))

    async def two_fail(message: Message) -> None:
        if message.id in ("m0", "m1"):
            raise OSError("still broken")

    async with bench.running(topology, two_fail):
        report = await canaried(bench, topology, wait=6)

    assert (report.done, report.left, report.stayed, report.outcome) == (4, 4, 0, "aborted")
    assert report.aborted == "of the 4 sent first 0 are back and 2 failed and are tried again, more than 25%"
    assert await letters_left(bench, topology.dlq) == ids[4:]
    (event,) = await events_of(bench, topology, names.REPLAYED)
    assert (event.outcome, event.count, sorted(event.ids)) == ("aborted", 4, ids[:4])


@quorum_only
async def test_a_canary_of_which_nothing_is_heard_stops_the_run(bench: Bench) -> None:
    topology = await bench.declared()
    ids = await park(bench, topology, b"a", b"b", b"c")

    report = await canaried(bench, topology, first=2, wait=0.3)
    assert (report.done, report.left) == (2, 1)
    assert "none of the 2 sent first has succeeded or failed within 0.3 s; is there a consumer" in report.aborted
    assert await letters_left(bench, topology.dlq) == ids[2:]

    await park_each(bench, topology, x="gone", y="gone", z=topology.name)
    report = await canaried(bench, topology, first=2)  # and it does not wait for what was never sent
    assert (report.done, report.stayed, report.left) == (0, 2, 1)
    assert report.aborted == "none of the 2 that were to go first could be sent"


@quorum_only
async def test_a_watch_tells_what_became_of_each(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = await bench.declared(["10ms", "20s"])
    other = await bench.raw.queue(f"{topology.name}-other")
    mine = dict.fromkeys(("good", "second", "hopeless", "hanging"), topology.name)
    await park_each(bench, topology, gone="gone", **mine, elsewhere=other)
    for _ in range(2):  # two that are one to whoever goes by their ids
        await bench.raw.republish(letter_for(topology, b"{}", Properties()))

    async def handle(message: Message) -> None:
        if message.id == "hopeless":
            raise Permanent("no such customer")
        if message.id == "hanging" or (message.id == "second" and message.attempt == 1):
            raise OSError("not now")

    # two of them never come to an end: the watch is over when all else was told, however long that takes
    expected = {"recovered": 4, "back": 1, "retrying": 1, "open": 1}
    stop, take = asyncio.Event(), Outcomes.take

    def taken(outcomes: Outcomes, event: JournalEvent) -> None:
        take(outcomes, event)
        if outcomes.counts() == expected:
            stop.set()

    async with bench.running(topology, handle), bench.dlq(topology) as dlq:
        with monkeypatch.context() as patch:
            patch.setattr(Outcomes, "take", taken)
            report = await dlq.replay(Selection(), watch=timedelta(seconds=15), stop=stop)
        assert (report.planned, report.done, report.stayed) == (8, 7, 1)
        assert report.outcomes == expected
        await park_each(bench, topology, gone="gone", good=topology.name)
        again = await asyncio.wait_for(dlq.replay("good", watch=timedelta(seconds=60)), 20)
        assert again.outcomes == {"recovered": 1, "back": 0, "retrying": 0, "open": 0}
        rest = await asyncio.wait_for(dlq.replay(Selection(limit=1), watch=timedelta(seconds=60)), 20)
        assert (rest.stayed, sum((rest.outcomes or {}).values())) == (1, 0)


# --- where to


@quorum_only
async def test_letters_go_where_they_are_told_to(bench: Bench) -> None:
    exchange = await bench.raw.exchange(f"shop-{id(bench)}")
    topology = await bench.declared(bindings=[WorkBinding(exchange, "order.*")])
    aside = await bench.raw.queue(f"{topology.name}-aside")
    headers = Headers({"tenant": "acme"})
    ids = await park(bench, topology, b"a", b"b", b"c", b"d", headers=headers)

    async with bench.dlq(topology) as dlq:
        assert (await dlq.replay(ids[0], to=Target.of_queue(aside))).done == 1
        assert (await dlq.replay(ids[1], to=Target(exchange, "order.again"))).done == 1
        lost = await dlq.replay(ids[2], to=Target(exchange, "nobody.listens"))
        assert (lost.done, lost.stayed, "no queue took the message" in lost.errors[0][1]) == (0, 1, True)
        missing = await dlq.replay(Selection(), to=Target("no-such-exchange", "x"))
        assert (missing.done, missing.stayed) == (0, 2)
        for there in (Target.of_queue(topology.dlq), Target(topology.dlx, "x")):
            with pytest.raises(ConfigurationError, match="leads to where they are"):
                await dlq.replay(Selection(), to=there)
        assert await words(dlq.each()) == ids[2:]
    ((_, properties, _),) = await bench.raw.take_all(aside)
    assert (properties.message_id, properties.table["tenant"], properties.table[names.LAP]) == (ids[0], "acme", 2)
    assert await letters_left(bench, topology.name) == [ids[1]]


@quorum_only
async def test_before_letters_go_home_each_home_is_looked_at(bench: Bench) -> None:
    topology = await bench.declared()
    other = await bench.raw.queue(f"{topology.name}-other")
    await park_each(bench, topology, a=topology.name, b=topology.name, c=other, d="gone")

    async with bench.dlq(topology) as dlq:
        findings = await dlq.preflight(await dlq.plan())
        nowhere = await dlq.preflight(await dlq.plan(Selection(frozenset({"d"}))))
    gone = "queue 'gone': there is no such queue"
    assert [finding.level for finding in findings if finding.text == gone] == ["warning"], (
        "the letters of the others go"
    )
    assert [finding.text for finding in nowhere if finding.level == "error"] == [gone]
    assert {finding.text for finding in findings if finding.check == "target"} == {
        f"queue {topology.name!r} is there, with 0 messages waiting",
        f"queue {other!r} is there, with 0 messages waiting",
        gone,
    }
    assert not [finding for finding in findings if finding.check == "origin"], "each goes to its own"
    assert len({*findings}) == len(findings)
