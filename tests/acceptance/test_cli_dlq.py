"""``rabbitdlq dlq``: looking, sending back, deleting, and asking before it."""

import asyncio
import signal
from datetime import datetime
from typing import Any

from rabbitdlq import Message, Permanent
from tests.acceptance.cli import Shell
from tests.broker.kit import until

#: a dead letter as JSON, as the design documents it
DOCUMENTED = {
    "id",
    "payload",
    "attempts",
    "max_attempts",
    "retry_count",
    "max_retries",
    "error_history",
    "created_at",
    "moved_to_dlq_at",
    "reason",
    "error",
    "queue",
    "exchange",
    "routing_key",
    "headers",
    "properties",
    "lap",
}
#: and what it has beside
MORE = {"first_failed_at", "history_partial", "original", "park_id", "id_derived"}
#: what `dlq show` tells beside, from the journal
STORY = {"laps", "operator_actions", "journal_read"}


async def three_letters(shell: Shell) -> list[str]:
    """Two that failed three times, and one that was refused at once; gives their ids in the order they were parked."""
    await shell.declare()
    await shell.bench.send(shell.topology, {"customer": "Ada"}, {"customer": "Größe"}, headers={"tenant": "acme"})
    await shell.bench.send(shell.topology, {"customer": "nobody"})

    def handle(message: Message) -> None:
        if message.payload["customer"] == "nobody":
            raise Permanent("no such customer")
        raise LookupError(f"attempt {message.attempt}: no address\nof {message.payload['customer']}")

    await shell.bench.drain(shell.topology, handle, concurrency=1)
    async with shell.bench.dlq(shell.topology) as dlq:
        return [letter.id for letter in await dlq.peek_all()]


async def pushed(shell: Shell, count: int, **payload: Any) -> list[str]:
    """Letters put there by hand, which is quick; gives their ids."""
    await shell.declare()
    async with shell.bench.dlq(shell.topology) as dlq:
        return [await dlq.push({"number": number, **payload}, "no address") for number in range(count)]


async def dead(shell: Shell) -> list[str]:
    """The ids in the dead-letter queue."""
    async with shell.bench.dlq(shell.topology) as dlq:
        return [letter.id for letter in await dlq.peek_all()]


async def test_dead_letters_are_shown_as_tables_and_as_documented_json(shell: Shell) -> None:
    ids = await three_letters(shell)
    dlq = ("dlq", "list", shell.queue)

    listed, as_json = await shell(*dlq, "--limit", "2"), await shell(*dlq, "--json")
    shown = await shell("dlq", "show", shell.queue, ids[1])
    one = await shell("dlq", "show", shell.queue, ids[2], "--json")
    unknown = await shell("dlq", "show", shell.queue, "nope")
    summary, counts = await shell.together(("dlq", "summary"), ("dlq", "summary", shell.queue, "--json"))

    head, *rows = listed.out.splitlines()
    assert head.split() == ["id", "parked", "reason", "attempts", "lap", "error", "routing", "key"]
    assert [row.split("  ")[0] for row in rows] == ids[:2]
    assert "permanent  1/3       1    " in rows[0]
    assert "Permanent: no such customer" in rows[0]
    assert "exhausted  3/3       1    LookupError: attempt 3: no address" in rows[1]
    assert listed.lines == [f"2 of 3 dead letters of {shell.queue}; --limit 0 lists all"]

    assert [letter["id"] for letter in as_json.json] == ids
    assert set(one.json[0]) == DOCUMENTED | MORE | STORY
    (shown_letter,) = [{name: letter[name] for name in letter if name not in STORY} for letter in one.json]
    for letter in [*as_json.json, shown_letter]:
        assert set(letter) == DOCUMENTED | MORE
        assert set(letter["error"]) == {"type", "message", "traceback", "fingerprint"}
        assert letter["retry_count"] == letter["attempts"] - 1 == len(letter["error_history"]) - 1
        assert letter["max_retries"] == letter["max_attempts"] - 1 == 2
        for time in ("created_at", "first_failed_at", "moved_to_dlq_at"):
            assert datetime.fromisoformat(letter[time]).tzinfo is not None
        for record in letter["error_history"]:
            assert set(record) == {"attempt", "at", "error_type", "error_message", "worker", "duration_ms"}
    assert shown_letter == as_json.json[2]
    assert as_json.lines == []

    for part in (
        ids[1],
        "LookupError: attempt 3: no address",
        '{"tenant": "acme"}',
        "3 of 3",
        "Traceback",
        "in handle",
    ):
        assert part in shown.out
    table = shown.out.split("\nattempts\n")[1].split("\ntraceback\n")[0]
    assert [line.split()[0] for line in table.splitlines() if "LookupError: attempt " in line] == ["1", "2", "3"]
    assert (unknown.code, unknown.out) == (1, "")
    assert unknown.lines == [
        f"rabbitdlq: no dead letter 'nope' in '{shell.queue}.dlq'; 'rabbitdlq dlq list {shell.queue}' shows those "
        "there are"
    ]
    assert summary.out.splitlines()[1].split() == [shell.queue, "0", "0", "3", "0"]
    (count,) = counts.json
    assert count == {
        "queue": shell.queue,
        "waiting": 0,
        "on_ladder": {rung.queue: 0 for rung in shell.topology.rungs},
        "dead": 3,
        "consumers": 0,
        "in_use": False,
        "held_by": None,
    }
    assert await dead(shell) == ids


