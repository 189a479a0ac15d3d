"""``rabbitdlq consume --isolation process``: crashes, logs of the children, and no child that outlives its consumer."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.cli import HANDLERS, Shell
from tests.broker.kit import until
from tests.broker.looks import rests

MODULE = f"""{HANDLERS}
import ctypes, os, structlog, subprocess
log = structlog.get_logger()

def handle(message):
    log.warning("at_work", pid=os.getpid())
    match message.payload:
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "greedy":
            bytearray(2**30)
    note(message, "succeeded")

def waits(message):
    note(message, "started")
    try:
        while not Path("go").exists():
            time.sleep(0.01)
    finally:
        note(message, "ended")

def runs(message):
    note(message, "started")
    subprocess.run(["sleep", "120"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


def processes(folder: Path) -> set[int]:
    """Those that were started in the directory and have not ended."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and Path(os.readlink(entry / "cwd")) == folder:
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def none_left(shell: Shell) -> Callable[[], bool]:
    return lambda: not processes(shell.folder)


@pytest.mark.parametrize("supervised", [(), ("--processes", "2")])
async def test_crashes_are_parked_neighbours_succeed_and_each_child_logs_like_its_consumer(
    shell: Shell, supervised: tuple[str, ...]
) -> None:
    shell.write("shop.py", MODULE)
    await shell.declare()
    ids = await shell.bench.send(shell.topology, "segfault", "exit", "greedy", *"abc")

    words = ("--handler", "shop:handle", "--drain", "--log-format", "json", "--concurrency", "2", *supervised)
    done = await shell("consume", shell.queue, *words, "--isolation", "process", "--max-memory", "256MiB")

    assert done.code == 0
    assert done.lines[-1] == "3 succeeded, 6 retried, 3 parked"
    told = [json.loads(line) for line in done.lines[:-1]]
    at_work = {(line["message_id"], line["attempt"]) for line in told if line["event"] == "at_work"}
    assert at_work == {(id, n) for id in ids[:3] for n in (1, 2, 3)} | {(id, 1) for id in ids[3:]}
    assert {(line["queue"], line["level"]) for line in told if line["event"] == "at_work"} == {(shell.queue, "warning")}
    parked = {
        line["message_id"]: (line["reason"], line["error_type"]) for line in told if line["event"] == "message_parked"
    }
    assert parked == dict(
        zip(ids, [("crashed", "HandlerDied"), ("crashed", "HandlerDied"), ("exhausted", "MemoryError")], strict=False)
    )
    await until(none_left(shell), "every child has ended")


@pytest.mark.parametrize("supervised", [(), ("--processes", "2")])
async def test_no_child_outlives_a_consumer_that_is_killed_and_nothing_that_its_handler_runs(
    shell: Shell, supervised: tuple[str, ...]
) -> None:
    shell.write("shop.py", MODULE)
    await shell.declare()
    await shell.bench.send(shell.topology, *range(4))
    words = ("consume", shell.queue, "--handler", "shop:runs", "--isolation", "process", "--concurrency", "2")
    running = await shell.start(*words, *supervised, "--grace", "100ms")
    await until(lambda: len(shell.noted()) >= 2, "handlers run")
    # the consumer, two children, and a program of each
    await until(lambda: len(processes(shell.folder)) >= 5, "their programs, too")

    await running.kill()

    await until(none_left(shell), "every child has ended", 20)


async def test_ctrl_c_in_a_terminal_does_not_end_the_children(shell: Shell) -> None:
    shell.write("shop.py", MODULE)
    await shell.declare()
    await shell.bench.send(shell.topology, "x", "y")
    running = await shell.start(
        script=f"exec setsid $rabbitdlq consume {shell.queue} --handler shop:waits --isolation process --concurrency 2"
    )
    await until(lambda: len(shell.noted()) == 2, "two handlers run")

    os.killpg(running.process.pid, signal.SIGINT)
    os.killpg(running.process.pid, signal.SIGCONT)
    shell.write("go", "")
    done = await running.end(deadline=20)

    assert done.code == 0
    assert done.lines[-1] == "2 succeeded, 0 retried, 0 parked"
    await until(none_left(shell), "every child has ended")


async def test_what_cannot_be_isolated_is_wrong_use_and_the_reason_is_told(shell: Shell) -> None:
    shell.write("shop.py", "handle = lambda message: None\ndef fine(message): ...\n")
    use = ("consume", shell.queue, "--handler")
    cases = {
        "handler: .*lambda.* cannot be found by another process": (*use, "shop:handle", "--isolation", "process"),
        "max_memory: with isolation 'async' handlers share": (*use, "shop:fine", "--max-memory", "1GiB"),
        "isolation: 'fork' is none of async, thread, process": (*use, "shop:fine", "--isolation", "fork"),
        r"max_memory: 40 MiB is too little: the process takes": (
            *(*use, "shop:fine", "--isolation", "process", "--max-memory", "40MiB"),
        ),
    }

    found = await shell.together(*cases.values())

    for reason, done in zip(cases, found, strict=True):
        assert done.code == 2, done.err
        assert re.search(reason, done.lines[-1]), done.err


HUNG = f"""{HANDLERS}
import asyncio, threading

async def handle(message):
    await asyncio.to_thread(hang, message)

def hang(message):
    note(message, "started")
    threading.Event().wait()
"""


async def test_a_thread_that_a_handler_left_behind_does_not_keep_a_process_that_was_told_to_stop(shell: Shell) -> None:
    """Python waits for such threads at its end, and nothing had been said but ``stopping``."""
    shell.write("shop.py", HUNG)
    await shell.declare()
    await shell.bench.send(shell.topology, *range(4))
    words = ("consume", shell.queue, "--handler", "shop:handle", "--log-format", "json", "--grace", "100ms")
    one = ("--concurrency", "1", "--prefetch", "1")
    running = [await shell.start(*words, *one, *more) for more in ((), ("--processes", "2"))]
    await until(lambda: len(shell.noted()) >= 3, "handlers hang")

    for each in running:
        each.send(signal.SIGTERM)
    ended = [await each.end(deadline=30) for each in running]

    for done, processes_of_it in zip(ended, (1, 2), strict=True):
        assert done.code == 0, done.err
        assert sum(line.endswith("given back") for line in done.lines) == 1
        told = [json.loads(line) for line in done.lines if line.startswith("{")]
        left = [line for line in told if line["event"] == "threads_left_behind"]
        assert len(left) == processes_of_it
        assert all("threading.Event().wait()" in line["stack"] for line in left)
    await rests(shell.bench, shell.queue, 4)


DEAF = f"""{HANDLERS}
import asyncio

async def handle(message):
    note(message, "started")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
"""


async def test_a_handler_that_does_not_listen_is_left_behind_and_its_message_goes_back(shell: Shell) -> None:
    """It held the process for a minute beyond the grace time, and its message came back as if of a crash."""
    shell.write("shop.py", DEAF)
    await shell.declare()
    await shell.bench.send(shell.topology, "x")
    running = await shell.start("consume", shell.queue, "--handler", "shop:handle", "--grace", "100ms")
    await until(lambda: len(shell.noted()) == 1, "it runs")

    running.send(signal.SIGTERM)
    done = await running.end(deadline=20)

    assert done.code == 0, done.err
    assert done.lines[-1] == "0 succeeded, 0 retried, 0 parked, 1 given back"
    await rests(shell.bench, shell.queue, 1)


async def test_a_process_whose_handlers_do_not_end_ends_all_the_same_and_a_supervisor_starts_it_anew(
    shell: Shell,
) -> None:
    shell.write("shop.py", DEAF)
    await shell.declare()
    await shell.bench.send(shell.topology, *range(40))
    words = ("consume", shell.queue, "--handler", "shop:handle", "--log-format", "json", "--concurrency", "2")
    limits = ("--soft-timeout", "100ms", "--hard-timeout", "100ms", "--no-breaker", "--grace", "0s")

    done = await shell(*words, *limits)
    assert done.code == 1
    assert "were left to themselves, more than the 10 that this process bears" in done.lines[-1]

    supervisor = await shell.start(*words, *limits, "--processes", "2")
    await supervisor.says("process_died")
    await until(lambda: supervisor.err.count(b'"consumer_started"') >= 2, "and starts it anew")
    await supervisor.kill()
