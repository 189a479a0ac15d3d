"""``rabbitdlq broker``: a RabbitMQ broker for trying things out, without one being installed, configured or started."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any

import typer

from rabbitdlq.local_broker import BrokerAddress, BrokerStatus, LocalBroker, ensure_server, obtain_broker, say_on_stderr

app = typer.Typer(
    help="A private RabbitMQ node on this machine: own name, own ports, own data, loopback only.",
    no_args_is_help=True,
)


@app.command()
def up() -> None:
    """Start the node unless it runs, and print its AMQP and management URLs, one a line.

    As root on Debian or Ubuntu, rabbitmq-server is installed first where it is missing.
    """
    ensure_server()
    address = LocalBroker().up()
    print(address.url)
    print(address.management_url)


@app.command()
def down() -> None:
    """Stop the node and remove its data, its configuration and its log."""
    if not LocalBroker().down():
        say_on_stderr("there is no private node")


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False) -> None:
    """Say how the node is; exits with 1 unless it is up."""
    found = LocalBroker().status()
    print(json.dumps(_as_json(found)) if as_json else "\n".join(_lines(found)))
    if found.state != "up":
        raise typer.Exit(1)


@app.command()
def url(
    management: Annotated[bool, typer.Option("--management", help="The URL of the management API and UI.")] = False,
) -> None:
    """Print the AMQP URL of the running node."""
    address = LocalBroker().address()
    print(address.management_url if management else address.url)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command to run.")]) -> None:
    """Run a command with a broker: RABBITDLQ_URL and, where it is known, RABBITDLQ_MANAGEMENT_URL are set for it.

    The broker is the one of RABBITDLQ_URL if set, else one by docker compose, else the private node; what was started
    is stopped when the command ends. The exit code is the command's.
    """
    if shutil.which(command[0]) is None:
        raise typer.BadParameter(f"there is no program {command[0]}", param_hint="COMMAND")
    with stopping_orderly(), obtain_broker() as address:
        code = _run_child(command, address)
    raise typer.Exit(code)


def _as_json(status: BrokerStatus) -> dict[str, Any]:
    address = status.address
    return {
        "state": status.state,
        "node": status.node,
        "version": status.version,
        "pid": status.pid,
        "home": str(status.home),
        "url": address and address.url,
        "management_url": address and address.management_url,
        "prometheus_url": address and address.prometheus_url,
    }


def _lines(status: BrokerStatus) -> Iterator[str]:
    """Word the status for people; what is unknown is left out."""
    for name, value in _as_json(status).items():
        if value is not None:
            yield f"{name.replace('_url', '').replace('url', 'amqp'):<11} {value}"


@contextmanager
def stopping_orderly() -> Iterator[None]:
    """Turn SIGTERM into an exit that passes through every ``finally``, so that no broker is left running."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_child(command: list[str], address: BrokerAddress) -> int:
    """Run the command to its end, handing on SIGTERM and SIGINT; returns its exit code as a shell would tell it."""
    surroundings = {**os.environ, "RABBITDLQ_URL": address.url}
    if address.management_url:
        surroundings["RABBITDLQ_MANAGEMENT_URL"] = address.management_url
    pending: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            pending.append(number)
        # the terminal tells its whole foreground group of Ctrl-C, the child included: twice would be one too many
        elif number != signal.SIGINT or not _terminal_tells_us():
            child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(command, env=surroundings)  # noqa: S603 - running it is what we were asked for
        for number in pending:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _terminal_tells_us() -> bool:
    """Tell whether we are in the foreground of a terminal."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False
