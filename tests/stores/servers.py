"""A Redis and a PostgreSQL of the tests' own: on loopback, each with a free port, a password and a directory."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import redis

__all__ = ["MissingServer", "Server", "postgres", "redis_server"]

PASSWORD = "not:to/be@shown"
#: as it is written in a URL
_QUOTED = "not%3Ato%2Fbe%40shown"
_SECONDS = 30


class MissingServer(Exception):
    """A server's programs are not on this machine."""


@dataclass
class Server:
    """A server that can be stopped and started again; what it has written is kept."""

    url: str
    command: list[str]
    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    #: PostgreSQL's word for "now, and in order"
    stop_signal: signal.Signals = signal.SIGTERM
    process: "subprocess.Popen[bytes] | None" = None
    port: int = 0

    def start(self) -> None:
        """Start it, and wait until it answers questions: it takes connections before that."""
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | self.environment
            )
        deadline = time.monotonic() + _SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.command[0]} does not run: {(self.home / 'log').read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop it, if it runs."""
        if self.process is not None:
            self.process.send_signal(self.stop_signal)
            self.process.wait(_SECONDS)
            self.process = None

    def _answers(self) -> bool:
        try:
            if self.url.startswith("redis"):
                with redis.Redis.from_url(self.url, retry=None) as client:
                    return bool(client.ping())
            with psycopg.connect(self.url) as connection:
                return connection.execute("SELECT 1").fetchone() == (1,)
        except (redis.RedisError, psycopg.OperationalError):
            return False


@contextmanager
def redis_server() -> Iterator[Server]:
    """A Redis that writes every command to disk, so that a restart loses nothing."""
    program = shutil.which("redis-server")
    if program is None:
        raise MissingServer("there is no redis-server; on Debian and Ubuntu: apt-get install redis-server")
    with _home(None) as home:
        port = _free_port()
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--requirepass", PASSWORD, "--save", ""]
        command += ["--dir", str(home), "--appendonly", "yes", "--appendfsync", "no", "--logfile", str(home / "redis")]
        with _running(Server(f"redis://:{_QUOTED}@127.0.0.1:{port}/0", command, home, port=port)) as server:
            yield server


@contextmanager
def postgres() -> Iterator[Server]:
    """A PostgreSQL with a superuser and a database of that name; as root it runs as another user, as it insists on."""
    initdb = _newest_initdb()
    if initdb is None:
        raise MissingServer("there is no PostgreSQL server; on Debian and Ubuntu: apt-get install postgresql")
    user = _other_user() if os.geteuid() == 0 else None
    with _home(user) as home:
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user is not None else []
        password = home / "password"
        password.write_text(PASSWORD)
        if user is not None:
            os.chown(password, user, -1)
        # no locale of the machine's; and nothing here has to outlive a power cut
        words = ["-D", str(home / "data"), "-U", "owner", "-A", "scram-sha-256", f"--pwfile={password}"]
        words += ["-E", "UTF8", "--locale=C", "--no-sync"]
        made = subprocess.run([*as_user, str(initdb), *words], capture_output=True, text=True, check=False, cwd=home)
        if made.returncode != 0:
            raise RuntimeError(f"initdb: {made.stdout}{made.stderr}")
        port = _free_port()
        command = [*as_user, str(initdb.parent / "postgres"), "-D", str(home / "data"), "-p", str(port)]
        for option in ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", "shared_buffers=16MB"):
            command += ["-c", option]
        url = f"postgresql://owner:{_QUOTED}@127.0.0.1:{port}/postgres"
        with _running(Server(url, command, home, stop_signal=signal.SIGINT, port=port)) as server:
            yield server


@contextmanager
def _running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def _home(user: int | None) -> Iterator[Path]:
    """A directory that another user can reach, too: pytest's own cannot be."""
    home = Path(tempfile.mkdtemp(prefix="rabbitdlq-stores-"))
    if user is not None:
        os.chown(home, user, -1)
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _newest_initdb() -> Path | None:
    """Debian keeps the server's programs off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("[1-9][0-9]/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1] if found else Path(on_path) if on_path else None


def _other_user() -> int:
    try:
        return pwd.getpwnam("postgres").pw_uid
    except KeyError:
        return pwd.getpwnam("nobody").pw_uid