async def test_letters_are_sent_back_by_id_or_all_and_what_cannot_go_stays(shell: Shell) -> None:
    ids = await pushed(shell, 3)

    some = await shell("dlq", "replay", shell.queue, ids[1], "nope", "--json")
    assert await dead(shell) == [ids[0], ids[2]]
    neither = await shell("dlq", "replay", shell.queue)
    rest = await shell("dlq", "replay", shell.queue, "--all")

    assert some.code == 3
    (report,) = some.json
    assert (report["done"], report["stayed"], report["left"], report["interrupted"]) == (1, 1, 0, False)
    assert [error["id"] for error in report["errors"]] == ["nope"]
    assert some.lines[1].startswith("nope: no dead letter 'nope'")
    assert some.lines[-1] == "replayed 1, stayed 1"
    asked = "rabbitdlq: dlq replay: name ids, select some, say --all, or go on with --resume"
    assert (neither.code, neither.lines) == (2, [asked])
    no_consumer = f"preflight: warning: queue '{shell.queue}' has no consumer: the letters would wait there"
    assert (rest.code, rest.lines) == (0, [no_consumer, "replayed 2, stayed 0"])
    assert await dead(shell) == []
    assert await shell.raw.count(shell.queue) == 3


async def test_letters_that_no_queue_takes_back_stay_and_are_named(shell: Shell) -> None:
    """C1: the work queue was deleted; sending back must not take the letters away."""
    ids = await pushed(shell, 3)
    channel = await shell.raw.channel()
    await channel.queue_delete(shell.queue)

    refused, done = await shell.one_by_one(
        ("dlq", "replay", shell.queue, "--all"), ("dlq", "replay", shell.queue, "--all", "--force")
    )

    missing = f"preflight: error: queue '{shell.queue}': there is no such queue"
    assert (refused.code, refused.lines[0], len(refused.lines)) == (1, missing, 2)
    assert (done.code, done.lines[0]) == (1, missing)
    assert {line.partition(":")[0] for line in done.lines[1:-1]} == set(ids)
    assert all("no queue took the message" in line for line in done.lines[1:-1])
    assert done.lines[-1] == "replayed 0, stayed 3"
    assert sorted(await dead(shell)) == sorted(ids)


async def test_deleting_asks_first_and_does_nothing_without_a_yes(shell: Shell) -> None:
    ids = await pushed(shell, 3)
    drop, purge = ("dlq", "drop", shell.queue, ids[0]), ("dlq", "purge", shell.queue)

    for words, answer, question in (
        (drop, "n\n", f"Delete 1 dead letter of {shell.queue} (id={ids[0]}, the oldest parked "),
        (purge, "", f"Delete 3 dead letters of {shell.queue} (all including held, the oldest parked "),  # stdin closed
    ):
        done = await shell(*words, stdin=answer)
        assert (done.code, done.out) == (1, "")
        assert done.lines[0].startswith(question)
        assert "nothing was deleted" in done.err
    asked = await shell.open(*purge)
    await asked.says("[y/N]")
    asked.send(signal.SIGINT)
    assert await asyncio.wait_for(asked.process.wait(), 10) != 0  # it ends although stdin stays open
    assert await dead(shell) == ids

    dropped = await shell(*drop, "nope", stdin="y\n")
    assert (dropped.code, "dropped 1, stayed 1" in dropped.lines) == (3, True)
    assert "nope: no dead letter 'nope'" in dropped.err
    assert await dead(shell) == ids[1:]
    purged = await shell(*purge, "--yes")
    assert (purged.code, purged.lines[0]) == (0, "dropped 2, stayed 0")
    assert await dead(shell) == []


async def test_a_second_operator_is_told_that_somebody_else_is_at_it(shell: Shell) -> None:
    ids = await pushed(shell, 3)
    commands: list[tuple[str, ...]] = [
        ("dlq", "list", shell.queue, "--json"),
        ("dlq", "purge", shell.queue, "--yes"),
    ]
    async with shell.bench.dlq(shell.topology) as first:
        letters = first.each()
        await anext(letters)

        found = await shell.together(*commands)
        await letters.aclose()

    for done in found:
        assert (done.code, done.out) == (1, "")
        assert done.lines[-1].startswith(f"rabbitdlq: '{shell.queue}.dlq' is in use: another operator has it: ")
        assert " is looking since " in done.lines[-1]
    assert await dead(shell) == ids


async def test_output_that_nobody_takes_ends_it_with_at_most_one_line(shell: Shell) -> None:
    # more than a pipe holds, so that somebody is still writing when the reader goes
    await pushed(shell, 60, text="x" * 5_000)
    listing, table = f"dlq list {shell.queue} --limit 0 --json", f"dlq list {shell.queue}"

    cut = await shell.script(f"$rabbitdlq {listing} | head -1")
    assert (cut.out.count("\n"), cut.err) == (1, "")
    full = await shell.script(f"$rabbitdlq {listing} >/dev/full")
    assert (full.code, full.err) == (1, "rabbitdlq: writing the output: No space left on device\n")
    closed = await shell.script(f"$rabbitdlq {table} >&-")
    assert (closed.code, closed.lines) == (0, [f"50 of 60 dead letters of {shell.queue}; --limit 0 lists all"])

    async def free() -> Any:
        return await dead(shell)

    assert len(await until(free, "the lock is given back")) == 60
