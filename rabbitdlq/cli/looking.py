"""``rabbitdlq dlq summary | groups | list | show``: what is in the dead-letter queues, without changing anything."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated

import typer

from rabbitdlq.cli import render
from rabbitdlq.cli.columns import DEFAULT_COLUMNS, Rows, parse_columns, parse_order
from rabbitdlq.cli.listing import Listing
from rabbitdlq.cli.options import json_line, options_of, run, say
from rabbitdlq.cli.options import show as display
from rabbitdlq.cli.progress import Reporter
from rabbitdlq.cli.selecting import Json, Queue, moment, tell_failures, tell_unknown_reasons, with_selection
from rabbitdlq.cli.whole_ids import find_whole
from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters import DLQManager, Group, QueueSummary, Selection, Story
from rabbitdlq.errors import DeadLetterNotFound

__all__ = ["groups", "list_letters", "show", "summary"]

#: groups of a table; more of them say that the letters should be grouped by something else
MOST_GROUPS = 200


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
    for entry in found:
        if entry.in_use:
            who = entry.held_by or "another operator is at it, and it is not known who"
            say(f"the dead letters of {entry.queue} are in use: {who}; letters in their hands are not counted")
    if any(None in (entry.waiting, entry.dead, *entry.on_ladder.values()) for entry in found):
        say("some queues are missing: 'rabbitdlq topology apply' declares them")


@with_selection
def groups(
    context: typer.Context,
    queue: Queue,
    selection: Selection,
    by: Annotated[
        str, typer.Option(help="fingerprint (the bug), error, type, reason, routing-key or worker.")
    ] = "fingerprint",
    since: Annotated[
        str | None, typer.Option(help="Say what is new, growing or regressed since: 2h ago, or a time in ISO 8601.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count dead letters by what they have in common, the largest group first: which bugs are there?"""
    options = options_of(context)
    topology = options.topology(queue)
    start = None if since is None else moment("--since", since)

    async def work() -> list[Group]:
        async with DLQManager(topology, url=options.url) as manager:
            with _progress(queue) as on_progress:
                return await manager.groups(by, since=start, selection=selection, on_progress=on_progress)

    found = run(work())
    if as_json:
        for group in found:
            json_line(group.as_json())
    else:
        display(render.groups(found[:MOST_GROUPS], by))
        count = sum(group.count for group in found)
        more = f"; the largest {MOST_GROUPS} are shown, --json lists all" if len(found) > MOST_GROUPS else ""
        say(f"{count:,} dead letters of {queue} in {len(found):,} group{'s' if len(found) != 1 else ''}{more}")
    tell_failures(selection)
    if not found:
        tell_unknown_reasons(selection, ())


@with_selection
def list_letters(
    context: typer.Context,
    queue: Queue,
    selection: Selection,
    limit: Annotated[int, typer.Option(min=0, help="At most so many, the first in order; 0 is all.")] = 50,
    sort: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Order by a column, with - in front the other way round.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="What to show, like id,error,payload.customer.id,headers.tenant."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List dead letters, oldest first. Looking removes nothing and keeps the order."""
    options = options_of(context)
    topology = options.topology(queue)
    shown = parse_columns(columns or DEFAULT_COLUMNS)

    def make(letter: DeadLetter) -> tuple[str, ...]:
        if not as_json:
            return render.row(shown, letter, topology.max_laps)
        value = letter.as_json() if columns is None else {column.name: column.json(letter) for column in shown}
        return (json.dumps(value, ensure_ascii=False),)

    rows = Rows(make, None if sort is None else parse_order(sort), limit or None)

    reasons: Counter[str] = Counter()

    async def work() -> int:
        there = 0

        async with DLQManager(topology, url=options.url) as manager:
            with _progress(queue, quiet=as_json and sort is None) as tell:

                def on_progress(read: int, count: int) -> None:
                    nonlocal there
                    there = count  # when it was locked: afterwards others may hold some of them
                    if tell is not None:
                        tell(read, count)

                first = (limit or None) if sort is None else None
                # closed before the connection is, also where the output fails: what was taken to look at goes back
                async with aclosing(manager.each(first, selection, on_progress)) as letters:
                    async for letter in letters:
                        reasons[letter.reason] += 1
                        if as_json and sort is None:
                            print(*make(letter), flush=True)
                        else:
                            rows.add(letter)
            return there

    count = run(work())
    if as_json:
        for line in rows.shown():
            print(*line)
    else:
        listing = Listing(shown, rows.shown(), _width(), asked=columns is not None)
        for text in listing.lines():
            print(text)
        sys.stdout.flush()
        shortened = "; ids are shortened, and other commands take them so" if listing.shortened else ""
        say(_told(queue, len(rows.shown()), count, rows.added, limit, selection) + shortened)
    tell_failures(selection)
    if sort is not None or limit == 0 or reasons.total() < limit:  # else there may be more of them
        tell_unknown_reasons(selection, reasons)


def _told(queue: str, shown: int, count: int, found: int, limit: int, selection: Selection) -> str:
    """``found`` is how many belong to the selection, as far as they were counted."""
    letters = f"dead letters of {queue}"
    if found > shown:
        return f"{shown:,} of {found:,} {letters}{'' if selection.everything else ' that match'}; --limit 0 lists all"
    more = "; --limit 0 lists all" if limit and shown == limit < count else ""
    if selection.everything:
        return f"{shown:,} of {count:,} {letters}{more}"
    return f"{'the first ' if more else ''}{shown:,} that match, of {count:,} {letters}{more}"


def show(
    context: typer.Context,
    queue: Queue,
    id: Annotated[str, typer.Argument(metavar="ID", help="Message id or park id, or its first 6 characters or more.")],
    as_json: Json = False,
) -> None:
    """Show one dead letter: the message, its attempts, the error with its traceback, its laps, who did what to it."""
    options = options_of(context)
    topology = options.topology(queue)

    async def work() -> Story:
        async with DLQManager(topology, url=options.url) as manager:
            try:
                with _progress(queue) as on_progress:
                    return await manager.story(id, on_progress)
            except DeadLetterNotFound:
                whole = (await find_whole(manager, [id])).get(id, id)
                if whole == id:
                    raise
            with _progress(queue) as on_progress:
                return await manager.story(whole, on_progress)

    story = run(work())
    if as_json:
        json_line(story.as_json())
    else:
        display(render.story(story, topology.max_laps))
    if not story.journal_read:
        say("the journal could not be read: attempts, laps and what operators did may be missing")


def _width() -> int | None:
    """Of the terminal; a pipe has none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextmanager
def _progress(queue: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """Tells how far reading has come; not where lines of data come to the same terminal meanwhile."""
    if quiet and sys.stdout.isatty():
        yield None
        return
    with Reporter(f"reading the dead letters of {queue}") as reporter:
        yield reporter.at
