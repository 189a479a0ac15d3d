"""``rabbitdlq dlq``: look at dead letters, send them back, delete them."""

import asyncio
from contextlib import aclosing
from typing import Annotated

import typer

from rabbitdlq.cli import render
from rabbitdlq.cli.options import Options, confirm, json_line, options_of, run, say, stop_on_signals
from rabbitdlq.cli.options import show as display
from rabbitdlq.cli.progress import Reporter
from rabbitdlq.dead_letters import DLQManager, QueueSummary, ReplayReport
from rabbitdlq.errors import ConfigurationError, RabbitDLQError

__all__ = ["app"]

app = typer.Typer(help="Look at dead letters, send them back, delete them.", no_args_is_help=True)

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The work queue, one of the topology file.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON Lines.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command()
def summary(
    context: typer.Context,
    queues: Annotated[list[str] | None, typer.Argument(metavar="QUEUE", help="All of the file unless named.")] = None,
    as_json: Json = False,
) -> None:
    """How many messages wait, are on the ladder, and are dead, by work queue."""
    options = options_of(context)
    topologies = options.topologies(queues)

    async def work() -> list[QueueSummary]:
        async with DLQManager(topologies[0], url=options.url) as manager:
            return await manager.summary(topologies)

    found = run(work())
    if as_json:
        for entry in found:
            json_line(entry.as_json())
    else:
        display(render.summaries(found))
    if any(None in (entry.waiting, entry.dead, *entry.on_ladder.values()) for entry in found):
        say("some queues are missing: 'rabbitdlq topology apply' declares them")


@app.command("list")
def list_letters(
    context: typer.Context,
    queue: Queue,
    limit: Annotated[int, typer.Option(min=0, help="At most so many, the oldest; 0 is all.")] = 50,
    as_json: Json = False,
) -> None:
    """List dead letters, oldest first. Looking removes nothing and keeps the order."""
    options = options_of(context)

    async def work() -> int:
        async with DLQManager(options.topology(queue), url=options.url) as manager:
            rows = []
            # closed before the connection is, also where the output fails: what was taken to be looked at goes back
            async with aclosing(manager.each(limit or None)) as letters:
                async for letter in letters:
                    if as_json:
                        json_line(letter.as_json())
                    else:
                        rows.append(render.row(letter))
            count = await manager.count()
        if not as_json:
            display(render.table(rows))
            more = "; --limit 0 lists all" if limit and len(rows) == limit < count else ""
            say(f"{len(rows):,} of {count:,} dead letters of {queue}{more}")
        return count

    run(work())


@app.command()
def show(
    context: typer.Context,
    queue: Queue,
    id: Annotated[str, typer.Argument(metavar="ID", help="Message id or park id.")],
    as_json: Json = False,
) -> None:
    """Show one dead letter: the message, its attempts, the error with its traceback."""
    options = options_of(context)

    async def work() -> None:
        async with DLQManager(options.topology(queue), url=options.url) as manager:
            letter = await manager.get(id)
        if as_json:
            json_line(letter.as_json())
        else:
            display(render.letter(letter))

    run(work())


@app.command()
def replay(
    context: typer.Context,
    queue: Queue,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Message ids or park ids.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that are there now.")] = False,
    as_json: Json = False,
) -> None:
    """Send dead letters back to the work queue, for a new lap with all attempts.

    A letter that cannot be sent stays, and is named. Ctrl-C stops between two letters.
    """
    if bool(ids) == everything:
        raise ConfigurationError("dlq replay: name ids, or say --all")
    report, failure = run(_replay(options_of(context), queue, ids or []))
    if as_json:
        json_line(render.replay_json(report))
    for letter_id, why in report.errors:
        say(f"{letter_id}: {why}")
    stopped = "; stopped before the end" if report.interrupted else ""
    copies = f", {report.duplicates:,} second copies removed" if report.duplicates else ""
    say(f"replayed {report.replayed:,}, stayed {report.stayed:,}{copies}{stopped}")
    if failure is not None:
        say(f"rabbitdlq: {failure}")
    if failure is not None or report.stayed or report.interrupted:
        raise typer.Exit(3 if report.replayed else 1)


async def _replay(options: Options, queue: str, ids: list[str]) -> tuple[ReplayReport, RabbitDLQError | None]:
    """Replay, and give what was done also where it ended in an error."""
    stop = asyncio.Event()
    total = ReplayReport()
    async with DLQManager(options.topology(queue), url=options.url) as manager:
        with stop_on_signals(stop), Reporter(f"replaying {queue}") as reporter:
            if not ids:

                def progress(report: ReplayReport) -> None:
                    nonlocal total
                    total = report
                    reporter.at(report.replayed + report.stayed + report.duplicates, report.found)

                try:
                    return await manager.replay_all(on_progress=progress, stop=stop), None
                except RabbitDLQError as error:
                    if not total.found:
                        raise
                    return total, error
            for place, letter_id in enumerate(ids, start=1):
                if stop.is_set():
                    total.interrupted = True
                    break
                try:
                    total.add(await manager.replay(letter_id))
                except RabbitDLQError as error:
                    total.stayed += 1
                    total.errors.append((letter_id, str(error)))
                reporter.at(place, len(ids))
    return total, None


@app.command()
def drop(
    context: typer.Context,
    queue: Queue,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Message ids or park ids.")],
    yes: Yes = False,
) -> None:
    """Delete dead letters for good."""
    options = options_of(context)
    topology = options.topology(queue)
    if not yes:
        confirm(f"Delete {len(ids):,} of the dead letters of {queue} for good?", "nothing was deleted")

    async def work() -> tuple[int, int]:
        dropped = failed = 0
        async with DLQManager(topology, url=options.url) as manager:
            for letter_id in ids:
                try:
                    await manager.drop(letter_id)
                    dropped += 1
                except RabbitDLQError as error:
                    failed += 1
                    say(f"{letter_id}: {error}")
        return dropped, failed

    dropped, failed = run(work())
    say(f"dropped {dropped:,}, failed {failed:,}")
    if failed:
        raise typer.Exit(3 if dropped else 1)


@app.command()
def purge(context: typer.Context, queue: Queue, yes: Yes = False) -> None:
    """Delete all dead letters of a queue for good."""
    options = options_of(context)
    topology = options.topology(queue)

    async def count() -> int:
        async with DLQManager(topology, url=options.url) as manager:
            return await manager.count()

    async def work() -> int:
        async with DLQManager(topology, url=options.url) as manager:
            return await manager.purge()

    # asked outside of the event loop, where Ctrl-C ends a question at once
    if not yes:
        confirm(f"Delete all {run(count()):,} dead letters of {queue} for good?", "nothing was deleted")
    say(f"purged {run(work()):,}")
