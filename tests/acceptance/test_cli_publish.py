"""``rabbitdlq publish``: every line arrives or is named."""

import asyncio
import json
import re
import signal

from tests.acceptance.cli import Shell
from tests.broker.kit import until
from tests.broker.proxy import Proxy


def confirmed(proxy: Proxy, number: int) -> bool:
    """Whether the confirms of so many went on to the publisher: there may be a message, and no word of it yet."""
    return any(line.confirmed >= number for line in proxy.lines)


async def test_good_lines_arrive_as_they_are_and_bad_ones_are_named_by_number(shell: Shell) -> None:
    await shell.declare()
    lines = [
        b'\xef\xbb\xbf{"n": 1}\r\n',  # as some editors of Windows write
        b"\n",
        b'{"n": 3,  "spaces":"stay"}\n',
        b"{bad\n",
        b'"\xff\xfe"\n',
        b"   \n",
        '{"n": 7, "ü": "Größe"}\n'.encode(),
        b"[1, 2]\r\n",
        b'{"n": 9}',
    ]
    shell.write("orders.jsonl", b"".join(lines))

    done = await shell("publish", shell.queue, "orders.jsonl")

    assert done.code == 3
    assert done.out == ""
    assert [line.partition(":")[0] for line in done.lines] == ["line 4", "line 5", "published 5, failed 2"]
    assert all("not valid JSON" in line for line in done.lines[:2])
    taken = await shell.raw.take_all(shell.queue)
    assert sorted(body for body, _, _ in taken) == sorted(
        [b'{"n": 1}', b'{"n": 3,  "spaces":"stay"}', lines[6].strip(), b"[1, 2]", b'{"n": 9}']
    )
    assert len({properties.message_id for _, properties, _ in taken}) == 5
    for _, properties, _ in taken:
        assert properties.delivery_mode == 2
        assert properties.content_type == "application/json"
        assert properties.timestamp


async def test_a_slow_pipe_is_published_line_by_line_and_its_faults_are_told_at_once(shell: Shell) -> None:
    """Reports used to wait for the next line: a failure showed 500 lines later, or at the end of the input."""
    await shell.declare()
    good = await shell.open("publish", shell.queue)
    lost = await shell.open("publish", "c-nowhere", "-")

    for running in (good, lost):
        await running.feed('{"n": 1}\n{"n": ')
    await until(lambda: shell.raw.count(shell.queue), "the first line arrives while the pipe is open")
    await lost.says("line 1: ")
    await good.feed("2}")

    done = await good.end()
    assert (done.code, done.lines) == (0, ["published 2, failed 0"])
    assert [json.loads(body) for body, _, _ in await shell.raw.take_all(shell.queue)] == [{"n": 1}, {"n": 2}]
    done = await lost.end()
    assert done.code == 1
    assert "no queue took the message" in done.lines[0]


async def test_input_without_one_good_line_fails_and_input_without_lines_does_not(shell: Shell) -> None:
    await shell.declare()
    shell.write("bad", "{\nnope\n")
    shell.write("empty", "\n\n")

    bad, empty, missing = await shell.together(
        ("publish", shell.queue, "bad"),
        ("publish", shell.queue, "empty"),
        ("publish", shell.queue, "there-is-none.jsonl"),
    )

    assert (bad.code, bad.lines[-1]) == (1, "published 0, failed 2")
    assert (empty.code, empty.lines) == (0, ["published 0, failed 0"])
    assert (missing.code, missing.lines) == (
        2,
        ["rabbitdlq: there-is-none.jsonl: cannot be read: No such file or directory"],
    )


async def test_each_line_that_no_queue_took_is_named(shell: Shell) -> None:
    exchange = await shell.raw.exchange(f"{shell.queue}-shop")
    shell.write("three", "1\n\n2\n3\n")

    to_queue, to_exchange = await shell.together(
        ("publish", shell.queue, "three"),
        ("publish", shell.queue, "three", "--exchange", exchange, "--routing-key", "nobody.wants"),
    )

    for done, what in ((to_queue, f"'{shell.queue}'"), (to_exchange, "'nobody.wants'")):
        assert done.code == 1
        assert sorted(line.partition(":")[0] for line in done.lines[:-1]) == ["line 1", "line 3", "line 4"]
        assert all(what in line for line in done.lines[:-1])
        assert done.lines[-1] == "published 0, failed 3"


