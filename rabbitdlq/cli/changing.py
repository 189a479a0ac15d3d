"""``rabbitdlq dlq replay | drop | purge | move | restore | runs``: what changes dead-letter queues, and what did."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace as changed
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from rabbitdlq.cli import render_runs
from rabbitdlq.cli.amounts import parse_rate, parse_share, parse_wait
from rabbitdlq.cli.options import Options, confirm, json_line, options_of, run, say, stop_on_signals
from rabbitdlq.cli.options import show as display
from rabbitdlq.cli.progress import Reporter
from rabbitdlq.cli.selecting import Json, Queue, tell_failures, with_selection
from rabbitdlq.dead_letters import Canary, DLQManager, Finding, ReplayPlan, RunInfo, RunReport, Selection, Target
from rabbitdlq.errors import ConfigurationError, RabbitDLQError

__all__ = ["drop", "move", "purge", "replay", "restore", "runs"]

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Message ids or park ids.")]
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
    chosen = _chosen("replay", selection, ids, everything, held, limit, resume)
    _check_resume("replay", resume, held=held, limit=limit, dry_run=dry_run, to=to, to_exchange=to_exchange)
    target = _target(to, to_exchange, to_routing_key)
    if abort_above is not None and canary is None:
        raise ConfigurationError("dlq replay: --abort-above needs --canary")
    if wait is not None and canary is None and not watch:
        raise ConfigurationError("dlq replay: --wait needs --canary or --watch")
    patience = parse_wait("--wait", wait or "2m")
    first = None if canary is None else Canary(canary, patience, parse_share(abort_above or "10%"))
    watching = patience if watch else None
    speed = parse_rate(rate)
    if dry_run:
        _show_plan(options, queue, chosen, target, as_json)
        return

    def work(manager: DLQManager, **common: object) -> Awaitable[RunReport]:
        if resume is not None:
            return manager.resume(resume, "replay", rate=speed, canary=first, watch=watching, **common)  # type: ignore[arg-type]

        async def look(plan: ReplayPlan) -> None:
            findings = await manager.preflight(plan, to=target, management_url=options.management_url)
            _tell_concerns(findings, options, force=force)

        return manager.replay(
            chosen,
            to=target,
            rate=speed,
            canary=first,
            watch=watching,
            before=look,
            **common,  # type: ignore[arg-type]
        )

    _carry_out(options, queue, "replaying", work, as_json, selection)


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
    chosen = _chosen("drop", selection, ids, everything, held, limit, resume)
    _check_resume("drop", resume, held=held, limit=limit, dry_run=dry_run)
    _drop(options, queue, chosen, _archive(queue, archive, no_archive), dry_run, resume, yes, as_json)


def purge(
    context: typer.Context,
    queue: Queue,
    archive: Archive = None,
    no_archive: NoArchive = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete all dead letters of a queue, also those held; as drop does."""
    file = _archive(queue, archive, no_archive)
    _drop(options_of(context), queue, Selection(held=True), file, False, None, yes, as_json, whole=True)


def _drop(
    options: Options,
    queue: str,
    chosen: Selection,
    archive: Path | None,
    dry_run: bool,
    resume: str | None,
    yes: bool,
    as_json: bool,
    *,
    whole: bool = False,
) -> None:
    if not dry_run:
        options.check_writable("dlq purge" if whole else "dlq drop")
    plan: ReplayPlan | None = None
    if resume is None and (dry_run or not yes):
        plan = run(_plan(options, queue, chosen))
        if dry_run:
            _print_plan(plan, None, as_json)
            tell_failures(chosen)
            return
        if not plan.count:
            say(f"none of the {plan.found:,} dead letters of {queue} belong to it")
            _tell_problems(plan)
            tell_failures(chosen)
            raise typer.Exit(1 if plan.problems else 0)
        # asked outside of the event loop, where Ctrl-C ends a question at once
        confirm(_question(plan, queue, archive), "nothing was deleted")
    elif resume is not None and not yes:
        confirm(f"Go on deleting dead letters of {queue} with run {resume}?", "nothing was deleted")

    def work(manager: DLQManager, **common: object) -> Awaitable[RunReport]:
        if resume is not None:
            return manager.resume(resume, "drop", archive=archive, **common)  # type: ignore[arg-type]
        if whole and archive is None and plan is None:
            return manager.purge(archive=None)
        return manager.drop(plan or chosen, archive=archive, **common)  # type: ignore[arg-type]

    _carry_out(options, queue, "dropping", work, as_json, chosen)


