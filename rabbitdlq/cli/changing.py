"""``rabbitdlq dlq replay | drop | purge | move | restore | runs``: what changes dead-letter queues, and what did."""

from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated

import typer

from rabbitdlq.cli import render_runs
from rabbitdlq.cli.amounts import parse_rate, parse_share, parse_wait
from rabbitdlq.cli.operating import (
    ArchiveFile,
    archive_file,
    carry_out,
    check_resume,
    chosen_letters,
    make_plan,
    print_plan,
    show_plan,
    target_of,
    tell_concerns,
    tell_problems,
)
from rabbitdlq.cli.options import Options, confirm, json_line, options_of, run, say
from rabbitdlq.cli.options import show as display
from rabbitdlq.cli.selecting import Json, Queue, tell_failures, tell_unknown_reasons, with_selection
from rabbitdlq.dead_letters import Canary, DLQManager, ReplayPlan, RunInfo, RunReport, Selection, Target
from rabbitdlq.errors import ConfigurationError

__all__ = ["drop", "move", "purge", "replay", "restore", "runs"]

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Message ids or park ids, or their first 6 characters or more."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
All = Annotated[bool, typer.Option("--all", help="All that are there now.")]
Held = Annotated[bool, typer.Option("--held", help="Also those that came back too often (max_laps).")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many, the oldest.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also where the preflight finds that letters would be lost, or none arrive.")
]
Rate = Annotated[str | None, typer.Option(metavar="RATE", help="At most so fast: 50/s, 600/m.")]
Resume = Annotated[str | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped or killed.")]
Archive = Annotated[
    Path | None, typer.Option(help="The new file they are written to first; one in this directory unless given.")
]
NoArchive = Annotated[bool, typer.Option("--no-archive", help="Keep nothing of them.")]


@with_selection
def replay(
    context: typer.Context,
    queue: Queue,
    selection: Selection,
    ids: Ids = None,
    everything: All = False,
    held: Held = False,
    limit: Limit = None,
    to: Annotated[str | None, typer.Option(metavar="QUEUE", help="To this queue, not where each came from.")] = None,
    to_exchange: Annotated[str | None, typer.Option(metavar="NAME", help="Through this exchange.")] = None,
    to_routing_key: Annotated[str | None, typer.Option(metavar="KEY", help="With this key; needs an exchange.")] = None,
    dry_run: DryRun = False,
    force: Force = False,
    rate: Rate = None,
    canary: Annotated[int | None, typer.Option(min=1, help="Send so many first, and see what becomes of them.")] = None,
    wait: Annotated[str | None, typer.Option(metavar="TIME", help="For them, or with --watch for all; 2m.")] = None,
    abort_above: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Stop if more of the canary fail again; 10%.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Tell in the end what became of them.")] = False,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Send dead letters back to the work queue each came from, for a new lap with all attempts.

    The set is frozen when it starts. A letter that cannot be sent stays, and is named. Ctrl-C stops between two.
    Before the first is sent a preflight looks whether they would arrive and stay there.
    """
    options = options_of(context)
    check_resume("replay", resume, held=held, limit=limit, dry_run=dry_run, to=to, to_exchange=to_exchange)
    target = target_of(to, to_exchange, to_routing_key)
    if abort_above is not None and canary is None:
        raise ConfigurationError("dlq replay: --abort-above needs --canary")
    if wait is not None and canary is None and not watch:
        raise ConfigurationError("dlq replay: --wait needs --canary or --watch")
    patience = parse_wait("--wait", wait or "2m")
    first = None if canary is None else Canary(canary, patience, parse_share(abort_above or "10%"))
    watching = patience if watch else None
    speed = parse_rate(rate)
    if not dry_run:
        options.check_writable("dlq replay")
    chosen = chosen_letters(options, "replay", queue, selection, ids, everything, held, limit, resume)
    if dry_run:
        show_plan(options, queue, chosen, target, as_json)
        return

    def work(manager: DLQManager, **common: object) -> Awaitable[RunReport]:
        if resume is not None:
            return manager.resume(resume, "replay", rate=speed, canary=first, watch=watching, **common)  # type: ignore[arg-type]

        async def look(plan: ReplayPlan) -> None:
            tell_unknown_reasons(chosen, plan.reasons)
            findings = await manager.preflight(plan, to=target, management_url=options.management_url)
            tell_concerns(findings, options, force=force)

        return manager.replay(
            chosen,
            to=target,
            rate=speed,
            canary=first,
            watch=watching,
            before=look,
            **common,  # type: ignore[arg-type]
        )

    carry_out(options, queue, "replaying", work, as_json, selection)


@with_selection
def drop(
    context: typer.Context,
    queue: Queue,
    selection: Selection,
    ids: Ids = None,
    everything: All = False,
    held: Held = False,
    limit: Limit = None,
    archive: Archive = None,
    no_archive: NoArchive = False,
    dry_run: DryRun = False,
    resume: Resume = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete dead letters, each when it is written to an archive file, from which it can be restored."""
    options = options_of(context)
    check_resume("drop", resume, held=held, limit=limit, dry_run=dry_run)
    file = archive_file(queue, archive, no_archive)
    if not dry_run:
        options.check_writable("dlq drop")
    chosen = chosen_letters(options, "drop", queue, selection, ids, everything, held, limit, resume)
    _drop(options, queue, chosen, file, dry_run, resume, yes, as_json)


def purge(
    context: typer.Context,
    queue: Queue,
    archive: Archive = None,
    no_archive: NoArchive = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete all dead letters of a queue, also those held; as drop does."""
    options, file = options_of(context), archive_file(queue, archive, no_archive)
    options.check_writable("dlq purge")
    _drop(options, queue, Selection(held=True), file, False, None, yes, as_json, whole=True)


def _drop(
    options: Options,
    queue: str,
    chosen: Selection,
    archive: ArchiveFile | None,
    dry_run: bool,
    resume: str | None,
    yes: bool,
    as_json: bool,
    *,
    whole: bool = False,
) -> None:
    plan: ReplayPlan | None = None
    if resume is None and (dry_run or not yes):
        plan = run(make_plan(options, queue, chosen))
        if dry_run:
            print_plan(plan, None, as_json)
            tell_failures(chosen)
            tell_unknown_reasons(chosen, plan.reasons)
            return
        if not plan.count:
            say(render_runs.nothing(queue, plan.found, plan.held))
            tell_problems(plan)
            tell_failures(chosen)
            tell_unknown_reasons(chosen, ())
            raise typer.Exit(1 if plan.problems else 0)
        tell_unknown_reasons(chosen, plan.reasons)
        # asked outside of the event loop, where Ctrl-C ends a question at once
        confirm(_question(plan, queue, archive), "nothing was deleted")
    elif resume is not None and not yes:
        confirm(f"Go on deleting dead letters of {queue} with run {resume}?", "nothing was deleted")

    def work(manager: DLQManager, **common: object) -> Awaitable[RunReport]:
        def into(path: Path | None) -> Awaitable[RunReport]:
            if resume is not None:
                return manager.resume(resume, "drop", archive=path, **common)  # type: ignore[arg-type]
            return manager.drop(plan or chosen, archive=path, **common)  # type: ignore[arg-type]

        if whole and archive is None and plan is None:
            return manager.purge(archive=None)
        return into(None) if archive is None else archive.write(into)

    carry_out(options, queue, "dropping", work, as_json, chosen)


def _question(plan: ReplayPlan, queue: str, archive: ArchiveFile | None) -> str:
    letters = "1 dead letter" if plan.count == 1 else f"{plan.count:,} dead letters"
    since = "" if plan.oldest is None else f", the oldest parked {render_runs.ago(plan.oldest)} ago"
    kept = "nothing is kept of them" if archive is None else f"archive: {archive.path}"
    return f"Delete {letters} of {queue} ({plan.selection.describe()}{since}; {kept})?"


@with_selection
def move(
    context: typer.Context,
    queue: Queue,
    selection: Selection,
    to_queue: Annotated[str | None, typer.Option(metavar="NAME", help="A queue that exists.")] = None,
    ids: Ids = None,
    everything: All = False,
    held: Held = False,
    limit: Limit = None,
    rate: Rate = None,
    dry_run: DryRun = False,
    force: Force = False,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Put dead letters as they are into another queue, to keep them apart.

    Before the first is moved a preflight looks whether they would arrive and stay there, as before a replay.
    """
    options = options_of(context)
    check_resume("move", resume, held=held, limit=limit, dry_run=dry_run, force=force, to_queue=to_queue)
    speed = parse_rate(rate)
    if to_queue is None and resume is None:
        raise ConfigurationError("dlq move: say where to with --to-queue")
    if not dry_run:
        options.check_writable("dlq move")
    if to_queue == options.topology(queue).dlq:
        raise ConfigurationError(f"dlq move: {to_queue!r} is where they are")
    chosen = chosen_letters(options, "move", queue, selection, ids, everything, held, limit, resume)
    if dry_run and to_queue is not None:
        show_plan(options, queue, chosen, Target.of_queue(to_queue), as_json, moving=True)
        return

    def work(manager: DLQManager, **common: object) -> Awaitable[RunReport]:
        if to_queue is None:
            assert resume is not None
            return manager.resume(resume, "move", rate=speed, **common)  # type: ignore[arg-type]
        target = Target.of_queue(to_queue)

        async def look(plan: ReplayPlan) -> None:
            tell_unknown_reasons(chosen, plan.reasons)
            findings = await manager.preflight(plan, to=target, management_url=options.management_url)
            tell_concerns(render_runs.of_a_move(findings), options, force=force)

        return manager.move(chosen, to_queue, rate=speed, before=look, **common)  # type: ignore[arg-type]

    carry_out(options, queue, "moving", work, as_json, selection)


def restore(
    context: typer.Context,
    queue: Queue,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="An archive that drop or purge wrote.")] = None,
    rate: Rate = None,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Put archived dead letters back into the dead-letter queue; those that are there already are left out."""
    options = options_of(context)
    if file is None and resume is None:
        raise ConfigurationError("dlq restore: name an archive file, or a run with --resume")
    speed = parse_rate(rate)

    def work(manager: DLQManager, **common: object) -> Awaitable[RunReport]:
        if resume is not None:
            return manager.resume(resume, "restore", archive=file, rate=speed, **common)  # type: ignore[arg-type]
        assert file is not None
        return manager.restore(file, rate=speed, **common)  # type: ignore[arg-type]

    carry_out(options, queue, "restoring", work, as_json, Selection())


def runs(context: typer.Context, queue: Queue, as_json: Json = False) -> None:
    """List what was done to the dead letters, and what was begun and never ended."""
    options = options_of(context)
    keeps = options.topology(queue).journal == "stream"

    async def work() -> list[RunInfo]:
        async with options.manager(queue) as manager:
            return await manager.runs()

    found = run(work())
    if as_json:
        for info in found:
            json_line(info.as_json())
    elif found or keeps:
        display(render_runs.table(found))
        say(f"{len(found):,} run{'' if len(found) == 1 else 's'} of {queue}, as far as the journal reaches back")
    if not keeps:
        say(f"the journal of {queue} is live and keeps nothing: what was done before is not known")
