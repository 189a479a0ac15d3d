"""The climb to a broker: the first way that works on this machine wins, and what was started for it is ended again.

1. ``RABBITDLQ_URL``, if set: a broker of the user's, never started nor stopped here.
2. The project's ``docker-compose.yml``, where a Docker engine answers.
3. A private node of the machine's ``rabbitmq-server``.
4. The same, after installing the package: as root on Debian or Ubuntu.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from rabbitdlq.errors import ConfigurationError, LocalBrokerError
from rabbitdlq.local_broker.compose import compose_answers, compose_broker
from rabbitdlq.local_broker.install import can_install, install_server
from rabbitdlq.local_broker.node import BrokerAddress, LocalBroker, say_on_stderr
from rabbitdlq.local_broker.overview import overview
from rabbitdlq.local_broker.setup import server_program

__all__ = ["broker_from_environment", "ensure_server", "obtain_broker", "private_broker"]

Say = Callable[[str], None]

#: the compose file of the source tree; an installed package has none
_COMPOSE_FILE = Path(__file__).parents[2] / "docker-compose.yml"

_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "::1"})
#: for the management API's answer
_ANSWER_SECONDS = 3.0

_NO_WAY = """\
no RabbitMQ broker can be had on this machine. Any one of these helps:
  - set RABBITDLQ_URL, and RABBITDLQ_MANAGEMENT_URL, to a broker that runs
  - start a Docker engine with the compose plugin
  - install rabbitmq-server (it need not run, a private node is started from it)
  - on Debian or Ubuntu, run this as root: it installs the package"""


@contextmanager
def obtain_broker(*, say: Say = say_on_stderr, home: Path | None = None) -> Iterator[BrokerAddress]:
    """Give the address of a broker for the length of a block; only what was started for it is stopped at its end.

    ``home`` is the directory of the private node, if it comes to that. Raises `LocalBrokerError` when the chosen way
    fails, or when there is none.
    """
    if address := broker_from_environment(home=home):
        say(f"using the broker of RABBITDLQ_URL, {_without_password(address.url)}")
        if not address.management_url:
            say("its management API is not where it usually is: RABBITDLQ_MANAGEMENT_URL may name it")
        yield address
    elif _COMPOSE_FILE.exists() and compose_answers():
        with compose_broker(_COMPOSE_FILE, say) as address:
            yield address
    else:
        with private_broker(say=say, home=home) as address:
            yield address


def broker_from_environment(
    variables: Mapping[str, str] | None = None, *, home: Path | None = None
) -> BrokerAddress | None:
    """Take the broker that ``RABBITDLQ_URL`` names, in this process's environment unless others are given.

    Without ``RABBITDLQ_MANAGEMENT_URL`` the management API is the private node's, where that one is named (``home`` is
    its directory), else it is asked for where RabbitMQ has it by default: same host and account, port number 10,000
    above the one of AMQP. The URL is empty where nothing answers.
    """
    variables = os.environ if variables is None else variables
    url = variables.get("RABBITDLQ_URL")
    if not url:
        return None
    management = variables.get("RABBITDLQ_MANAGEMENT_URL") or _management_url(url, home)
    return BrokerAddress(url=url, management_url=management, prometheus_url=None, source="environment")


@contextmanager
def private_broker(*, say: Say = say_on_stderr, home: Path | None = None) -> Iterator[BrokerAddress]:
    """Lease the private node, installing ``rabbitmq-server`` first where that is possible and needed."""
    ensure_server(say)
    with LocalBroker(home, say=say).lease() as address:
        yield address


def ensure_server(say: Say = say_on_stderr) -> None:
    """See to it that ``rabbitmq-server`` is on this machine, or raise `LocalBrokerError` with all ways to a broker."""
    if server_program() is not None:
        return
    if not can_install():
        raise LocalBrokerError(_NO_WAY)
    install_server(say)


def _management_url(url: str, home: Path | None) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port or (5671 if parts.scheme == "amqps" else 5672)
    except ValueError as error:
        raise ConfigurationError(f"RABBITDLQ_URL is no URL: {error}") from error
    if parts.scheme not in {"amqp", "amqps"}:
        raise ConfigurationError("RABBITDLQ_URL has to start with amqp:// or amqps://")
    if parts.hostname in _THIS_MACHINE:
        with suppress(LocalBrokerError):  # a node whose state cannot be read is not the one that is meant
            private = LocalBroker(home).status().address
            if private is not None and urlsplit(private.url).port == port:
                return private.management_url
    usual = _usual_management_url(parts, port)
    return usual if _answers(usual) else ""


def _answers(url: str) -> bool:
    """Tell whether the management API answers there, to this account."""
    return "rabbitmq_version" in (overview(url, _ANSWER_SECONDS) or {})


def _usual_management_url(parts: SplitResult, port: int) -> str:
    scheme = "https" if parts.scheme == "amqps" else "http"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or "localhost"
    user, password = (quote(unquote(part), safe="") for part in (parts.username or "guest", parts.password or "guest"))
    return f"{scheme}://{user}:{password}@{host}:{port + 10_000}"


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
