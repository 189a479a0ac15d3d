"""Dead letters on a terminal of 80 columns, which is what a phone or a console in a data center has."""

import re

from rabbitdlq import names
from rabbitdlq.wire import Headers
from tests.acceptance.cli import Shell
from tests.broker.operator_kit import park

ERROR = "LookupError: customer 17 of the shop in Antananarivo has no address"


async def test_a_narrow_terminal_shows_id_time_reason_attempts_and_error(shell: Shell) -> None:
    """The id took 32 columns, and time and error were not to be seen."""
    await shell.declare()

    def handle(message: object) -> None:
        raise LookupError(ERROR.partition(": ")[2])

    await shell.bench.send(shell.topology, 1, 2, 3)
    await shell.bench.drain(shell.topology, handle)
    async with shell.bench.dlq(shell.topology) as dlq:
        letters = await dlq.peek_all()

    narrow = await shell.on_terminal("dlq", "list", shell.queue, columns=80)
    wide = await shell.on_terminal("dlq", "list", shell.queue, columns=200)
    piped = await shell("dlq", "list", shell.queue, env={"COLUMNS": "80"})

    head, *lines = narrow.out.splitlines()
    assert head.split("  ")[0] == "id"
    assert {"parked", "reason", "attempts", "error"} < set(head.split())
    for letter, line in zip(letters, lines, strict=True):
        assert len(line) <= 80
        id, day, time, reason, attempts, error = line.split(maxsplit=5)
        assert letter.moved_to_dlq_at is not None
        assert (id, f"{day} {time}") == (letter.id[:8], f"{letter.moved_to_dlq_at.astimezone():%Y-%m-%d %H:%M:%S}")
        assert (reason, attempts) == ("exhausted", "3/3")
        assert error.startswith("LookupError: customer")
    assert narrow.lines[-1].endswith("; ids are shortened, and other commands take them so")
    assert wide.out == piped.out
    for letter, line in zip(letters, piped.out.splitlines()[1:], strict=True):
        assert line.startswith(f"{letter.id}  ")
        assert line.endswith(f"  1    {ERROR}  {shell.queue}")
    assert "shortened" not in wide.err + piped.err


async def test_columns_that_were_asked_for_stay_and_so_does_what_is_held(shell: Shell) -> None:
    await shell.declare()
    await park(shell.bench, shell.topology, b"1", b"2", message_id="a" * 31)
    ids = ["abcdefgh-0001", "abcdefgh-0002"]
    for id in ids:
        await park(shell.bench, shell.topology, b"3", message_id=id, headers=Headers({names.LAP: 3}))

    asked, usual = [
        await shell.on_terminal("dlq", "list", shell.queue, *more, columns=70)
        for more in (("--columns", "id,parked,lap,routing-key,error,payload"), ())
    ]

    assert re.match(r"id +parked +lap +routing\S* .*error +payload$", asked.out.splitlines()[0])
    # those of the same id are one; two that begin alike are told apart
    assert [line.split()[0] for line in usual.out.splitlines()[1:]] == ["a" * 13, "a" * 13, *ids]
    assert [" held " in line for line in usual.out.splitlines()[1:]] == [False, False, True, True]
    assert all(len(line) <= 70 for line in (asked.out + usual.out).splitlines())
