"""``rabbitdlq consume --status-port``: what probes and Prometheus are told, by one process and by several."""

import asyncio
import json
import random
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.acceptance.cli import Shell, handler_failing
from tests.broker.kit import until


def ask(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """The answer's code and text; 0 where nobody listens yet."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


async def asked(port: int, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(ask, port, path)


@pytest.fixture
def two_ports() -> int:
    """The first of two free ports next to each other, of those that the system gives to nobody's connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue


async def test_a_consumer_process_tells_how_it_is_and_what_it_did(shell: Shell, two_ports: int) -> None:
    await shell.declare()
    shell.write("shop.py", handler_failing("order == 'bad'"))
    await shell.bench.send(shell.topology, "good", "good", "bad")

    running = await shell.start("consume", shell.queue, "--handler", "shop:handle", "--status-port", str(two_ports))

    async def parked() -> bool:
        code, text = await asked(two_ports, "/metrics")
        return code == 200 and f'rabbitdlq_deliveries_total{{outcome="parked",queue="{shell.queue}"}} 1.0' in text

    await until(parked, "one is parked")
    _, text = await asked(two_ports, "/metrics")
    assert f'rabbitdlq_attempts_failed_total{{error_type="RuntimeError",queue="{shell.queue}"}} 3.0' in text
    assert f'rabbitdlq_handler_duration_seconds_count{{queue="{shell.queue}"}} 5.0' in text
    assert "process_resident_memory_bytes" in text
    code, text = await asked(two_ports, "/health")
    found: dict[str, Any] = json.loads(text)
    assert (code, found["status"], found["consumers"][0]["queue"]) == (200, "ok", shell.queue)
    assert (await asked(two_ports, "/live"))[0] == 200

    second = await shell("consume", shell.queue, "--handler", "shop:handle", "--status-port", str(two_ports))
    assert (second.code, second.out) == (2, "")
    assert f"cannot listen on 127.0.0.1:{two_ports}: Address already in use" in second.lines[-1]
    running.process.terminate()
    assert (await running.end()).code == 0


async def test_each_of_several_processes_has_a_port_of_its_own(shell: Shell, two_ports: int) -> None:
    await shell.declare()
    shell.write("shop.py", handler_failing("False"))
    words = ["--handler", "shop:handle", "--processes", "2", "--status-port", str(two_ports)]

    running = await shell.start("consume", shell.queue, *words)

    async def well() -> bool:
        return all([(await asked(port, "/health"))[0] == 200 for port in (two_ports, two_ports + 1)])

    await until(well, "both consume")
    workers = {
        json.loads((await asked(port, "/health"))[1])["consumers"][0]["worker"] for port in (two_ports, two_ports + 1)
    }
    assert len(workers) == 2
    running.process.terminate()
    assert (await running.end()).code == 0
