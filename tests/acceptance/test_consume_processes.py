"""``rabbitdlq consume --processes``: the work is shared, deaths are repaired, and every way to stop reaches all."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

from rabbitdlq import BrokerError, ConsumerSummary
from rabbitdlq.consumer.supervisor import Supervisor, SupervisorReport
from rabbitdlq.local_broker.daemon import Daemon, started_at
from tests.acceptance.cli import HANDLERS, Done, Running, Shell
from tests.acceptance.test_readme import blocks
from tests.broker.kit import until

#: what they have in common: a handler that notes its process, and one that works until a file is there
SHOP = f"""{HANDLERS}
import os, signal

async def waits(message: Message) -> None:
    note(message, f"started:{{os.getpid()}}")
    while not Path("go").exists():
        await asyncio.sleep(0.01)
    note(message, f"succeeded:{{os.getpid()}}")
"""
#: seconds in which processes that are told to stop and have nothing to wait for are gone, on a busy machine
SOON = 30.0


def events(said: str) -> list[dict[str, Any]]:
    """The log lines among the words."""
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def words(done: Done) -> list[str]:
    """The rest."""
    return [line for line in done.lines if not line.startswith("{")]


def started_pids(told: Iterable[Mapping[str, Any]]) -> set[int]:
    """The process ids of all processes so far."""
    return {event["pid"] for event in told if event["event"] == "process_started"}


def started(running: Running) -> set[int]:
    """The same of a supervisor that runs; its last line may still be being written."""
    return started_pids(events(running.err.decode().rpartition("\n")[0]))


@pytest.fixture
def daemons(shell: Shell) -> Iterator[list[Daemon]]:
    """Processes that a failed test would leave behind, and wait for: they hold the streams that the shell reads."""
    found: list[Daemon] = []
    yield found
    for daemon in found:
        daemon.signal(signal.SIGKILL)


async def both_wait(shell: Shell, running: Running, daemons: list[Daemon], left: int) -> None:
    """Return when two processes run a handler each and hold what they may, so that so many are left in the queue."""

    def pids() -> set[int]:
        return {int(what.partition(":")[2]) for what, _, _ in shell.noted()}

    await until(lambda: len(pids()) == 2, "two processes run a handler each")
    daemons += [Daemon(pid, started_at(pid) or "") for pid in pids()]
    await until(lambda: pids() == started(running), "it has told of them")
    await ready(shell, left)


def waits(running: Running, number: signal.Signals) -> bool:
    """Whether the signal was sent to the process, which has not had it yet."""
    (pending,) = re.findall(r"ShdPnd:\s*(\w+)", Path(f"/proc/{running.process.pid}/status").read_text())
    return bool(int(pending, 16) & 1 << (number - 1))


async def ready(shell: Shell, count: int) -> None:
    async def seen() -> bool:
        return await shell.raw.count(shell.queue) == count

    await until(seen, f"{count} messages are in the queue")


def consume(shell: Shell, handler: str, *more: str, processes: int = 2) -> tuple[str, ...]:
    return ("consume", shell.queue, "--handler", f"shop:{handler}", "--processes", str(processes), *more)


async def test_processes_share_the_work_and_their_numbers_are_added_up(shell: Shell) -> None:
    """No message is handled before three processes have one, so none can have done it all."""
    shell.write(
        "shop.py",
        f"""{SHOP}
async def handle(message: Message) -> None:
    note(message, f"by:{{os.getpid()}}")
    while len({{line.split()[0] for line in open("noted")}}) < 3:
        await asyncio.sleep(0.01)
    if message.payload % 2 or message.payload == 4 and message.attempt == 1:
        raise RuntimeError("boom")
