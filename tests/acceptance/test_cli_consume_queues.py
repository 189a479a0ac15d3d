"""``rabbitdlq consume`` with several queues: a handler for each, slots that they share; and its other limits."""

import json
import uuid

from rabbitdlq import apply_topology
from rabbitdlq.topology import Topology
from tests.acceptance.cli import HANDLERS, Shell

SHOP = f"""{HANDLERS}
running = {{"bulk": 0, "critical": 0}}

def floor(name, seconds):
    async def handle(message: Message) -> None:
        running[name] += 1
        note(message, f"{{name}}:{{running['bulk']}}+{{running['critical']}}")
        await asyncio.sleep(seconds)
        running[name] -= 1
    return handle

bulk, critical = floor("bulk", 0.05), floor("critical", 0.01)

async def fails(message: Message) -> None:
    from rabbitdlq import External
    note(message, "failed")
    raise External("503")
"""


async def two_queues(shell: Shell) -> tuple[Topology, Topology]:
    """The shell's own queue, which is the slow one, and another one."""
    other = f"c-{uuid.uuid4().hex[:10]}"
    critical = shell.bench.topology(["100ms", "150ms"], name=other, queue_type=shell.topology.queue_type)
    more = f'[queues."{other}"]\ndelays = ["100ms", "150ms"]\nqueue_type = "{critical.queue_type}"\n'
    slow = shell.write_topology(more=more)
    shell.write("shop.py", SHOP)
    for topology in (slow, critical):
        await apply_topology(shell.raw.connection, topology)
    return slow, critical


async def test_several_queues_have_a_handler_each_and_share_slots(shell: Shell) -> None:
    slow, critical = await two_queues(shell)
    await shell.bench.send(slow, *range(20))
    await shell.bench.send(critical, *range(10))
    words = [
        "consume",
        slow.name,
        critical.name,
        "--handler",
        "shop:bulk",
        "--handler",
        f"{critical.name}=shop:critical",
    ]
    words += ["--concurrency", "8", "--concurrency", f"{critical.name}=2", "--priority", f"{critical.name}=10"]

    done = await shell(*words, "--slots", "4", "--drain")

    assert done.code == 0, done.err
    assert done.lines[-1] == "30 succeeded, 0 retried, 0 parked"
    at_once = [tuple(map(int, what.partition(":")[2].split("+"))) for what, _, _ in shell.noted()]
    assert max(bulk for bulk, _ in at_once) == 3, "a slot is kept for the more important queue"
    assert max(urgent for _, urgent in at_once) <= 2
    assert max(bulk + urgent for bulk, urgent in at_once) <= 4
    assert sum(what.startswith("critical:") for what, _, _ in shell.noted()) == 10


async def test_processes_are_told_of_all_queues(shell: Shell) -> None:
    slow, critical = await two_queues(shell)
    await shell.bench.send(slow, *range(6))
    await shell.bench.send(critical, *range(6))
    words = ["consume", slow.name, critical.name, "--handler", f"{slow.name}=shop:bulk"]
    words += ["--handler", f"{critical.name}=shop:critical", "--slots", "3", "--order", "weighted"]

    done = await shell(*words, "--priority", f"{critical.name}=2", "--rate", "100/s", "--processes", "2", "--drain")

    assert done.code == 0, done.err
    assert done.lines[-1] == "12 succeeded, 0 retried, 0 parked"


async def test_without_a_breaker_an_outage_uses_up_the_attempts_and_with_it_the_log_tells_of_the_pause(
    shell: Shell,
) -> None:
    shell.write("shop.py", SHOP)
    await shell.declare()
    await shell.bench.send(shell.topology, *range(6))

    done = await shell("consume", shell.queue, "--handler", "shop:fails", "--no-breaker", "--drain")
    assert done.code == 0, done.err
    assert done.lines[-1] == "0 succeeded, 12 retried, 6 parked"

    await shell.bench.send(shell.topology, *range(12))
    running = await shell.start("consume", shell.queue, "--handler", "shop:fails", "--log-format", "json")
    await running.says("breaker_opened")
    running.process.terminate()
    done = await running.end(deadline=10)
    assert done.code == 0
    opened = next(json.loads(line) for line in done.lines if "breaker_opened" in line)
    assert (opened["failures"], opened["queue"]) == (5, shell.queue)
    assert await shell.raw.count(shell.topology.dlq) == 6


async def test_wrong_words_get_one_line(shell: Shell) -> None:
    slow, critical = await two_queues(shell)
    both = ["consume", slow.name, critical.name]
    handler = ["--handler", "shop:bulk"]
    cases = [
        ([*both, "--handler", f"{slow.name}=shop:bulk"], f"--handler: none for '{critical.name}'"),
        ([*both, *handler, "--concurrency", "nope=3"], "--concurrency: 'nope' is not consumed here; there are: "),
        ([*both, *handler, "--concurrency", "0"], "--concurrency: '0' is no whole number above 0"),
        ([*both, *handler, "--priority", "2", "--priority", "3"], "--priority: told twice for all queues"),
        ([*both, *handler, "--rate", "fast"], "--rate: 'fast' is no rate above zero; write 50/s, 600/m or 1000/h"),
        ([*both, *handler, "--rate", "1/h"], "rate: 1/h is too slow"),
        ([*both, *handler, "--order", "fair"], "--order: 'fair' is neither 'strict' nor 'weighted'"),
        (["consume", slow.name, *handler, "--order", "fair"], "--order: 'fair' is neither 'strict' nor 'weighted'"),
        ([*both, *handler, "--priority", f"{slow.name}=2", "--slots", "1"], "slots: 1 is too few"),
        (["consume", slow.name, slow.name, *handler], f"'{slow.name}' has 2"),
        # what would do nothing
        ([*both, *handler, "--priority", f"{slow.name}=2"], "--priority: nobody waits for another unless they share "),
        (["consume", slow.name, *handler, "--priority", "2"], "they share slots; give --slots, too"),
        ([*both, *handler, "--order", "weighted"], "--order: nobody waits for another unless they share slots; give "),
        ([*both, *handler, "--lease", "1h"], "--lease: there is no store of what was done; give --idempotency, too"),
        (
            [*both, *handler, "--idempotency", "memory:", "--processes", "2"],
            "--idempotency: each of several processes would have a memory of its own; give a store that they share",
        ),
        ([*both, *handler, "--status-host", "0.0.0.0"], "--status-host: nothing is served without a port; give "),
    ]
    for done, (_, reason) in zip(await shell.together(*(words for words, _ in cases)), cases, strict=True):
        assert done.code == 2, done.err
        assert reason in done.err
        assert len(done.lines) == 1, done.err


async def test_the_help_says_what_goes_with_what(shell: Shell) -> None:
    told = " ".join((await shell("consume", "--help", env={"COLUMNS": "200"})).out.replace("│", " ").split())

    assert "So many are begun, evenly, of each queue, in each process: 5/s, 100/m, 1000/h." in told
    assert "A handler that takes longer is cancelled; 10m. Plain functions only with --isolation process." in told
