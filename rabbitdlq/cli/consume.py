"""``rabbitdlq consume``: run handlers on work queues."""

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Protocol, TypeVar, cast, get_args

import typer

from rabbitdlq.cli.amounts import parse_pace, parse_wait
from rabbitdlq.cli.options import Options, options_of, run, say
from rabbitdlq.cli.queue_options import count, per_queue
from rabbitdlq.cli.stopping import StopAnnounced
from rabbitdlq.consumer import Breaker, Consumer, ConsumerGroup, ConsumerSummary, Handler
from rabbitdlq.consumer.attempt import check_takes_message
from rabbitdlq.consumer.isolation import Isolation
from rabbitdlq.consumer.leaving import leave
from rabbitdlq.consumer.slots import Order
from rabbitdlq.consumer.supervised import SupervisorLink
from rabbitdlq.consumer.supervisor import Supervisor
from rabbitdlq.errors import ConfigurationError, RabbitDLQError
from rabbitdlq.logs import configure_logs
from rabbitdlq.status import StatusServer

__all__ = ["consume", "load_handler"]

T_co = TypeVar("T_co", covariant=True)
LOCAL, LAST_PORT = "127.0.0.1", 65_535


def consume(
    context: typer.Context,
    queues: Annotated[list[str], typer.Argument(metavar="QUEUE...", help="The work queues, of the topology file.")],
    handler: Annotated[
        list[str],
        typer.Option(metavar="[QUEUE=]MODULE:FUNCTION", help="What to call with each message, found from here."),
    ],
    concurrency: Annotated[
        list[str] | None, typer.Option(metavar="[QUEUE=]N", help="Handlers at a time, of each queue; 10.")
    ] = None,
    prefetch: Annotated[
        list[str] | None,
        typer.Option(metavar="[QUEUE=]N", help="Unacknowledged messages; twice the concurrency unless given."),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[QUEUE=]RATE",
            help="So many are begun, evenly, of each queue, in each process: 5/s, 100/m, 1000/h.",
        ),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Handlers at a time, over all queues; all there are.")
    ] = None,
    priority: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[QUEUE=]N", help="With --slots: who gets one first where they are scarce, the higher number; 1."
        ),
    ] = None,
    order: Annotated[
        str, typer.Option(metavar="ORDER", help="With --slots: strict, or weighted, in the ratio of the priorities.")
    ] = "strict",
    breaker: Annotated[
        bool, typer.Option("--breaker/--no-breaker", help="Pause while most attempts fail by something outside.")
    ] = True,
    drain: Annotated[bool, typer.Option("--drain", help="End when work queue and ladder are empty.")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes, each with that concurrency; one that dies is restarted.")
    ] = 1,
    soft_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="A handler that takes longer is cancelled; 10m. Plain functions only with --isolation process.",
        ),
    ] = None,
    hard_timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="One that goes on all the same is given up; 15m.")
    ] = None,
    isolation: Annotated[
        str | None,
        typer.Option(metavar="WHERE", help="Where handlers run: async (plain functions in a thread), thread, process."),
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --isolation process: of each process, like 512MiB.")
    ] = None,
    idempotency: Annotated[
        str | None,
        typer.Option(
            envvar="RABBITDLQ_IDEMPOTENCY",
            metavar="URL",
            help="Where to keep what was done, so that a message that comes twice is handled once: sqlite:FILE, "
            "redis://..., postgresql://..., memory:.",
        ),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="With --idempotency: how long claims outlive a dead process; the hard timeout and 90s."
        ),
    ] = None,
    status_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            metavar="PORT",
            help="Serve /live, /health and /metrics there; with --processes the first one there, the second on the "
            "next port, and so on. 0 takes a free one.",
        ),
    ] = None,
    status_host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="With --status-port: the address, 127.0.0.1 unless given; 0.0.0.0 for probes from other hosts.",
        ),
    ] = None,
    grace: Annotated[str, typer.Option(help="How long handlers may go on after SIGTERM or Ctrl-C.")] = "30s",
    log_format: Annotated[
        str, typer.Option(envvar="RABBITDLQ_LOG_FORMAT", help="console, json, or auto: console on a terminal.")
    ] = "auto",
    log_level: Annotated[
        str, typer.Option(envvar="RABBITDLQ_LOG_LEVEL", help="debug (successes, too), info, warning, error, critical.")
    ] = "info",
) -> None:
    """Consume work queues: failures are retried on the ladder, and parked when the attempts are used up.

    SIGTERM or Ctrl-C: no more messages are taken, handlers get the grace time, the rest goes back untouched, and the
    exit code is 0. A second signal ends the grace time. With --processes all of this goes for all of them, and a
    third signal kills those that do not listen.

    With several queues [QUEUE=] tells an option for one of them. --slots makes them share handlers; one slot for each
    queue of a higher priority is always kept free of the others.
    """
    configure_logs(log_format, log_level)
    options = options_of(context)
    options.check_writable("consume")
    topologies, grace_time = options.topologies(queues), parse_wait("--grace", grace)
    # told here, and not by each of several processes
    handlers = per_queue("--handler", handler, queues, lambda _, path: path)
    concurrencies = per_queue("--concurrency", concurrency or ["10"], queues, count)
    prefetches = per_queue("--prefetch", prefetch, queues, count)
    rates = per_queue("--rate", rate, queues, parse_pace)
    priorities = per_queue("--priority", priority, queues, count)
    if order not in get_args(Order):
        raise ConfigurationError(f"--order: {order!r} is neither 'strict' nor 'weighted'")
    for name in queues:
        if name not in handlers:
            raise ConfigurationError(f"--handler: none for {name!r}; write --handler {name}=MODULE:FUNCTION")
    _check_used(slots, priorities, order, idempotency, lease, processes, status_port, status_host)
    isolated_in = None if isolation is None else Isolation.of(isolation, max_memory).where
    soft = None if soft_timeout is None else parse_wait("--soft-timeout", soft_timeout)
    hard = None if hard_timeout is None else parse_wait("--hard-timeout", hard_timeout)
    lease_time = None if lease is None else parse_wait("--lease", lease)
    if processes > 1:
        words = ["consume", *queues, "--grace", grace, "--log-format", log_format, "--log-level", log_level]
        each = {"--handler": handler, "--concurrency": concurrency, "--prefetch": prefetch}
        each |= {"--rate": rate, "--priority": priority}
        words += [word for option, told in each.items() for text in told or () for word in (option, text)]
        words += [] if slots is None else ["--slots", str(slots)]
        words += ["--order", order] if len(queues) > 1 else []
        words += [] if breaker else ["--no-breaker"]
        words += [] if soft_timeout is None else ["--soft-timeout", soft_timeout]
        words += [] if hard_timeout is None else ["--hard-timeout", hard_timeout]
        words += [] if isolation is None else ["--isolation", isolation]
        words += [] if max_memory is None else ["--max-memory", max_memory]
        words += [] if lease is None else ["--lease", lease]
        words += [] if status_port is None else ["--status-port", str(status_port)]
        words += [] if status_host is None else ["--status-host", status_host]
        words += ["--drain"] if drain else []
        # not among the words: a command is there for everybody to read, and a URL may have a password in it
        secrets = {"RABBITDLQ_URL": options.url, "RABBITDLQ_IDEMPOTENCY": idempotency}
        secrets["RABBITDLQ_MANAGEMENT_URL"] = options.management_url
        _supervise(options, words, processes, drain, {name: told for name, told in secrets.items() if told})
        return
    with SupervisorLink() as link:
        functions = {path: load_handler(path) for path in dict.fromkeys(handlers.values())}
        consumers = [
            Consumer(
                topology,
                functions[handlers[topology.name]],
                url=options.url,
                concurrency=concurrencies[topology.name],
                prefetch=prefetches.get(topology.name),
                drain=drain,
                grace=grace_time,
                soft_timeout=soft,
                hard_timeout=hard,
                isolation=isolated_in,
                max_memory=max_memory,
                child_setup=partial(configure_logs, log_format, log_level),
                breaker=Breaker() if breaker else None,
                rate=rates.get(topology.name),
                priority=priorities.get(topology.name, 1),
                idempotency=idempotency,
                lease=lease_time,
                management_url=options.management_url,
            )
            for topology in topologies
        ]
        # one alone has nobody to share with, and is told of in one line if it fails
        alone = len(consumers) == 1 and slots is None
        group = consumers[0] if alone else ConsumerGroup(consumers, slots=slots, priority=cast(Order, order))
        announced = StopAnnounced(group, consumers, grace_time, supervised=link.supervised)
        with _status_served(consumers, status_port, status_host or LOCAL, link.number):
            if link.supervised:
                run(link.run(announced))  # the supervisor tells the numbers of all
            else:
                run(_alone(announced))


