"""Sending back, deleting, moving and putting back at two in the morning: what is asked, told, refused and left."""

import asyncio
import re
import signal
import stat
from datetime import UTC, datetime, timedelta

from rabbitdlq import names
from rabbitdlq.local_broker import BrokerAddress
from rabbitdlq.wire import Headers
from tests.acceptance.cli import Shell
from tests.broker.kit import until
from tests.broker.operator_kit import Management, letters_left, park


async def filled(shell: Shell, count: int) -> list[str]:
    """So many letters that a consumer parked; gives their ids."""
    await shell.declare()
    return await park(shell.bench, shell.topology, *(b'{"n": %d}' % number for number in range(count)))


async def dead(shell: Shell) -> list[str]:
    async with shell.bench.dlq(shell.topology) as dlq:
        return [letter.id for letter in await dlq.peek_all()]


def no_consumer(shell: Shell) -> str:
    """What a replay is told where nobody is at work."""
    return f"preflight: warning: queue '{shell.queue}' has no consumer: the letters would wait there"


async def test_a_dry_run_tells_what_would_be_done_and_does_nothing(shell: Shell) -> None:
    ids = await filled(shell, 3)
    await park(shell.bench, shell.topology, b"{}", first=3, headers=Headers({names.LAP: 3}))
    replay, queue = ("dlq", "replay", shell.queue), shell.queue

    table, as_json, lost, drop, listed, shown = await shell.one_by_one(
        ("--read-only", *replay, "--all", "--dry-run"),
        (*replay, "m0", "m1", "nope", "--dry-run", "--json"),
        (*replay, "--all", "--dry-run", "--to", "nowhere"),
        ("--read-only", "dlq", "drop", queue, "--all", "--dry-run"),
        ("dlq", "list", queue, "--columns", "id,lap"),
        ("dlq", "show", queue, "m3"),
    )
    for done, code in ((table, 0), (as_json, 0), (lost, 1), (drop, 0)):
        assert done.code == code, done.err
    for text in (
        "letters  3 of 4 (all)",
        f"to       {queue} (3)",
        "held     1 came back too often; --held takes them too",
        "the warehouse is closed",
        f"queue '{queue}' is there, with 0 messages waiting",
    ):
        assert text in table.out
    (plan,) = as_json.json
    assert (plan["count"], plan["selection"], plan["found"]) == (2, "id=m0,m1,nope", 4)
    assert [problem["id"] for problem in plan["problems"]] == ["nope"]
    assert [group["count"] for group in plan["groups"]] == [2]
    assert {finding["check"] for finding in plan["preflight"]} >= {"target", "consumers", "write"}
    assert "queue 'nowhere': there is no such queue" in lost.out
    assert "letters  3 of 4 (all)" in drop.out
    assert "\nto  " not in drop.out, "what is dropped goes nowhere"
    assert [line.split() for line in listed.out.splitlines()[1:]] == [[id, "1"] for id in ids] + [["m3", "3", "held"]]
    assert re.search(r"lap +3, held: it came back too often", shown.out)
    assert await dead(shell) == [*ids, "m3"]
    assert await shell.raw.count(queue) == 0

    bulk, by_flag = await shell.one_by_one((*replay, "--reason", "exhausted"), (*replay, "--all", "--held"))
    assert (bulk.code, bulk.lines) == (0, [no_consumer(shell), "replayed 3, stayed 0; 1 held, see --held"])
    assert (by_flag.code, by_flag.lines) == (0, [no_consumer(shell), "replayed 1, stayed 0"])


