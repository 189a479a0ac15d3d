"""``rabbitdlq consume``: handlers found or refused, logs, draining, and every way to be told to stop."""

import json
import re
import signal
from typing import Any

import pytest

from tests.acceptance.cli import HANDLERS, Done, Shell, handler_failing
from tests.broker.kit import until

#: a handler that works until a file is there, once async and once plain
WAITING = f"""{HANDLERS}
async def waits(message: Message) -> None:
    note(message, "started")
    while not Path("go").exists():
        await asyncio.sleep(0.01)
    note(message, "succeeded")

def plain(message: Message) -> None:
    note(message, "started")
    while not Path("go").exists():
        time.sleep(0.01)
    note(message, "succeeded")
"""


def events(done: Done) -> list[dict[str, Any]]:
    """The log lines; everything on stderr but the summary has to be one."""
    return [json.loads(line) for line in done.lines[:-1]]


async def ready(shell: Shell, count: int) -> bool:
    """Whether so many messages are in the queue."""
    return await shell.raw.count(shell.queue) == count


async def test_a_handler_that_cannot_be_used_is_wrong_use_and_the_reason_is_told(shell: Shell) -> None:
    shell.write("good.py", "def handle(message): ...\nnumber = 3\n")
    shell.write("broken.py", "import json\n\n\nratio = 1 / 0\n")
    shell.write("script.py", "import sys\nsys.exit(7)\n")
    reasons = {
        "good": r"'good' is not MODULE:FUNCTION, like shop\.orders:handle",
        "nowhere:handle": r"module 'nowhere' cannot be imported from .*No module named 'nowhere'$",
        "broken:handle": r"ZeroDivisionError: division by zero \(.*broken\.py, line 4\)$",
        "script:handle": r"SystemExit: 7 \(.*script\.py, line 2\)$",
        "good:missing": r"module 'good' has no 'missing'$",
        "good:number": r"'good:number' cannot be called$",
    }

    found = await shell.together(*(("consume", shell.queue, "--handler", handler) for handler in reasons))

    for (handler, reason), done in zip(reasons.items(), found, strict=True):
        assert done.code == 2, handler
        (line,) = done.lines
        assert line.startswith("rabbitdlq: --handler: ")
        assert re.search(reason, line), line


async def test_a_topology_file_or_an_option_that_cannot_be_used_is_named_with_place_and_reason(shell: Shell) -> None:
    shell.write("good.py", "def handle(message): ...\n")
    shell.write("torn.toml", '[queues.orders]\ndelays = ["5s"\n[queues.other]\n')
    use = ("consume", shell.queue, "--handler", "good:handle")
    cases: dict[str, tuple[str, ...]] = {
        r"no queue 'orders' in it; there are: c-": ("consume", "orders", "--handler", "good:handle"),
        r"none\.toml: no such file; name the topology file with --topology": ("--topology", "none.toml", *use),
        r"torn\.toml: not valid TOML: .*line \d+, column \d+": ("--topology", "torn.toml", *use),
        r"--grace: '5' is not a duration; write a number and a unit": (*use, "--grace", "5"),
        r"log format: 'xml' is none of auto, console, json": (*use, "--log-format", "xml"),
        r"prefetch: 2 is not between concurrency and 65,535": (*use, "--concurrency", "5", "--prefetch", "2"),
    }

    found = await shell.together(*cases.values())

    for reason, done in zip(cases, found, strict=True):
        assert done.code == 2, reason
        (line,) = done.lines
        assert re.match(f"rabbitdlq: .*{reason}", line), line


