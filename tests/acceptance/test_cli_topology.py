"""``rabbitdlq topology``: declaring, drawing, comparing; nothing is ever half done."""

import json
import re

from rabbitdlq import Message, check_topology
from tests.acceptance.cli import Shell

LADDER = """\
{q}: 3 attempts within 35s of waiting
  shop (topic) ─ order.* ─▶ {q}
  ● {q}              attempt 1 at once
  │ fails
  ├▶ {q}.retry.1.5s  waits 5s, then attempt 2 after 5s
  │ fails
  ├▶ {q}.retry.2.30s waits 30s, then attempt 3 after 35s
  │ fails
  └▶ {q}.dlq         rests until somebody replays or drops it
  journal: {q}.journal, kept 7d

"""


async def test_the_ladder_is_drawn_without_a_broker(shell: Shell) -> None:
    shell.write(
        "shop.toml",
        '[queues.orders]\ndelays = ["5s", "30s"]\nbindings = [{ exchange = "shop", type = "topic", key = "order.*" }]\n'
        '[queues.mails]\ndelays = ["2m"]\nqueue_type = "classic"\njournal = "live"\n',
    )
    show = ("--topology", "shop.toml", "topology", "show")

    text, as_json = await shell.together((*show, "orders"), (*show, "--json"), url="amqp://127.0.0.1:1/")

    assert (text.code, text.err) == (0, "")
    assert text.out == LADDER.format(q="orders")
    assert as_json.json == [
        {
            "queue": "orders",
            "max_attempts": 3,
            "queue_type": "quorum",
            "attempts": [
                {"attempt": 1, "after": "0s"},
                {"attempt": 2, "after": "5s", "rung": "orders.retry.1.5s"},
                {"attempt": 3, "after": "35s", "rung": "orders.retry.2.30s"},
            ],
            "dlq": "orders.dlq",
            "journal": "stream",
        },
        {
            "queue": "mails",
            "max_attempts": 2,
            "queue_type": "classic",
            "attempts": [{"attempt": 1, "after": "0s"}, {"attempt": 2, "after": "2m", "rung": "mails.retry.1.2m"}],
            "dlq": "mails.dlq",
            "journal": "live",
        },
    ]


async def test_what_is_missing_is_told_then_declared_once_and_then_all_is_well(shell: Shell) -> None:
    entities = shell.topology.entities(shell.raw.connection.version)
    names = [("exchange", each.name) for each in entities.exchanges] + [
        ("queue", each.name) for each in entities.queues
    ]

    missing = await shell("topology", "check")
    first = await shell("topology", "apply")
    again = await shell("topology", "apply", shell.queue)
    checked, clean = await shell.together(("topology", "check", shell.queue), ("topology", "check", "--json"))

    assert missing.code == 1
    head, *lines = missing.out.splitlines()
    assert head == f"{shell.queue}: {len(names)} findings"
    assert lines == [f"  {kind} {name!r} is missing" for kind, name in names]
    assert (first.code, first.lines) == (0, [f"{shell.queue}: {len(names)} declared"])
    assert (again.code, again.lines) == (0, [f"{shell.queue}: all there"])
    assert (checked.code, checked.out) == (0, f"{shell.queue}: as it should be\n")
    assert clean.json == [{"queue": shell.queue, "arguments_compared": True, "findings": [], "not_visible": []}]


