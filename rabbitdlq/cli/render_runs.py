"""Plans, reports and runs for people."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from rabbitdlq.cli.render import groups, plain, plain_table, safe, time_text
from rabbitdlq.dead_letters import Finding, ReplayPlan, RunInfo, RunReport, Target
from rabbitdlq.durations import format_duration

__all__ = ["ago", "concerns", "lines", "nothing", "of_a_move", "plan", "table"]

_STYLES = {"error": "bold red", "warning": "yellow"}
#: what is said of letters that are to be handled again; those that are moved are put aside
_OF_REPLAYS = frozenset({"consumers", "origin"})
_DONE = {"replay": "replayed", "drop": "dropped", "move": "moved", "restore": "restored"}


def ago(moment: datetime) -> str:
    """How long since then, to its largest unit: ``3h``."""
    seconds = max(0, int((datetime.now(UTC) - moment).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def plan(made: ReplayPlan, target: Target | None, findings: Sequence[Finding]) -> RenderableType:
    """What would be done."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    copies = f", and {made.copies:,} second copies" if made.copies else ""
    where = str(target) if target else ", ".join(f"{queue} ({count:,})" for queue, count in made.origins.items())
    rows = [
        ("letters", f"{made.count:,} of {made.found:,} ({made.selection.describe()}){copies}"),
        ("to", where if findings else ""),  # what is dropped goes nowhere
        ("held", f"{made.held:,} came back too often; --held takes them too" if made.held else ""),
        ("parked", f"{time_text(made.oldest)} to {time_text(made.newest)}" if made.oldest else ""),
        ("size", f"{made.total_bytes:,} bytes, the largest {made.largest_bytes:,}"),
        ("reasons", ", ".join(f"{reason} ({count:,})" for reason, count in made.reasons.items())),
    ]
    for name, value in rows:
        if value:
            facts.add_row(name, safe(value))
    parts: list[RenderableType] = [facts]
    if made.groups:
        parts += ["", groups(made.groups, "fingerprint")]
    if findings:
        checks = plain_table("preflight", "what", "", whole=True)
        for finding in findings:
            checks.add_row(safe(finding.level, _STYLES.get(finding.level, "")), safe(finding.check), safe(finding.text))
        parts += ["", checks]
    return Group(*parts)


def concerns(findings: Sequence[Finding], *, asked_management: bool) -> Iterator[str]:
    """What speaks against sending; nothing where all is well. What is held is told by the report."""
    for finding in findings:
        noise = finding.level == "ok" or finding.check == "held"
        if not noise and (asked_management or finding.level != "unknown"):
            yield plain(f"preflight: {finding.level}: {finding.text}")


def of_a_move(findings: Sequence[Finding]) -> list[Finding]:
    """What of it matters where letters are put aside: nobody is expected to handle them there."""
    return [finding for finding in findings if finding.check not in _OF_REPLAYS or finding.level == "error"]


def nothing(queue: str, found: int, held: int) -> str:
    """Why no letter is meant."""
    if not found:
        return f"there are no dead letters of {queue}"
    if held == found:
        return f"all {found:,} dead letters of {queue} came back too often and are held: --held takes them too"
    others = f"; {held:,} that came back too often are held, and --held takes them too" if held else ""
    return f"none of the {found:,} dead letters of {queue} belong to it{others}"


def lines(report: RunReport, queue: str, *, keeps_runs: bool = True) -> Iterator[str]:
    """What was done, in words; ``keeps_runs`` is whether the journal keeps what a run can be gone on with from."""
    yield from _errors(report)
    words = [f"{_DONE[report.operation]} {report.done:,}", f"stayed {report.stayed:,}"]
    if report.before:
        words.append(f"{report.before:,} done before")
    if report.left:
        words.append(f"{report.left:,} left")
    if report.duplicates:
        words.append(f"{report.duplicates:,} second copies removed")
    if report.held and report.planned:
        words.append(f"{report.held:,} held, see --held")
    if report.interrupted:
        words.append("stopped before the end")
    yield ", ".join(words[:2]) + "".join(f"; {word}" for word in words[2:])
    if not report.planned:
        yield nothing(queue, report.found, report.held) if report.operation != "restore" else "the archive is empty"
    if report.archive and report.operation == "drop" and report.done:
        yield f"what was dropped is in {report.archive}: 'rabbitdlq dlq restore {queue} {report.archive}' puts it back"
    if report.in_flight:
        named = ", ".join(report.in_flight[:20]) + (", …" if len(report.in_flight) > 20 else "")
        yield plain(f"{len(report.in_flight):,} were in flight before, and may be there twice: {named}")
    if report.outcomes is not None:
        told = report.outcomes
        followed = sum(told.values())
        ended = f"of {followed:,} followed {told['recovered']:,} recovered, {told['back']:,} are back"
        yield f"{ended}, {told['retrying']:,} failed and are tried again, of {told['open']:,} nothing was heard"
    if report.aborted:
        yield f"aborted: {report.aborted}"
    yield from _going_on(report, queue, keeps_runs)


def _going_on(report: RunReport, queue: str, keeps_runs: bool) -> Iterator[str]:
    if not keeps_runs:
        if report.left and report.run:
            yield f"the journal of {queue} is live and keeps nothing, so no run is resumed: the rest needs a new one"
        return
    if report.left and report.run and report.journaled:
        yield f"go on with: rabbitdlq dlq {report.operation} {queue} --resume {report.run}"
    if not report.journaled:
        yield "the journal could not be written: this run cannot be resumed"


def _errors(report: RunReport) -> Iterator[str]:
    for id, why in report.errors:
        yield plain(f"{id}: {why}" if id else why)
    if report.stayed > len(report.errors):
        yield f"and {report.stayed - len(report.errors):,} more"


def table(found: Sequence[RunInfo]) -> Table:
    """One line a run."""
    shown = plain_table("run", "operation", "started", "took", "by", "selection", "to", "letters", "outcome")
    for info in found:
        took = "" if info.ended_at is None else format_duration(_whole(info))
        counts = ", ".join(f"{name} {count:,}" for name, count in info.counts.items() if count)
        shown.add_row(
            safe(info.id),
            safe(info.operation),
            time_text(info.started_at),
            took,
            safe(info.who),
            safe(info.selection),
            safe(info.target or _near(info.archive)),
            safe(f"{info.planned:,}: {counts}" if counts else f"{info.planned:,}"),
            safe(info.outcome),
        )
    return shown


def _near(archive: str | None) -> str:
    """The file's name where it is in this directory, where it would be named so in a command."""
    path = Path(archive or "")
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path) if archive else ""


def _whole(info: RunInfo) -> timedelta:
    assert info.ended_at is not None
    return timedelta(seconds=max(1, round((info.ended_at - info.started_at).total_seconds())))
