"""``rabbitdlq journal``: what failed, recovered, was parked, and what operators did."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from rabbitdlq import names
from rabbitdlq.broker import Connection, PublishLink
from rabbitdlq.cli.options import Options, options_of, run, say, stop_on_signals
from rabbitdlq.cli.render import plain
from rabbitdlq.durations import parse_duration
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.journal import JournalEvent, JournalWriter, read_journal

__all__ = ["journal"]

_FOR_RESUMING = frozenset({names.RUN_PLANNED, names.RUN_SENDING, names.RUN_SETTLED})


def journal(
    context: typer.Context,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="The work queue, one of the topology file.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")] = False,
    since: Annotated[str | None, typer.Option(help="Only the last while, like 2h; all there is unless given.")] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Only what operators did: who, when, to what.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON Lines.")] = False,
) -> None:
    """Show the journal of a work queue, oldest event first."""
    try:
        start = None if since is None else datetime.now(UTC) - parse_duration(since)
    except ValueError as error:
        raise ConfigurationError(f"--since: {error}") from error
    show = _json if as_json else _line
    options = options_of(context)
    if options.topology(queue).journal != "stream":
        end = "events are shown from now on" if follow else "with --follow, events are shown from then on"
        say(f"the journal of {queue} is live and keeps nothing: {end}")
    run(_show(options, queue, start, follow, lambda event: "" if audit and not event.who else show(event)))


async def _show(
    options: Options, queue: str, since: datetime | None, follow: bool, line_of: Callable[[JournalEvent], str]
) -> None:
    topology = options.topology(queue)
    link = PublishLink(options.url, f"rabbitdlq journal {queue}")
    writer = JournalWriter(topology, link)
    stop = asyncio.Event()
    try:
        async with await Connection.open(options.url, f"rabbitdlq journal {queue}") as connection:
            with stop_on_signals(stop):
                reading = asyncio.create_task(_print(connection, options, queue, writer, since, follow, line_of))
                stopping = asyncio.create_task(stop.wait())
                await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if not reading.done():
                    reading.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reading
    finally:
        await link.close()


async def _print(
    connection: Connection,
    options: Options,
    queue: str,
    writer: JournalWriter,
    since: datetime | None,
    follow: bool,
    line_of: Callable[[JournalEvent], str],
) -> None:
    reading = read_journal(connection, options.topology(queue), writer, since=since, follow=follow)
    async with contextlib.aclosing(reading) as events:
        async for event in events:
            if line := line_of(event):
                print(line, flush=True)


def _json(event: JournalEvent) -> str:
    return json.dumps(event.as_json(), ensure_ascii=False)


def _line(event: JournalEvent) -> str:
    """For people; empty for what only a run that is gone on with reads."""
    if event.event in _FOR_RESUMING:
        return ""
    words = [event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S"), f"{event.event:<11}"]
    if event.who is not None:
        return plain("  ".join([*words, *_operator_words(event)]))
    words.append(f"{event.message_id}  attempt {event.attempt}/{event.max_attempts}")
    if (event.lap or 1) > 1:
        words.append(f"lap {event.lap}")
    if event.event in (names.PARKED, names.DROPPED):
        words.append(f"{event.reason}")
    if event.error_type:
        text = (event.error_message or "").splitlines()
        words.append(f"{event.error_type}{f': {text[0]}' if text else ''}")
    return plain("  ".join(words))


def _operator_words(event: JournalEvent) -> Iterator[str]:
    """``3 by anna@desk as ops: 17, 18, 19  run 20261130T…  reason=exhausted``."""
    ids = ", ".join(event.ids[:5]) + (", …" if len(event.ids) > 5 else "")
    count = "" if event.count is None else f"{event.count:,} "
    yield f"{count}by {event.who} as {event.amqp_user}{f': {ids}' if ids else ''}"
    if event.run is not None:
        yield f"run {event.run}"
    if event.event == names.RUN_STARTED:
        yield f"{event.operation} {event.selection or ''}".rstrip()
    if event.target is not None:
        yield f"to {' '.join(filter(None, event.target))}"
    if event.archive is not None:
        yield f"archive {event.archive}"
    if event.outcome not in (None, "done"):
        yield f"{event.outcome}"
