"""SIGKILL of ``dlq replay``, ``drop``, ``move`` and ``restore``, wherever they are; and ``--resume`` after it.

Every letter is in the dead-letter queue, in the queue it was sent to, handled, or in an archive: none is gone. What is
there twice was in flight at a kill, and ``--resume`` names it.

The normal suite kills each operation once, with 2,000 letters, and perhaps its resumed run. With ``RABBITDLQ_KILLS=20``
in the environment twenty points of each operation are tried on 20,000 letters, spread from the first look at the queue
to the end; ``RABBITDLQ_SEED`` repeats a run, whose seed is printed.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from aiormq.exceptions import AMQPError, ChannelLockedResource

from rabbitdlq import names
from rabbitdlq.broker import ConsumingChannel, Delivery, PublishLink
from rabbitdlq.dead_letters.archive import ArchiveWriter, read_archive
from rabbitdlq.dead_letters.run_log import RunLog
from rabbitdlq.dead_letters.selection import Selection
from rabbitdlq.errors import ConfigurationError, DeadLettersInUse
from rabbitdlq.journal import JournalWriter
from rabbitdlq.wire import Properties
from tests.acceptance.cli import Done, Shell
from tests.broker.kit import until
from tests.broker.looks import all_empty
from tests.broker.operator_kit import events_of, letter_for, publish_all
from tests.broker.worker import Order, WorkerProcess, worker_process

KILLS = int(os.environ.get("RABBITDLQ_KILLS", "1"))
LETTERS = 2_000 if KILLS == 1 else 20_000
#: kills of the resumed run, at most
AGAIN = 1 if KILLS == 1 else 3
SEED = int(os.environ.get("RABBITDLQ_SEED", "0")) or random.randrange(1, 1_000_000)
#: letters that come after a kill: the resumed run is not about them
OTHERS = 20
#: what fails always, where there is a consumer
DOOMED_EVERY = 50
ORDERS = [Order(number, failures=0 if number % DOOMED_EVERY else 99) for number in range(LETTERS + OTHERS)]
BODIES = [json.dumps(asdict(order)).encode() for order in ORDERS]
IDS = [f"m{number}" for number in range(LETTERS + OTHERS)]

Say = Callable[[str], None]


@dataclass
class Tally:
    """What the kills of one test came to."""

    rounds: int = 0
    kills: int = 0
    #: before the plan was in the journal, and after the run had ended
    early: int = 0
    late: int = 0
    named: int = 0
    twice: int = 0

    def __str__(self) -> str:
        return (
            f"{self.rounds} runs of {LETTERS:,} letters, {self.kills} kills, {self.early} before the plan was written, "
            f"{self.late} too late; {self.named} letters named, {self.twice} there twice"
        )


class Killing:
    """One operation that is killed, and what is found of its letters afterwards."""

    def __init__(self, shell: Shell, operation: str, dice: random.Random) -> None:
        self.shell = shell
        self.operation = operation
        self.dice = dice
        self.topology = shell.topology
        self.aside = f"{shell.queue}-aside"
        self.letters = [
            letter_for(self.topology, body, Properties(message_id=id, delivery_mode=2))
            for id, body in zip(IDS, BODIES, strict=True)
        ]
        self.tally = Tally()
        self.runs_before: set[str] = set()
        self.archives: list[Path] = []
        #: where somebody consumes what is replayed
        self.consumer: WorkerProcess | None = None
        #: what the run is about
        self.meant = IDS[:LETTERS]
        self.others_came = False
        self._listed = operation != "replay"
        #: how often each letter was found where it was to go, and in the dead-letter queue
        self.arrived: Counter[str] = Counter()
        self.named: set[str] = set()

    @property
    def _doomed(self) -> list[str]:
        """What is a dead letter again when somebody has consumed it."""
        return self.meant[::DOOMED_EVERY]

    @property
    def source(self) -> Path:
        """Where a restore takes its letters from."""
        return self.shell.folder / "before.jsonl"

    async def prepare(self) -> None:
        """Declare what is needed."""
        await self.shell.declare()
        if self.operation == "move":
            await self.shell.raw.queue(self.aside, x_queue_type="quorum")
        if self.operation == "restore":
            await publish_all(self.shell.url, self.letters[:LETTERS])
            async with self.shell.bench.dlq(self.topology) as dlq:
                await until(lambda: self._rest(LETTERS), "all letters are there")
                with ArchiveWriter(self.source, queue=self.topology.name, who="ann", why="all") as archive:
                    async with aclosing(dlq.each()) as each:
                        async for letter in each:
                            archive.write(letter)

    async def _rest(self, count: int) -> bool:
        return await self.shell.raw.count(self.topology.dlq) == count

    async def fill(self) -> None:
        """A new round: the queue as it was before."""
        async with self.shell.bench.dlq(self.topology) as dlq:
            await dlq.purge(archive=None)
            self.runs_before = {run.id for run in await dlq.runs()}
        self.meant, self.others_came = IDS[:LETTERS], False
        if self.operation != "restore":
            await publish_all(self.shell.url, self.letters[:LETTERS])
            await until(lambda: self._rest(LETTERS), "all letters are there")
        self.arrived.clear()
        self.named.clear()
        for path in self.archives:
            path.unlink(missing_ok=True)
        self.archives.clear()

    async def others_come(self) -> None:
        """Letters of which the run knows nothing."""
        if not self.others_came:
            self.others_came = True
            await publish_all(self.shell.url, self.letters[LETTERS:])

    # --- the command

    def words(self, resume: str | None = None) -> list[str]:
        """Its command line."""
        chosen = ["--resume", resume] if resume else ["--all"]
        match self.operation:
            case "replay":
                more = chosen
            case "drop":
                self.archives.append(self.shell.folder / f"archive-{len(self.archives)}.jsonl")
                more = [*chosen, "--archive", self.archives[-1].name, "--yes"]
            case "move":
                more = chosen if resume else [*chosen, "--to-queue", self.aside]
            case _:
                more = chosen if resume else [self.source.name]
        return ["dlq", self.operation, self.shell.queue, *more, "--json"]

    async def kill(self, share: float, whole: float | None = None, resume: str | None = None) -> float:
        """Start it and kill it; gives the seconds that it lived from the lock on.

        With ``whole`` that is when a share of these seconds is over, else when a share of the letters has arrived.
        """
        before = await self._count()
        running = await self.shell.start(*self.words(resume))
        ended = asyncio.create_task(running.process.wait())
        while not await self._is_locked() and not ended.done():
            await asyncio.sleep(0.002)
        began = time.monotonic()
        if whole is not None:
            await asyncio.wait([ended], timeout=whole * share)
        else:
            while await self._count() < before + share * LETTERS and not ended.done():
                await asyncio.sleep(0.002)
        late, lived = ended.done(), time.monotonic() - began
        await running.kill()
        await ended
        self.tally.kills += not late
        self.tally.late += late
        if late:
            done = await running.end()
            assert done.code == 0, done.err
            self.note(done)
        return lived

    async def _count(self) -> int:
        """How many have arrived."""
        if self.consumer is not None:
            return self.consumer.count("started") + await self.shell.raw.count(self.topology.name)
        if self.operation == "drop":
            return sum(path.read_bytes().count(b"\n") - 1 for path in self.archives if path.exists())
        queue = {"replay": self.topology.name, "move": self.aside}.get(self.operation, self.topology.dlq)
        return await self.shell.raw.count(queue)

    async def _is_locked(self) -> bool:
        channel = await self.shell.raw.channel()
        try:
            # somebody else's exclusive queue is refused
            await channel.queue_declare(self.topology.lock_queue, passive=True)
        except AMQPError as error:
            return isinstance(error, ChannelLockedResource)
        await channel.close()
        return False

    async def unlocked(self) -> None:
        """Return when the broker has noticed the kill."""

        async def free() -> bool:
            return not await self._is_locked()

        await until(free, "the lock of the killed one is gone")

    def note(self, done: Done) -> dict[str, Any]:
        """What it said; every planned letter is in one of its counts."""
        report: dict[str, Any] = done.json[0]
        self.named.update(report["in_flight"])
        assert sum(report[name] for name in ("done", "before", "stayed", "left")) == report["planned"], report
        return report

    async def the_run(self) -> dict[str, Any] | None:
        """The run of this round, as ``dlq runs --json`` lists it."""
        if self._listed:  # a look of our own is quicker
            async with self.shell.bench.dlq(self.topology) as dlq:
                runs = [run.as_json() for run in await dlq.runs()]
        else:
            listed = await self.shell("dlq", "runs", self.shell.queue, "--json")
            assert listed.code == 0, listed.err
            runs, self._listed = listed.json, True
        found = [run for run in runs if run["id"] not in self.runs_before]
        assert len(found) <= 1, found
        return found[0] if found else None

    # --- what is found

    async def look(self) -> None:
        """Take away what has arrived so far, as a consumer would; nothing is gone."""
        await self.unlocked()
        await self.collect()
        if self.consumer is not None:
            return  # what it has taken is told only when it begins with it
        left = await self.ids_left()
        if self.topology.dlq_type == "classic":
            # a quorum queue takes back what a dead process held channel by channel, in any order of the channels
            assert left == sorted(left, key=lambda id: int(id[1:])), "they are not in their old order"
        present = Counter(left)
        gone = [id for id in IDS[:LETTERS] if not (present[id] or self.arrived[id] or self.operation == "restore")]
        assert not gone, f"{len(gone)} are gone: {gone[:10]}"

    async def collect(self) -> None:
        """Count what is where it was to go."""
        match self.operation:
            case "replay" if self.consumer is not None:
                self.arrived = Counter(
                    f"m{run.n}" for run in self.consumer.runs if (run.what, run.attempt) == ("started", 1)
                )
            case "replay":
                self.arrived.update(await _taken(self.shell, self.topology.name))
            case "move":
                self.arrived.update(await _taken(self.shell, self.aside))
            case "drop":
                self.arrived = Counter(self._archived())
            case _:
                self.arrived = Counter(await self.ids_left()) - Counter(IDS[LETTERS:])

    def _archived(self) -> Iterator[str]:
        """The ids in all archives; a file that was cut by a kill is read up to there."""
        for path in self.archives:
            for letter in read_archive(path) if path.exists() else ():
                assert letter.body == BODIES[int(letter.id[1:])]
                yield letter.id

    async def ids_left(self) -> list[str]:
        """The ids in the dead-letter queue, copies too, in its order."""
        async with (
            self.shell.bench.dlq(self.topology) as dlq,
            dlq._browse() as browser,
            aclosing(browser.read()) as all,
        ):
            return [held.traits.id async for held in all]

    async def handled(self) -> bool:
        """Whether the consumer is through with all: it has begun with each, and what fails always is dead again."""
        if not await all_empty(self.shell.bench, self.topology):
            return False
        await self.collect()
        # by id: a count is reached by letters of others, and by copies
        return self.arrived.keys() >= set(self.meant) and set(await self.ids_left()) >= set(self._doomed)

    async def check(self) -> str:
        """All are where they were to go, what is there twice was named, the rest is still here."""
        await self.unlocked()
        await self.collect()
        missing = [id for id in self.meant if not self.arrived[id]]
        assert not missing, f"{len(missing)} are missing: {missing[:10]}"
        assert self.arrived.keys() == set(self.meant)
        twice = {id for id, count in self.arrived.items() if count > 1}
        assert twice <= self.named, f"twice, and not named: {sorted(twice - self.named)[:10]}"
        left = await self.ids_left()
        # what has arrived may be there again: put back, or failed again
        rest = [id for id in left if id not in self.arrived]
        others = [id for id in IDS[LETTERS:] if self.others_came and id not in self.arrived]
        assert sorted(rest) == others
        if self.consumer is not None:
            assert set(left) - set(rest) == set(self._doomed)
        elif self.operation != "restore":
            assert left == rest
        self.tally.twice += len(twice)
        self.tally.named += len(self.named)
        return f"{len(self.named)} named, {len(twice)} twice"


@asynccontextmanager
async def _publishing(url: str) -> AsyncIterator[PublishLink]:
    link = PublishLink(url, "rabbitdlq tests")
    try:
        yield link
    finally:
        await link.close()


async def _taken(shell: Shell, queue: str) -> list[str]:
    """The ids of all messages of a queue, which are gone from it then."""
    ids: list[str] = []

    def take(delivery: Delivery) -> None:
        ids.append(str(delivery.properties().message_id))
        delivery.ack()

    channel = await ConsumingChannel.consume(shell.raw.connection, queue, take, lambda _: None, prefetch=1_000)
    seen = -1

    async def empty() -> bool:
        nonlocal seen
        before, seen = seen, len(ids)
        return seen == before and await shell.raw.count(queue) == 0

    await until(empty, f"{queue} is empty", 60)
    await channel.cancel()
    await channel.close()
    return ids


@pytest.fixture
def dice(request: pytest.FixtureRequest, say: Say) -> random.Random:
    """Dice that fall the same way for the same seed and test."""
    say(f"{request.node.name}: RABBITDLQ_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


async def _to_the_end(killing: Killing, whole: float) -> None:
    """After a kill: resume, perhaps with a kill or two of the resumed run, until the run is done."""
    dice, shell = killing.dice, killing.shell
    for again in range(AGAIN + 1):
        if dice.random() < 0.5:  # else it comes as fast as it can
            await killing.look()
        run = await killing.the_run()
        if run is not None and run["outcome"] == "done":
            killing.named.update(run["in_flight"])  # killed between its last word in the journal and that to us
            return
        if run is not None:
            await killing.others_come()
        if run is not None and again < AGAIN and dice.random() < 0.4:
            assert run["outcome"] == "unfinished"
            await killing.kill(dice.random(), whole, run["id"])
            continue
        done = await shell(*killing.words(run["id"])) if run else None
        if done is None or done.code != 0:
            assert done is None or "ended before its plan was written" in done.err, done
            killing.tally.early += 1
            await killing.collect()
            assert not killing.arrived, "nothing is sent before the plan is written"
            killing.runs_before |= {run["id"]} if run else set()
            if killing.others_came and killing.operation != "restore":
                killing.meant = IDS
            done = await shell(*killing.words())
        assert done.code == 0, done.err
        report = killing.note(done)
        assert (report["planned"], report["stayed"], report["left"]) == (len(killing.meant), 0, 0), report
        return


@pytest.mark.parametrize(
    ("operation", "dlq_type"),
    [*((operation, "quorum") for operation in ("replay", "drop", "move", "restore")), ("replay", "classic")],
)
async def test_a_killed_run_loses_nothing_and_its_resumed_run_leaves_nothing_out(
    shell: Shell, operation: str, dlq_type: str, dice: random.Random, say: Say
) -> None:
    shell.write_topology(dlq_type=dlq_type, more=f'dlq_type = "{dlq_type}"\n')
    killing = Killing(shell, operation, dice)
    await killing.prepare()
    whole = 0.5
    if KILLS > 1:  # how long it takes from the lock to the end
        await killing.fill()
        whole = await killing.kill(1.0, 300)
        assert await killing.check() == "0 named, 0 twice"
        killing.tally = Tally()
    for number in range(KILLS):
        killing.tally.rounds += 1
        await killing.fill()
        share = (number + dice.random()) / KILLS
        # by the clock also while it plans, and at its end; else while it sends
        by_clock = KILLS > 1 and number % 2 == 0
        await killing.kill(share, whole if by_clock else None)
        await _to_the_end(killing, whole)
        found = await killing.check()
        if KILLS > 1:
            say(f"{operation} killed at {share:.0%} of {f'{whole:.1f} s' if by_clock else 'its letters'}: {found}")
    run = await killing.the_run()
    assert run is not None
    assert run["outcome"] == "done"
    async with shell.bench.dlq(shell.topology) as dlq:
        with pytest.raises(ConfigurationError, match="is done: there is nothing to go on with"):
            await dlq.resume(run["id"], operation)
    say(f"{operation}: {killing.tally}")


async def test_a_replay_that_is_killed_while_a_consumer_is_at_work_is_gone_on_with(
    shell: Shell, dice: random.Random, say: Say
) -> None:
    """What has failed again is a dead letter again, and no letter of the run."""
    killing = Killing(shell, "replay", dice)
    await killing.prepare()
    for number in range(KILLS):
        killing.tally.rounds += 1
        await killing.fill()
        log = shell.folder / f"handled-{number}"
        async with worker_process(shell.url, shell.topology, log, "consumer", concurrency=100) as killing.consumer:
            await killing.kill((number + dice.random()) / KILLS)
            await _to_the_end(killing, 0.5)
            await until(killing.handled, "the consumer is through", 120)
            found = await killing.check()
        if KILLS > 1:
            say(f"replay with a consumer: {found}")
    say(f"replay with a consumer: {killing.tally}")


# --- what a kill leaves, put there by hand


async def _leave(
    shell: Shell, operation: str, keys: list[str], *batches: list[str], settled: int = 0, **told: Any
) -> str:
    """Write a run into the journal as a kill leaves it, the first batches settled; gives its id."""
    async with _publishing(shell.url) as link:
        log = RunLog(JournalWriter(shell.topology, link), shell.queue, f"by-hand-{operation}", operation)
        await log.start(keys, who="ann", amqp_user="guest", **told)
        for batch in batches:
            number = await log.sending(batch)
            if number < settled:
                log.settled(number, [])
        await asyncio.gather(*log._settling)
    return log.run


async def _parked(shell: Shell, *bodies: bytes, **properties: Any) -> list[str]:
    """Dead letters that a consumer parked; gives what runs call them."""
    letters = [
        letter_for(shell.topology, body, Properties(message_id=f"m{number}", **properties))
        for number, body in enumerate(bodies)
    ]
    await publish_all(shell.url, letters)
    return [letter.properties.table.text(names.PARK_ID) or "" for letter in letters]


async def test_what_is_done_and_still_there_goes_and_what_was_in_flight_goes_again_and_is_named(shell: Shell) -> None:
    """An ack that the queue never heard of: the letter was sent, and lies there again."""
    await shell.declare()
    keys = await _parked(shell, b"0", b"1", b"2")
    run = await _leave(shell, "replay", keys, [keys[0]], [keys[1]], settled=1, target=("", shell.queue))

    done = await shell("dlq", "replay", shell.queue, "--resume", run, "--json")

    report = done.json[0]
    assert {name: report[name] for name in ("planned", "done", "before", "stayed", "left", "in_flight")} == {
        "planned": 3, "done": 2, "before": 1, "stayed": 0, "left": 0, "in_flight": ["m1"],
    }  # fmt: skip
    assert await _taken(shell, shell.queue) == ["m1", "m2"]
    assert await shell.raw.count(shell.topology.dlq) == 0
    async with shell.bench.dlq(shell.topology) as dlq:
        (listed,) = await dlq.runs()
    assert (listed.outcome, listed.in_flight) == ("done", ("m1",))


async def test_of_two_equal_letters_one_of_which_is_done_the_other_is_sent(shell: Shell) -> None:
    """It was taken for the one that was done, and deleted: letters that are equal in all have one name."""
    await shell.declare()
    for _ in range(2):
        await shell.raw.publish(shell.topology.dlq, b"equal", delivery_mode=2)
    async with shell.bench.dlq(shell.topology) as dlq:
        keys = list((await dlq.plan()).keys)
        assert len(set(keys)) == 1
        run = await _leave(shell, "replay", keys, keys[:1], settled=1)
        assert await shell.raw.take(shell.topology.dlq) is not None  # which was sent

        report = await dlq.resume(run)

    assert (report.done, report.before, report.stayed, report.left) == (1, 1, 0, 0)
    assert await shell.raw.count(shell.queue) == 1


async def test_a_run_is_looked_up_under_the_lock(shell: Shell) -> None:
    """Before it was taken: what somebody who was at it still, or went on with it too, did meanwhile was done again."""
    await shell.declare()
    one, other = shell.bench.dlq(shell.topology), shell.bench.dlq(shell.topology)
    async with one, other, one._browse(doing="replaying"):
        with pytest.raises(DeadLettersInUse, match="is replaying since"):
            await other.resume("no such run")


async def test_a_restore_is_gone_on_with_from_another_directory_and_with_its_own_archive_only(shell: Shell) -> None:
    await shell.declare()
    # a letter without an id is not the same to the last bit when it is put back: it has one then
    await shell.raw.publish(shell.topology.dlq, b"no id", delivery_mode=2)
    await _parked(shell, b"0", b"1")
    cut = shell.folder / "cut.jsonl"
    async with shell.bench.dlq(shell.topology) as dlq:
        assert (await dlq.drop(Selection(), archive=shell.folder / "a.jsonl")).done == 3
        whole = (shell.folder / "a.jsonl").read_bytes()
        cut.write_bytes(whole[:-20])  # its last line, as a kill leaves it
        first = await dlq.restore(cut)
        assert (first.planned, first.done, first.left) == (2, 2, 0)
        assert ["was cut off while it was written" in why for _, why in first.errors] == [True]
        again = await dlq.restore(cut)
        assert (again.done, again.before, again.left) == (0, 2, 0), "they are there already"
    (planned,) = [
        event for event in await events_of(shell.bench, shell.topology, names.RUN_PLANNED) if event.run == first.run
    ]
    run = await _leave(shell, "restore", list(planned.keys), list(planned.keys[:1]), archive=str(cut))

    (shell.folder / "elsewhere").mkdir()
    script = f"cd elsewhere; $rabbitdlq --topology ../rabbitdlq.toml dlq restore {shell.queue} --resume {run} --json"
    wrong = await shell("dlq", "restore", shell.queue, "a.jsonl", "--resume", run)
    resumed = await shell.script(script)

    assert wrong.code == 2
    assert f"'a.jsonl' is not the one that run {run!r} puts back" in wrong.err
    assert resumed.code == 0, resumed.err
    assert [resumed.json[0][name] for name in ("planned", "done", "before", "left")] == [2, 0, 2, 0]
    assert await shell.raw.count(shell.topology.dlq) == 2


async def test_a_drop_that_is_gone_on_with_tells_where_all_its_archives_are(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shell.declare()
    keys = await _parked(shell, b"0", b"1")
    run = await _leave(shell, "drop", keys, keys[:1], archive="/somewhere/first.jsonl")
    monkeypatch.chdir(shell.folder)
    async with shell.bench.dlq(shell.topology) as dlq:
        report = await dlq.resume(run, "drop", archive="second.jsonl")
        (listed,) = await dlq.runs()

    assert (report.done, report.in_flight, report.archive) == (2, ["m0"], "second.jsonl")
    assert listed.archives == ("/somewhere/first.jsonl", str(shell.folder / "second.jsonl"))
    assert [letter.id for letter in read_archive("second.jsonl")] == ["m0", "m1"]


async def test_without_a_journal_that_lasts_or_can_be_written_a_run_is_done_and_cannot_be_gone_on_with(
    shell: Shell,
) -> None:
    """Each try to write to an exchange that was missing closed the channel: letters on it were sent a second time."""
    await shell.declare()
    await _parked(shell, *(b"%d" % number for number in range(1_000)))
    channel = await shell.raw.channel()
    await channel.exchange_delete(shell.topology.journal_exchange)
    await channel.close()

    done = await shell("dlq", "replay", shell.queue, "--all", "--json")

    assert (done.code, done.json[0]["done"], done.json[0]["journaled"]) == (0, 1_000, False)
    assert "the journal could not be written: this run cannot be resumed" in done.err
    assert await shell.raw.count(shell.queue) == 1_000
    shell.write_topology(journal="live", more='journal = "live"\n')
    refused = await shell("dlq", "replay", shell.queue, "--resume", "r")
    assert refused.code == 2
    assert refused.lines == [
        f"rabbitdlq: run 'r': the journal of {shell.queue!r} is live and keeps nothing, so no run can be resumed"
    ]
