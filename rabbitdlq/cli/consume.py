"""``rabbitdlq consume``: run a handler on a work queue."""

import asyncio
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Protocol, TypeVar

import typer

from rabbitdlq.cli.options import Options, options_of, run, say
from rabbitdlq.consumer import Consumer, ConsumerSummary, Handler
from rabbitdlq.consumer.supervised import SupervisorLink
from rabbitdlq.consumer.supervisor import Supervisor
from rabbitdlq.durations import parse_duration
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.logs import configure_logs

__all__ = ["consume", "load_handler"]

T_co = TypeVar("T_co", covariant=True)


def consume(
    context: typer.Context,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="The work queue, one of the topology file.")],
    handler: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="What to call with each message, found from here.")
    ],
    concurrency: Annotated[int, typer.Option(min=1, help="Handlers at a time.")] = 10,
    prefetch: Annotated[
        int | None, typer.Option(min=1, help="Unacknowledged messages; twice the concurrency unless given.")
    ] = None,
    drain: Annotated[bool, typer.Option("--drain", help="End when work queue and ladder are empty.")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes, each with that concurrency; one that dies is restarted.")
    ] = 1,
    soft_timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="A handler that takes longer is cancelled; 10m.")
    ] = None,
    hard_timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="One that goes on all the same is given up; 15m.")
    ] = None,
    grace: Annotated[str, typer.Option(help="How long handlers may go on after SIGTERM or Ctrl-C.")] = "30s",
    log_format: Annotated[
        str, typer.Option(envvar="RABBITDLQ_LOG_FORMAT", help="console, json, or auto: console on a terminal.")
    ] = "auto",
    log_level: Annotated[
        str, typer.Option(envvar="RABBITDLQ_LOG_LEVEL", help="debug (successes, too), info, warning, error, critical.")
    ] = "info",
) -> None:
    """Consume a work queue: failures are retried on the ladder, and parked when the attempts are used up.

    SIGTERM or Ctrl-C: no more messages are taken, handlers get the grace time, the rest goes back untouched, and the
    exit code is 0. A second signal ends the grace time. With --processes all of this goes for all of them, and a
    third signal kills those that do not listen.
    """
    configure_logs(log_format, log_level)
    options = options_of(context)
    options.check_writable("consume")
    topology, grace_time = options.topology(queue), _duration("--grace", grace)
    soft = None if soft_timeout is None else _duration("--soft-timeout", soft_timeout)
    hard = None if hard_timeout is None else _duration("--hard-timeout", hard_timeout)
    if processes > 1:
        words = ["consume", queue, "--handler", handler, "--concurrency", str(concurrency), "--grace", grace]
        words += ["--log-format", log_format, "--log-level", log_level]
        words += [] if prefetch is None else ["--prefetch", str(prefetch)]
        words += [] if soft_timeout is None else ["--soft-timeout", soft_timeout]
        words += [] if hard_timeout is None else ["--hard-timeout", hard_timeout]
        words += ["--drain"] if drain else []
        _supervise(options, words, processes, drain)
        return
    with SupervisorLink() as link:
        function = load_handler(handler)
        consumer = Consumer(
            topology,
            function,
            url=options.url,
            concurrency=concurrency,
            prefetch=prefetch,
            drain=drain,
            grace=grace_time,
            soft_timeout=soft,
            hard_timeout=hard,
        )
        if link.supervised:
            run(link.run(consumer))  # the supervisor tells the numbers of all
        else:
            say(_told(run(_until_signal(consumer))))


def _supervise(options: Options, words: Sequence[str], processes: int, drain: bool) -> None:
    """Run the command with these words in several processes; exits with 1 if one did not end well."""
    # as we were started: the installed program does not look for modules of its own in the current directory
    python = [sys.executable] if os.getcwd() in sys.path else [sys.executable, "-P"]
    supervisor = Supervisor(
        [*python, "-m", "rabbitdlq", "--topology", str(options.topology_file), *words],
        processes,
        drain=drain,
        # not among the words: a command is there for everybody to read, and the URL has a password in it
        environment={**os.environ, "RABBITDLQ_URL": options.url},
    )
    report = run(_until_signal(supervisor))
    restarts = f", {report.restarts:,} restart{'s' if report.restarts > 1 else ''}" if report.restarts else ""
    say(_told(report.summary) + restarts)
    if report.failed:
        raise typer.Exit(1)


def _told(summary: ConsumerSummary) -> str:
    words = [f"{summary.succeeded:,} succeeded", f"{summary.retried:,} retried", f"{summary.parked:,} parked"]
    if summary.dropped:
        words.append(f"{summary.dropped:,} dropped")
    if summary.released:
        words.append(f"{summary.released:,} given back")
    if summary.too_late:
        words.append(f"{summary.too_late:,} settled too late")
    return ", ".join(words)


class _Stoppable(Protocol[T_co]):
    """A consumer or a supervisor."""

    def stop(self) -> None: ...

    async def run(self) -> T_co: ...


async def _until_signal(running: _Stoppable[T_co]) -> T_co:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.stop)
    return await running.run()


def _duration(option: str, text: str) -> timedelta:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from error


def _place(error: BaseException) -> str:
    """Where in the user's files it broke."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def load_handler(path: str) -> Handler:
    """The function that ``module:function`` names, found from the current directory.

    Raises :class:`ConfigurationError` saying what is wrong: the form, the import, the name, or that it cannot be
    called.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigurationError(f"--handler: {path!r} is not MODULE:FUNCTION, like shop.orders:handle")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script without the __name__ guard may end itself
        raise ConfigurationError(
            f"--handler: module {module_name!r} cannot be imported from {os.getcwd()}: {type(error).__name__}: "
            f"{error}{_place(error)}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"--handler: module {module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigurationError(f"--handler: {path!r} cannot be called")
    return found
