"""Dead letters for people: tables and the full story of one."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rabbitdlq.cli.columns import Column
from rabbitdlq.dead_letter import AttemptRecord, DeadLetter
from rabbitdlq.dead_letters import Group as DeadGroup
from rabbitdlq.dead_letters import OperatorAction, QueueSummary, Story
from rabbitdlq.dead_letters.groups import NONE

__all__ = ["groups", "heading", "plain", "plain_table", "row", "safe", "story", "summaries", "time_text"]

#: characters of a cell; what can be pasted into the next command is never cut
LONGEST_CELL = 80
PASTED = frozenset({"id", "park id", "fingerprint", "example id"})

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def plain(text: str) -> str:
    """The text without what a terminal would obey: a message may carry escape sequences."""
    return text.translate(_CONTROLS)


def safe(text: str, style: str = "") -> Text:
    """The same, for rich."""
    return Text(plain(text), style=style)


def time_text(moment: datetime | None) -> str:
    """In local time, to the second."""
    return "?" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def plain_table(*columns: str, whole: bool = False) -> Table:
    """An empty table without lines; with ``whole`` long cells are folded, not cut."""
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        # an id that is cut cannot be pasted into the next command
        shown.add_column(column, no_wrap=column in PASTED, overflow="fold" if whole or column in PASTED else "ellipsis")
    return shown


def row(columns: Sequence[Column], dead: DeadLetter, max_laps: int) -> tuple[str, ...]:
    """One line of the list; a letter of lap ``max_laps`` or a later one is held."""
    held = " held" if dead.lap >= max_laps else ""
    return tuple(_cell(column, dead) + (held if column.name == "lap" else "") for column in columns)


def _cell(column: Column, dead: DeadLetter) -> str:
    value = column.value(dead)
    match column.name, value:
        case "attempts", _:
            return f"{dead.attempts}/{dead.max_attempts}" if dead.max_attempts else str(dead.attempts)
        case "error", None if dead.bare:
            return "(parked by the broker; see 'dlq show')"
        case _, None:
            return ""
        case _, datetime():
            return time_text(value)
        case _, str():
            return _short(value, LONGEST_CELL if heading(column) not in PASTED else len(value))
        case _:
            return _short(_compact(value), LONGEST_CELL)


def heading(column: Column) -> str:
    """What is above it."""
    return column.name if "." in column.name else column.name.replace("-", " ")


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def groups(found: Sequence[DeadGroup], by: str) -> Table:
    """One line a group of dead letters; columns that no group has anything in are left out."""
    columns: list[tuple[str, Callable[[DeadGroup], str]]] = [
        (by.replace("-", " "), lambda group: group.key or NONE),
        ("count", lambda group: f"{group.count:,}"),
        ("share", lambda group: f"{group.share:.1%}" if group.share >= 0.001 else "<0.1%"),
        ("state", lambda group: group.state or ""),
        ("first parked", lambda group: time_text(group.first_parked)),
        ("last parked", lambda group: time_text(group.last_parked)),
        ("came back", lambda group: f"{group.came_back:,} (lap {group.max_lap})" if group.came_back else ""),
        ("last replayed", lambda group: time_text(group.last_replayed) if group.last_replayed else ""),
        ("example id", lambda group: group.example_id),
    ]
    if by == "fingerprint":
        columns.insert(1, ("signature", lambda group: group.signature))
    always = {by.replace("-", " "), "count", "share", "first parked", "last parked"}
    lines = [[text(group) for _, text in columns] for group in found]
    kept = [place for place, (name, _) in enumerate(columns) if name in always or any(line[place] for line in lines)]
    shown = plain_table(*(columns[place][0] for place in kept))
    for line in lines:
        shown.add_row(*(safe(_short(line[place], LONGEST_CELL)) for place in kept))
    return shown


def summaries(found: Sequence[QueueSummary]) -> Table:
    """One line a work queue."""
    shown = plain_table("queue", "waiting", "on the ladder", "dead", "consumers")
    for entry in found:
        known = [count for count in entry.on_ladder.values() if count is not None]
        ladder = f"{sum(known):,}" if len(known) == len(entry.on_ladder) else "missing"
        shown.add_row(
            safe(entry.queue),
            *(("missing" if count is None else f"{count:,}") for count in (entry.waiting,)),
            ladder,
            "missing" if entry.dead is None else f"{entry.dead:,}{' ready, more in use' if entry.in_use else ''}",
            "missing" if entry.consumers is None else f"{entry.consumers:,}",
        )
    return shown


def story(told: Story, max_laps: int) -> RenderableType:
    """Everything about one dead letter, and what the journal knows of its message."""
    dead = told.letter
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")  # a long word is shown to its end
    for name, value in _facts(dead, max_laps):
        facts.add_row(name, safe(value))
    parts: list[RenderableType] = [facts]
    if dead.history:
        parts += _section("attempts", _timeline(dead.history))
    if dead.error is not None and dead.error.traceback:
        parts += _section("traceback", safe(dead.error.traceback.rstrip()))
    for lap in reversed(told.laps[:-1]):
        end = f"parked {time_text(lap.parked_at)}, {lap.reason}" if lap.reason else "its end is not in the journal"
        parts += _section(f"lap {lap.number}: {end}", _timeline(lap.attempts))
    if told.actions:
        parts += _section("operators", _actions(told.actions))
    return Group(*parts)


def _section(title: str, content: RenderableType) -> list[RenderableType]:
    return [safe(f"\n{title}", style="bold"), Padding(content, (0, 0, 0, 2))]


def _facts(dead: DeadLetter, max_laps: int) -> list[tuple[str, str]]:
    derived = " (derived: the publisher set none)" if dead.id_derived else ""
    attempts = f"{dead.attempts} of {dead.max_attempts}" if dead.max_attempts else str(dead.attempts)
    error = f"{dead.error.type}: {dead.error.message}" if dead.error else "(none recorded)"
    held = ", held: it came back too often (max_laps), and goes by its id or with --held only"
    held = held if dead.lap >= max_laps else ""
    # where it went on its way is the broker's book-keeping; --json has it
    moved = {name: value for name, value in dead.original.items() if not name.startswith("x-")}
    facts = [
        ("id", dead.id + derived),
        ("park id", dead.park_id or "(none: the broker parked it)"),
        ("reason", dead.reason),
        ("error", error),
        ("fingerprint", dead.error.fingerprint if dead.error else ""),
        ("attempts", attempts + (", history incomplete" if dead.history_partial else "")),
        ("lap", f"{dead.lap}{held}"),
        ("queue", dead.queue),
        ("published to", f"{dead.exchange or '(default exchange)'} with key {dead.routing_key!r}"),
        ("created", time_text(dead.created_at)),
        ("first failed", time_text(dead.first_failed_at)),
        ("parked", time_text(dead.moved_to_dlq_at)),
        ("headers", _compact(dead.as_json()["headers"])),
        ("properties", _compact(dead.as_json()["properties"])),
        ("moved out", _compact(moved) if moved else ""),
        ("payload", _compact(dead.payload)),
    ]
    return [(name, value) for name, value in facts if value]


def _timeline(records: Sequence[AttemptRecord]) -> Table:
    """One line an attempt; a record's time is the end of its attempt."""
    shown = plain_table("attempt", "at", "took", "then waited", "worker", "error", whole=True)
    for record, following in zip(records, (*records[1:], None), strict=True):
        took = "" if record.duration_ms is None else f"{record.duration_ms:,.1f} ms"
        shown.add_row(
            str(record.attempt),
            time_text(record.at),
            took,
            _waited(record, following),
            safe(record.worker),
            safe(f"{record.error_type}: {record.error_message}"),
        )
    return shown


def _waited(record: AttemptRecord, following: AttemptRecord | None) -> str:
    if following is None or following.attempt != record.attempt + 1:
        return ""
    wait = following.at - record.at - timedelta(milliseconds=following.duration_ms or 0)
    # workers' clocks differ
    return span(wait) if wait > timedelta() else ""


def span(duration: timedelta) -> str:
    """For people: to the tenth of a second below a minute, to the second from there on."""
    seconds = duration.total_seconds()
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def _actions(actions: Sequence[OperatorAction]) -> Table:
    shown = plain_table("at", "what", "letters", "who", "as", whole=True)
    for action in actions:
        what = action.event if action.named else f"{action.event} (does not name all: this one may be among them)"
        shown.add_row(time_text(action.at), what, f"{action.count:,}", safe(action.who), safe(action.amqp_user or ""))
    return shown


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
