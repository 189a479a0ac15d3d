"""What goes wrong on the way to the broker: one clear line, the right exit code, and never a password."""

import asyncio
import contextlib
import shlex
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from yarl import URL

from tests.acceptance.cli import Shell

#: no broker listens there
NOBODY = 1


async def test_a_broker_that_cannot_be_used_is_one_line_without_the_password(shell: Shell) -> None:
    connecting = "rabbitdlq: connecting to "
    cases = {
        shell.with_url(scheme="http", password="geheim"): (2, "rabbitdlq: broker URL: 'http://", "is not amqp://"),
        "amqp://guest:ge/heim@127.0.0.1/": (2, "rabbitdlq: broker URL: ", "of a password as %2F"),
        "amqp://guest:12/geheim@127.0.0.1/": (2, "rabbitdlq: broker URL: ", "of a password as %2F"),
        f"{shell.with_url(password='geheim')}?heartbeat=x": (
            2,
            "rabbitdlq: broker URL: heartbeat: 'x' is no whole",
            "",
        ),
        f"{shell.with_url(password='geheim')}?heartbeat=-1": (2, "rabbitdlq: broker URL: heartbeat: '-1' is no ", ""),
        shell.with_url(port=NOBODY, password="geheim"): (1, connecting, "connection refused; does the broker run"),
        shell.with_url(password="geheim"): (1, connecting, "check user, password"),
        shell.with_url(path="/nowhere"): (1, connecting, "vhost nowhere not found"),
        shell.with_url(scheme="amqps", password="geheim"): (1, connecting, "that port does not speak TLS"),
        f"{shell.with_url(scheme='amqps', password='geheim')}?cafile=none.pem": (
            2,
            "rabbitdlq: broker URL: cafile",
            "",
        ),
    }

    found = await shell.together(*(("--url", url, "dlq", "list", shell.queue) for url in cases))

    for (url, (code, start, part)), done in zip(cases.items(), found, strict=True):
        assert done.code == code, url
        (line,) = done.lines
        assert line.startswith(start), line
        assert part in line, line
        assert "heim" not in done.out + done.err


async def test_a_port_that_speaks_something_else_is_told_to_be_none_of_amqp(shell: Shell) -> None:
    """ "Server connection unexpectedly closed. Read 0 bytes but 1 bytes expected": of the management API's port."""
    done = await shell("--url", shell.with_url(port=URL(shell.management_url).port or 0), "dlq", "list", shell.queue)

    assert (done.code, done.out) == (1, "")
    (line,) = done.lines
    assert line.endswith("is that an AMQP port, or the one of the management API or of TLS (amqps://)?")


async def test_commands_that_work_on_a_broker_say_in_one_line_that_there_is_none(shell: Shell) -> None:
    shell.write("shop.py", "def handle(message): ...\n")
    commands = [
        ("publish", shell.queue),
        ("consume", shell.queue, "--handler", "shop:handle"),
        ("demo",),
    ]

    found = await shell.together(*commands, url=shell.with_url(port=NOBODY))

    for words, done in zip(commands, found, strict=True):
        assert (done.code, done.out) == (1, ""), words
        (line,) = done.lines
        assert "connection refused; does the broker run, and is the port right?" in line


async def test_wrong_use_is_two(shell: Shell) -> None:
    for done in await shell.together(("dlq", "list", shell.queue, "--nope"), ("publish", shell.queue, "--window", "0")):
        assert (done.code, done.out) == (2, "")
        assert "Usage: rabbitdlq " in done.err


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of its own authority for localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate")
    key, cert = tmp_path / "key.pem", tmp_path / "ca.pem"
    how = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    words = shlex.split(f"openssl req -x509 {how} -addext subjectAltName=DNS:localhost")
    subprocess.run([*words, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


@asynccontextmanager
async def tls_in_front(url: str, certificate: tuple[Path, Path]) -> AsyncIterator[int]:
    """Terminate TLS in front of the broker; gives the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    target = URL(url)
    tasks: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection(target.host, target.port)
        for source, sink in ((from_client, to_broker), (from_broker, to_client)):
            task = asyncio.create_task(pump(source, sink))
            tasks.add(task)

    server = await asyncio.start_server(serve, "localhost", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_tls_works_with_the_authority_named_and_is_refused_without(
    shell: Shell, certificate: tuple[Path, Path]
) -> None:
    await shell.declare()
    async with tls_in_front(shell.url, certificate) as port:
        url = shell.with_url(scheme="amqps", host="localhost", port=port)

        published = await shell("publish", shell.queue, url=f"{url}?cafile={certificate[0]}", stdin='{"n": 1}\n')
        stranger, other_name = await asyncio.gather(
            shell("dlq", "list", shell.queue, url=url),
            shell("dlq", "list", shell.queue, url=f"{URL(url).with_host('127.0.0.1')}?cafile={certificate[0]}"),
        )

    assert (published.code, published.lines) == (0, ["published 1, failed 0"])
    assert await shell.raw.count(shell.queue) == 1
    for done, reason in (
        (stranger, "is not trusted: self-signed certificate; name its authority's certificate with ?cafile="),
        (other_name, "is for another host: IP address mismatch"),
    ):
        assert (done.code, done.out) == (1, "")
        (line,) = done.lines
        assert f"TLS failed: the broker's certificate {reason}" in line.replace("self signed", "self-signed")