async def test_drain_works_off_everything_and_each_log_line_tells_message_queue_and_attempt(shell: Shell) -> None:
    shell.write("shop.py", handler_failing("order % 2 or order == 4 and message.attempt == 1"))
    await shell.declare()
    ids = await shell.bench.send(shell.topology, *range(5))

    words = ("--handler", "shop:handle", "--drain", "--log-format", "json", "--log-level", "debug")
    done = await shell("consume", shell.queue, *words)

    assert done.code == 0
    assert done.lines[-1] == "3 succeeded, 5 retried, 2 parked"
    told = events(done)
    assert {event["queue"] for event in told} == {shell.queue}
    by_name: dict[str, set[tuple[str, int]]] = {}
    for event in told:
        if event["event"] != "consumer_started":
            assert event["max_attempts"] == 3
            by_name.setdefault(event["event"], set()).add((event["message_id"], event["attempt"]))
    odd = {ids[1], ids[3]}
    assert by_name == {
        "delivery_settled": {(id, 1) for id in ids} | {(ids[4], 2)} | {(id, n) for id in odd for n in (2, 3)},
        "retry_scheduled": {(ids[4], 1)} | {(id, n) for id in odd for n in (1, 2)},
        "message_parked": {(id, 3) for id in odd},
    }
    for event in told:
        if event["event"] == "message_parked":
            assert (event["reason"], event["error"]) == ("exhausted", "boom 3")
    for queue in (shell.queue, *(rung.queue for rung in shell.topology.rungs)):
        assert await shell.raw.count(queue) == 0
    assert await shell.raw.count(shell.topology.dlq) == 2


async def test_logs_for_people_are_words_and_the_level_is_kept(shell: Shell) -> None:
    """The topology is declared by the consumer itself here; nobody had applied it."""
    shell.write("shop.py", f"{HANDLERS}\ndef handle(message):\n    raise Permanent('no such customer')\n")
    running = await shell.start(
        "consume", shell.queue, "--handler", "shop:handle", "--log-format", "console", "--log-level", "warning"
    )
    await until(shell.consumers, "the consumer declares its queue and takes from it")
    (id,) = await shell.bench.send(shell.topology, "x")
    await running.says("message_parked")
    running.send(signal.SIGTERM)

    done = await running.end()

    assert done.code == 0
    parked, summary = done.lines
    assert summary == "0 succeeded, 0 retried, 1 parked"
    for word in ("message_parked", id, f"queue={shell.queue}", "attempt=1", "reason=permanent", "no such customer"):
        assert word in parked
    assert not parked.startswith("{")


@pytest.mark.parametrize(("number", "handler"), [(signal.SIGTERM, "waits"), (signal.SIGINT, "plain")])
async def test_told_to_stop_it_finishes_what_runs_and_gives_the_rest_back(
    shell: Shell, number: signal.Signals, handler: str
) -> None:
    shell.write("shop.py", WAITING)
    await shell.declare()
    await shell.bench.send(shell.topology, *range(6))
    running = await shell.start("consume", shell.queue, "--handler", f"shop:{handler}", "--concurrency", "2")
    await until(lambda: len(shell.noted()) == 2, "two handlers run")
    await until(lambda: ready(shell, 2), "it has taken two more")

    running.send(number)

    await until(lambda: ready(shell, 4), "what nobody had begun is in the queue again")
    shell.write("go", "")
    done = await running.end()

    assert done.code == 0
    assert done.lines[-1] == "2 succeeded, 0 retried, 0 parked, 2 given back"
    assert [what for what, _, _ in shell.noted()] == ["started", "started", "succeeded", "succeeded"]
    assert await shell.raw.count(shell.queue) == 4


@pytest.mark.parametrize(("how", "handler"), [("grace over", "waits"), ("second signal", "plain")])
async def test_a_handler_that_does_not_end_is_left_and_its_message_keeps_its_attempts(
    shell: Shell, how: str, handler: str
) -> None:
    shell.write("shop.py", WAITING)
    await shell.declare()
    await shell.bench.send(shell.topology, "x", "y")
    grace = "200ms" if how == "grace over" else "10m"
    running = await shell.start(
        "consume", shell.queue, "--handler", f"shop:{handler}", "--grace", grace, "--concurrency", "1"
    )
    await until(shell.noted, "the handler runs")
    await until(lambda: ready(shell, 0), "and the other message is here")

    running.send(signal.SIGTERM)
    if how == "second signal":
        await until(lambda: shell.raw.count(shell.queue), "the first one is heeded: the other message is given back")
        running.send(signal.SIGTERM)
    done = await running.end(deadline=15)

    assert done.code == 0
    assert "handlers_interrupted" in done.err
    assert done.lines[-1] == "0 succeeded, 0 retried, 0 parked, 2 given back"
    letters = await shell.raw.take_all(shell.queue)
    assert len(letters) == 2
    assert all("x-death" not in properties.table for _, properties, _ in letters)
