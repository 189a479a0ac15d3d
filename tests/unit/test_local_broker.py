"""The private node and the climb, as far as no RabbitMQ is needed to tell."""

import os
import socket
import stat
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from rabbitdlq.errors import LocalBrokerError
from rabbitdlq.local_broker import LocalBroker
from rabbitdlq.local_broker.daemon import Daemon, launch, started_at, wait_until
from rabbitdlq.local_broker.home import NodeHome, NodeState, default_home
from rabbitdlq.local_broker.ports import Ports, is_free
from rabbitdlq.local_broker.setup import configure, environment, epmd_program, node_name, server_program

_PORTS = Ports(amqp=20001, management=20002, prometheus=20003, distribution=20004, epmd=20005)
_STATE = NodeState("rabbitdlq-1@localhost", _PORTS, keep=True)


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _sleeper(tmp_path: Path, *, script: str = "exec sleep 60") -> Daemon:
    return launch(["/bin/sh", "-c", script], environment=dict(os.environ), log=tmp_path / "log", cwd=tmp_path)


class TestPorts:
    def test_a_node_gets_five_ports_on_which_nobody_listens(self) -> None:
        ports = astuple(Ports.choose())
        assert len(set(ports)) == 5
        assert all(map(is_free, ports))

    def test_a_port_with_a_listener_is_not_free(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert not is_free(port)
            assert not replace(_PORTS, epmd=port).free()
        assert is_free(port)

    def test_a_port_with_nothing_but_remains_of_connections_is_free(self) -> None:
        """A node could not be started again on its ports otherwise: the system remembers its connections a minute."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
            # who closes first, keeps the remains
            accepted.close()
            client.close()
            port = server.getsockname()[1]
        assert is_free(port)


class TestDaemon:
    def test_a_launched_process_is_nobodys_child_and_is_ended(self, tmp_path: Path) -> None:
        daemon = _sleeper(tmp_path)
        assert daemon.alive()
        with pytest.raises(ChildProcessError):
            os.waitpid(daemon.pid, os.WNOHANG)
        assert os.getsid(daemon.pid) != os.getsid(0)
        daemon.end(grace=5)
        assert not daemon.alive()

    def test_its_output_is_appended_to_the_log(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("before\n")
        _sleeper(tmp_path, script="echo out; echo err >&2")
        assert wait_until(lambda: (tmp_path / "log").read_text() == "before\nout\nerr\n", 5)

    def test_a_process_that_took_over_the_id_is_left_alone(self, tmp_path: Path) -> None:
        """After a reboot the recorded id may be anybody's: the database's, the editor's."""
        other = _sleeper(tmp_path)
        ours = Daemon(other.pid, "long before")
        assert not ours.alive()
        ours.end(grace=0)
        assert other.alive()
        other.end(grace=0)

    def test_one_that_ignores_sigterm_is_killed_after_the_grace(self, tmp_path: Path) -> None:
        daemon = _sleeper(tmp_path, script="trap '' TERM; echo ready; while :; do sleep 0.05; done")
        assert wait_until(lambda: "ready" in (tmp_path / "log").read_text(), 5)
        daemon.end(grace=0.2)
        assert not daemon.alive()

    def test_a_zombie_is_gone(self) -> None:
        with subprocess.Popen(["true"]) as child:
            assert wait_until(lambda: started_at(child.pid) is None, 5)
            assert Path(f"/proc/{child.pid}").exists()


class TestHome:
    @pytest.fixture
    def home(self, tmp_path: Path) -> NodeHome:
        return NodeHome(tmp_path / "rabbitdlq" / "broker")

    def test_it_is_in_the_users_cache_unless_told_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RABBITDLQ_BROKER_HOME", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert default_home() == Path.home() / ".cache/rabbitdlq/broker"
        monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
        assert default_home() == Path("/caches/rabbitdlq/broker")
        monkeypatch.setenv("RABBITDLQ_BROKER_HOME", "/elsewhere")
        assert default_home() == Path("/elsewhere")

    def test_nobody_else_may_look_into_it(self, home: NodeHome) -> None:
        with home.locked(create=True, patience=0):
            assert stat.S_IMODE(home.path.stat().st_mode) == 0o700

    def test_a_directory_with_other_files_is_refused_and_left_as_it_is(self, tmp_path: Path) -> None:
        """RABBITDLQ_BROKER_HOME=$HOME must not end in a home directory that `down` has removed."""
        (tmp_path / "thesis.tex").write_text("years")
        broker = LocalBroker(tmp_path, say=lambda _: None)
        with pytest.raises(LocalBrokerError, match="not ours"):
            broker.up()
        assert broker.down() is False
        assert os.listdir(tmp_path) == ["thesis.tex"]

    def test_removing_leaves_no_trace_but_spares_files_of_others(self, home: NodeHome) -> None:
        with home.locked(create=True, patience=0):
            configure(home, _PORTS)
            home.write(_STATE)
            os.close(home.take_lease())
            (home.path / "notes").write_text("mine")
            home.remove()
        assert os.listdir(home.path) == ["notes"]
        (home.path / "notes").unlink()
        with home.locked(create=True, patience=0):
            home.remove()
        assert not home.path.parent.exists()

    def test_only_one_at_a_time_has_the_lock(self, home: NodeHome) -> None:
        refused = pytest.raises(LocalBrokerError, match="another process")
        with home.locked(create=True, patience=0), refused, home.locked(create=True, patience=0.1):
            pytest.fail("it has been taken twice")
        with home.locked(create=True, patience=0) as there:
            assert there

    def test_the_lock_of_a_directory_that_was_removed_holds_nothing(self, home: NodeHome) -> None:
        """The lock goes with the directory: whoever waited for it has a file to which no path leads, and goes on."""
        with home.locked(create=True, patience=0):
            waiting = home._open_lock()
            home.remove()
        assert waiting is not None
        assert not home._hold(waiting)
        with home.locked(create=True, patience=0):
            assert not home._hold(waiting)
        os.close(waiting)

    def test_nothing_is_created_by_looking_or_taking_down(self, home: NodeHome) -> None:
        broker = LocalBroker(home.path, say=lambda _: None)
        assert broker.status().state == "down"
        assert broker.down() is False
        broker.stop()
        with pytest.raises(LocalBrokerError, match="rabbitdlq broker up"):
            broker.address()
        assert not home.path.parent.exists()

    def test_the_state_survives_writing_and_reading(self, home: NodeHome) -> None:
        state = replace(_STATE, epmd=Daemon(1, "then"), broker=Daemon(2, "a little later"))
        with home.locked(create=True, patience=0):
            assert home.read() is None
            home.write(state)
            assert home.read() == state

    def test_a_state_that_cannot_be_read_is_named(self, home: NodeHome) -> None:
        with home.locked(create=True, patience=0):
            (home.path / "state.json").write_text("{")
            with pytest.raises(LocalBrokerError, match=r"state\.json"):
                home.read()

    def test_the_last_one_to_leave_knows_it(self, home: NodeHome) -> None:
        with home.locked(create=True, patience=0):
            first, second = home.take_lease(), home.take_lease()
            assert not home.last_to_leave(first)
            os.close(first)
            assert home.last_to_leave(second)
            os.close(second)

    def test_a_lease_on_a_node_that_was_taken_down_says_nothing_about_the_next(self, home: NodeHome) -> None:
        with home.locked(create=True, patience=0):
            old = home.take_lease()
            home.remove()
        with home.locked(create=True, patience=0):
            assert not home.last_to_leave(old)
            new = home.take_lease()
            assert not home.last_to_leave(old)
        os.close(old)
        os.close(new)


class TestStaleState:
    def test_a_node_of_before_the_reboot_is_dead_and_nobody_else_dies_for_it(self, tmp_path: Path) -> None:
        stranger = _sleeper(tmp_path)
        home = NodeHome(tmp_path / "home")
        old = Daemon(stranger.pid, "1234 after boot of-yesterday")
        with home.locked(create=True, patience=0):
            home.write(replace(_STATE, epmd=old, broker=old))
        broker = LocalBroker(home.path, say=lambda _: None)
        assert broker.status().state == "dead"
        with pytest.raises(LocalBrokerError, match="no node runs"):
            broker.kill()
        assert broker.down() is True
        assert stranger.alive()
        assert not home.path.exists()
        stranger.end(grace=0)

    def test_a_process_that_does_not_answer_as_our_node_is_not_up(self, tmp_path: Path) -> None:
        silent = _sleeper(tmp_path)
        home = NodeHome(tmp_path / "home")
        with home.locked(create=True, patience=0):
            home.write(replace(_STATE, ports=Ports.choose(), broker=silent))
        assert LocalBroker(home.path).status().state == "unresponsive"
        silent.end(grace=0)


class TestSetup:
    def test_the_node_takes_nothing_from_the_machines_own_rabbitmq(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("RABBITMQ_NODENAME", "RABBITMQ_SERVER_START_ARGS", "ERL_FLAGS", "ERL_LIBS", "NOTIFY_SOCKET"):
            monkeypatch.setenv(name, "of-the-machine")
        home = NodeHome(tmp_path / "home")
        surroundings = environment(home, _STATE)
        assert "of-the-machine" not in surroundings.values()
        assert surroundings["RABBITMQ_CONF_ENV_FILE"] == os.devnull
        places = {name: text for name, text in surroundings.items() if text.startswith("/") and name != "PATH"}
        del places["RABBITMQ_CONF_ENV_FILE"]
        assert len(places) >= 8
        assert [name for name, text in places.items() if not text.startswith(str(home.node))] == []

    def test_every_listener_is_on_loopback(self, tmp_path: Path) -> None:
        home = NodeHome(tmp_path / "home")
        with home.locked(create=True, patience=0):
            configure(home, _PORTS)
        text = (home.node / "rabbitmq.conf").read_text()
        assert "listeners.tcp.1 = 127.0.0.1:20001\n" in text
        assert "management.tcp.ip = 127.0.0.1\n" in text
        assert "prometheus.tcp.ip = 127.0.0.1\n" in text
        surroundings = environment(home, _STATE)
        assert surroundings["ERL_EPMD_ADDRESS"] == "127.0.0.1"
        assert "inet_dist_use_interface {127,0,0,1}" in surroundings["RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"]

    def test_the_cookie_is_secret_and_is_kept(self, tmp_path: Path) -> None:
        home = NodeHome(tmp_path / "home")
        with home.locked(create=True, patience=0):
            configure(home, _PORTS)
            cookie = home.node / ".erlang.cookie"
            before = cookie.read_text()
            configure(home, _PORTS)
        assert len(before) == 40
        assert cookie.read_text() == before
        assert stat.S_IMODE(cookie.stat().st_mode) == 0o400

    def test_nodes_of_different_directories_have_different_names(self) -> None:
        assert node_name(Path("/a")) == node_name(Path("/a"))
        assert node_name(Path("/a")) != node_name(Path("/b"))

    def test_the_packaged_server_goes_before_the_one_on_the_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Debian's and Red Hat's wrapper on the PATH insists on the account rabbitmq."""
        on_path = _script(tmp_path / "bin/rabbitmq-server", "")
        monkeypatch.setenv("PATH", str(on_path.parent))
        monkeypatch.setattr("rabbitdlq.local_broker.setup._PACKAGED", tmp_path / "packaged")
        assert server_program() == on_path
        packaged = _script(tmp_path / "packaged/rabbitmq-server", "")
        assert server_program() == packaged
        packaged.unlink()
        on_path.unlink()
        assert server_program() is None

    def test_epmd_is_found_beside_erlang_when_it_is_not_on_the_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        erl = _script(tmp_path / "erlang/bin/erl", "")
        monkeypatch.setenv("PATH", str(erl.parent))
        with pytest.raises(LocalBrokerError, match="epmd"):
            epmd_program()
        epmd = _script(tmp_path / "erlang/erts-13.1/bin/epmd", "")
        assert epmd_program() == epmd


def test_the_module_runs_where_nothing_was_imported_before() -> None:
    """The parts import each other; whichever is imported first has to work."""
    for module in ("climb", "compose", "home", "install", "node", "setup"):
        subprocess.run([sys.executable, "-c", f"import rabbitdlq.local_broker.{module}"], check=True)
