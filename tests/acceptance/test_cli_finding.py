"""``rabbitdlq dlq groups | list | show``: which bugs are there, which letters are meant, what happened to one."""

import json
from datetime import UTC, datetime, timedelta

from rabbitdlq import Message, Permanent
from tests.acceptance.cli import Done, Shell
from tests.broker.operator_kit import letters_left, park


def handle(message: Message) -> None:
    """Two bugs, by customer."""
    customer = message.payload["customer"]
    if customer["id"] == 3:
        raise Permanent(f"customer {customer['id']} is blocked")
    raise LookupError(f"no address of customer {customer['id']}\nnowhere")


async def parked(shell: Shell, count: int = 5) -> list[str]:
    """Letters of two bugs; gives their ids in the order in which they were parked."""
    await shell.declare()
    payloads = [{"customer": {"id": number}, "items": ["x"] * number} for number in range(1, count + 1)]
    await shell.bench.send(shell.topology, *payloads, headers={"tenant": "acme"})
    await shell.bench.drain(shell.topology, handle)
    async with shell.bench.dlq(shell.topology) as dlq:
        return [letter.id for letter in await dlq.peek_all()]


def shown(done: Done) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    return [[cell for cell in line.split("  ") if cell] for line in done.out.splitlines()[1:]]


async def test_the_bugs_are_counted_as_a_table_and_as_json(shell: Shell) -> None:
    await parked(shell)

    table, as_json, reasons, since, some, unknown, later = await shell.one_by_one(
        ("dlq", "groups", shell.queue),
        ("dlq", "groups", shell.queue, "--json", "--since", "1h"),
        ("dlq", "groups", shell.queue, "--by", "reason", "--json"),
        ("dlq", "groups", shell.queue, "--since", "1h"),
        ("dlq", "groups", shell.queue, "--reason", "permanent", "--json"),
        ("dlq", "groups", shell.queue, "--by", "colour"),
        ("dlq", "groups", shell.queue, "--since", "soon"),
    )

    head, first, second = table.out.splitlines()
    assert head.split("  ")[0] == "fingerprint"
    assert "LookupError: no address of customer" in first
    assert ("  4  " in first, "80.0%" in first) == (True, True)
    assert ("  1  " in second, "20.0%" in second) == (True, True)
    assert "state" not in head
    assert table.lines == [f"5 dead letters of {shell.queue} in 2 groups"]
    largest, smallest = as_json.json
    assert set(largest) == {
        "key",
        "signature",
        "count",
        "share",
        "first_parked",
        "last_parked",
        "last_replayed",
        "example_id",
        "came_back",
        "max_lap",
        "state",
    }
    assert (largest["count"], largest["share"], largest["state"]) == (4, 0.8, "new")
    assert first.startswith(largest["key"])
    assert smallest["example_id"] in second
    assert {group["key"]: group["count"] for group in reasons.json} == {"exhausted": 4, "permanent": 1}
    assert all("  new  " in line for line in since.out.splitlines()[1:])
    assert [(group["key"], group["share"]) for group in some.json] == [(smallest["key"], 1.0)]
    assert (unknown.code, unknown.lines) == (
        2,
        ["rabbitdlq: letters cannot be grouped by 'colour'; by fingerprint, error, type, reason, routing-key, worker"],
    )
    assert later.code == 2
    assert later.lines[0].startswith("rabbitdlq: --since: 'soon' is not a duration; ")


async def test_letters_are_found_by_filters_that_combine(shell: Shell) -> None:
    ids = await parked(shell)
    moment = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    async with shell.bench.dlq(shell.topology) as dlq:
        letters = {letter.id: letter for letter in await dlq.peek_all()}
    blocked = next(id for id in ids if letters[id].reason == "permanent")
    error = letters[blocked].error
    assert error is not None

    def listed(*options: str) -> tuple[str, ...]:
        return ("dlq", "list", shell.queue, "--columns", "id", "--json", *options)

    cases: list[tuple[tuple[str, ...], list[str]]] = [
        (("--reason", "permanent"), [blocked]),
        (("--reason", "permanent", "--reason", "exhausted"), ids),
        (("--error", "LookupError: no address of *", "--attempts", ">=3"), [id for id in ids if id != blocked]),
        (("--fingerprint", error.fingerprint[:6]), [blocked]),
        (("--routing-key", "c-*", "--older-than", moment, "--newer-than", "1h", "--lap", "1"), ids),
        (("--older-than", "1h"), []),
        (
            ("--where", "payload.customer.id in [2, 3] and headers.tenant == 'acme'", "--reason", "exhausted"),
            [id for id in ids if letters[id].payload["customer"]["id"] == 2],
        ),
    ]
    found = await shell.one_by_one(*(listed(*options) for options, _ in cases))
    for (options, wanted), done in zip(cases, found, strict=True):
        assert (done.code, [line["id"] for line in done.json]) == (0, wanted), (options, done.err)
    cut, typo = await shell.one_by_one(
        ("dlq", "list", shell.queue, "--error", "LookupError*", "--limit", "2"),
        ("dlq", "list", shell.queue, "--where", "payload.custmer.id == 2"),
    )
    assert cut.lines == [f"the first 2 that match, of 5 dead letters of {shell.queue}; --limit 0 lists all"]
    assert (typo.code, typo.lines) == (
        0,
        [
            f"0 that match, of 5 dead letters of {shell.queue}",
            "where: could not be evaluated for 5 letters, which did not match: no key 'custmer'",
            "where: no letter that was asked has payload.custmer",
        ],
    )
    async with shell.bench.dlq(shell.topology) as dlq:
        assert [letter.id for letter in await dlq.peek_all()] == ids