def _check_used(
    slots: int | None,
    priorities: Mapping[str, int],
    order: str,
    idempotency: str | None,
    lease: str | None,
    processes: int,
    status_port: int | None,
    status_host: str | None,
) -> None:
    """Refuse options that would do nothing without another one, which nobody would notice."""
    if slots is None:
        for option, given in (("--priority", set(priorities.values()) - {1}), ("--order", order != "strict")):
            if given:
                raise ConfigurationError(
                    f"{option}: nobody waits for another unless they share slots; give --slots, too"
                )
    if lease is not None and idempotency is None:
        raise ConfigurationError("--lease: there is no store of what was done; give --idempotency, too")
    if processes > 1 and idempotency is not None and idempotency.startswith("memory:"):
        raise ConfigurationError(
            "--idempotency: each of several processes would have a memory of its own; give a store that they share, "
            "like sqlite:FILE"
        )
    if status_port is not None and status_port + processes - 1 > LAST_PORT:
        raise ConfigurationError(f"--status-port: {processes} processes from {status_port} on go beyond {LAST_PORT}")
    if status_host is not None and status_port is None:
        raise ConfigurationError("--status-host: nothing is served without a port; give --status-port, too")


def _status_served(
    consumers: Sequence[Consumer], port: int | None, host: str, number: int
) -> contextlib.AbstractContextManager[object]:
    """The status server of process ``number``; nothing without a port."""
    if port is None:
        return contextlib.nullcontext()
    return StatusServer(consumers, port + number - 1 if port else 0, host)