async def test_ctrl_c_stops_between_two_and_says_what_was_done(shell: Shell) -> None:
    ids = await filled(shell, 60)
    replay = ("dlq", "replay", shell.queue)

    running = await shell.start(*replay, "--all", "--rate", "2/s", "--json")
    await until(lambda: _reached(shell, 3), "some are sent")
    second, looking, counted, told = await shell.one_by_one(
        ("dlq", "purge", shell.queue, "--yes"),
        ("dlq", "list", shell.queue),
        ("dlq", "summary", "--json"),
        ("dlq", "summary"),
    )
    running.send(signal.SIGINT)
    done = await running.end()

    for refused in (second, looking):
        assert (refused.code, refused.out) == (1, "")
        assert re.search(r"is in use: another operator has it: \S+@\S+ is replaying since ", refused.err)
    (half,) = counted.json
    assert (half["in_use"], half["held_by"]["doing"], half["held_by"]["process"]) == (
        True, "replaying", running.process.pid,
    )  # fmt: skip
    assert re.fullmatch(
        rf"the dead letters of {shell.queue} are in use: \S+@\S+ is replaying since \S+ \(process \d+\); "
        "letters in their hands are not counted",
        told.lines[0],
    )
    assert " ready, more in use " in told.out
    (report,) = done.json
    sent = report["done"]
    assert (done.code, report["interrupted"]) == (3, True)
    assert 3 <= sent < 60
    assert [line for line in done.lines if not line.startswith("replaying ")] == [
        no_consumer(shell),
        f"replayed {sent}, stayed 0; {60 - sent} left; stopped before the end",
        f"go on with: rabbitdlq dlq replay {shell.queue} --resume {report['run']}",
    ]
    assert await letters_left(shell.bench, shell.queue) == ids[:sent]
    assert await dead(shell) == ids[sent:]

    rest = await shell(*replay, "--resume", report["run"])
    assert (rest.code, rest.lines) == (0, [f"replayed {60 - sent}, stayed 0; {sent} done before"])
    assert await letters_left(shell.bench, shell.queue) == ids[sent:]
    audit = (await shell("journal", shell.queue, "--audit")).out.splitlines()
    assert [line.split()[2] for line in audit] == ["run-started", "replayed"] * 2
    assert audit[1].endswith(f"run {report['run']}  stopped")
    assert " replay all" in audit[2], "a run that is gone on with is still of the same letters"


async def _reached(shell: Shell, count: int) -> bool:
    return await shell.raw.count(shell.queue) >= count


async def test_a_full_queue_and_a_canary_of_which_nothing_is_heard_end_with_three(
    shell: Shell, broker: BrokerAddress
) -> None:
    """C40: of three letters one finds room; two stay, and the exit code says so."""
    shell.write_topology(queue_type="classic")
    replay = ("dlq", "replay", shell.queue)
    async with (
        Management.of(broker) as management,
        management.policy(shell.queue, max_length=1, overflow="reject-publish"),
    ):
        await filled(shell, 3)
        full = await shell(*replay, "--all", "--watch", "--wait", "200ms")
        assert full.code == 3
        assert full.lines[-2] == "replayed 1, stayed 2"
        assert [line for line in full.lines if "refused the message; is the queue full" in line] == full.lines[-4:-2]
        assert full.lines[-1].endswith("of 1 nothing was heard")
        assert len(left := await dead(shell)) == 2

        assert len(await letters_left(shell.bench, shell.queue)) == 1
        aborted = await shell(*replay, "--all", "--canary", "1", "--wait", "300ms")
    assert aborted.code == 3
    assert aborted.lines[1].endswith("waiting for what becomes of them: 1 so far")
    assert aborted.lines[2] == "replayed 1, stayed 0; 1 left"
    assert any(line.startswith("aborted: none of the 1 sent first has succeeded or failed") for line in aborted.lines)
    assert await letters_left(shell.bench, shell.queue) == left[:1]
    assert await dead(shell) == left[1:]


