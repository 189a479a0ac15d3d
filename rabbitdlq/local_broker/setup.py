"""What a private node is made of: the programs, the configuration, and the environment that keeps it to itself."""

import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Final

from rabbitdlq.errors import LocalBrokerError
from rabbitdlq.local_broker.home import NodeHome, NodeState
from rabbitdlq.local_broker.ports import LOOPBACK, Ports

__all__ = ["PLUGINS", "configure", "environment", "epmd_program", "node_name", "server_program"]

#: the plugins of every broker that this project starts, wherever it runs
PLUGINS: Final = ("rabbitmq_management", "rabbitmq_prometheus", "rabbitmq_shovel", "rabbitmq_shovel_management")

#: where the packages of Debian, Ubuntu and the RPM family keep RabbitMQ's own scripts; the ones they put on the PATH
#: insist on the account rabbitmq
_PACKAGED = Path("/usr/lib/rabbitmq/bin")


def server_program() -> Path | None:
    """Find ``rabbitmq-server``, or ``None``."""
    packaged = _PACKAGED / "rabbitmq-server"
    if os.access(packaged, os.X_OK):
        return packaged
    found = shutil.which("rabbitmq-server")
    return Path(found) if found else None


def epmd_program() -> Path:
    """Find Erlang's port mapper: on the PATH, or beside the Erlang that is."""
    if found := shutil.which("epmd"):
        return Path(found)
    if erl := shutil.which("erl"):
        root = Path(erl).resolve().parent.parent
        for candidate in [root / "bin/epmd", *root.glob("erts-*/bin/epmd")]:
            if os.access(candidate, os.X_OK):
                return candidate
    raise LocalBrokerError("rabbitmq-server is here, but Erlang's epmd is not: is Erlang on the PATH?")


def node_name(home: Path) -> str:
    """Name the node after its directory: the data in there can only be read by a node of the same name."""
    return f"rabbitdlq-{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}@localhost"


def configure(home: NodeHome, ports: Ports) -> None:
    """Write the node's files; data, cookie and log of before are kept."""
    for folder in (home.node, home.node / "conf.d", home.node / "data"):
        folder.mkdir(mode=0o700, exist_ok=True)
    (home.node / "enabled_plugins").write_text(f"[{','.join(PLUGINS)}].\n")
    (home.node / "advanced.config").write_text("[].\n")
    (home.node / "rabbitmq.conf").write_text(_configuration(ports))
    cookie = home.node / ".erlang.cookie"
    if not cookie.exists():
        cookie.touch(mode=0o600)
        cookie.write_text(secrets.token_hex(20))
        cookie.chmod(0o400)


def _configuration(ports: Ports) -> str:
    return f"""\
listeners.tcp.1 = {LOOPBACK}:{ports.amqp}
management.tcp.ip = {LOOPBACK}
management.tcp.port = {ports.management}
prometheus.tcp.ip = {LOOPBACK}
prometheus.tcp.port = {ports.prometheus}
# a laptop's disk is fuller than a server's
disk_free_limit.absolute = 50MB
# counts in the management UI follow within a second, not five
collect_statistics_interval = 1000
# an eighth of the default: the log that quorum queues share is kept in memory, too
raft.wal_max_size_bytes = 67108864
"""


def environment(home: NodeHome, state: NodeState) -> dict[str, str]:
    """Build the whole environment of the node and its epmd; of ours only the PATH goes along.

    Nothing may come from the machine's own RabbitMQ: every file that it would look for by default is named here.
    """
    node = home.node
    return {
        "PATH": os.pathsep.join([str(_PACKAGED), os.environ.get("PATH", ""), "/usr/sbin:/usr/bin:/sbin:/bin"]),
        "HOME": str(node),
        "LANG": "C.UTF-8",
        "ERL_EPMD_PORT": str(state.ports.epmd),
        "ERL_EPMD_ADDRESS": LOOPBACK,
        # no crash dumps: they are large, and what failed is in the log
        "ERL_CRASH_DUMP_SECONDS": "0",
        "RABBITMQ_NODENAME": state.node,
        "RABBITMQ_DIST_PORT": str(state.ports.distribution),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_CONFIG_FILE": str(node / "rabbitmq.conf"),
        "RABBITMQ_CONFIG_FILES": str(node / "conf.d"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(node / "advanced.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(node / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(node / "data"),
        "RABBITMQ_LOG_BASE": str(node),
        # to standard output: one file with everything, also what is said before logging works
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_PID_FILE": str(node / "pid"),
        # the script becomes the Erlang VM instead of waiting for it: the process we launched is the node itself
        "RUNNING_UNDER_SYSTEMD": "true",
    }