async def test_a_changed_ladder_is_refused_with_both_ladders_named_and_replaced_on_request(shell: Shell) -> None:
    """C19: a delay changed in the file; nothing is declared beside the old ladder, and nothing is deleted."""
    before = await shell.declare()
    after = shell.write_topology(["100ms", "300ms"])
    new = {rung.queue for rung in after.rungs} - {rung.queue for rung in before.rungs}

    refused, checked = await shell.together(("topology", "apply"), ("topology", "check", "--json"))
    assert not {queue for queue in new if await shell.exists(queue)}
    migrated = await shell("topology", "apply", "--migrate")

    assert refused.code == 1
    assert "the ladder there is 100ms, 150ms, the one asked for 100ms, 300ms" in refused.err
    assert f"'rabbitdlq topology apply {shell.queue} --migrate'" in refused.err
    assert "nothing was changed" in refused.lines[0]
    assert checked.code == 1
    differing = [each for each in checked.json[0]["findings"] if each["problem"] == "differs"]
    assert {
        "kind": "exchange",
        "name": f"{shell.queue}.retry.ladder",
        "problem": "differs",
        "argument": "alternate-exchange",
        "wanted": "100ms.300ms",
        "found": "100ms.150ms",
    } in differing
    assert migrated.code == 0, migrated.err
    assert migrated.lines == [f"{shell.queue}: 1 declared, ladder changed"]
    assert (await check_topology(shell.raw.connection, after)).findings == ()
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(message.attempt)
        raise RuntimeError

    await shell.bench.send(after, "x")
    await shell.bench.drain(after, handle)
    assert attempts == [1, 2, 3]
    assert await shell.raw.count(after.dlq) == 1


async def test_a_queue_with_other_arguments_is_named_with_both_values_and_the_others_go_on(shell: Shell) -> None:
    """C19: the queue exists as another team declared it."""
    await shell.raw.queue(shell.queue, x_queue_type="classic")
    other = f"{shell.queue}-other"
    shell.bench.topology(["1s"], name=other)
    text = (shell.folder / "rabbitdlq.toml").read_text()
    shell.write("rabbitdlq.toml", f'{text}[queues."{other}"]\ndelays = ["1s"]\n')

    done = await shell("topology", "apply")

    assert done.code == 3
    assert done.lines[0] == f"rabbitdlq: topology of '{shell.queue}': what exists differs; nothing was changed"
    # the broker names one of those that differ, each version its own
    assert re.fullmatch(rf"  queue '{shell.queue}': x-[a-z-]+ should be '.+' but is '.+'", done.lines[1])
    assert not await shell.exists(f"{shell.queue}.dlq")
    assert done.lines[-1] == f"{other}: 11 declared"
    assert await shell.exists(f"{other}.dlq")


async def test_definitions_are_written_for_a_version(shell: Shell) -> None:
    new, old, middle, nonsense = await shell.together(
        ("topology", "definitions", "--vhost", "shop", "--users"),
        *(("topology", "definitions", "--broker", version) for version in ("3.x", "3.13", "nonsense")),
        env={"RABBITDLQ_PRODUCER_PASSWORD": "s3cret"},
    )

    limits = {}
    for name, done in (("4.x", new), ("3.x", old), ("3.13", middle)):
        assert done.code == 0
        values = json.loads(done.out)
        assert values["vhosts"] == [{"name": "shop" if name == "4.x" else "/"}]
        limits[name] = {
            queue["name"].removeprefix(shell.queue): queue["arguments"].get("x-delivery-limit")
            for queue in values["queues"]
        }
    assert limits["4.x"] == {"": 22, ".dlq": -1, ".journal": None, ".retry.1.100ms": -1, ".retry.2.150ms": -1}
    assert limits["3.13"] == {"": 22, ".dlq": None, ".journal": None, ".retry.1.100ms": None, ".retry.2.150ms": None}
    assert set(limits["3.x"].values()) == {None}
    assert "users" not in json.loads(old.out)

    users = {user["name"] for user in json.loads(new.out)["users"]}
    assert users == {"rabbitdlq-producer", "rabbitdlq-consumer", "rabbitdlq-operator"}
    made_up = dict(line.removeprefix("password of ").split(": ") for line in new.lines)
    assert set(made_up) == {"rabbitdlq-consumer", "rabbitdlq-operator"}
    assert all(len(password) >= 20 and password not in new.out for password in made_up.values())
    assert "s3cret" not in new.out + new.err

    assert (nonsense.code, nonsense.out) == (2, "")
    assert nonsense.lines == ["rabbitdlq: --broker: 'nonsense' is no version; write 4.x, 3.x or one like 3.13"]