async def test_a_replay_that_would_lose_letters_or_send_none_is_refused_unless_it_is_forced(
    shell: Shell, broker: BrokerAddress
) -> None:
    """It was sent all the same, and the queue pushed out what it had."""
    await filled(shell, 3)
    drops = await shell.raw.queue(f"{shell.queue}-drops", x_max_length=1)
    replay = ("dlq", "replay", shell.queue, "--all", "--to")
    async with Management.of(broker) as management:

        async def counted() -> bool:
            found = await management.get(f"queues/{{v}}/{drops}")
            return found is not None and "messages" in found and "effective_policy_definition" in found

        await until(counted, "figures of the queue")

    nowhere, refused, forced = await shell.one_by_one(
        (*replay, "nowhere"),
        ("--management-url", broker.management_url, *replay, drops, "--json"),
        ("--management-url", broker.management_url, *replay, drops, "--force"),
    )

    for done, why in ((nowhere, "queue 'nowhere': there is no such queue"), (refused, "would be LOST (drop-head)")):
        assert (done.code, done.out) == (1, "")
        assert any(line.startswith("preflight: error: ") and why in line for line in done.lines)
        assert done.lines[-1].startswith("nothing was sent; ")
        assert "unknown" not in done.err, "that there is no management URL is told by a dry run only"
    assert forced.code == 0
    assert "would be LOST" in forced.err
    assert forced.lines[-1] == "replayed 3, stayed 0"
    assert (await shell.raw.count(drops), await dead(shell)) == (1, [])


async def test_what_is_deleted_is_in_a_file_first_and_can_be_put_back(shell: Shell) -> None:
    ids = await filled(shell, 4)
    shell.write("taken.jsonl", "precious\n")
    drop, queue = ("dlq", "drop", shell.queue), shell.queue

    existing, device = await shell.one_by_one(
        (*drop, "--all", "--yes", "--archive", "taken.jsonl"), (*drop, "--all", "--yes", "--archive", "/dev/full")
    )
    full = await shell.script(f"ulimit -f 1; $rabbitdlq dlq drop {queue} --all --yes --archive full.jsonl")
    for refused, why in (
        (existing, "there is such a file"),
        (device, "there is such a file"),
        (full, "File too large"),
    ):
        assert refused.code == 1
        assert why in refused.err
    assert (shell.folder / "taken.jsonl").read_text() == "precious\n"
    assert not (shell.folder / "full.jsonl").exists()
    assert await dead(shell) == ids

    done = await shell(*drop, "m1", "m2", stdin="yes\n")
    assert done.code == 0
    asked, puts_back = done.lines
    assert re.fullmatch(
        rf"Delete 2 dead letters of {queue} \(id=m1,m2, the oldest parked \d+s ago; archive: "
        rf"{queue}-dead-\w+\.jsonl\)\? \[y/N\]: dropped 2, stayed 0",
        asked,
    )
    (file,) = shell.folder.glob(f"{queue}-dead-*.jsonl")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"'rabbitdlq dlq restore {queue} {file.name}' puts it back" in puts_back
    assert await dead(shell) == ["m0", "m3"]
    first, again = await shell.one_by_one(*[("dlq", "restore", queue, file.name)] * 2)
    assert (first.code, first.lines) == (0, ["restored 2, stayed 0"])
    assert (again.code, again.lines) == (0, ["restored 0, stayed 0; 2 done before"])
    assert await dead(shell) == ["m0", "m3", "m1", "m2"]


async def test_a_purge_takes_no_more_than_it_asked_for(shell: Shell) -> None:
    """A letter that came between the question and the yes was deleted too, and nothing was kept of it."""
    await filled(shell, 2)
    asked = await shell.open("dlq", "purge", shell.queue, "--no-archive")
    await asked.says("[y/N]")
    assert f"Delete 2 dead letters of {shell.queue} (all including held, the oldest parked " in asked.err.decode()
    assert "; nothing is kept of them)?" in asked.err.decode()
    await park(shell.bench, shell.topology, b"{}", first=2)
    await asked.feed("y\n")
    done = await asked.end()
    assert (done.code, done.lines[-1].endswith("dropped 2, stayed 0")) == (0, True)
    assert await dead(shell) == ["m2"]