""",
    )
    await shell.declare()
    ids = await shell.bench.send(shell.topology, *range(12))

    done = await shell(*consume(shell, "handle", "--concurrency", "1", "--prefetch", "1", "--drain", processes=3))

    assert done.code == 0
    assert words(done) == ["6 succeeded, 13 retried, 6 parked"]
    assert done.lines[-1] == words(done)[0]
    assert len({what for what, _, _ in shell.noted()}) == 3
    assert {id for _, id, _ in shell.noted()} == set(ids)
    assert await shell.raw.count(shell.topology.dlq) == 6
    told = [event["event"] for event in events(done.err)]
    assert (told.count("process_started"), told.count("process_finished")) == (3, 3)


@pytest.mark.parametrize("death", ["os._exit(0)", "os._exit(2)", "os.kill(os.getpid(), signal.SIGKILL)"])
async def test_a_message_that_kills_its_process_takes_nothing_with_it(shell: Shell, death: str) -> None:
    """It kills one process, on its first way; exit codes that look like success or wrong use mislead nobody."""
    shell.write(
        "shop.py",
        f"""{SHOP}
async def handle(message: Message) -> None:
    if message.payload == 3 and not Path("killed").exists():
        Path("killed").touch()
        {death}
    note(message, "succeeded")
""",
    )
    await shell.declare()
    ids = await shell.bench.send(shell.topology, *range(20))

    done = await shell(*consume(shell, "handle", "--drain"))

    assert done.code == 0
    assert {id for _, id, _ in shell.noted()} == set(ids)
    for queue in (shell.queue, *(rung.queue for rung in shell.topology.rungs), shell.topology.dlq):
        assert await shell.raw.count(queue) == 0
    assert words(done) == [done.lines[-1]]
    assert done.lines[-1].endswith(" 0 parked, 1 restart")
    told = events(done.err)
    (died,) = [event for event in told if event["event"] == "process_died"]
    assert (died.get("exit_code"), died.get("signal")) in {(0, None), (2, None), (None, "SIGKILL")}
    assert died["next_start_in_s"] == 1.0
    assert len(started_pids(told)) == 3


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C", "service manager"])
async def test_told_to_stop_all_finish_what_runs_and_give_the_rest_back(
    shell: Shell, daemons: list[Daemon], how: str
) -> None:
    """Ctrl-C reaches a terminal's whole process group, a service manager's SIGTERM every process of the service."""
    shell.write("shop.py", SHOP)
    await shell.declare()
    await shell.bench.send(shell.topology, *range(6))
    line = " ".join(consume(shell, "waits", "--concurrency", "1"))
    # a process group of its own, or the test would get the Ctrl-C as well
    running = await shell.start(script=f"exec setsid $rabbitdlq {line}")
    await both_wait(shell, running, daemons, 2)
    for daemon in daemons:
        command = Path(f"/proc/{daemon.pid}/cmdline").read_text()
        assert shell.queue in command
        assert "amqp" not in command, "the URL with its password is there for everybody to read"

    if how == "Ctrl-C":
        os.killpg(running.process.pid, signal.SIGINT)
    else:
        running.send(signal.SIGTERM)
    if how == "service manager":
        for daemon in daemons:
            daemon.signal(signal.SIGTERM)

    await ready(shell, 4)
    assert all(daemon.alive() for daemon in daemons), "the grace time was cut short"
    shell.write("go", "")
    done = await running.end()

    assert done.code == 0
    assert words(done) == ["2 succeeded, 0 retried, 0 parked, 2 given back"]
    assert [what.partition(":")[0] for what, _, _ in shell.noted()] == ["started"] * 2 + ["succeeded"] * 2
    assert await shell.raw.count(shell.queue) == 4


async def test_a_second_signal_ends_the_grace_time_of_all(shell: Shell, daemons: list[Daemon]) -> None:
    shell.write("shop.py", SHOP)
    await shell.declare()
    await shell.bench.send(shell.topology, *range(4))
    running = await shell.start(*consume(shell, "waits", "--concurrency", "1", "--prefetch", "2", "--grace", "10m"))
    await both_wait(shell, running, daemons, 0)

    running.send(signal.SIGTERM)
    await ready(shell, 2)
    running.send(signal.SIGTERM)
    done = await running.end(deadline=SOON)

    assert done.code == 0
    assert words(done) == ["0 succeeded, 0 retried, 0 parked, 4 given back"]
    assert await shell.raw.count(shell.queue) == 4


async def test_processes_that_no_longer_listen_are_killed_by_the_third_signal(
    shell: Shell, daemons: list[Daemon]
) -> None:
    shell.write(
        "shop.py",
        f"""{SHOP}
