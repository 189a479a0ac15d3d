"""What a list of dead letters shows of each, and in which order."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from rabbitdlq.dead_letter import DeadLetter, iso, jsonable
from rabbitdlq.dead_letters.groups import worker_of
from rabbitdlq.dead_letters.selection import error_line
from rabbitdlq.errors import ConfigurationError

__all__ = ["DEFAULT_COLUMNS", "Column", "Order", "Rows", "parse_columns", "parse_order"]

T = TypeVar("T")

DEFAULT_COLUMNS = "id,parked,reason,attempts,lap,error,routing-key"


@dataclass(frozen=True, slots=True)
class Column:
    """One thing that is shown of a dead letter."""

    name: str
    #: None where the letter has no such thing
    value: Callable[[DeadLetter], Any]

    def json(self, letter: DeadLetter) -> Any:
        """The value as ``--json`` shows it."""
        value = self.value(letter)
        return iso(value) if isinstance(value, datetime) else value


_NAMED: Mapping[str, Callable[[DeadLetter], Any]] = {
    "id": lambda letter: letter.id,
    "park-id": lambda letter: letter.park_id or None,
    "parked": lambda letter: letter.moved_to_dlq_at,
    "created": lambda letter: letter.created_at,
    "first-failed": lambda letter: letter.first_failed_at,
    "reason": lambda letter: letter.reason,
    "attempts": lambda letter: letter.attempts,
    "max-attempts": lambda letter: letter.max_attempts,
    "lap": lambda letter: letter.lap,
    "error": lambda letter: letter.error and error_line(letter.error),
    "type": lambda letter: letter.error and letter.error.type,
    "message": lambda letter: letter.error and letter.error.message,
    "fingerprint": lambda letter: letter.error and letter.error.fingerprint,
    "worker": lambda letter: worker_of(letter) or None,
    "queue": lambda letter: letter.queue,
    "exchange": lambda letter: letter.exchange,
    "routing-key": lambda letter: letter.routing_key,
    "size": lambda letter: len(letter.body),
    "payload": lambda letter: letter.as_json()["payload"],
    "headers": lambda letter: letter.as_json()["headers"],
    "properties": lambda letter: letter.as_json()["properties"],
}
#: where a path may begin
_PATHS: Mapping[str, Callable[[DeadLetter], Any]] = {
    "payload": lambda letter: letter.payload,
    "headers": lambda letter: letter.properties.table,
    "properties": _NAMED["properties"],
}


def parse_columns(text: str) -> tuple[Column, ...]:
    """The columns that ``id,error,payload.customer.id`` names; raises :class:`ConfigurationError` for unknown ones."""
    return tuple(_column("--columns", name.strip()) for name in text.split(","))


def _column(option: str, name: str) -> Column:
    known = name.replace("_", "-")
    if known in _NAMED:
        return Column(known, _NAMED[known])
    start, _, path = name.partition(".")
    if start not in _PATHS or not path:
        raise ConfigurationError(
            f"{option}: there is no column {name!r}; there are {', '.join(_NAMED)}, and paths like "
            "payload.customer.id, headers.tenant, properties.type"
        )
    read = _PATHS[start]
    return Column(name, lambda letter: _plain(_at(read(letter), path)))


def _at(value: Any, path: str) -> Any:
    """What is at the path: keys of objects, positions in arrays; None where there is nothing.

    A key may have dots in it: the whole rest of the path is tried before its parts.
    """
    if isinstance(value, Mapping) and path in value:
        return value[path]
    first, _, rest = path.partition(".")
    if isinstance(value, Mapping):
        found = value.get(first)
    elif isinstance(value, list | tuple) and first.isdecimal() and len(first) < 10 and int(first) < len(value):
        found = value[int(first)]
    else:
        return None
    return _at(found, rest) if rest else found


def _plain(value: Any) -> Any:
    try:
        return value if isinstance(value, datetime) else jsonable(value)
    except RecursionError:
        return "(nested too deeply)"


@dataclass(frozen=True, slots=True)
class Order:
    """By which column a list is ordered; letters without a value come last, either way."""

    column: Column
    reverse: bool

    def key(self, letter: DeadLetter) -> tuple[bool, int, Any]:
        """To compare the letter by."""
        value = self.column.value(letter)
        rank, comparable = _comparable(value)
        return (value is not None) if self.reverse else (value is None), rank, comparable


def parse_order(text: str) -> Order:
    """The order that ``parked`` or ``-parked`` names; raises :class:`ConfigurationError` for unknown columns."""
    return Order(_column("--sort", text.strip().removeprefix("-")), text.strip().startswith("-"))


def _comparable(value: Any) -> tuple[int, Any]:
    """Values of one kind compare with each other, kinds in this order: numbers, times, texts, all others."""
    match value:
        case None:
            return 0, 0
        case bool() | int():
            return 0, value
        case float() if math.isfinite(value):
            return 0, value
        case datetime() if value.tzinfo is not None:
            return 1, value
        case str():
            return 2, value
        case _:
            return 3, json.dumps(value, sort_keys=True, default=str)


class Rows(Generic[T]):
    """The rows of a list in its order, no more than ``limit`` of them: with one, few are kept at any time."""

    def __init__(self, make: Callable[[DeadLetter], T], order: Order | None, limit: int | None) -> None:
        """``make`` gives a letter's row; it is called only for letters that may be shown."""
        self._make = make
        self._order = order
        self._limit = limit
        self._rows: list[tuple[Any, T]] = []
        self._worst: Any = None
        #: letters that were added, also those whose rows are not kept
        self.added = 0

    def add(self, letter: DeadLetter) -> None:
        """Take in a letter."""
        self.added += 1
        if self._order is None:
            if self._limit is None or len(self._rows) < self._limit:
                self._rows.append((None, self._make(letter)))
            return
        key = self._order.key(letter)
        if self._worst is not None and (key <= self._worst if self._order.reverse else key >= self._worst):
            return
        self._rows.append((key, self._make(letter)))
        if self._limit is not None and len(self._rows) >= 2 * self._limit:
            self._cut()

    def _cut(self) -> None:
        if self._order is not None:
            self._rows.sort(key=lambda row: row[0], reverse=self._order.reverse)
        if self._limit is not None and len(self._rows) >= self._limit:
            del self._rows[self._limit :]
            self._worst = self._rows[-1][0]

    def shown(self) -> list[T]:
        """The rows in order; those of equal letters as they came."""
        self._cut()
        return [row for _, row in self._rows]