async def test_many_lines_with_one_error_are_told_in_one(shell: Shell) -> None:
    """A file of 200,000 lines for a queue that was not there gave 200,000 lines that said so."""
    shell.write("many", "".join(f"{number}\n" for number in range(1_000)) + "{bad\n" + "2\n" * 10)

    done = await shell("publish", shell.queue, "many")

    *told, rest, counts = done.lines
    why = f": publishing to the default exchange with key '{shell.queue}': no queue took the message"
    bad = [line for line in told if why not in line]
    assert done.code == 1
    assert [line.partition(": Expecting")[0] for line in bad] == ["line 1001: not valid JSON"]
    assert len(told) == 21
    assert re.match(r"and 990 more, lines \d.*-1000, 1002-1011: publishing to ", rest)
    assert counts == "published 0, failed 1,011"


async def test_no_more_than_the_window_is_in_flight(shell: Shell) -> None:
    """``--window`` could have been without effect, and no test would have known."""
    await shell.declare()
    async with Proxy(shell.url) as proxy:
        running = await shell.open("publish", shell.queue, "--window", "3", url=proxy.url)
        await running.feed("0\n")
        await until(lambda: confirmed(proxy, 1), "the first message")
        proxy.freeze(towards=("client",))  # what is sent from now on waits for its confirm
        await running.feed("".join(f"{number}\n" for number in range(1, 100)))

        async def three_more() -> bool:
            return await shell.raw.count(shell.queue) >= 4

        await until(three_more, "three more")
        in_flight = await shell.raw.count(shell.queue) - 1
        proxy.thaw()
        done = await running.end()

    assert in_flight == 3
    assert (done.code, done.lines) == (0, ["published 100, failed 0"])


async def test_an_exchange_of_the_application_brings_messages_with_their_key(shell: Shell) -> None:
    await shell.declare()
    exchange = await shell.raw.exchange(f"{shell.queue}-shop")
    await shell.raw.bind(shell.queue, exchange, "order.*")

    done = await shell(
        "publish", shell.queue, "-", "--exchange", exchange, "--routing-key", "order.created", stdin='{"n": 1}\n'
    )

    assert done.code == 0
    ((_, _, got),) = await shell.raw.take_all(shell.queue)
    assert (got.exchange, got.routing_key) == (exchange, "order.created")


async def test_ten_thousand_lines_arrive_and_how_far_it_is_gets_told(shell: Shell) -> None:
    await shell.declare()
    running = await shell.open("publish", shell.queue)
    fed = 9_000
    await running.feed("".join(f'{{"n": {number}}}\n' for number in range(fed)))
    # a fast broker is through before the first word is due: more comes until it was said
    while f"publishing to {shell.queue}: " not in running.err.decode():
        await running.feed(f'{{"n": {fed}}}\n')
        fed += 1
        await asyncio.sleep(0.01)
    await running.feed("".join(f'{{"n": {number}}}\n' for number in range(fed, 10_000)))

    done = await running.end()

    total = max(fed, 10_000)
    assert done.code == 0
    assert done.lines[-1] == f"published {total:,}, failed 0"
    assert all(line.startswith(f"publishing to {shell.queue}: ") for line in done.lines[:-1])
    assert await shell.raw.count(shell.queue) == total


async def test_ctrl_c_ends_a_silent_pipe_and_tells_how_far_it_came(shell: Shell) -> None:
    """A read that waited for more input used to hold up the end until some came."""
    await shell.declare()
    running = await shell.open("publish", shell.queue)
    await running.feed("".join(f"{number}\n" for number in range(100)))

    async def all_there() -> bool:
        return await shell.raw.count(shell.queue) == 100

    await until(all_there, "a hundred messages")
    running.send(signal.SIGINT)
    await asyncio.wait_for(running.process.wait(), 10)

    done = await running.end()
    assert done.code == 3
    assert done.lines == ["published 100, failed 0; stopped after line 100, the rest was not sent"]


async def test_a_lost_connection_stops_it_and_every_line_in_doubt_is_named(shell: Shell) -> None:
    await shell.declare()
    async with Proxy(shell.url) as proxy:
        running = await shell.open("publish", shell.queue, url=proxy.url)
        await running.feed("1\n2\n")
        await until(lambda: confirmed(proxy, 2), "the first messages")
        proxy.freeze(towards=("client",))  # arrives, but its confirm does not
        await running.feed("3\n4\n")

        async def four() -> bool:
            return await shell.raw.count(shell.queue) == 4

        await until(four, "four messages")
        proxy.refuse()
        proxy.cut()
        await asyncio.wait_for(running.process.wait(), 20)
        done = await running.end()

    assert done.code == 3
    assert sorted(line.partition(":")[0] for line in done.lines[:-1]) == ["line 3", "line 4"]
    assert all("the connection was lost before the confirm" in line for line in done.lines[:-1])
    assert done.lines[-1] == "published 2, failed 2; stopped after line 4, the rest was not sent"
