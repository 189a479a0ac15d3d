"""What the commands that change dead-letter queues have in common: what is meant, where it goes, how it is told."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import typer

from rabbitdlq.cli import render_runs
from rabbitdlq.cli.options import Options, json_line, run, say, stop_on_signals
from rabbitdlq.cli.options import show as display
from rabbitdlq.cli.progress import Reporter
from rabbitdlq.cli.selecting import tell_failures, tell_unknown_reasons
from rabbitdlq.cli.whole_ids import with_whole_ids
from rabbitdlq.dead_letters import Finding, ReplayPlan, RunReport, Selection, Target
from rabbitdlq.errors import ArchiveError, ConfigurationError, RabbitDLQError

__all__ = [
    "ArchiveFile",
    "archive_file",
    "carry_out",
    "check_resume",
    "chosen_letters",
    "make_plan",
    "print_plan",
    "show_plan",
    "target_of",
    "tell_concerns",
    "tell_problems",
]


# --- what is meant


def chosen_letters(
    options: Options,
    command: str,
    queue: str,
    selection: Selection,
    ids: list[str] | None,
    everything: bool,
    held: bool,
    limit: int | None,
    resume: str | None,
) -> Selection:
    """The letters that a command is about; ids that were shortened are whole in it.

    Raises :class:`ConfigurationError` where nothing is named, or what does not go together.
    """
    named = {
        "ids": bool(ids),
        "a selection": not selection.everything,
        "--all": everything,
        "--resume": resume is not None,
    }
    given = [name for name, told in named.items() if told]
    if not given:
        raise ConfigurationError(f"dlq {command}: name ids, select some, say --all, or go on with --resume")
    if len(given) > 1 and given != ["ids", "a selection"]:
        raise ConfigurationError(
            f"dlq {command}: {' and '.join([', '.join(given[:-1]), given[-1]])} do not go together: name ids, select "
            "some, say --all, or go on with --resume"
        )
    meant = changed(selection, ids=frozenset(ids or ()), held=held, limit=limit)
    return with_whole_ids(options, queue, meant)


def check_resume(command: str, resume: str | None, **others: object) -> None:
    """What a run that is gone on with has settled already, or what would be without effect, is refused."""
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    if resume is not None and given:
        raise ConfigurationError(
            f"dlq {command}: --resume goes on with the letters of that run; leave {', '.join(given)} out"
        )


def target_of(queue: str | None, exchange: str | None, key: str | None) -> Target | None:
    """Where a replay goes to; None is where each letter came from."""
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


# --- archives


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """The file that letters are written to before they are deleted."""

    path: Path
    #: the name that we made, which gives way to ``name-2``, ``name-3`` … where the file is there already; None where
    #: somebody gave it
    ours: Path | None = None

    async def write(self, drop: Callable[[Path], Awaitable[RunReport]]) -> RunReport:
        """Drop letters into it. Nothing is dropped before the file is made, so a taken name costs nothing."""
        path = self.path
        while True:
            try:
                return await drop(path)
            except ArchiveError as error:
                if self.ours is None or not isinstance(error.__cause__, FileExistsError):
                    raise
                path = _free(self.ours)  # somebody else took it just now


def archive_file(queue: str, file: Path | None, no_archive: bool) -> ArchiveFile | None:
    """The file that was named, a new one in this directory without a name, or None."""
    if no_archive:
        if file is not None:
            raise ConfigurationError("--archive and --no-archive: choose one")
        return None
    if file is not None:
        return ArchiveFile(file)
    ours = Path(f"{re.sub(r'[^A-Za-z0-9._-]', '_', queue)}-dead-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl")
    return ArchiveFile(_free(ours), ours)


def _free(path: Path) -> Path:
    """The path, or the first of ``name-2``, ``name-3`` … that is not there: two may be made within one second."""
    return next(each for each in _like(path) if not os.path.lexists(each))


def _like(path: Path) -> Iterator[Path]:
    yield path
    for number in count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


# --- plans


async def make_plan(options: Options, queue: str, chosen: Selection) -> ReplayPlan:
    """What would be done; nothing is changed."""
    async with options.manager(queue) as manager:
        with Reporter(f"reading {queue}") as reporter:
            return await manager.plan(chosen, on_progress=reporter.at)


def show_plan(
    options: Options, queue: str, chosen: Selection, target: Target | None, as_json: bool, *, moving: bool = False
) -> None:
    """The plan of a replay or a move, and whether it would go well; exits with 1 where it would not."""

    async def look() -> tuple[ReplayPlan, list[Finding]]:
        plan = await make_plan(options, queue, chosen)
        async with options.manager(queue) as manager:
            return plan, await manager.preflight(plan, to=target, management_url=options.management_url)

    plan, findings = run(look())
    if moving:
        findings = render_runs.of_a_move(findings)
    print_plan(plan, target, as_json, findings)
    tell_failures(chosen)
    tell_unknown_reasons(chosen, plan.reasons)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def tell_concerns(findings: Sequence[Finding], options: Options, *, force: bool) -> None:
    """Say what speaks against it; exits with 1 where letters would be lost or none arrive, unless that is forced."""
    for line in render_runs.concerns(findings, asked_management=options.management_url is not None):
        say(line)
    if not force and any(finding.level == "error" for finding in findings):
        say("nothing was sent; --dry-run shows all that is known, --force sends them all the same")
        raise typer.Exit(1)


def print_plan(plan: ReplayPlan, target: Target | None, as_json: bool, findings: Sequence[Finding] = ()) -> None:
    """The plan as data, and on stderr the ids that name no letter or several."""
    if as_json:
        preflight = [finding.as_json() for finding in findings]
        json_line(plan.as_json() | {"target": None if target is None else str(target), "preflight": preflight})
    else:
        display(render_runs.plan(plan, target, findings))
    tell_problems(plan)


def tell_problems(plan: ReplayPlan) -> None:
    """Ids that name no letter, or several."""
    for _, error in plan.problems:
        say(str(error))


# --- doing it


def carry_out(
    options: Options,
    queue: str,
    doing: str,
    work: Callable[..., Awaitable[RunReport]],
    as_json: bool,
    selection: Selection,
) -> None:
    """Do it, and tell what was done; exits with 1 where nothing was, with 3 where some was."""
    keeps_runs = options.topology(queue).journal == "stream"
    report, failure = run(_work(options, queue, doing, work))
    if as_json:
        json_line(report.as_json())
    for line in render_runs.lines(report, queue, keeps_runs=keeps_runs):
        say(line)
    tell_failures(selection)
    if not report.planned:
        tell_unknown_reasons(selection, ())
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
