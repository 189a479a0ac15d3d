"""Real brokers for the tests that need one.

``broker`` climbs: ``RABBITDLQ_URL``, if set → a container by testcontainers where a Docker engine answers → a private
node of this machine's ``rabbitmq-server``, installed first as root on Debian or Ubuntu → skip, but fail when ``CI`` is
set: there, a skipped broker test is a broken build.
"""

import fcntl
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from rabbitdlq.errors import LocalBrokerError
from rabbitdlq.local_broker import (
    PLUGINS,
    BrokerAddress,
    LocalBroker,
    broker_from_environment,
    docker_answers,
    ensure_server,
    private_broker,
)

_IMAGE = "rabbitmq:4-management"

Say = Callable[[str], None]


@pytest.fixture(scope="session")
def broker(shared_path: Path, rabbitmq_may_be_needed: None, say: Say) -> Iterator[BrokerAddress]:
    """Give the broker that all tests share; it is stopped at the end if it was started for them."""
    with ExitStack() as stack:
        try:
            address = stack.enter_context(_climb(shared_path / "broker", say))
        except LocalBrokerError as error:
            _no_broker(error)
        yield address


@pytest.fixture(scope="session")
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the directory that the processes of one run share (pytest-xdist gives each a base of its own in it)."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session")
def rabbitmq_may_be_needed(shared_path: Path, say: Say) -> None:
    """Install ``rabbitmq-server`` where that is the way to a broker: one process of the run at a time."""
    if broker_from_environment() or docker_answers():
        return
    with (shared_path / "installing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # where it cannot be had, the broker's fixture says all ways there are
        with suppress(LocalBrokerError):
            ensure_server(say)


@pytest.fixture(scope="session")
def rabbitmq_server(shared_path: Path, say: Say) -> None:
    """See to it that this machine has a ``rabbitmq-server``, for tests that start nodes of their own."""
    try:
        with (shared_path / "installing").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ensure_server(say)
    except LocalBrokerError as error:
        _no_broker(error)


@pytest.fixture(scope="session")
def private_node(tmp_path_factory: pytest.TempPathFactory, say: Say, rabbitmq_server: None) -> Iterator[LocalBroker]:
    """Give a private node that runs, for tests that restart or kill it; those leave it up."""
    node = LocalBroker(tmp_path_factory.mktemp("private-node") / "home", say=say)
    try:
        node.up()
        yield node
    finally:
        node.down()


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Say:
    """Write past pytest's capturing: who waits a minute for an installation wants to know why."""
    capturing = request.config.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        if capturing is None:
            print(line, file=sys.stderr)
            return
        with capturing.global_and_fixture_disabled():
            print(f"\n[broker] {line}", file=sys.stderr, end="", flush=True)

    return write


@pytest.fixture(scope="session", autouse=True)
def _end_by_sigterm_as_by_ctrl_c() -> Iterator[None]:
    """Let a CI that cancels the run not leave a broker behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@contextmanager
def _climb(home: Path, say: Say) -> Iterator[BrokerAddress]:
    if address := broker_from_environment():
        yield address
    elif docker_answers():
        with _container(say) as address:
            yield address
    else:
        with private_broker(say=say, home=home) as address:
            yield address


def _no_broker(error: LocalBrokerError) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, so a broker is a must: {error}")
    pytest.skip(str(error))


@contextmanager
def _container(say: Say) -> Iterator[BrokerAddress]:
    """Run RabbitMQ in a container; testcontainers' own class for it would need another client library."""
    with warnings.catch_warnings():
        # what testcontainers and docker-py deprecate among themselves is not ours to mend
        warnings.simplefilter("ignore")
        from testcontainers.core.container import DockerContainer  # noqa: PLC0415 - most runs do without it
        from testcontainers.core.wait_strategies import LogMessageWaitStrategy  # noqa: PLC0415

        enable = f"echo '[{','.join(PLUGINS)}].' >/etc/rabbitmq/enabled_plugins"
        container = (
            DockerContainer(_IMAGE)
            .with_exposed_ports(5672, 15672, 15692)
            .with_command(["bash", "-c", f"{enable}; exec docker-entrypoint.sh rabbitmq-server"])
            .waiting_for(LogMessageWaitStrategy("Server startup complete").with_startup_timeout(180))
        )
        say(f"starting a container of {_IMAGE}")
        with container:
            address = BrokerAddress.behind_ports(
                "container",
                host=container.get_container_host_ip(),
                amqp=int(container.get_exposed_port(5672)),
                management=int(container.get_exposed_port(15672)),
                prometheus=int(container.get_exposed_port(15692)),
            )
            yield address
        container.get_docker_client().client.close()
