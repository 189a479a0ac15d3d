"""What every command is given: broker, topology file; and how commands run, show and stop."""

import asyncio
import contextlib
import gc
import importlib
import json
import signal
import sys
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
import typer
from rich.console import Console, RenderableType

from rabbitdlq.dead_letters import DLQManager
from rabbitdlq.errors import ReadOnly
from rabbitdlq.settings import load_topologies, pick_topology
from rabbitdlq.topology import Topology

__all__ = ["Options", "confirm", "err", "json_line", "options_of", "run", "say", "show", "stop_on_signals"]

log = structlog.stdlib.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """The options in front of the command."""

    url: str
    management_url: str | None
    topology_file: Path
    #: whatever changes something is refused
    read_only: bool = False

    def topologies(self, queues: Iterable[str] | None = None) -> list[Topology]:
        """The topologies of these queues, all of the file without any. Raises :class:`ConfigurationError`."""
        known = load_topologies(self.topology_file)
        return [pick_topology(known, queue, str(self.topology_file)) for queue in queues or known]

    def topology(self, queue: str) -> Topology:
        """The topology of one queue. Raises :class:`ConfigurationError`."""
        return self.topologies([queue])[0]

    def manager(self, queue: str) -> DLQManager:
        """For the dead letters of one queue. Raises :class:`ConfigurationError`."""
        return DLQManager(self.topology(queue), url=self.url, read_only=self.read_only)

    def check_writable(self, command: str) -> None:
        """Raises :class:`ReadOnly` where changes are refused."""
        if self.read_only:
            raise ReadOnly(f"{command}: refused, because --read-only or RABBITDLQ_READ_ONLY is set")


def options_of(context: typer.Context) -> Options:
    """The options in front of the command."""
    found = context.find_object(Options)
    assert found is not None, "the app's callback sets it"
    return found


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # a pipe has no width: let lines be as long as they are there
    return Console(stderr=stderr, width=None if stream.isatty() else 200, highlight=False, markup=False)


def show(renderable: RenderableType) -> None:
    """Data for people, to stdout; into a pipe without the blanks that fill a table's last column."""
    console = _console(stderr=False)
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def err() -> Console:
    """For words and progress."""
    return _console(stderr=True)


def say(line: str) -> None:
    """A line of words, to stderr."""
    print(line, file=sys.stderr, flush=True)


def confirm(question: str, otherwise: str) -> None:
    """Ask on stderr, because stdout is for data. Anything but a yes ends the command with 1, saying ``otherwise``."""
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if answer.strip().lower() in {"y", "yes"}:
        return
    say(otherwise if answer.endswith("\n") else f"\n{otherwise}")
    raise typer.Exit(1)


def json_line(value: Any) -> None:
    """One JSON document on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; on uvloop where that is installed (the extra ``fast``)."""
    try:
        new_loop = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        new_loop = None
    _tune_memory()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.get_loop().set_exception_handler(_tell_loop_error)
        return runner.run(work)


def _tune_memory() -> None:
    """What was loaded by now stays: the garbage collector need not look through it again and again.

    This is our process and nobody else's; a program that uses the library decides for itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _tell_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What nobody waited for, as a connection that was being opened when the command was stopped: one line."""
    log.warning("loop_error", message=context.get("message"), error=repr(context.get("exception")))


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """While inside, SIGINT and SIGTERM set ``stop`` instead of ending the process; a second one ends it as usual."""
    loop = asyncio.get_running_loop()

    def asked(number: int) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, asked, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
