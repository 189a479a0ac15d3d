"""Dead letters for people: tables and the full story of one."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters import QueueSummary, ReplayReport

__all__ = ["letter", "plain", "replay_json", "row", "summaries", "table"]

COLUMNS = ("id", "parked", "reason", "attempts", "lap", "error", "routing key")


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def plain(text: str) -> str:
    """The text without what a terminal would obey: a message may carry escape sequences."""
    return text.translate(_CONTROLS)


def safe(text: str, style: str = "") -> Text:
    """The same, for rich."""
    return Text(plain(text), style=style)


def _time(moment: datetime | None) -> str:
    return "?" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _plain_table(*columns: str) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        # an id that is cut cannot be pasted into the next command
        shown.add_column(column, no_wrap=column == "id", overflow="fold" if column == "id" else "ellipsis")
    return shown


def _error_line(dead: DeadLetter) -> str:
    if dead.error is None:
        return "(parked by the broker; see 'dlq show')" if dead.bare else ""
    lines = dead.error.message.splitlines()
    text = f"{dead.error.type}: {lines[0] if lines else ''}"
    return text if len(text) <= 80 else text[:79] + "…"


def row(dead: DeadLetter) -> tuple[str, ...]:
    """One line of the list."""
    attempts = f"{dead.attempts}/{dead.max_attempts}" if dead.max_attempts else str(dead.attempts)
    return (
        dead.id,
        _time(dead.moved_to_dlq_at),
        dead.reason,
        attempts,
        str(dead.lap),
        _error_line(dead),
        dead.routing_key,
    )


def table(rows: Sequence[tuple[str, ...]]) -> Table:
    """The list."""
    shown = _plain_table(*COLUMNS)
    for cells in rows:
        shown.add_row(*(safe(cell) for cell in cells))
    return shown


def summaries(found: Sequence[QueueSummary]) -> Table:
    """One line a work queue."""
    shown = _plain_table("queue", "waiting", "on the ladder", "dead", "consumers")
    for entry in found:
        known = [count for count in entry.on_ladder.values() if count is not None]
        ladder = f"{sum(known):,}" if len(known) == len(entry.on_ladder) else "missing"
        shown.add_row(
            safe(entry.queue),
            *(("missing" if count is None else f"{count:,}") for count in (entry.waiting,)),
            ladder,
            *(("missing" if count is None else f"{count:,}") for count in (entry.dead, entry.consumers)),
        )
    return shown


def letter(dead: DeadLetter) -> RenderableType:
    """Everything about one dead letter."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, value in _facts(dead):
        facts.add_row(name, safe(value))
    parts: list[RenderableType] = [facts]
    if dead.history:
        parts += [safe("\nattempts", style="bold"), Padding(_history(dead), (0, 0, 0, 2))]
    if dead.error is not None and dead.error.traceback:
        parts += [safe("\ntraceback", style="bold"), Padding(safe(dead.error.traceback.rstrip()), (0, 0, 0, 2))]
    return Group(*parts)


def _facts(dead: DeadLetter) -> list[tuple[str, str]]:
    derived = " (derived: the publisher set none)" if dead.id_derived else ""
    attempts = f"{dead.attempts} of {dead.max_attempts}" if dead.max_attempts else str(dead.attempts)
    error = f"{dead.error.type}: {dead.error.message}" if dead.error else "(none recorded)"
    # where it went on its way is the broker's book-keeping; --json has it
    moved = {name: value for name, value in dead.original.items() if not name.startswith("x-")}
    facts = [
        ("id", dead.id + derived),
        ("park id", dead.park_id or "(none: the broker parked it)"),
        ("reason", dead.reason),
        ("error", error),
        ("fingerprint", dead.error.fingerprint if dead.error else ""),
        ("attempts", attempts + (", history incomplete" if dead.history_partial else "")),
        ("lap", str(dead.lap)),
        ("queue", dead.queue),
        ("published to", f"{dead.exchange or '(default exchange)'} with key {dead.routing_key!r}"),
        ("created", _time(dead.created_at)),
        ("first failed", _time(dead.first_failed_at)),
        ("parked", _time(dead.moved_to_dlq_at)),
        ("headers", _compact(dead.as_json()["headers"])),
        ("properties", _compact(dead.as_json()["properties"])),
        ("moved out", _compact(moved) if moved else ""),
        ("payload", _compact(dead.payload)),
    ]
    return [(name, value) for name, value in facts if value]


def _history(dead: DeadLetter) -> Table:
    shown = _plain_table("attempt", "at", "took", "worker", "error")
    for record in dead.history:
        took = "" if record.duration_ms is None else f"{record.duration_ms:,.1f} ms"
        shown.add_row(
            str(record.attempt),
            _time(record.at),
            took,
            safe(record.worker),
            safe(f"{record.error_type}: {record.error_message}"),
        )
    return shown


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def replay_json(report: ReplayReport) -> dict[str, Any]:
    """As ``dlq replay --json`` shows it."""
    return {
        "found": report.found,
        "replayed": report.replayed,
        "duplicates": report.duplicates,
        "stayed": report.stayed,
        "errors": [{"id": letter_id, "error": why} for letter_id, why in report.errors],
        "interrupted": report.interrupted,
    }
