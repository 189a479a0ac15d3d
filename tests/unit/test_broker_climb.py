"""Every way to a broker, in its order: the environment, Docker Compose, this machine, an installation."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rabbitdlq.errors import ConfigurationError, LocalBrokerError
from rabbitdlq.local_broker import BrokerAddress, broker_from_environment, climb, compose, install
from rabbitdlq.local_broker.daemon import Daemon, started_at
from rabbitdlq.local_broker.home import NodeHome, NodeState
from rabbitdlq.local_broker.ports import Ports

_PORTS = Ports(amqp=20001, management=20002, prometheus=20003, distribution=20004, epmd=20005)
_STATE = NodeState("rabbitdlq-1@localhost", _PORTS, keep=True)


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class TestEnvironmentUrl:
    @pytest.fixture(autouse=True)
    def _no_network(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("RABBITDLQ_BROKER_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(climb, "_answers", lambda _url: True)

    @pytest.mark.parametrize(
        ("url", "management"),
        [
            ("amqp://localhost", "http://guest:guest@localhost:15672"),
            ("amqp://anna:s%2Fcret@mq.example:5699/shop", "http://anna:s%2Fcret@mq.example:15699"),
            ("amqps://anna:x@mq.example/", "https://anna:x@mq.example:15671"),
            ("amqp://guest:guest@[::1]:5673/", "http://guest:guest@[::1]:15673"),
        ],
    )
    def test_the_management_api_is_expected_where_rabbitmq_has_it_by_default(self, url: str, management: str) -> None:
        address = broker_from_environment({"RABBITDLQ_URL": url})
        assert address == BrokerAddress(url, management, None, "environment")

    def test_where_nothing_answers_there_is_no_management_url(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A command was given one that led nowhere, or to somebody else."""
        monkeypatch.setattr(climb, "_answers", lambda _url: False)
        address = broker_from_environment({"RABBITDLQ_URL": "amqp://mq.example"})
        assert address == BrokerAddress("amqp://mq.example", "", None, "environment")

    @pytest.mark.parametrize(
        ("url", "management"),
        [
            ("amqp://guest:guest@127.0.0.1:20001/", "http://guest:guest@127.0.0.1:20002"),
            ("amqp://localhost:20001", "http://guest:guest@127.0.0.1:20002"),
            ("amqp://guest:guest@127.0.0.1:20011/", "http://guest:guest@127.0.0.1:30011"),
            ("amqp://mq.example:20001", "http://guest:guest@mq.example:30001"),
        ],
    )
    def test_the_private_node_knows_its_own(self, url: str, management: str, tmp_path: Path) -> None:
        """Its ports are free ones: 10,000 above that of AMQP there is nothing."""
        home, ourselves = NodeHome(tmp_path / "node"), Daemon(os.getpid(), started_at(os.getpid()) or "")
        with home.locked(create=True, patience=5):
            home.write(replace(_STATE, broker=ourselves))
        address = broker_from_environment({"RABBITDLQ_URL": url}, home=home.path)
        assert address
        assert address.management_url == management

    def test_a_management_url_that_is_given_is_taken(self) -> None:
        address = broker_from_environment({"RABBITDLQ_URL": "amqp://a", "RABBITDLQ_MANAGEMENT_URL": "http://b:1"})
        assert address
        assert address.management_url == "http://b:1"

    @pytest.mark.parametrize("url", ["localhost:5672", "http://localhost", "amqp://host:port/"])
    def test_what_is_no_amqp_url_is_a_configuration_error(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match="RABBITDLQ_URL"):
            broker_from_environment({"RABBITDLQ_URL": url})


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make a machine with nothing on it; returns where the climb's steps are noted."""
    taken: list[str] = []

    @contextmanager
    def fake_compose(_file: Path, _say: Callable[[str], None]) -> Iterator[BrokerAddress]:
        taken.append("compose")
        yield BrokerAddress("amqp://compose", "http://compose", None, "compose")

    class FakeNode:
        def __init__(self, _home: Path | None, *, say: Callable[[str], None]) -> None:
            pass

        @contextmanager
        def lease(self) -> Iterator[BrokerAddress]:
            taken.append("private node")
            yield BrokerAddress("amqp://local", "http://local", None, "local")

    monkeypatch.delenv("RABBITDLQ_URL", raising=False)
    monkeypatch.setattr(climb, "_answers", lambda _url: True)
    monkeypatch.setattr(climb, "compose_answers", lambda: False)
    monkeypatch.setattr(climb, "compose_broker", fake_compose)
    monkeypatch.setattr(climb, "server_program", lambda: None)
    monkeypatch.setattr(climb, "can_install", lambda: False)
    monkeypatch.setattr(climb, "install_server", lambda _say: taken.append("install"))
    monkeypatch.setattr(climb, "LocalBroker", FakeNode)
    return taken


