"""``rabbitdlq journal``: the story of a queue, told to the end, from a point in time, or as it goes on."""

import signal

from rabbitdlq import Message
from tests.acceptance.cli import Shell


async def a_story(shell: Shell) -> tuple[str, str]:
    """One message that recovers, then one that is parked, sent back and parked again, dropped; gives their ids."""
    await shell.declare()
    recovering, failing = await shell.bench.send(shell.topology, "recovers", "fails")

    def handle(message: Message) -> None:
        if message.payload == "fails" or message.attempt == 1:
            raise LookupError(f"{message.payload}: no address\nnor a name")

    await shell.bench.drain(shell.topology, handle)
    async with shell.bench.dlq(shell.topology) as dlq:
        await dlq.replay(failing)
        await shell.bench.drain(shell.topology, handle)
        await dlq.drop(failing, archive=None)
    return recovering, failing


async def test_the_journal_tells_every_failure_and_every_action_in_order(shell: Shell) -> None:
    recovering, failing = await a_story(shell)

    text, as_json, recent, audit = await shell.together(
        ("journal", shell.queue),
        ("journal", shell.queue, "--json"),
        ("journal", shell.queue, "--since", "0ms"),
        ("journal", shell.queue, "--audit"),
    )

    assert (text.code, as_json.code, recent.code) == (0, 0, 0)
    events = as_json.json
    assert [event["event"] for event in events if event.get("message_id") == recovering] == ["failed", "recovered"]
    of_failing = [
        (event["event"], event.get("lap"), event.get("attempt"))
        for event in events
        if failing in (event.get("message_id"), *event.get("ids", ()))
    ]
    assert of_failing == [
        *(("failed", 1, attempt) for attempt in (1, 2, 3)),
        ("parked", 1, 3),
        ("replayed", None, None),
        *(("failed", 2, attempt) for attempt in (1, 2, 3)),
        ("parked", 2, 3),
        ("dropped", None, None),
    ]
    (replayed,) = [event for event in events if event["event"] == "replayed"]
    assert (replayed["count"], replayed["amqp_user"]) == (1, "guest")
    assert replayed["who"].count("@") == 1
    lines = text.out.splitlines()
    bookkeeping = {"run-planned", "run-sending", "run-settled"}
    shown = [event["event"] for event in events if event["event"] not in bookkeeping]
    assert bookkeeping < {event["event"] for event in events}
    assert [line.split()[2] for line in lines] == shown
    failed = next(line for line in lines if failing in line and "lap 2" in line)
    assert failed.endswith(f"failed       {failing}  attempt 1/3  lap 2  LookupError: fails: no address")
    (dropped,) = [event for event in events if event["event"] == "dropped"]
    assert lines[-1].endswith(f"dropped      1 by {replayed['who']} as guest: {failing}  run {dropped['run']}")
    assert recent.out == ""
    assert [line.split()[2] for line in audit.out.splitlines()] == ["run-started", "replayed", "run-started", "dropped"]
    assert [event["selection"] for event in events if event["event"] == "run-started"] == [f"id={failing}"] * 2


async def test_following_shows_what_is_written_from_now_on_until_ctrl_c(shell: Shell) -> None:
    await a_story(shell)
    running = await shell.start("journal", shell.queue, "--follow", "--json")
    await running.says('"dropped"')

    async with shell.bench.dlq(shell.topology) as dlq:
        await dlq.purge(archive=None)
    await running.says('"purged"')
    assert running.process.returncode is None
    running.send(signal.SIGINT)
    done = await running.end(deadline=10)

    assert (done.code, done.err) == (0, "")
    assert [event["event"] for event in done.json][-2:] == ["dropped", "purged"]


async def test_a_journal_that_cannot_be_read_is_said_so(shell: Shell) -> None:
    missing, since = await shell.together(("journal", shell.queue), ("journal", shell.queue, "--since", "yesterday"))

    assert missing.code == 1
    (line,) = missing.lines
    assert f"'{shell.queue}.journal'" in line
    assert "'rabbitdlq topology apply' declares what is missing" in line
    assert since.code == 2
    assert since.lines == [
        "rabbitdlq: --since: 'yesterday' is not a duration; write a number and a unit, like 500ms, 5s, 2m, 1h or 7d"
    ]
