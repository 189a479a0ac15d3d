"""A background process that outlives the process that started it, and is only ever ended if it is still that process.

A process id alone names nothing for long: the machine hands it out again. A `Daemon` therefore remembers when its
process started, as the system tells it, and `end` touches nothing that started at another time.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rabbitdlq.errors import LocalBrokerError

__all__ = ["Daemon", "launch", "wait_until"]

#: seconds between two looks at a condition
_POLL = 0.05
#: how long a process has to vanish after SIGKILL, in seconds
_KILL_DEADLINE = 10.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """One process of ours: its id, and its start as the system words it."""

    pid: int
    started: str

    def alive(self) -> bool:
        """Tell whether the very process that was launched is still running."""
        return started_at(self.pid) == self.started

    def end(self, *, grace: float) -> None:
        """Ask it to stop, and after ``grace`` seconds kill it; returns when it is gone, at once if it was gone before.

        Raises `LocalBrokerError` when it survives SIGKILL, which only a process stuck in the kernel does.
        """
        if grace > 0 and self.signal(signal.SIGTERM) and wait_until(lambda: not self.alive(), grace):
            return
        self.signal(signal.SIGKILL)
        if not wait_until(lambda: not self.alive(), _KILL_DEADLINE):
            raise LocalBrokerError(f"process {self.pid} does not end, not even by SIGKILL")

    def signal(self, number: int) -> bool:
        """Send a signal, unless the process is gone (then ``False``)."""
        if not self.alive():
            return False
        # it may end between the look and the signal
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return True


def launch(command: Sequence[str], *, environment: Mapping[str, str], log: Path, cwd: Path) -> Daemon:
    """Start ``command`` in a session of its own, its output appended to ``log``; it is nobody's child afterwards.

    The detour through a shell that ends at once hands the process to the system, so that it survives us, and so that
    a long-running starter collects no zombies.
    """
    shell = ["/bin/sh", "-c", 'log=$1; shift; "$@" >>"$log" 2>&1 & echo $!', "launch", str(log), *command]
    done = subprocess.run(  # noqa: S603 - the command is ours, not a user's text
        shell,
        env=dict(environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=True,
    )
    pid = int(done.stdout)
    return Daemon(pid, started_at(pid) or "ended at once")


def started_at(pid: int) -> str | None:
    """Say when a process started, in words only good for comparing; ``None`` if it is gone or a zombie."""
    if not Path("/proc/self/stat").exists():
        return _started_at_by_ps(pid)
    try:
        # the name in parentheses may hold spaces and parentheses; what follows the last one is regular
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        return None
    # start times count from boot: another boot may give the same number
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{fields[19]} after boot {boot}"


def _started_at_by_ps(pid: int) -> str | None:
    """Do the same where there is no /proc, as on macOS."""
    command = ["ps", "-o", "state=,lstart=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    state, _, started = done.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; ``False`` when it does not hold within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True