async def test_a_list_shows_what_is_asked_for_in_the_order_that_is_asked_for(shell: Shell) -> None:
    ids = await parked(shell)
    dlq = ("dlq", "list", shell.queue)
    columns = "id,payload.customer.id,payload.items.2,headers.tenant,properties.delivery_mode,max_attempts,size"

    as_json, down, up, cut, plain = await shell.one_by_one(
        (*dlq, "--columns", columns, "--sort", "-payload.customer.id", "--json"),
        (*dlq, "--columns", "payload.customer.id,payload.items.4", "--sort", "-payload.items.4"),
        (*dlq, "--columns", "payload.customer.id,routing-key", "--sort", "payload.customer.id"),
        (*dlq, "--columns", "payload.customer.id", "--sort", "-size", "--limit", "2"),
        (*dlq, "--sort", "-parked", "--json"),
    )

    assert [line["payload.customer.id"] for line in as_json.json] == [5, 4, 3, 2, 1]
    assert as_json.json[0] | {"id": ""} == {
        "id": "",
        "payload.customer.id": 5,
        "payload.items.2": "x",
        "headers.tenant": "acme",
        "properties.delivery_mode": 2,
        "max-attempts": 3,
        "size": len(json.dumps({"customer": {"id": 5}, "items": ["x"] * 5}, separators=(",", ":"))),
    }
    assert as_json.json[-1]["payload.items.2"] is None
    assert shown(down)[0] == ["5", "x"]
    assert down.out.splitlines()[0].split() == ["payload.customer.id", "payload.items.4"]
    assert shown(up) == [[str(number), shell.queue] for number in (1, 2, 3, 4, 5)]
    assert shown(cut) == [["5"], ["4"]]
    assert cut.lines == [f"2 of 5 dead letters of {shell.queue}; --limit 0 lists all"]
    assert [letter["id"] for letter in plain.json] == sorted(
        ids, key=lambda id: next(letter["moved_to_dlq_at"] for letter in plain.json if letter["id"] == id), reverse=True
    )


async def test_what_cannot_be_meant_is_told_in_one_line_before_anything_is_read(shell: Shell) -> None:
    dlq = ("dlq", "list", shell.queue)
    wrong = {
        ("--where", "payload.id =="): "where: 'payload.id ==', column 14: invalid syntax",
        ("--where", "order.id == 1"): "where: 'order.id == 1', column 1: there is no 'order'; there are payload, ",
        ("--attempts", "many"): "--attempts: 'many' is no number or range of numbers; write 3, >=3, <3 or 2-5",
        ("--lap", "5-2"): "--lap: '5-2' has no number in it: the smaller one comes first",
        ("--older-than", "yesterday"): "--older-than: 'yesterday' is not a duration; ",
        ("--fingerprint", "abc"): "fingerprint 'abc': give at least 6 of its hex digits (0-9, a-f)",
        ("--columns", "id,colour"): "--columns: there is no column 'colour'; there are id, ",
        ("--sort", "-colour"): "--sort: there is no column 'colour'; there are id, ",
    }

    found = await shell.one_by_one(*((*dlq, *options) for options in wrong))

    for told, done in zip(wrong.values(), found, strict=True):
        assert (done.code, done.out, len(done.lines)) == (2, "", 1)
        assert done.lines[0].startswith(f"rabbitdlq: {told}")


async def test_the_story_of_a_letter_tells_its_laps_its_waits_and_who_sent_it_back(shell: Shell) -> None:
    (id,) = await parked(shell, 1)
    async with shell.bench.dlq(shell.topology) as dlq:
        await dlq.replay(id)
        who = dlq.who
    await shell.bench.drain(shell.topology, handle)

    shown, as_json = await shell.one_by_one(
        ("dlq", "show", shell.queue, id), ("dlq", "show", shell.queue, id, "--json")
    )

    assert (shown.code, shown.err) == (0, "")
    attempts = shown.out.split("\nattempts\n")[1].split("\ntraceback\n")[0].splitlines()
    assert attempts[0].split() == ["attempt", "at", "took", "then", "waited", "worker", "error"]
    rows = [line for line in attempts if "LookupError" in line]
    assert [" s  " in row for row in rows] == [True, True, False], "the last one was parked"
    assert "\nlap 1: parked " in shown.out
    assert ", exhausted\n" in shown.out
    operators = shown.out.split("\noperators\n")[1]
    assert "replayed" in operators
    assert who in operators
    (letter,) = as_json.json
    assert [lap["lap"] for lap in letter["laps"]] == [1, 2]
    assert [len(lap["attempts"]) for lap in letter["laps"]] == [3, 3]
    assert letter["laps"][1]["attempts"] == letter["error_history"]
    assert [(action["event"], action["who"]) for action in letter["operator_actions"]] == [("replayed", who)]
    assert letter["journal_read"] is True


async def test_looking_for_something_leaves_every_letter_in_its_place(shell: Shell) -> None:
    await shell.declare()
    ids = await park(shell.bench, shell.topology, *(b'{"n": %d}' % number for number in range(60)))

    found = await shell.one_by_one(
        ("dlq", "list", shell.queue, "--where", "payload.n == 41", "--limit", "1", "--json"),
        ("dlq", "groups", shell.queue, "--json"),
    )

    assert [[line.get("id", line.get("count")) for line in done.json] for done in found] == [["m41"], [60]]
    assert await letters_left(shell.bench, shell.topology.dlq) == ids
