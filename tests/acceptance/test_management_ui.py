"""The dead-letter queue as people see it: RabbitMQ's management UI in a real browser.

Chromium is driven by its ChromeDriver over the WebDriver protocol (https://www.w3.org/TR/webdriver2/). With
``RABBITDLQ_PICTURE=file.png`` the test keeps the picture that the README shows.
"""

import asyncio
import base64
import json
import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from yarl import URL

from rabbitdlq import Connection, Consumer, Message, Producer, Topology, WorkBinding, apply_topology
from rabbitdlq.local_broker import BrokerAddress
from tests.broker.kit import Raw, until

PICTURE = os.environ.get("RABBITDLQ_PICTURE")

WIDTH = 1_100
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    f"--window-size={WIDTH},1000",
]

#: the key under which WebDriver hands out elements
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"

ERRORS = {
    1: "payment provider: connect timed out after 3 s",
    2: "payment provider: 503 Service Unavailable",
    3: "payment provider: 503 Service Unavailable, retry after 60 s",
}


class Browser:
    """One window of a headless Chromium."""

    def __init__(self, client: httpx.AsyncClient, session: str) -> None:
        self._client = client
        self._session = session

    @classmethod
    @asynccontextmanager
    async def of(cls, chromium: str, driver: str, profile: Path) -> AsyncIterator["Browser"]:
        """A fresh browser that ends with the block."""
        process = await asyncio.create_subprocess_exec(
            driver, "--port=0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            port = await asyncio.wait_for(_port(process), 30)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
                wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
                answer = (await client.post("/session", json=wanted)).raise_for_status().json()
                browser = cls(client, answer["value"]["sessionId"])
                try:
                    yield browser
                finally:
                    await browser._do("DELETE", "")
        finally:
            process.terminate()
            await process.wait()

    async def _do(self, method: str, path: str, **body: Any) -> Any:
        content = json.dumps(body) if method == "POST" else None
        answer = await self._client.request(method, f"/session/{self._session}{path}", content=content)
        assert answer.status_code == httpx.codes.OK, answer.text
        return answer.json()["value"]

    async def open(self, url: str) -> None:
        await self._do("POST", "/url", url=url)

    async def run(self, script: str) -> Any:
        """What a JavaScript function body returns."""
        return await self._do("POST", "/execute/sync", script=script, args=[])

    async def visible(self, css: str, text: str = "") -> str:
        """Wait for an element that is displayed and holds the text; gives its handle."""

        async def look() -> str | None:
            for found in await self._do("POST", "/elements", using="css selector", value=css):
                try:
                    shown = await self._do("GET", f"/element/{found[ELEMENT]}/displayed")
                    if shown and text in await self._do("GET", f"/element/{found[ELEMENT]}/text"):
                        return str(found[ELEMENT])
                except AssertionError:  # the page draws itself anew every few seconds
                    return None
            return None

        handle: str = await until(look, f"{css} with {text!r} is visible")
        return handle

    async def type(self, css: str, text: str) -> None:
        handle = await self.visible(css)
        await self._do("POST", f"/element/{handle}/clear")
        await self._do("POST", f"/element/{handle}/value", text=text)

    async def click(self, css: str, text: str = "") -> None:
        async def clicked() -> bool:
            handle = await self.visible(css, text)
            try:
                await self._do("POST", f"/element/{handle}/click")
            except AssertionError:  # drawn anew between the look and the click
                return False
            return True

        await until(clicked, f"{css} with {text!r} can be clicked")

    async def text(self, css: str) -> str:
        """What a person can read there."""
        return str(await self._do("GET", f"/element/{await self.visible(css)}/text"))

    async def picture(self) -> bytes:
        """The whole page as PNG."""
        height = await self.run("return document.documentElement.scrollHeight")
        await self._do("POST", "/window/rect", width=WIDTH, height=height)
        return base64.b64decode(await self._do("GET", "/screenshot"))


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    async for line in process.stdout:
        if match := re.search(rb"started successfully on port (\d+)", line):
            return int(match[1])
    raise AssertionError("ChromeDriver ended before it had a port")


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing = "no chromium with its chromedriver: 'apt-get install chromium chromium-driver' brings them"
        if os.environ.get("CI"):
            pytest.fail(f"CI is set, so a browser is a must: {missing}")
        pytest.skip(missing)
    async with Browser.of(chromium, driver, tmp_path / "profile") as opened:
        yield opened


@pytest.fixture
async def orders(broker: BrokerAddress) -> AsyncIterator[tuple[str, Topology]]:
    """A virtual host with an order that was parked after three attempts; its URL, and its topology."""
    management, vhost = URL(broker.management_url), "shop" if PICTURE else f"t-{uuid.uuid4().hex[:8]}"
    auth = (management.user or "", management.password or "")
    async with httpx.AsyncClient(base_url=f"{management.with_user(None)}/api/", auth=auth, timeout=30) as client:
        (await client.put(f"vhosts/{vhost}")).raise_for_status()
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        (await client.put(f"permissions/{vhost}/{URL(broker.url).user}", json=everything)).raise_for_status()
        url = str(URL(broker.url).with_path(f"/{vhost}"))
        topology = Topology("orders", ["50ms", "100ms"], bindings=[WorkBinding("shop", "order.*")])
        try:
            await _let_an_order_die(url, topology)
            yield f"{management.with_user(None)}/#/queues/{vhost}/{topology.dlq}", topology
        finally:
            await client.delete(f"vhosts/{vhost}")


async def _let_an_order_die(url: str, topology: Topology) -> None:
    async def charge(message: Message) -> None:
        raise ConnectionError(ERRORS[message.attempt])

    # the picture is for people who do not know where this file lies
    charge.__code__ = charge.__code__.replace(co_filename="/app/shop/payments.py", co_firstlineno=17)
    async with await Connection.open(url) as connection, Producer(url) as producer:
        await apply_topology(connection, topology)
        order = {"order": 1017, "customer": "C-42", "total": "149.90", "currency": "EUR"}
        await producer.send(
            "order.created", order, exchange="shop", message_id="order-1017", headers={"tenant": "acme"}
        )
        consumer = Consumer(topology, charge, url=url, worker="worker-1")
        running = asyncio.create_task(consumer.run())
        await until(lambda: Raw(connection).count(topology.dlq), "the order rests in the dead-letter queue")
        consumer.stop()
        await running


async def test_reason_error_and_history_of_a_dead_letter_are_readable_in_the_management_ui(
    browser: Browser, broker: BrokerAddress, orders: tuple[str, Topology]
) -> None:
    page, topology = orders
    account = URL(broker.management_url)

    await browser.open(str(account.with_user(None)))
    await browser.type("input[name=username]", account.user or "")
    await browser.type("input[name=password]", account.password or "")
    await browser.click("#login input[type=submit]")
    await browser.visible("h1", "Overview")
    await browser.open(page)
    await browser.visible("h1", topology.dlq)
    await browser.click("h2", "Overview")  # its charts fold away
    await browser.click("h2", "Get messages")
    await browser.click("form[action='#/queues/get'] input[type=submit]")

    # the page builds the message piece by piece, its payload last
    shown = await until(lambda: _with_payload(browser), "the message with its payload")
    lines = shown.splitlines()
    assert "The server reported 0 messages remaining." in lines
    assert any(line.startswith("dlq-reason:") and "exhausted" in line for line in lines), shown
    assert any(line.startswith("dlq-error-type:") and "ConnectionError" in line for line in lines)
    assert any(line.startswith("dlq-error-message:") and ERRORS[3] in line for line in lines)
    (history,) = [line for line in lines if line.startswith("dlq-history:")]
    for attempt, text in ERRORS.items():
        assert f'"attempt":{attempt}' in history
        assert text in history
    for name, value in {"dlq-attempts": "3", "dlq-queue": "orders", "dlq-routing-key": "order.created"}.items():
        assert any(line.startswith(f"{name}:") and value in line for line in lines)
    assert any(line.startswith("tenant:") and "acme" in line for line in lines), "the publisher's own headers too"
    picture = await browser.picture()
    assert picture.startswith(b"\x89PNG")
    if PICTURE:
        Path(PICTURE).write_bytes(picture)


async def _with_payload(browser: Browser) -> str | None:
    try:
        shown = await browser.text("#msg-wrapper")
    except AssertionError:  # drawn anew between the look and the reading
        return None
    return shown if '"order":1017' in shown.replace(" ", "") else None
