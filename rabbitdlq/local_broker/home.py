"""The directory of a private node: who may touch it, its lock, its state file, and how it is removed without a trace.

::

    HOME/rabbitdlq-broker.lock    one at a time; also the mark that the directory is ours
    HOME/lease                    shared lock of everybody who uses a node that was not asked to stay
    HOME/state.json               node name, ports, processes
    HOME/node/                    HOME of the node itself: cookie, configuration, data, log
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rabbitdlq.errors import LocalBrokerError
from rabbitdlq.local_broker.daemon import Daemon
from rabbitdlq.local_broker.ports import Ports

__all__ = ["NodeHome", "NodeState", "default_home"]

_LOCK = "rabbitdlq-broker.lock"


@dataclass(frozen=True, slots=True)
class NodeState:
    """What has to be known about a node to find and to end it from another process."""

    node: str
    ports: Ports
    #: whether it was asked to stay (``up``), or goes when the last one who leases it has left
    keep: bool
    epmd: Daemon | None = None
    broker: Daemon | None = None


_STATE = TypeAdapter(NodeState)


def default_home() -> Path:
    """Where the node lives: ``RABBITDLQ_BROKER_HOME``, or ``rabbitdlq/broker`` in the user's cache directory."""
    if chosen := os.environ.get("RABBITDLQ_BROKER_HOME"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rabbitdlq" / "broker"


class NodeHome:
    """One node's directory. Nothing in it is read or written without its lock, except for reading the state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.node = path / "node"
        self.log = self.node / "node.log"
        self._lock = path / _LOCK
        self._state = path / "state.json"
        self._lease = path / "lease"

    @contextmanager
    def locked(self, *, create: bool, patience: float) -> Iterator[bool]:
        """Hold the directory alone; yields ``False``, and creates nothing, when it is not there and not wanted.

        Raises `LocalBrokerError` when another process holds it for longer than ``patience`` seconds, or when the
        directory is not one of ours.
        """
        deadline = time.monotonic() + patience
        while create or self._lock.exists():
            descriptor = self._open_lock()
            if self._hold(descriptor):
                break
            if descriptor is not None:
                os.close(descriptor)
            if time.monotonic() > deadline:
                raise LocalBrokerError(
                    f"another process has been starting or stopping the node in {self.path} for long"
                )
            time.sleep(0.05)
        else:
            yield False
            return
        try:
            yield True
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open_lock(self) -> int | None:
        """Open the lock, in a directory that is ours or becomes ours; ``None`` if it is being removed right now."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            inside = os.listdir(self.path)
            if inside and _LOCK not in inside:
                raise LocalBrokerError(
                    f"{self.path} holds files that are not ours: let RABBITDLQ_BROKER_HOME name a new directory"
                )
            return os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            return None
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise LocalBrokerError(f"cannot keep a node in {self.path}: {error}") from error

    def _hold(self, descriptor: int | None) -> bool:
        """Take the lock without waiting; a lock whose file was removed meanwhile holds nothing."""
        if descriptor is None:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(descriptor), os.stat(self._lock))
        except (BlockingIOError, FileNotFoundError):
            return False

    def take_lease(self) -> int:
        """Join those who use the node; the returned descriptor is to be given to `last_to_leave`, or closed."""
        descriptor = os.open(self._lease, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor

    def last_to_leave(self, descriptor: int) -> bool:
        """Leave; tells whether nobody else uses the node. The system takes the lease of a killed process back."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a lease on a node that was taken down, and perhaps started anew, says nothing about the new one
            return os.path.samestat(os.fstat(descriptor), os.stat(self._lease))
        except (BlockingIOError, FileNotFoundError):
            return False

    def read(self) -> NodeState | None:
        """Return what is known of the node, ``None`` if there is none."""
        try:
            return _STATE.validate_json(self._state.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValidationError as error:
            raise LocalBrokerError(f"{self._state} cannot be read: {error}") from error

    def write(self, state: NodeState) -> NodeState:
        """Replace the state in one step, so that no reader ever sees half of it."""
        part = self._state.with_suffix(".part")
        part.write_bytes(_STATE.dump_json(state, indent=2))
        part.replace(self._state)
        return state

    def remove(self) -> None:
        """Remove what is ours and, if nothing else is in there, the directory; the lock has to be held."""
        if self.node.exists():
            shutil.rmtree(self.node)
        for file in (self._state, self._state.with_suffix(".part"), self._lease, self._lock):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()
            if self.path.parent.name == "rabbitdlq":
                self.path.parent.rmdir()

    def log_tail(self, lines: int = 25) -> str:
        """Return the last lines of the node's log that tell something, indented."""
        if not self.log.exists():
            return "    (no log was written)"
        text = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        verdicts = [number for number, line in enumerate(text) if "BOOT FAILED" in line]
        if verdicts:
            # what follows RabbitMQ's own words are pages of Erlang's crash reports
            text = text[: verdicts[-1] + 5]
        return "\n".join(f"    {line}" for line in text[-lines:])
