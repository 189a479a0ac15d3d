"""The private node: up, down, and what tests do to it in between."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rabbitdlq.errors import LocalBrokerError
from rabbitdlq.local_broker.daemon import launch, wait_until
from rabbitdlq.local_broker.home import NodeHome, NodeState, default_home
from rabbitdlq.local_broker.overview import overview
from rabbitdlq.local_broker.ports import LOOPBACK, Ports, is_free
from rabbitdlq.local_broker.setup import configure, environment, epmd_program, node_name, server_program

__all__ = ["BrokerAddress", "BrokerStatus", "LocalBroker", "say_on_stderr"]

#: seconds a node may take to start; an idle laptop needs five
_START_DEADLINE = 120.0
#: seconds a node may take to stop by itself before it is killed
_STOP_GRACE = 30.0


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where a broker is found, and how it came to be."""

    #: AMQP, with account and virtual host
    url: str
    #: management HTTP API and UI, with account, without a path
    management_url: str
    #: metrics; ``None`` where nobody told
    prometheus_url: str | None
    #: ``environment``, ``compose``, ``container`` or ``local``
    source: str

    @classmethod
    def behind_ports(
        cls, source: str, *, amqp: int, management: int, prometheus: int, host: str = LOOPBACK
    ) -> "BrokerAddress":
        """Build the address of a broker with the default account."""
        return cls(
            url=f"amqp://guest:guest@{host}:{amqp}/",
            management_url=f"http://guest:guest@{host}:{management}",
            prometheus_url=f"http://{host}:{prometheus}/metrics",
            source=source,
        )


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A private node at one moment."""

    #: ``up``, ``unresponsive`` (runs, but does not answer or not yet), ``dead`` (ended by itself or by force), ``down``
    state: str
    home: Path
    node: str | None = None
    pid: int | None = None
    version: str | None = None
    address: BrokerAddress | None = None


def say_on_stderr(line: str) -> None:
    """Write one plain line for the person at the terminal."""
    print(line, file=sys.stderr, flush=True)


class LocalBroker:
    """A private RabbitMQ node in a directory of its own; any process may take it up or down.

    `up` and `lease` start it if need be, with the data of before if it was only stopped or killed. `down` removes it.
    """

    def __init__(self, home: Path | None = None, *, say: Callable[[str], None] = say_on_stderr) -> None:
        self._home = NodeHome(home or default_home())
        self._say = say

    def up(self) -> BrokerAddress:
        """Start the node unless it runs, wait until it takes connections, and let it stay until `down`.

        Raises `LocalBrokerError` with the last lines of the node's log when it does not start; nothing runs then.
        """
        with self._home.locked(create=True, patience=_START_DEADLINE):
            return self._ensure_up(keep=True)

    @contextmanager
    def lease(self) -> Iterator[BrokerAddress]:
        """Use the node for the length of a block, starting it if need be.

        The last one to leave takes it down, unless somebody asked for it to stay with `up`. A user that was killed
        leaves all the same.
        """
        with self._home.locked(create=True, patience=_START_DEADLINE):
            address = self._ensure_up(keep=False)
            descriptor = self._home.take_lease()
        try:
            yield address
        finally:
            with self._home.locked(create=False, patience=_START_DEADLINE) as there:
                state = self._home.read() if there else None
                if self._home.last_to_leave(descriptor) and state and not state.keep:
                    self._take_down(state)
            os.close(descriptor)

    def down(self) -> bool:
        """Stop the node and remove every trace of it; ``False`` if there was none."""
        with self._home.locked(create=False, patience=_START_DEADLINE) as there:
            if there:
                self._take_down(self._home.read())
            return there

    def stop(self) -> None:
        """Stop the node as an administrator would; its data stays for the next `up`."""
        with self._home.locked(create=False, patience=_START_DEADLINE) as there:
            if there and (state := self._home.read()):
                self._end(state)
                self._home.write(replace(state, broker=None, epmd=None))

    def restart(self) -> BrokerAddress:
        """Stop the node and start it again on the same ports with its data."""
        self.stop()
        return self.up()

    def kill(self) -> None:
        """End the node with SIGKILL, as a power cut would; `up` starts it again with what it had written."""
        state = self._home.read()
        if state is None or state.broker is None or not state.broker.alive():
            raise LocalBrokerError(f"no node runs in {self._home.path}")
        state.broker.end(grace=0)

    def address(self) -> BrokerAddress:
        """Return where the running node is found; raises `LocalBrokerError` if it is not up."""
        status = self.status()
        if status.state != "up" or status.address is None:
            raise LocalBrokerError(f"the private node is {status.state}; start it with: rabbitdlq broker up")
        return status.address

    def status(self) -> BrokerStatus:
        """Look at the node, change nothing."""
        state = self._home.read()
        if state is None:
            return BrokerStatus("down", self._home.path)
        if state.broker is None or not state.broker.alive():
            return BrokerStatus("dead", self._home.path, state.node)
        version = _version_if_ready(state)
        return BrokerStatus(
            "up" if version else "unresponsive",
            self._home.path,
            state.node,
            state.broker.pid,
            version,
            _address(state),
        )

    def _ensure_up(self, *, keep: bool) -> BrokerAddress:
        state = self._home.read()
        if state is None:
            return self._start(NodeState(node_name(self._home.path), Ports.choose(), keep), fresh=True)
        # a node that somebody wanted to keep is not removed under them because a demo ran on it
        state = replace(state, keep=keep or state.keep)
        if state.broker is None or not state.broker.alive():
            if state.broker:
                self._say("the private RabbitMQ node ended without being asked to; its data is still there")
            self._end(state)
            # the system closes the sockets of a killed process a moment after the process is gone
            ports = state.ports if wait_until(state.ports.free, 5) else Ports.choose()
            return self._start(NodeState(state.node, ports, state.keep), fresh=False)
        self._home.write(state)
        self._await_ready(state)
        return _address(state)

    def _start(self, state: NodeState, *, fresh: bool) -> BrokerAddress:
        server = server_program()
        if server is None:
            if fresh:
                self._home.remove()
            raise LocalBrokerError("there is no rabbitmq-server on this machine")
        self._say(f"starting a private RabbitMQ node in {self._home.path}")
        try:
            configure(self._home, state.ports)
            state = self._launch(state, server)
            self._await_ready(state)
        except BaseException:
            # also on an interrupt: a half-started node would be nobody's; asked to stop, it would finish starting first
            self._end(self._home.read() or state, grace=0)
            if fresh:
                self._home.remove()
            raise
        self._say(f"RabbitMQ takes connections on {LOOPBACK}:{state.ports.amqp}")
        return _address(state)

    def _launch(self, state: NodeState, server: Path) -> NodeState:
        """Start epmd and the node, each written down as soon as it runs."""
        home = self._home
        surroundings = environment(home, state)
        command = [str(epmd_program()), "-port", str(state.ports.epmd), "-address", LOOPBACK]
        epmd = launch(command, environment=surroundings, log=home.log, cwd=home.node)
        state = home.write(replace(state, epmd=epmd))
        # a node that finds no epmd starts one of its own, of which nobody would know
        if not wait_until(lambda: not epmd.alive() or not is_free(state.ports.epmd), 10) or not epmd.alive():
            raise LocalBrokerError(f"epmd did not start; the end of its log:\n{home.log_tail()}")
        broker = launch([str(server)], environment=surroundings, log=home.log, cwd=home.node)
        return home.write(replace(state, broker=broker))

    def _await_ready(self, state: NodeState) -> None:
        broker = state.broker
        if broker is None:
            raise LocalBrokerError(f"no node runs in {self._home.path}")
        in_time = wait_until(lambda: not broker.alive() or _version_if_ready(state) is not None, _START_DEADLINE)
        if not broker.alive() or not in_time:
            what = "did not answer in time" if broker.alive() else "ended while it was starting"
            raise LocalBrokerError(f"the private RabbitMQ node {what}; the end of its log:\n{self._home.log_tail()}")

    def _take_down(self, state: NodeState | None) -> None:
        if state is not None:
            self._say(f"stopping the private RabbitMQ node in {self._home.path}")
            # an orderly stop takes seconds, to bring to disk what is removed in the next line
            self._end(state, grace=0)
        self._home.remove()

    def _end(self, state: NodeState, *, grace: float = _STOP_GRACE) -> None:
        """End the processes of a node, the node first: epmd refuses to leave while one is registered with it."""
        if state.broker:
            state.broker.end(grace=grace)
        if state.epmd:
            state.epmd.end(grace=grace)


def _address(state: NodeState) -> BrokerAddress:
    ports = state.ports
    return BrokerAddress.behind_ports(
        "local", amqp=ports.amqp, management=ports.management, prometheus=ports.prometheus
    )


def _version_if_ready(state: NodeState) -> str | None:
    """Ask the management API whether this very node takes AMQP connections: listeners are opened last at its start."""
    answer = overview(_address(state).management_url, timeout=5)
    if answer is None:
        return None
    try:
        listening = {(listener["protocol"], listener["port"]) for listener in answer["listeners"]}
        ready = answer["node"] == state.node and ("amqp", state.ports.amqp) in listening
        return str(answer["rabbitmq_version"]) if ready else None
    except (KeyError, TypeError):  # not yet able to answer in full
        return None