async def blocks(message: Message) -> None:
    note(message, f"started:{{os.getpid()}}")
    time.sleep(30)
""",
    )
    await shell.declare()
    await shell.bench.send(shell.topology, *range(4))
    running = await shell.start(*consume(shell, "blocks", "--concurrency", "1", "--prefetch", "1"))
    await both_wait(shell, running, daemons, 2)

    for _ in range(2):
        running.send(signal.SIGTERM)
        await until(lambda: not waits(running, signal.SIGTERM), "it has heard: of two that wait one would be left")
        await asyncio.sleep(0.2)  # nobody answers: there is nothing to wait for
    assert all(daemon.alive() for daemon in daemons)
    running.send(signal.SIGTERM)
    done = await running.end(deadline=SOON)

    assert done.code == 1
    assert not any(daemon.alive() for daemon in daemons)
    failed = [event for event in events(done.err) if event["event"] == "process_failed"]
    assert [event["signal"] for event in failed] == ["SIGKILL"] * 2
    await ready(shell, 4)


async def test_processes_stop_by_themselves_when_the_supervisor_is_killed(shell: Shell, daemons: list[Daemon]) -> None:
    shell.write("shop.py", SHOP)
    await shell.declare()
    await shell.bench.send(shell.topology, *range(6))
    running = await shell.start(*consume(shell, "waits", "--concurrency", "1"))
    await both_wait(shell, running, daemons, 2)

    running.send(signal.SIGKILL)

    await ready(shell, 4)
    assert all(daemon.alive() for daemon in daemons), "what runs has the grace time"
    shell.write("go", "")
    await until(lambda: not any(daemon.alive() for daemon in daemons), "the processes end", SOON)
    assert [what.partition(":")[0] for what, _, _ in shell.noted()] == ["started"] * 2 + ["succeeded"] * 2
    assert await shell.raw.count(shell.queue) == 4
    assert "supervisor_lost" in running.err.decode()


async def test_what_is_wrong_is_told_once_and_not_tried_again(shell: Shell) -> None:
    shell.write("shop.py", SHOP)
    cases = {
        r"rabbitdlq: connecting to .*connection refused": (1, consume(shell, "waits"), shell.with_url(port=1)),
        r"rabbitdlq: .*no queue 'orders' in it": (2, ("consume", "orders", *consume(shell, "waits")[2:]), None),
        r"rabbitdlq: --handler: module 'shop' has no 'nothing'": (2, consume(shell, "nothing"), None),
        r"rabbitdlq: broker URL: .*is not amqp://": (2, consume(shell, "waits"), "http://guest:geheim@127.0.0.1/"),
        r"rabbitdlq: --grace: '5' is not a duration": (2, consume(shell, "waits", "--grace", "5"), None),
    }
    found = await asyncio.gather(*(shell(*command, url=url) for _, command, url in cases.values()))

    for (reason, (code, _, _)), done in zip(cases.items(), found, strict=True):
        assert done.code == code, reason
        told = [line for line in words(done) if re.match(reason, line)]
        assert len(told) == 1, done.err
        assert "Traceback" not in "\n".join(words(done)), done.err
        assert "geheim" not in done.err
        # the others may have come to an end of their own before they were told to
        assert {event["event"] for event in events(done.err)} <= {"process_started", "process_finished"}


async def test_a_supervisor_in_a_program_knows_the_numbers_of_the_killed_and_leaves_nothing_behind(
    shell: Shell,
) -> None:
    """Programs of one's own are supervised like the command; the numbers are there while it runs."""
    worker = shell.write(
        "worker.py",
        f"""
import asyncio, os
from pathlib import Path
from rabbitdlq import Consumer, load_topologies
from rabbitdlq.consumer.supervised import SupervisorLink

def handle(message): ...

topology = load_topologies(Path("{shell.folder}/rabbitdlq.toml"))["{shell.queue}"]
with SupervisorLink() as link:
    asyncio.run(link.run(Consumer(topology, handle, url=os.environ["RABBITDLQ_URL"])))
""",
    )
    await shell.declare()
    open_before = len(os.listdir("/proc/self/fd"))
    environment = shell.environment(None, None)
    supervisor = Supervisor([sys.executable, str(worker)], 2, environment=environment, first_wait=timedelta(0))
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(supervisor.run())
        for number in range(3):
            await until(lambda count=2 + number: len(started_pids(logs)) == count, "they are started")
            await until(shell.consumers, "they consume")
            await shell.bench.send(shell.topology, *range(5))
            await until(lambda sent=5 * (number + 1): supervisor.summary.succeeded == sent, "the numbers are told")
            os.kill(logs[-1]["pid"] if number else logs[0]["pid"], signal.SIGKILL)
        await until(lambda: len(started_pids(logs)) == 5, "the last one is started")
        supervisor.stop()
        report = await asyncio.wait_for(running, SOON)

    assert report.summary == ConsumerSummary(succeeded=15)
    assert (report.restarts, report.failed) == (3, 0)
    died = [event for event in logs if event["event"] == "process_died"]
    assert [event["signal"] for event in died] == ["SIGKILL"] * 3
    for pid in started_pids(logs):
        with pytest.raises(ProcessLookupError):  # not even a zombie
            os.kill(pid, 0)
    assert len(os.listdir("/proc/self/fd")) == open_before