class TestClimb:
    def _source(self) -> str:
        with climb.obtain_broker(say=lambda _: None) as address:
            return address.source

    def test_a_given_url_goes_before_everything(self, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(climb, "compose_answers", lambda: True)
        monkeypatch.setenv("RABBITDLQ_URL", "amqp://mine")
        assert self._source() == "environment"
        assert steps == []

    def test_the_password_of_a_given_url_is_not_said(self, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RABBITDLQ_URL", "amqp://anna:secret@mine:5672/")
        said: list[str] = []
        with climb.obtain_broker(say=said.append):
            pass
        assert said == ["using the broker of RABBITDLQ_URL, amqp://mine:5672/"]

    def test_docker_compose_goes_before_a_private_node(self, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(climb, "compose_answers", lambda: True)
        monkeypatch.setattr(climb, "server_program", lambda: Path("/x"))
        assert self._source() == "compose"
        assert steps == ["compose"]

    def test_an_installed_package_has_no_compose_file_and_does_without(
        self, steps: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(climb, "compose_answers", lambda: True)
        monkeypatch.setattr(climb, "_COMPOSE_FILE", tmp_path / "docker-compose.yml")
        monkeypatch.setattr(climb, "server_program", lambda: Path("/x"))
        assert self._source() == "local"

    def test_a_server_that_is_there_is_used_and_not_installed(
        self, steps: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(climb, "can_install", lambda: True)
        monkeypatch.setattr(climb, "server_program", lambda: Path("/x"))
        assert self._source() == "local"
        assert steps == ["private node"]

    def test_a_server_is_installed_where_that_can_be_done(
        self, steps: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(climb, "can_install", lambda: True)
        assert self._source() == "local"
        assert steps == ["install", "private node"]

    def test_where_nothing_can_be_done_every_way_is_listed(self, steps: list[str]) -> None:
        with pytest.raises(LocalBrokerError) as error:
            self._source()
        for way in ("RABBITDLQ_URL", "Docker", "rabbitmq-server", "as root"):
            assert way in str(error.value)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a docker on the PATH that notes how it is called and does as the files beside it say."""
    folder = tmp_path / "docker"
    _script(
        folder / "docker",
        f"""cd {folder}
echo "$*" "amqp=$RABBITDLQ_AMQP_PORT" >>calls
case "$*" in
  info) [ -e hangs ] && exec sleep 60; [ ! -e no-engine ] ;;
  *" ps "*) cat running 2>/dev/null; true ;;
  *" up "*) if [ -e no-image ]; then echo "pull failed" >&2; exit 18; fi
     echo "$RABBITDLQ_AMQP_PORT" >port-5672; echo "$RABBITDLQ_MANAGEMENT_PORT" >port-15672
     echo "$RABBITDLQ_PROMETHEUS_PORT" >port-15692 ;;
  *" port "*) echo "127.0.0.1:$(cat "port-${{*##* }}")" ;;
esac""",
    )
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


class TestCompose:
    def _calls(self, docker: Path, word: str) -> list[str]:
        return [line for line in (docker / "calls").read_text().splitlines() if f" {word} " in line]

    def test_an_engine_answers_or_not(self, docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert compose.compose_answers()
        (docker / "no-engine").touch()
        assert not compose.docker_answers()
        (docker / "no-engine").unlink()
        (docker / "hangs").touch()
        monkeypatch.setattr(compose, "_ANSWER_DEADLINE", 0.3)
        assert not compose.docker_answers()
        monkeypatch.setenv("PATH", "/nowhere")
        assert not compose.docker_answers()

    def test_a_container_of_our_own_is_started_on_free_ports_and_removed_with_its_data(self, docker: Path) -> None:
        with compose.compose_broker(Path("/p/docker-compose.yml"), lambda _: None) as address:
            up = self._calls(docker, "up")
            assert self._calls(docker, "down") == []
        (down,) = self._calls(docker, "down")
        project = f"compose -f /p/docker-compose.yml -p rabbitdlq-{os.getpid()}"
        port = address.url.rpartition(":")[2].rstrip("/")
        assert up == [f"{project} up -d --wait amqp={port}"]
        assert down.startswith(f"{project} down -v ")
        assert address.source == "compose"
        assert int(port) > 1024
        assert address.management_url == f"http://guest:guest@127.0.0.1:{(docker / 'port-15672').read_text().strip()}"

    def test_the_container_that_the_user_has_up_is_used_and_left_up(self, docker: Path) -> None:
        (docker / "running").write_text("0123abcd\n")
        for port in (5672, 15672, 15692):
            (docker / f"port-{port}").write_text(str(port))
        with compose.compose_broker(Path("/p/docker-compose.yml"), lambda _: None) as address:
            assert address.url == "amqp://guest:guest@127.0.0.1:5672/"
        assert self._calls(docker, "up") == []
        assert self._calls(docker, "down") == []

    def test_a_container_that_does_not_start_is_an_error_and_is_removed(self, docker: Path) -> None:
        (docker / "no-image").touch()
        refused = pytest.raises(LocalBrokerError, match="up -d --wait")
        with refused, compose.compose_broker(Path("/p/docker-compose.yml"), lambda _: None):
            pytest.fail("there is no broker")
        assert len(self._calls(docker, "down")) == 1


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an apt-get on the PATH that notes how it is called and what the policy for services was at that time."""
    folder = tmp_path / "apt"
    policy = tmp_path / "policy-rc.d"
    _script(
        folder / "apt-get",
        f"""cd {folder}
echo "$*" >>calls
[ ! -x {policy} ] || {policy} || echo "policy $?" >>calls
if [ -e broken ]; then echo "E: Unable to locate package rabbitmq-server"; exit 100; fi""",
    )
    _script(folder / "systemctl", f'echo "systemctl $*" >>{folder}/calls')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(install, "_POLICY", policy)
    monkeypatch.setattr(install, "server_program", lambda: Path("/x"))
    return folder


class TestInstall:
    def test_the_package_is_installed_and_no_service_is_started_meanwhile_or_at_boot(self, apt: Path) -> None:
        said: list[str] = []
        install.install_server(said.append)
        calls = (apt / "calls").read_text().splitlines()
        assert calls[0].endswith(" update")
        assert calls[2].endswith(" install -y --no-install-recommends rabbitmq-server")
        assert calls[1] == calls[3] == "policy 101"
        assert calls[4].startswith("systemctl disable rabbitmq-server.service")
        assert "installing" in said[0]
        assert not install._POLICY.exists()

    @pytest.mark.parametrize(
        ("erlang_before", "units"),
        [(True, "rabbitmq-server.service"), (False, "rabbitmq-server.service epmd.service epmd.socket")],
    )
    def test_what_erlang_would_start_at_boot_is_left_to_who_had_it_before(
        self, apt: Path, monkeypatch: pytest.MonkeyPatch, erlang_before: bool, units: str
    ) -> None:
        monkeypatch.setenv("PATH", str(apt))
        if erlang_before:
            _script(apt / "epmd", "")
        install.install_server(lambda _: None)
        assert (apt / "calls").read_text().splitlines()[-1] == f"systemctl disable {units}"

    def test_a_policy_of_the_machines_own_is_left_alone(self, apt: Path) -> None:
        _script(install._POLICY, "exit 104")
        install.install_server(lambda _: None)
        assert "policy 104" in (apt / "calls").read_text()
        assert "exit 104" in install._POLICY.read_text()

    def test_when_apt_fails_its_last_words_are_told_and_no_policy_stays(self, apt: Path) -> None:
        (apt / "broken").touch()
        with pytest.raises(LocalBrokerError, match="Unable to locate package"):
            install.install_server(lambda _: None)
        assert not install._POLICY.exists()

    @pytest.mark.parametrize(
        ("release", "user", "expected"),
        [
            ({"ID": "debian"}, 0, True),
            ({"ID": "ubuntu", "ID_LIKE": "debian"}, 0, True),
            ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, 0, True),
            ({"ID": "debian"}, 1000, False),
            ({"ID": "fedora"}, 0, False),
        ],
    )
    def test_only_root_on_debian_and_its_kind_installs(
        self, apt: Path, monkeypatch: pytest.MonkeyPatch, release: dict[str, str], user: int, expected: bool
    ) -> None:
        monkeypatch.setattr("platform.freedesktop_os_release", lambda: release)
        monkeypatch.setattr("os.geteuid", lambda: user)
        assert install.can_install() is expected
