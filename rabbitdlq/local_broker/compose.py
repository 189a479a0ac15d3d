"""The project's docker-compose.yml as a broker, where a Docker engine answers."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rabbitdlq.errors import LocalBrokerError
from rabbitdlq.local_broker.node import BrokerAddress
from rabbitdlq.local_broker.ports import Ports

__all__ = ["compose_answers", "compose_broker", "docker_answers"]

_SERVICE = "rabbitmq"
#: ports inside the container: AMQP, management, metrics
_AMQP, _MANAGEMENT, _PROMETHEUS = 5672, 15672, 15692
#: seconds for an engine that is there to say so
_ANSWER_DEADLINE = 5.0
#: seconds for pulling the image and starting the broker
_UP_DEADLINE = 900.0


def docker_answers() -> bool:
    """Tell whether a Docker engine answers; one that hangs does not."""
    return _answers("docker", "info")


def compose_answers() -> bool:
    """Tell whether a Docker engine answers and the compose plugin is there."""
    return docker_answers() and _answers("docker", "compose", "version")


@contextmanager
def compose_broker(file: Path, say: Callable[[str], None]) -> Iterator[BrokerAddress]:
    """Give the broker of the compose file: the one the user has up, untouched, or one of our own for this block.

    Ours is a compose project with a name, ports and a volume of its own, so that ``down -v`` removes nobody's data.
    """
    users = ["docker", "compose", "-f", str(file)]
    if _output([*users, "ps", "--status", "running", "-q", _SERVICE]):
        say("using the RabbitMQ container that docker compose has up")
        yield _address(users)
        return
    ours = ["docker", "compose", "-f", str(file), "-p", f"rabbitdlq-{os.getpid()}"]
    say("starting RabbitMQ in a container of its own by docker compose")
    try:
        _run([*ours, "up", "-d", "--wait"], _free_ports())
        yield _address(ours)
    finally:
        say("stopping the RabbitMQ container")
        try:
            _run([*ours, "down", "-v"], {})
        except LocalBrokerError as error:
            # said, not raised: it must not hide why `up` failed, nor turn work that is done into a failure
            say(str(error))


def _answers(*command: str) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_ANSWER_DEADLINE, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _free_ports() -> Mapping[str, str]:
    """Choose ports for the variables that the compose file reads."""
    ports = Ports.choose()
    return {
        "RABBITDLQ_AMQP_PORT": str(ports.amqp),
        "RABBITDLQ_MANAGEMENT_PORT": str(ports.management),
        "RABBITDLQ_PROMETHEUS_PORT": str(ports.prometheus),
    }


def _address(compose: list[str]) -> BrokerAddress:
    def port(inside: int) -> int:
        # "127.0.0.1:5672"
        return int(_output([*compose, "port", _SERVICE, str(inside)]).rpartition(":")[2])

    return BrokerAddress.behind_ports(
        "compose", amqp=port(_AMQP), management=port(_MANAGEMENT), prometheus=port(_PROMETHEUS)
    )


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise LocalBrokerError(f"{' '.join(command)} failed: {getattr(error, 'stderr', None) or error}") from error
    return done.stdout.strip()


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    """Run a docker command that takes its time; what it says goes to stderr."""
    try:
        subprocess.run(  # noqa: S603
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=2,  # progress, no data
            timeout=_UP_DEADLINE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LocalBrokerError(f"{' '.join(command)} failed: {error}") from error
