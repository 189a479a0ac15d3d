"""What was meant, where it was not quite said: shortened ids, reasons with a typo, options in the wrong place."""

import re

from tests.acceptance.cli import Shell

IDS = ("order-2026-alpha", "order-2026-beta", "order-20", "order-30")


async def pushed(shell: Shell) -> None:
    await shell.declare()
    async with shell.bench.dlq(shell.topology) as dlq:
        for id in IDS:
            await dlq.push({"id": id}, "no such customer", message_id=id)


async def dead(shell: Shell) -> list[str]:
    async with shell.bench.dlq(shell.topology) as dlq:
        return [letter.id for letter in await dlq.peek_all()]


async def test_the_beginning_of_an_id_is_enough_where_no_other_letter_begins_so(shell: Shell) -> None:
    await pushed(shell)
    async with shell.bench.dlq(shell.topology) as dlq:
        park_id = (await dlq.get("order-30")).park_id
    later = await shell.raw.queue(f"{shell.queue}-later")
    show, change = ("dlq", "show", shell.queue), ("--no-archive", "--yes")

    shown, exact, unclear, short, by_park_id = await shell.one_by_one(
        (*show, "order-2026-a"), (*show, "order-20"), (*show, "order-"), (*show, "order"), (*show, park_id[:8])
    )
    assert shown.out.splitlines()[0].split() == ["id", "order-2026-alpha"]
    assert exact.out.splitlines()[0].split() == ["id", "order-20"], "an id goes before what begins with it"
    assert by_park_id.out.splitlines()[0].split() == ["id", "order-30"]
    assert (short.code, "no dead letter 'order'" in short.err) == (1, True)
    assert (unclear.code, "4 dead letters have an id that begins with 'order-': " in unclear.err) == (1, True)

    refused, planned, dropped, moved, sent = await shell.one_by_one(
        ("dlq", "drop", shell.queue, "order-2026", *change),
        ("dlq", "replay", shell.queue, "order-2026-b", "--dry-run", "--json"),
        ("dlq", "drop", shell.queue, "order-20", *change),
        ("dlq", "move", shell.queue, park_id[:10], "--to-queue", later),
        ("dlq", "replay", shell.queue, "order-2026-b", "order-2026-alp"),
    )
    assert (refused.code, refused.out) == (1, "")
    assert re.search(r"2 dead letters have an id that begins with 'order-2026': order-2026-alpha \(", refused.err)
    assert (planned.json[0]["count"], planned.json[0]["selection"]) == (1, "id=order-2026-beta")
    assert (dropped.code, dropped.lines) == (0, ["dropped 1, stayed 0"])
    assert (moved.code, moved.lines) == (0, [f"{park_id[:10]} is {park_id}", "moved 1, stayed 0"])
    assert sent.code == 0
    assert sorted(sent.lines[:2]) == ["order-2026-alp is order-2026-alpha", "order-2026-b is order-2026-beta"]
    assert await dead(shell) == []
    assert await shell.raw.count(shell.queue) == 2


async def test_a_reason_that_nobody_parks_for_is_told(shell: Shell) -> None:
    """``--reason exausted`` matched nothing, and nothing was said."""
    await pushed(shell)
    typo = ("--reason", "pusht")
    commands = [
        ("dlq", "list", shell.queue, *typo),
        ("dlq", "list", shell.queue, *typo, "--reason", "pushed", "--json"),
        ("dlq", "groups", shell.queue, *typo),
        ("dlq", "replay", shell.queue, *typo),
        ("dlq", "replay", shell.queue, *typo, "--reason", "pushed", "--dry-run"),
        ("dlq", "drop", shell.queue, *typo),
        ("dlq", "drop", shell.queue, *typo, "--yes"),
        ("dlq", "move", shell.queue, *typo, "--to-queue", shell.queue),
        ("dlq", "replay", shell.queue, *typo, "--reason", "pushed", "--limit", "1"),
    ]

    found = await shell.one_by_one(*commands, ("dlq", "list", shell.queue, "--reason", "exhausted", "--limit", "1"))

    told = "--reason: no letter was found that has 'pusht', which is no reason of ours; is 'pushed' meant?"
    for words, done in zip(commands, found, strict=False):
        assert (done.code, done.lines.count(told)) == (0, 1), words
    assert "--reason" not in found[-1].err, "a reason of ours may have no letters"
    assert await dead(shell) == list(IDS[1:])


async def test_an_option_of_the_program_behind_the_command_is_told_where_it_goes(shell: Shell) -> None:
    """ "No such option: --url (Possible options: --lap)"."""
    for words, command in (
        (("dlq", "list", shell.queue, "--url", shell.url), "dlq list"),
        (("publish", shell.queue, "--read-only"), "publish"),
        (("dlq", "--topology=x", "list", shell.queue), "dlq"),
    ):
        name = next(word for word in words if word.startswith("--")).partition("=")[0]
        done = await shell(*words)
        assert (done.code, done.out) == (2, "")
        assert f"{name} goes before the command: rabbitdlq {name} … {command} " in done.err
        assert "Possible" not in done.err
    other = await shell("dlq", "list", shell.queue, "--limt", "3")
    assert "No such option: --limt" in other.err