def _supervise(
    options: Options, words: Sequence[str], processes: int, drain: bool, environment: Mapping[str, str]
) -> None:
    """Run the command with these words in several processes; exits with 1 if one did not end well."""
    # as we were started: the installed program does not look for modules of its own in the current directory
    python = [sys.executable] if os.getcwd() in sys.path else [sys.executable, "-P"]
    supervisor = Supervisor(
        [*python, "-m", "rabbitdlq", "--topology", str(options.topology_file), *words],
        processes,
        drain=drain,
        environment={**os.environ, **environment},
    )
    report = run(_until_signal(supervisor))
    restarts = f", {report.restarts:,} restart{'s' if report.restarts > 1 else ''}" if report.restarts else ""
    say(_told(report.summary) + restarts)
    if report.failed:
        raise typer.Exit(1)


def _told(summary: ConsumerSummary) -> str:
    words = [f"{summary.succeeded:,} succeeded", f"{summary.retried:,} retried", f"{summary.parked:,} parked"]
    if summary.skipped:
        words.append(f"{summary.skipped:,} done before")
    if summary.postponed:
        words.append(f"{summary.postponed:,} postponed")
    if summary.dropped:
        words.append(f"{summary.dropped:,} dropped")
    if summary.released:
        words.append(f"{summary.released:,} given back")
    if summary.too_late:
        words.append(f"{summary.too_late:,} settled too late")
    return ", ".join(words)


async def _alone(running: StopAnnounced) -> None:
    """Run it until a signal, and tell its numbers."""
    try:
        summary = await _until_signal(running)
    except RabbitDLQError as error:
        leave(error.exit_code, queue=running.queue, last_words=f"rabbitdlq: {error}")
        raise
    say(_told(summary))
    leave(0, queue=running.queue)


class _Stoppable(Protocol[T_co]):
    """A consumer or a supervisor."""

    def stop(self) -> None: ...

    async def run(self) -> T_co: ...


async def _until_signal(running: _Stoppable[T_co]) -> T_co:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.stop)
    return await running.run()


def _place(error: BaseException) -> str:
    """Where in the user's files it broke."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def load_handler(path: str) -> Handler:
    """The function that ``module:function`` names, found from the current directory.

    Raises :class:`ConfigurationError` saying what is wrong: the form, the import, the name, or that it cannot be
    called with a message.
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
    check_takes_message(f"--handler: {path!r}", found)
    return found