async def test_the_two_programs_of_the_readme_share_the_work_and_stop_when_they_are_told_to(shell: Shell) -> None:
    (worker,) = [block for block in blocks("python") if "SupervisorLink()" in block]
    (supervisor,) = [block for block in blocks("python") if "Supervisor(" in block]
    (shop,) = [block for block in blocks("python") if "shipped to" in block]
    shell.write("shop.py", shop)
    shell.write("worker.py", worker.replace('"orders"', repr(shell.queue)))
    shell.write("supervise.py", supervisor)
    await shell.declare()

    async def all_consume() -> bool:
        return await shell.consumers() == 4

    running = await shell.start(command=(sys.executable, "supervise.py"), env={"PYTHONUNBUFFERED": "1"})
    try:
        await until(all_consume, "four processes consume")
        orders = [{"customer": "Linus", "total": 1, "address": number} for number in range(8)]
        await shell.bench.send(shell.topology, *orders)
        await until(lambda: running.out.count(b"shipped to") == len(orders), "the work is done")
    finally:
        running.send(signal.SIGTERM)
        done = await running.end(deadline=SOON)

    assert done.code == 0
    report = SupervisorReport(ConsumerSummary(succeeded=len(orders)), restarts=0, failed=0)
    assert done.out.splitlines()[-1] == str(report)


async def test_a_program_hears_why_its_processes_gave_up(shell: Shell) -> None:
    shell.write("shop.py", SHOP)
    command = ["-m", "rabbitdlq", "--topology", str(shell.folder / "rabbitdlq.toml"), "consume", shell.queue]
    environment = shell.environment(shell.with_url(port=1), None)

    with pytest.raises(BrokerError, match="connection refused"):
        await Supervisor([sys.executable, *command, "--handler", "math:sqrt"], 2, environment=environment).run()
