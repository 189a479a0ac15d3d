"""A real private node: up, down, restarted, killed, leased, and alone with itself on a machine that has others."""

import base64
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from rabbitdlq.errors import LocalBrokerError
from rabbitdlq.local_broker import PLUGINS, BrokerAddress, LocalBroker, setup
from rabbitdlq.local_broker.daemon import started_at, wait_until
from rabbitdlq.local_broker.home import NodeHome, NodeState
from rabbitdlq.local_broker.ports import is_free

pytestmark = pytest.mark.usefixtures("rabbitmq_server")

_BROKER = [sys.executable, "-c", "from rabbitdlq.cli.broker import app; app()"]


def _environment(home: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RABBITDLQ_")}
    # no docker on the PATH: `run` is to come to the private node
    return {**kept, "RABBITDLQ_BROKER_HOME": str(home), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def _cli(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*_BROKER, *arguments]
    return subprocess.run(command, env=_environment(home), capture_output=True, text=True, timeout=120, check=False)


def _api(address: BrokerAddress, path: str, *, method: str = "GET", body: object = None) -> Any:
    request = urllib.request.Request(
        address.management_url.replace("guest:guest@", "") + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Basic {base64.b64encode(b'guest:guest').decode()}"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read()
        return json.loads(text) if text else None


def _put_a_message(address: BrokerAddress, text: str) -> None:
    arguments = {"durable": True, "arguments": {"x-queue-type": "quorum"}}
    _api(address, "/api/queues/%2F/kept", method="PUT", body=arguments)
    message = {"routing_key": "kept", "payload": text, "payload_encoding": "string", "properties": {"delivery_mode": 2}}
    answer = _api(address, "/api/exchanges/%2F/amq.default/publish", method="POST", body=message)
    assert answer == {"routed": True}


def _messages(address: BrokerAddress) -> list[str]:
    """Look at the queue's messages; a queue that has just been recovered may elect its leader first."""
    found: list[str] = []

    def look() -> bool:
        order = {"count": 9, "ackmode": "ack_requeue_true", "encoding": "auto"}
        try:
            answer = _api(address, "/api/queues/%2F/kept/get", method="POST", body=order)
        except urllib.error.HTTPError:
            return False
        found[:] = [message["payload"] for message in answer]
        return bool(found)

    wait_until(look, 20)
    return found


def _state(home: Path) -> NodeState:
    state = NodeHome(home).read()
    assert state is not None
    return state


def _erlang_processes() -> dict[int, str]:
    """List all nodes and port mappers of this machine, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and started_at(int(entry.name)) is not None:
            try:
                program = (entry / "comm").read_text().strip()
                if program in {"beam.smp", "epmd"}:
                    found[int(entry.name)] = (entry / "cmdline").read_text()
            except OSError:
                # gone since it was listed
                continue
    return found


def _assert_no_trace(home: Path, state: NodeState) -> None:
    assert not home.exists()
    assert [pid for pid, command in _erlang_processes().items() if str(home) in command] == []
    for daemon in (state.broker, state.epmd):
        assert daemon is not None
        assert not daemon.alive()
    # the system takes a moment to close what a killed process had open
    assert wait_until(state.ports.free, 5), state.ports


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Give the place for a node that the test starts, and take it down if the test has not."""
    home = tmp_path / "home"
    yield home
    LocalBroker(home).down()


@pytest.fixture(scope="module")
def twice_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """Start one node by two processes at the same time; gives its home and what both printed."""
    home = tmp_path_factory.mktemp("node") / "home"
    command = [*_BROKER, "up"]
    starters = [
        subprocess.Popen(command, env=_environment(home), stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(2)
    ]
    try:
        yield home, [starter.communicate(timeout=180)[0] for starter in starters]
    finally:
        LocalBroker(home).down()


@pytest.fixture(scope="module")
def node(twice_up: tuple[Path, list[str]]) -> LocalBroker:
    return LocalBroker(twice_up[0])


def test_two_processes_that_start_it_at_once_get_the_same_node(twice_up: tuple[Path, list[str]]) -> None:
    home, printed = twice_up
    address = LocalBroker(home).address()
    assert printed == [f"{address.url}\n{address.management_url}\n"] * 2


def test_it_outlives_the_processes_that_started_it_and_up_again_changes_nothing(node: LocalBroker) -> None:
    before = node.status()
    assert before.state == "up"
    assert node.up() == before.address
    assert node.status() == before


def test_it_has_all_plugins_and_its_metrics(node: LocalBroker) -> None:
    address = node.address()
    assert address.prometheus_url
    # the node's own statistics come a moment after its start
    assert wait_until(lambda: "enabled_plugins" in _api(address, "/api/nodes")[0], 20)
    assert set(PLUGINS) <= set(_api(address, "/api/nodes")[0]["enabled_plugins"])
    with urllib.request.urlopen(address.prometheus_url, timeout=30) as answer:
        assert b"rabbitmq_build_info" in answer.read()


def test_it_listens_on_loopback_only(node: LocalBroker) -> None:
    state = _state(node.status().home)
    listening: dict[int, set[str]] = {port: set() for port in astuple(state.ports)}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, status, *_ = line.split()
            host, port = local.split(":")
            if status == "0A" and int(port, 16) in listening:
                listening[int(port, 16)].add(host)
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert all(hosts and hosts <= loopback for hosts in listening.values()), listening
    assert state.broker is not None
    # and nothing beside those five, as a port that was forgotten would be
    assert _listening_sockets(state.broker.pid) == 4


def _listening_sockets(pid: int) -> int:
    """Count the sockets on which a process listens."""
    opened = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            opened.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    listening = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            listening += fields[3] == "0A" and f"socket:[{fields[9]}]" in opened
    return listening


def test_a_restart_keeps_address_and_messages(node: LocalBroker) -> None:
    address = node.address()
    _api(address, "/api/queues/%2F/kept", method="PUT", body={"durable": True, "arguments": {"x-queue-type": "quorum"}})
    _api(address, "/api/queues/%2F/kept/contents", method="DELETE")
    _put_a_message(address, "from before the restart")
    process = node.status().pid
    assert node.restart() == address
    assert node.status().pid != process
    assert _messages(address) == ["from before the restart"]


def test_a_node_that_was_killed_comes_up_again_with_address_and_messages(node: LocalBroker) -> None:
    address = node.address()
    _api(address, "/api/queues/%2F/kept", method="PUT", body={"durable": True, "arguments": {"x-queue-type": "quorum"}})
    _api(address, "/api/queues/%2F/kept/contents", method="DELETE")
    _put_a_message(address, "from before the crash")
    node.kill()
    assert node.status().state == "dead"
    with pytest.raises(LocalBrokerError, match="is dead"):
        node.address()
    assert node.up() == address
    assert _messages(address) == ["from before the crash"]


def test_a_port_that_was_taken_meanwhile_is_exchanged(node: LocalBroker) -> None:
    before = node.address()
    node.kill()
    port = _state(node.status().home).ports.amqp
    assert wait_until(lambda: is_free(port), 5)
    with socket.create_server(("127.0.0.1", port)):
        assert node.up() != before


def test_the_command_line_tells_state_and_addresses(node: LocalBroker) -> None:
    address = node.address()
    home = node.status().home
    assert _cli(home, "url").stdout == f"{address.url}\n"
    assert _cli(home, "url", "--management").stdout == f"{address.management_url}\n"
    told = json.loads(_cli(home, "status", "--json").stdout)
    assert told["state"] == "up"
    assert told["url"] == address.url
    assert told["pid"] == node.status().pid
    words = _cli(home, "status")
    assert words.returncode == 0
    assert f"amqp        {address.url}\n" in words.stdout


def test_down_leaves_no_trace_and_touches_no_other_node(node: LocalBroker, home: Path) -> None:
    LocalBroker(home).up()
    state = _state(home)
    # the other private node of these tests; what else the machine has may end when it likes
    other = _state(node.status().home)
    theirs = [daemon for daemon in (other.broker, other.epmd) if daemon is not None]
    assert [daemon.alive() for daemon in theirs] == [True, True]
    done = _cli(home, "down")
    assert done.returncode == 0
    assert done.stdout == ""
    _assert_no_trace(home, state)
    assert [daemon.alive() for daemon in theirs] == [True, True]
    assert node.status().state == "up"
    assert _cli(home, "down").stderr == "there is no private node\n"
    assert _cli(home, "status").returncode == 1


def test_the_last_one_to_leave_takes_the_node_down(home: Path) -> None:
    """A demo and a test run side by side share a node; the first to end must not end it for the other."""
    with LocalBroker(home).lease() as first:
        with LocalBroker(home).lease() as second:
            assert second == first
        assert LocalBroker(home).status().state == "up"
        state = _state(home)
    _assert_no_trace(home, state)


def test_a_node_that_was_asked_to_stay_stays_and_one_whose_user_was_killed_goes(home: Path) -> None:
    holding = "import sys; from rabbitdlq.local_broker import LocalBroker\nwith LocalBroker().lease():\n  input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", holding], env=_environment(home), stdin=subprocess.PIPE, start_new_session=True
    )
    with holder:
        assert wait_until(lambda: LocalBroker(home).status().state == "up", 120)
        holder.kill()
    assert LocalBroker(home).status().state == "up"
    state = _state(home)
    with LocalBroker(home).lease():
        pass
    _assert_no_trace(home, state)


def test_up_during_a_lease_lets_the_node_stay(home: Path) -> None:
    with LocalBroker(home).lease():
        LocalBroker(home).up()
    assert LocalBroker(home).status().state == "up"


def test_a_node_that_cannot_start_tells_the_end_of_its_log_and_leaves_no_trace(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = setup._configuration
    monkeypatch.setattr(setup, "_configuration", lambda ports: configuration(ports) + "no_such_key = 1\n")
    with pytest.raises(LocalBrokerError) as error:
        LocalBroker(home).up()
    assert "ended while it was starting" in str(error.value)
    assert "no_such_key" in str(error.value)
    assert not home.exists()
    assert [pid for pid, command in _erlang_processes().items() if str(home) in command] == []


def test_run_gives_a_command_a_broker_and_hands_on_its_exit_code(home: Path) -> None:
    looking = (
        "import os, sys, urllib.parse, socket\n"
        "url = urllib.parse.urlsplit(os.environ['RABBITDLQ_URL'])\n"
        "socket.create_connection((url.hostname, url.port)).close()\n"
        "print(os.environ['RABBITDLQ_MANAGEMENT_URL'], *sys.argv[1:])\n"
        "sys.exit(7)"
    )
    done = _cli(home, "run", "--", sys.executable, "-c", looking, "--json", "a b")
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("http://guest:guest@127.0.0.1:")
    assert done.stdout.endswith(" --json a b\n")
    assert not home.exists()


#: waits for a signal and half a second for more of them, and exits with a code that tells what came
_WAITING = """
import signal, sys, time
seen = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: seen.append(number))
print("ready", flush=True)
deadline = time.monotonic() + 20
while not seen and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.5)
sys.exit({(signal.SIGTERM,): 42, (signal.SIGINT,): 43}.get(tuple(seen), 1))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 43)], ids=["SIGTERM", "SIGINT"])
def test_run_hands_a_signal_on_and_leaves_a_node_that_was_up_before(node: LocalBroker, number: int, code: int) -> None:
    before = node.status()
    command = [*_BROKER, "run", "--", sys.executable, "-c", _WAITING]
    surroundings = _environment(before.home)
    runner = subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with runner:
        assert runner.stdout
        assert runner.stdout.readline() == "ready\n"
        runner.send_signal(number)
        assert runner.wait(60) == code
    assert node.status() == before


def test_ctrl_c_at_a_terminal_is_left_to_the_terminal(node: LocalBroker) -> None:
    """The terminal tells the command and us: a second SIGINT from us would turn its orderly end into a hard one.

    The command leaves the foreground here, so that a SIGINT it sees can only be ours.
    """
    terminal, its_end = pty.openpty()
    command = [
        "setsid",
        "--ctty",
        *_BROKER,
        "run",
        "--",
        sys.executable,
        "-c",
        f"import os; os.setpgid(0, 0){_WAITING}",
    ]
    surroundings = _environment(node.status().home)
    with subprocess.Popen(command, env=surroundings, stdin=its_end, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout
        assert runner.stdout.readline() == "ready\n"
        os.write(terminal, b"\x03")
        assert os.read(terminal, 2) == b"^C"
        runner.terminate()
        assert runner.wait(60) == 42
    os.close(terminal)
    os.close(its_end)


def test_a_signal_while_the_node_is_starting_leaves_no_trace(home: Path) -> None:
    runner = subprocess.Popen([*_BROKER, "run", "--", "true"], env=_environment(home), start_new_session=True)
    with runner:
        assert wait_until(lambda: (state := NodeHome(home).read()) is not None and state.broker is not None, 60)
        state = _state(home)
        runner.terminate()
        assert runner.wait(60) == 128 + signal.SIGTERM
    _assert_no_trace(home, state)