async def test_a_move_into_a_queue_that_is_not_there_is_refused_before_anything_is_sent(shell: Shell) -> None:
    """An error for each letter, a run in the journal, and the advice to declare the topology, which does not help."""
    await filled(shell, 2)
    later = await shell.raw.queue(f"{shell.queue}-later")
    move = ("dlq", "move", shell.queue, "--all", "--to-queue")

    refused, forced, planned, moved, runs = await shell.one_by_one(
        (*move, "nowhere"),
        (*move, "nowhere", "--force"),
        (*move, later, "--dry-run"),
        (*move, later),
        ("dlq", "runs", shell.queue, "--json"),
    )

    error = "preflight: error: queue 'nowhere': there is no such queue"
    assert (refused.code, refused.lines[0], refused.lines[1].partition(";")[0]) == (1, error, "nothing was sent")
    assert len(refused.lines) == 2
    assert (forced.code, forced.lines[0], forced.lines[-1]) == (1, error, "moved 0, stayed 2")
    # nobody is expected to work on letters that are put aside
    assert (planned.code, "consumer" in planned.out) == (0, False)
    assert (moved.code, moved.lines) == (0, ["moved 2, stayed 0"])
    assert [run["counts"]["done"] for run in runs.json] == [0, 2]
    assert await letters_left(shell.bench, later) == ["m0", "m1"]


async def test_letters_can_be_dropped_twice_within_one_second(shell: Shell) -> None:
    """The archive's name tells the second, and the second file of it was refused as one that is there already."""
    await filled(shell, 3)
    queue, now = shell.queue, datetime.now(UTC)
    for second in range(60):
        shell.write(f"{queue}-dead-{now + timedelta(seconds=second):%Y%m%dT%H%M%SZ}.jsonl", "precious\n")

    dropped, purged = await shell.one_by_one(("dlq", "drop", queue, "m0", "--yes"), ("dlq", "purge", queue, "--yes"))

    for done in (dropped, purged):
        assert done.code == 0, done.err
        assert re.search(rf"what was dropped is in {queue}-dead-\w+-[23]\.jsonl: ", done.lines[-1])
    assert await dead(shell) == []
    kept = list(shell.folder.glob(f"{queue}-dead-*.jsonl"))
    assert len(kept) == 62
    assert [path.read_text() for path in kept].count("precious\n") == 60


async def test_a_run_of_a_live_journal_is_not_said_to_be_resumed(shell: Shell) -> None:
    """``--resume`` was advised, and then refused since the journal keeps nothing."""
    shell.write_topology(more='journal = "live"\n', journal="live")
    await filled(shell, 20)

    running = await shell.start("dlq", "replay", shell.queue, "--all", "--rate", "2/s")
    await until(lambda: _reached(shell, 2), "some are sent")
    running.send(signal.SIGINT)
    done = await running.end()
    runs, journal = await shell.together(("dlq", "runs", shell.queue), ("journal", shell.queue))

    keeps_nothing = f"the journal of {shell.queue} is live and keeps nothing"
    assert done.code == 3
    assert done.lines[-1] == f"{keeps_nothing}, so no run is resumed: the rest needs a new one"
    assert "--resume" not in done.err
    assert (runs.code, runs.out, runs.lines) == (0, "", [f"{keeps_nothing}: what was done before is not known"])
    assert (journal.code, journal.out, len(journal.lines)) == (0, "", 1)
    assert journal.lines[0] == f"{keeps_nothing}: with --follow, events are shown from then on"


async def test_why_no_letter_is_meant_is_told(shell: Shell) -> None:
    """ "None of the 0 dead letters belong to it", and the same of letters that are all held."""
    await shell.declare()
    replay, drop = ("dlq", "replay", shell.queue), ("dlq", "drop", shell.queue, "--all")
    empty = await shell.one_by_one((*replay, "--all"), drop)
    await park(shell.bench, shell.topology, b"{}", b"{}", headers=Headers({names.LAP: 3}))
    held = await shell.one_by_one((*replay, "--all"), drop)
    others = await shell(*replay, "--reason", "permanent")

    for done in empty:
        assert (done.code, done.lines[-1]) == (0, f"there are no dead letters of {shell.queue}")
    for done in held:
        assert done.code == 0
        assert done.lines[-1] == (
            f"all 2 dead letters of {shell.queue} came back too often and are held: --held takes them too"
        )
        assert "see --held" not in done.err
    assert others.lines[-1] == f"none of the 2 dead letters of {shell.queue} belong to it"


