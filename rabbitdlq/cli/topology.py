"""``rabbitdlq topology``: declare, draw, compare and export the queues of the topology file."""

import json
import os
import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated

import typer

from rabbitdlq.broker import Connection, Report, apply_topology, check_topology
from rabbitdlq.cli.options import Options, json_line, options_of, run, say
from rabbitdlq.definitions import accounts, definitions, definitions_version
from rabbitdlq.durations import format_duration
from rabbitdlq.errors import AccessDenied, BrokerError, TopologyMismatch
from rabbitdlq.topology import Topology

__all__ = ["app", "draw"]

app = typer.Typer(help="Declare, draw, compare and export the queues of the topology file.", no_args_is_help=True)

Queues = Annotated[list[str] | None, typer.Argument(metavar="QUEUE", help="All of the file unless named.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON Lines.")]


@app.command()
def apply(
    context: typer.Context,
    queues: Queues = None,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Let a changed ladder replace the old one, whose rungs drain.")
    ] = False,
) -> None:
    """Declare what is missing; what exists is left as it is, and must be as the file says.

    A queue that cannot be declared is named, and the others go on (exit code 3).
    """
    options = options_of(context)
    options.check_writable("topology apply")
    outcomes = run(_apply(options, queues, migrate=migrate))
    done = [report for report in outcomes if isinstance(report, Report)]
    for outcome in outcomes:
        say(_told(outcome) if isinstance(outcome, Report) else f"rabbitdlq: {outcome}")
    if len(done) < len(outcomes):
        raise typer.Exit(3 if done else 1)


def _told(report: Report) -> str:
    missing = len(report.missing)
    done = f"{missing} declared" if missing else "all there"
    return f"{report.topology.name}: {done}{', ladder changed' if report.differing else ''}"


async def _apply(options: Options, queues: list[str] | None, *, migrate: bool) -> list[Report | BrokerError]:
    """What became of each queue; where the broker is gone, nothing else can be done and the error is raised."""
    outcomes: list[Report | BrokerError] = []
    topologies = options.topologies(queues)
    async with await Connection.open(options.url, "rabbitdlq topology") as connection:
        for topology in topologies:
            try:
                outcomes.append(await apply_topology(connection, topology, migrate=migrate))
            except (AccessDenied, TopologyMismatch) as error:
                outcomes.append(error)
    return outcomes


@app.command()
def show(context: typer.Context, queues: Queues = None, as_json: Json = False) -> None:
    """Draw the ladder: queues, delays, and when each attempt happens. Needs no broker."""
    for topology in options_of(context).topologies(queues):
        if as_json:
            json_line(_as_json(topology))
        else:
            print("\n".join(draw(topology)) + "\n")


@app.command()
def check(context: typer.Context, queues: Queues = None, as_json: Json = False) -> None:
    """Compare the broker with the file, changing nothing; exits with 1 where something is missing or differs."""
    options = options_of(context)

    async def look() -> list[Report]:
        topologies = options.topologies(queues)
        async with await Connection.open(options.url, "rabbitdlq topology") as connection:
            return [await check_topology(connection, topology) for topology in topologies]

    reports = run(look())
    for report in reports:
        _tell(report, as_json)
    if any(report.findings for report in reports):
        raise typer.Exit(1)


def _tell(report: Report, as_json: bool) -> None:
    name = report.topology.name
    if as_json:
        findings = [
            {
                "kind": finding.kind,
                "name": finding.name,
                "problem": finding.problem,
                "argument": finding.argument or None,
                "wanted": finding.wanted or None,
                "found": finding.found or None,
            }
            for finding in report.findings
        ]
        json_line(
            {
                "queue": name,
                "arguments_compared": report.arguments_compared,
                "findings": findings,
                "not_visible": [{"kind": kind, "name": hidden} for kind, hidden in sorted(report.hidden)],
            }
        )
        return
    found = f"{len(report.findings)} finding{'s' if len(report.findings) > 1 else ''}"
    compared = "" if report.arguments_compared else " (existence only: comparing needs the configure permission)"
    print(f"{name}: {found if report.findings else 'as it should be'}{compared}")
    for finding in report.findings:
        print(f"  {finding}")
    if report.hidden:
        print(f"  not visible to this account, which has no permission on them: {len(report.hidden)} of its entities")


@app.command("definitions")
def write_definitions(
    context: typer.Context,
    queues: Queues = None,
    broker: Annotated[str, typer.Option(help="The broker's version: 4.x, 3.x, or one like 3.13.")] = "4.x",
    vhost: Annotated[str, typer.Option(help="The virtual host they are for.")] = "/",
    users: Annotated[
        bool,
        typer.Option(
            "--users",
            help="With an account each for producer, consumer and operator. Passwords come from "
            "RABBITDLQ_PRODUCER_PASSWORD, RABBITDLQ_CONSUMER_PASSWORD and RABBITDLQ_OPERATOR_PASSWORD; one that is "
            "missing is made up and shown once.",
        ),
    ] = False,
) -> None:
    """Write the broker's definitions.json to stdout, for load_definitions, rabbitmqctl or the HTTP API."""
    topologies = options_of(context).topologies(queues)
    version = definitions_version(broker)
    passwords = _passwords(topologies) if users else None
    value = definitions(topologies, version, vhost=vhost, passwords=passwords)
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _passwords(topologies: list[Topology]) -> dict[str, str]:
    passwords = {}
    for account in accounts(topologies):
        password = os.environ.get(f"RABBITDLQ_{account.role.upper()}_PASSWORD")
        if not password:
            password = secrets.token_urlsafe(18)
            say(f"password of {account.name}: {password}")
        passwords[account.role] = password
    return passwords


def _as_json(topology: Topology) -> dict[str, object]:
    waited = timedelta()
    attempts: list[dict[str, object]] = [{"attempt": 1, "after": "0s"}]
    for rung in topology.rungs:
        waited += rung.delay
        attempts.append({"attempt": rung.number + 1, "after": format_duration(waited), "rung": rung.queue})
    return {
        "queue": topology.name,
        "max_attempts": topology.max_attempts,
        "queue_type": topology.queue_type,
        "attempts": attempts,
        "dlq": topology.dlq,
        "journal": topology.journal,
    }


def draw(topology: Topology) -> Iterator[str]:
    """The ladder as lines of text."""
    width = max(len(rung.queue) for rung in topology.rungs)
    yield f"{topology.name}: {topology.max_attempts} attempts within {format_duration(topology.lap)} of waiting"
    for binding in topology.bindings:
        yield f"  {binding.exchange} ({binding.type}) ─ {binding.key or '(no key)'} ─▶ {topology.name}"
    yield f"  ● {topology.name:<{width}}  attempt 1 at once"
    waited = timedelta()
    for rung in topology.rungs:
        waited += rung.delay
        delay, total = format_duration(rung.delay), format_duration(waited)
        after = f"attempt {rung.number + 1} after {total}"
        yield "  │ fails"
        yield f"  ├▶ {rung.queue:<{width}} waits {delay}, then {after}"
    yield "  │ fails"
    yield f"  └▶ {topology.dlq:<{width}} rests until somebody replays or drops it"
    kept = f"kept {format_duration(topology.journal_max_age)}" if topology.journal == "stream" else "not kept (live)"
    yield f"  journal: {topology.journal_exchange}, {kept}"
