"""Installing ``rabbitmq-server`` on Debian and Ubuntu, without ever starting its system service."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rabbitdlq.errors import LocalBrokerError
from rabbitdlq.local_broker.setup import server_program

__all__ = ["can_install", "install_server"]

#: asked by packages whether they may start their services; 101 is "no"
_POLICY = Path("/usr/sbin/policy-rc.d")
_NEVER = "#!/bin/sh\n# written by rabbitdlq while it installs rabbitmq-server\nexit 101\n"

#: the system's port mapper, which belongs to whoever installed Erlang before us
_ERLANG_UNITS = ("epmd.service", "epmd.socket")

#: Debian's and Ubuntu's own tools run at boot and by timers; wait for their lock a while
_APT = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=3")


def can_install() -> bool:
    """Tell whether we are root on Debian, Ubuntu or one of their kind."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return False
    family = {release.get("ID", ""), *release.get("ID_LIKE", "").split()}
    return os.geteuid() == 0 and bool(family & {"debian", "ubuntu"}) and shutil.which("apt-get") is not None


def install_server(say: Callable[[str], None]) -> None:
    """Install the distribution's ``rabbitmq-server``; raises `LocalBrokerError` with the end of what apt-get said."""
    say("rabbitmq-server is not on this machine; installing the distribution's package (about 100 MB, a minute)")
    # the package also makes its service, and Erlang's, start with the machine: nobody asked for that
    units = ["rabbitmq-server.service"] if shutil.which("epmd") else ["rabbitmq-server.service", *_ERLANG_UNITS]
    with _no_services():
        _apt("update")
        _apt("install", "-y", "--no-install-recommends", "rabbitmq-server")
    if systemctl := shutil.which("systemctl"):
        subprocess.run([systemctl, "disable", *units], capture_output=True, check=False)  # noqa: S603
    if server_program() is None:
        raise LocalBrokerError("the package rabbitmq-server was installed, but brought no rabbitmq-server")


@contextmanager
def _no_services() -> Iterator[None]:
    """Keep packages from starting services while the block runs; a policy of the machine's own is left alone."""
    try:
        descriptor = os.open(_POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    except FileExistsError:
        yield
        return
    with os.fdopen(descriptor, "w") as policy:
        policy.write(_NEVER)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)


def _apt(*arguments: str) -> None:
    command = [*_APT, *arguments]
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(  # noqa: S603
        command,
        env=quiet,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        end = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-15:])
        raise LocalBrokerError(f"apt-get {arguments[0]} failed; the end of what it said:\n{end}")
