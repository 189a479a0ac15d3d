"""How commands end that somebody does not want any longer: Ctrl-C at any time, and a reader that has had enough."""

import json
import signal
import sys

import pytest

from tests.acceptance.cli import HANDLERS, Shell
from tests.broker.operator_kit import park

#: Ctrl-C in the moment in which the program loads a module of its own
LOADING = """
import importlib.abc, os, signal, sys
awaited = sys.argv[1]

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == awaited:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

# whoever started the tests may ignore it, and that is inherited
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from rabbitdlq.cli import main
sys.argv[1:] = ["--version"]
main()
"""
STUBBORN = f"""{HANDLERS}
async def handle(message: Message) -> None:
    note(message, "started")
    print("begun", flush=True)
    await asyncio.sleep(60)
"""


@pytest.mark.parametrize("module", ["rabbitdlq.cli.program", "rabbitdlq.cli.consume", "typer.core"])
async def test_ctrl_c_while_the_program_is_loaded_is_quiet(shell: Shell, module: str) -> None:
    """It showed the traceback of an import."""
    done = await (await shell.start(command=(sys.executable, "-c", LOADING, module))).end()
    assert (done.code, done.out, done.err) == (130, "", "")


async def test_a_reader_that_has_had_enough_ends_a_command_as_it_ends_cat(shell: Shell) -> None:
    """The exit code was 1, as if something had gone wrong."""
    await shell.declare()
    # more than a pipe holds, so that somebody is still writing when the reader goes
    await park(shell.bench, shell.topology, *(b'"%s"' % (b"x" * 5_000) for _ in range(60)))
    codes = 'echo "${PIPESTATUS[0]}" >&2'

    for command in (
        f"dlq list {shell.queue} --limit 0 --json",
        f"dlq list {shell.queue} --limit 0 --json --sort id",
    ):
        done = await shell.script(f"$rabbitdlq {command} | head -c 1 >/dev/null; {codes}")
        assert done.err == "141\n", command
    following = await shell.start(script=f"$rabbitdlq journal {shell.queue} -f --json | head -1; {codes}")
    await shell.consumers()
    async with shell.bench.dlq(shell.topology) as dlq:
        while following.process.returncode is None and b"141" not in following.err:
            await dlq.push({}, "an event")
    done = await following.end()
    assert (done.err, json.loads(done.out)["event"]) == ("141\n", "pushed")


@pytest.mark.parametrize(("how", "to_whom"), [((), ""), (("--processes", "2"), " to the supervisor")])
async def test_a_consumer_that_is_stopped_says_what_it_waits_for(
    shell: Shell, how: tuple[str, ...], to_whom: str
) -> None:
    """Nothing was said for the whole grace time: it looked as if it had not heard."""
    await shell.declare()
    shell.write("work.py", STUBBORN)
    await shell.bench.send(shell.topology, 1, 2)
    consume = ("consume", shell.queue, "--handler", "work:handle", "--log-format", "json", "--grace", "45s")

    running = await shell.start(*consume, *how)
    await running.says("begun\nbegun\n")
    running.send(signal.SIGINT)
    await running.says('"stopping"')
    if how:
        await running.says('"process_finished"' if b'"handlers":2' in running.err else '"stopping"')
    running.send(signal.SIGINT)
    done = await running.end()

    assert done.code == 0
    told = [json.loads(line) for line in done.lines[:-1]]
    stopping = [event for event in told if event["event"] == "stopping"]
    assert sum(event["handlers"] for event in stopping) == 2
    for event in stopping:
        assert (event["queue"], event["grace_s"]) == (shell.queue, 45.0)
        assert event["hint"] == f"a second signal{to_whom} ends the grace time"
    assert done.lines[-1].endswith("2 given back")