def _question(plan: ReplayPlan, queue: str, archive: Path | None) -> str:
    letters = "1 dead letter" if plan.count == 1 else f"{plan.count:,} dead letters"
    since = "" if plan.oldest is None else f", the oldest parked {render_runs.ago(plan.oldest)} ago"
    kept = "nothing is kept of them" if archive is None else f"archive: {archive}"
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
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Put dead letters as they are into another queue, to keep them apart."""
    options = options_of(context)
    chosen = _chosen("move", selection, ids, everything, held, limit, resume)
    _check_resume("move", resume, held=held, limit=limit, dry_run=dry_run, to_queue=to_queue)
    speed = parse_rate(rate)
    if to_queue is None and resume is None:
        raise ConfigurationError("dlq move: say where to with --to-queue")
    if dry_run and to_queue is not None:
        _show_plan(options, queue, chosen, Target.of_queue(to_queue), as_json)
        return

    def work(manager: DLQManager, **common: object) -> Awaitable[RunReport]:
        if to_queue is None:
            assert resume is not None
            return manager.resume(resume, "move", rate=speed, **common)  # type: ignore[arg-type]
        return manager.move(chosen, to_queue, rate=speed, **common)  # type: ignore[arg-type]

    _carry_out(options, queue, "moving", work, as_json, selection)


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

    _carry_out(options, queue, "restoring", work, as_json, Selection())


def runs(context: typer.Context, queue: Queue, as_json: Json = False) -> None:
    """List what was done to the dead letters, and what was begun and never ended."""
    options = options_of(context)

    async def work() -> list[RunInfo]:
        async with options.manager(queue) as manager:
            return await manager.runs()

    found = run(work())
    if as_json:
        for info in found:
            json_line(info.as_json())
    else:
        display(render_runs.table(found))
        say(f"{len(found):,} run{'' if len(found) == 1 else 's'} of {queue}, as far as the journal reaches back")


# --- what they have in common


def _chosen(
    command: str,
    selection: Selection,
    ids: list[str] | None,
    everything: bool,
    held: bool,
    limit: int | None,
    resume: str | None,
) -> Selection:
    narrowed = bool(ids) or not selection.everything
    if (narrowed + everything + (resume is not None)) != 1:
        raise ConfigurationError(f"dlq {command}: name ids, select some, say --all, or go on with --resume")
    return changed(selection, ids=frozenset(ids or ()), held=held, limit=limit)


def _check_resume(command: str, resume: str | None, **others: object) -> None:
    """What a run that is gone on with has settled already, or what would be without effect, is refused."""
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    if resume is not None and given:
        raise ConfigurationError(
            f"dlq {command}: --resume goes on with the letters of that run; leave {', '.join(given)} out"
        )


def _target(queue: str | None, exchange: str | None, key: str | None) -> Target | None:
    if queue is not None:
        if exchange is not None or key is not None:
            raise ConfigurationError("dlq replay: --to names a queue; leave --to-exchange and --to-routing-key out")
        return Target.of_queue(queue)
    if exchange is None:
        if key is not None:
            raise ConfigurationError("dlq replay: --to-routing-key needs --to-exchange")
        return None
    if key is None:
        raise ConfigurationError("dlq replay: --to-exchange needs --to-routing-key")
    return Target(exchange, key)


def _archive(queue: str, file: Path | None, no_archive: bool) -> Path | None:
    if no_archive:
        if file is not None:
            raise ConfigurationError("--archive and --no-archive: choose one")
        return None
    return file or Path(f"{re.sub(r'[^A-Za-z0-9._-]', '_', queue)}-dead-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl")


async def _plan(options: Options, queue: str, chosen: Selection) -> ReplayPlan:
    async with options.manager(queue) as manager:
        with Reporter(f"reading {queue}") as reporter:
            return await manager.plan(chosen, on_progress=reporter.at)


def _show_plan(options: Options, queue: str, chosen: Selection, target: Target | None, as_json: bool) -> None:
    """The plan of a replay or a move, and whether it would go well; exits with 1 where it would not."""

    async def look() -> tuple[ReplayPlan, list[Finding]]:
        plan = await _plan(options, queue, chosen)
        async with options.manager(queue) as manager:
            return plan, await manager.preflight(plan, to=target, management_url=options.management_url)

    plan, findings = run(look())
    _print_plan(plan, target, as_json, findings)
    tell_failures(chosen)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def _tell_concerns(findings: Sequence[Finding], options: Options, *, force: bool) -> None:
    """Say what speaks against it; exits with 1 where letters would be lost or none arrive, unless that is forced."""
    for line in render_runs.concerns(findings, asked_management=options.management_url is not None):
        say(line)
    if not force and any(finding.level == "error" for finding in findings):
        say("nothing was sent; --dry-run shows all that is known, --force sends them all the same")
        raise typer.Exit(1)


def _print_plan(plan: ReplayPlan, target: Target | None, as_json: bool, findings: Sequence[Finding] = ()) -> None:
    if as_json:
        preflight = [finding.as_json() for finding in findings]
        json_line(plan.as_json() | {"target": None if target is None else str(target), "preflight": preflight})
    else:
        display(render_runs.plan(plan, target, findings))
    _tell_problems(plan)


def _tell_problems(plan: ReplayPlan) -> None:
    for _, error in plan.problems:
        say(str(error))


def _carry_out(
    options: Options,
    queue: str,
    doing: str,
    work: Callable[..., Awaitable[RunReport]],
    as_json: bool,
    selection: Selection,
) -> None:
    report, failure = run(_work(options, queue, doing, work))
    if as_json:
        json_line(report.as_json())
    for line in render_runs.lines(report, queue):
        say(line)
    tell_failures(selection)
    if failure is not None:
        say(f"rabbitdlq: {failure}")
    if failure is not None or report.stayed or report.interrupted or report.aborted:
        raise typer.Exit(3 if report.done else 1)


async def _work(
    options: Options, queue: str, doing: str, work: Callable[..., Awaitable[RunReport]]
) -> tuple[RunReport, RabbitDLQError | None]:
    """Do it, and give what was done also where it ended in an error."""
    stop = asyncio.Event()
    known: list[RunReport] = []
    async with options.manager(queue) as manager:
        with stop_on_signals(stop), Reporter(f"{doing} {queue}") as reporter:

            def progress(report: RunReport) -> None:
                if not known:
                    known.append(report)
                reporter.at(report.looked_at, report.planned)
                reporter.waiting(report.phase == "waiting")

            try:
                return await work(manager, stop=stop, on_progress=progress), None
            except RabbitDLQError as error:
                if not known or not known[0].run:
                    raise
                return known[0], error