async def test_runs_name_an_archive_as_it_is_named_in_a_command(shell: Shell) -> None:
    await filled(shell, 2)
    elsewhere = shell.folder.parent / f"{shell.queue}.jsonl"
    _, _, runs = await shell.one_by_one(
        ("dlq", "drop", shell.queue, "m0", "--yes", "--archive", "mine.jsonl"),
        ("dlq", "drop", shell.queue, "m1", "--yes", "--archive", str(elsewhere)),
        ("dlq", "runs", shell.queue, "--json"),
    )
    table = await shell("dlq", "runs", shell.queue)

    # for programs, which may run anywhere
    assert [run["archive"] for run in runs.json] == [str(shell.folder / "mine.jsonl"), str(elsewhere)]
    first, second = table.out.splitlines()[1:]
    assert "  mine.jsonl  " in first
    assert f"  {elsewhere}"[:40] in second


async def test_read_only_refuses_every_change_and_lets_look(shell: Shell) -> None:
    await filled(shell, 2)
    shell.write("letters.jsonl", '{"n": 1}\n')
    shell.write("work.py", "async def handle(message):\n    pass\n")
    queue = shell.queue
    by_variable, by_option = await asyncio.gather(
        shell.one_by_one(
            ("dlq", "replay", queue, "--resume", "20261130T000000Z-abcdef"),
            ("dlq", "drop", queue, "--all", "--yes"),
            ("dlq", "restore", queue, "letters.jsonl"),
            ("publish", queue, "letters.jsonl"),
            ("topology", "apply"),
            env={"RABBITDLQ_READ_ONLY": "1"},
        ),
        shell.one_by_one(
            ("--read-only", "dlq", "replay", queue, "--all"),
            ("--read-only", "dlq", "purge", queue, "--yes", "--no-archive"),
            ("--read-only", "dlq", "move", queue, "--all", "--to-queue", queue),
            ("--read-only", "consume", queue, "--handler", "work:handle", "--drain"),
            ("--read-only", "dlq", "list", queue),
        ),
    )
    *refused, listed = by_option
    for done in (*by_variable, *refused):
        assert (done.code, done.out) == (2, "")
        assert "refused, because" in done.err
    assert (listed.code, "m1" in listed.out) == (0, True)
    assert await dead(shell) == ["m0", "m1"]
    assert await shell.raw.count(queue) == 0
    assert not list(shell.folder.glob("*-dead-*"))


async def test_what_cannot_be_meant_is_told_and_nothing_is_done(shell: Shell) -> None:
    """``drop --resume RUN --dry-run`` went on and deleted."""
    await filled(shell, 1)
    queue = shell.queue
    refused = {
        ("drop", queue, "--resume", "r", "--dry-run"): "leave --dry-run out",
        ("replay", queue, "--resume", "r", "--canary", "5", "--to", queue): "leave --to out",
        ("move", queue, "--all"): "say where to with --to-queue",
        ("replay", queue, "--all", "--to", queue, "--to-exchange", "x"): "leave --to-exchange",
        ("replay", queue, "--all", "--to", f"{queue}.dlq"): "where they are",
        ("purge", queue, "--archive", "a", "--no-archive"): "choose one",
        ("replay", queue, "--all", "--reason", "exhausted"): "a selection and --all do not go together",
        ("drop", queue, "m0", "--all", "--yes"): "ids and --all do not go together",
        ("move", queue, "m0", "--all", "--resume", "r", "--to-queue", "q"): "leave --to-queue out",
        ("drop", queue, "m0", "--error", "X", "--all"): "ids, a selection and --all do not go together",
    }
    found = await shell.one_by_one(*(("dlq", *words) for words in refused))
    for done, why in zip(found, refused.values(), strict=True):
        assert (done.code, done.out) == (2, "")
        assert why in done.err
    assert await dead(shell) == ["m0"]
