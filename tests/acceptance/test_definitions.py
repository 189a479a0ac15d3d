"""``definitions/``: what the generator writes, and what a node boots and ``rabbitmqctl`` imports."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rabbitdlq.broker import parse_version
from rabbitdlq.local_broker import BrokerAddress, LocalBroker
from rabbitdlq.local_broker.home import NodeHome
from rabbitdlq.local_broker.setup import environment
from tests.acceptance.cli import Shell
from tests.conftest import Say

ROOT = Path(__file__).parents[2]
TOPOLOGY_FILE = ROOT / "rabbitdlq" / "demo" / "orders.toml"


async def test_the_files_of_the_project_are_what_the_generator_writes(shell: Shell) -> None:
    makefile = (ROOT / "Makefile").read_text()
    passwords = dict(re.findall(r"(RABBITDLQ_[A-Z]+_PASSWORD)=(\S+)", makefile))
    files = dict(re.findall(r"(orders\S*):(\d\.x)", makefile))
    assert set(files.values()) == {"3.x", "4.x"}

    written = await shell.together(
        *(
            ("--topology", str(TOPOLOGY_FILE), "topology", "definitions", "--users", "--broker", version)
            for version in files.values()
        ),
        env=passwords,
    )

    for name, done in zip(files, written, strict=True):
        assert (done.code, done.err) == (0, "")
        assert done.out == (ROOT / "definitions" / f"{name}.json").read_text(), f"run: make definitions ({name})"


def node_environment(home: NodeHome) -> dict[str, str]:
    state = home.read()
    assert state is not None
    return environment(home, state)


def definitions_for(version: tuple[int, ...]) -> Path:
    return ROOT / "definitions" / ("orders.json" if version >= (4, 0) else "orders-3.x.json")


@pytest.fixture(scope="module")
def booted(
    tmp_path_factory: pytest.TempPathFactory, say: Say, rabbitmq_server: None
) -> Iterator[tuple[NodeHome, BrokerAddress]]:
    """A node that loads definitions at boot, with the configuration of docker-compose.yml but for the folder."""
    folder = tmp_path_factory.mktemp("definitions")
    shutil.copy(ROOT / "definitions" / "guest.json", folder / "10-guest.json")
    configuration = (ROOT / "definitions" / "rabbitmq.conf").read_text()
    assert "/etc/rabbitmq/definitions.d" in configuration
    home = NodeHome(tmp_path_factory.mktemp("defined-node") / "home")
    with home.locked(create=True, patience=10):
        (home.node / "conf.d").mkdir(parents=True)
        configuration = configuration.replace("/etc/rabbitmq/definitions.d", str(folder))
        (home.node / "conf.d" / "50-rabbitdlq.conf").write_text(configuration)
    version = installed_version()
    if version[:2] in {(3, 12), (3, 13)}:
        pytest.skip("the project has no definitions for the RabbitMQ of this machine")
    shutil.copy(definitions_for(version), folder / "20-orders.json")
    node = LocalBroker(home.path, say=say)
    try:
        yield home, node.up()
    finally:
        node.down()


def installed_version() -> tuple[int, ...]:
    """The version of this machine's RabbitMQ, by its plugins' folder: asking the program takes seconds."""
    found = [
        parse_version(path.name.partition("-")[2]) for path in Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")
    ]
    if not found:
        pytest.skip("where this machine keeps its RabbitMQ is not known")
    return max(found)


async def test_a_node_that_boots_with_the_definitions_has_the_topology_and_its_accounts(
    shell: Shell, booted: tuple[NodeHome, BrokerAddress]
) -> None:
    _, address = booted
    producer = address.url.replace("guest:guest", "rabbitdlq-producer:producer")
    check = ("--topology", str(TOPOLOGY_FILE), "topology", "check")

    checked, published = await asyncio.gather(
        shell(*check, url=address.url), shell("publish", "orders", url=producer, stdin='{"order": 1}\n')
    )

    assert (checked.code, checked.out) == (0, "orders: as it should be\n"), checked.err
    assert (published.code, published.lines) == (0, ["published 1, failed 0"])


async def test_rabbitmqctl_imports_the_definitions(shell: Shell, booted: tuple[NodeHome, BrokerAddress]) -> None:
    home, address = booted
    values = in_vhost(json.loads(definitions_for(installed_version()).read_text()), "imported")
    values["permissions"].append({"user": "guest", "vhost": "imported", "configure": ".*", "write": ".*", "read": ".*"})
    path = shell.write("definitions.json", json.dumps(values))

    done = subprocess.run(
        ["rabbitmqctl", "--quiet", "import_definitions", str(path)],
        env=node_environment(home),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=home.node,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    url = f"{address.url}imported"
    checked = await shell("--topology", str(TOPOLOGY_FILE), "topology", "check", url=url)
    assert (checked.code, checked.out) == (0, "orders: as it should be\n"), checked.err


def in_vhost(definitions: dict[str, Any], vhost: str) -> dict[str, Any]:
    """The same for another virtual host."""
    moved = {
        kind: [each | {"vhost": vhost} if "vhost" in each else each for each in entities]
        for kind, entities in definitions.items()
    }
    return moved | {"vhosts": [{"name": vhost}]}
