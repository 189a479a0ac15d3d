"""``rabbitdlq demo``: the story it promises, and nothing left behind; in a virtual host of its own."""

import re
import shutil
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from yarl import URL

from rabbitdlq import Topology
from rabbitdlq.local_broker import BrokerAddress
from tests.acceptance.cli import Shell, open_shell

BUILT_IN = "amq."


@pytest.fixture
async def alone(broker: BrokerAddress, tmp_path: Path) -> AsyncIterator[Shell]:
    """A shell in a fresh virtual host: other tests and other people may have a queue "orders"."""
    vhost = f"demo/{uuid.uuid4().hex[:8]}"
    path = f"/api/vhosts/{quote(vhost, safe='')}"
    async with httpx.AsyncClient(base_url=broker.management_url, timeout=30) as management:
        (await management.put(path)).raise_for_status()
        try:
            url = str(URL(broker.url).with_path(f"/{quote(vhost, safe='')}", encoded=True))
            async with open_shell(replace(broker, url=url), tmp_path) as shell:
                yield shell
        finally:
            (await management.delete(path)).raise_for_status()


async def names_of(shell: Shell, kind: str) -> set[str]:
    """The queues or exchanges that are there, less the broker's own."""
    vhost = quote(shell.raw.connection.vhost, safe="")
    async with httpx.AsyncClient(base_url=shell.management_url, timeout=30) as management:
        found = (await management.get(f"/api/{kind}/{vhost}")).raise_for_status().json()
    return {each["name"] for each in found if each["name"] and not each["name"].startswith(BUILT_IN)}


async def test_the_demo_tells_its_story_and_leaves_nothing_behind(alone: Shell) -> None:
    shutil.copytree(Path(__file__).parents[2] / "definitions", alone.folder / "definitions")

    done = await alone("demo", env={"RABBITDLQ_MANAGEMENT_URL": alone.management_url})

    assert done.code == 0, done.err
    story = [
        # the file that the project comes with; 3.12 and 3.13 need one of their own
        r"topology loaded from definitions(?:/orders(?:-3\.x)?\.json| made for this version)\n",
        r"1\. The topology",
        r"orders: 3 attempts",
        r"2\. Ten orders come in",
        r"3\. A consumer works on them",
        r"attempt 1  failed: ConnectionError: payment service: connection refused; again in 1 s",
        r"attempt 2  failed: KeyError: 'address'; again in 3 s",
        r"attempt 3  failed: KeyError: 'address'; parked, exhausted",
        r"7 succeeded, 7 retried, 3 parked",
        r"4\. What failed three times",
        r"(?:\w{32}  .*exhausted  3/3 .*KeyError: 'address'  order\.created\n){3}",
        r"5\. One dead letter in full",
        r'payload +\{"order": \d, "customer"',
        r"traceback\n  Traceback",
        r"6\. The bug is fixed",
        r"attempt 1  succeeded",
        r"3 succeeded, 0 retried, 0 parked",
        r"7\. Nothing is left behind",
        r"orders  0 +0 +0 +0",
    ]
    assert re.search(".*".join(story), done.out, re.DOTALL), done.out
    recovered = re.search(r"(\w{8})  attempt 1  failed: ConnectionError", done.out)
    assert recovered is not None
    assert f"{recovered[1]}  attempt 2  succeeded" in done.out
    for line in ("published 10, failed 0", "3 of 3 dead letters of orders", "replayed 3, stayed 0"):
        assert line in done.lines
    assert await names_of(alone, "queues") == set()
    assert await names_of(alone, "exchanges") == set()


async def test_a_demo_that_is_told_to_stop_clears_up_as_well(alone: Shell) -> None:
    running = await alone.start("demo")
    await running.says("again in 3 s")
    assert await names_of(alone, "queues") > {"orders", "orders.dlq"}

    running.send(signal.SIGTERM)
    done = await running.end()

    assert done.code == 128 + signal.SIGTERM
    assert await names_of(alone, "queues") | await names_of(alone, "exchanges") == set()


async def test_a_queue_orders_that_is_in_use_is_left_alone(alone: Shell) -> None:
    topology: Topology = await alone.bench.declared(["1s", "3s"], name="orders")
    await alone.bench.send(topology, "somebody's")
    before = await names_of(alone, "queues") | await names_of(alone, "exchanges")

    done = await alone("demo")

    assert (done.code, done.out) == (2, "")
    (line,) = done.lines
    assert "the broker has a work queue 'orders' in use" in line
    assert await alone.raw.count("orders") == 1
    assert await names_of(alone, "queues") | await names_of(alone, "exchanges") == before
