"""Which dead letters are meant: filters that combine, without any I/O."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters.where import Where, glob
from rabbitdlq.durations import parse_duration
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.failure import Failure
from rabbitdlq.limits import check_kind

__all__ = ["NumberRange", "Selection", "Where", "check_selection", "checked_moment", "error_line"]

_NUMBER = re.compile(r"(?P<sign><=|>=|<|>|=|==)?\s*(?P<number>\d{1,9})", re.ASCII)
_FROM_TO = re.compile(r"(\d{1,9})\s*-\s*(\d{1,9})", re.ASCII)
#: as many as a person has to type before a fingerprint is meant by them
_SHORTEST_FINGERPRINT = 6
_FINGERPRINT = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Whole numbers from ``low`` to ``high``, both included; None is no end."""

    low: int | None = None
    high: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``3``, ``>=3``, ``<3`` or ``2-5``; raises :class:`ConfigurationError` for anything else.

        >>> [str(NumberRange.parse(text)) for text in ("3", ">2", "<= 5", "2-5")]
        ['3', '>=3', '<=5', '2-5']
        """
        if match := _FROM_TO.fullmatch(text.strip()):
            low, high = int(match[1]), int(match[2])
            if low > high:
                raise ConfigurationError(f"{text!r} has no number in it: the smaller one comes first")
            return cls(low, high)
        match = _NUMBER.fullmatch(text.strip())
        if match is None:
            raise ConfigurationError(f"{text!r} is no number or range of numbers; write 3, >=3, <3 or 2-5")
        number = int(match["number"])
        if match["sign"] == "<" and number == 0:
            raise ConfigurationError(f"{text!r} has no number in it: there is none below 0")
        match match["sign"]:
            case ">=":
                return cls(number, None)
            case ">":
                return cls(number + 1, None)
            case "<=":
                return cls(None, number)
            case "<":
                return cls(None, number - 1)
            case _:
                return cls(number, number)

    def __contains__(self, number: int) -> bool:
        return (self.low is None or self.low <= number) and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        if self.high is None:
            return f">={self.low}"
        return f"<={self.high}" if self.low is None else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Selection:
    """Dead letters that all of the given filters say yes to.

    A letter that lacks what a filter asks for, as one without an error, does not belong to it. ``limit`` and ``held``
    are carried for whoever reads the letters; :meth:`matches` does not look at them.
    """

    #: message ids or park ids; any where empty
    ids: frozenset[str]
    reasons: frozenset[str]
    #: a glob (``*`` and ``?``), for "Type: first line of the message" and for the type alone; case counts
    error: str | None
    #: whole, or its first six digits or more
    fingerprint: str | None
    #: a glob, for the publisher's routing key
    routing_key: str | None
    #: parked before this moment
    older_than: datetime | None
    #: parked at this moment or after it
    newer_than: datetime | None
    attempts: NumberRange | None
    lap: NumberRange | None
    where: Where | None
    #: letters that the loop breaker holds belong to it although they are not named by id
    held: bool
    #: at most so many, the oldest
    limit: int | None

    def __init__(
        self,
        ids: Iterable[str] = frozenset(),
        reasons: Iterable[str] = frozenset(),
        error: str | None = None,
        fingerprint: str | None = None,
        routing_key: str | None = None,
        older_than: datetime | timedelta | str | None = None,
        newer_than: datetime | timedelta | str | None = None,
        attempts: NumberRange | int | str | None = None,
        lap: NumberRange | int | str | None = None,
        where: Where | str | None = None,
        held: bool = False,
        limit: int | None = None,
    ) -> None:
        """``older_than``, ``newer_than``: a datetime with a time zone, or how long ago, a timedelta or like ``"2h"``.

        ``attempts``, ``lap``: a number, or a range like ``">=3"`` or ``"2-5"``; ``where``: a condition. Raises
        :class:`ConfigurationError` for what can never be meant: letters are deleted by this.
        """
        put = object.__setattr__
        put(self, "ids", _texts("ids", ids))
        put(self, "reasons", _texts("reasons", reasons))
        for name, text in (("error", error), ("fingerprint", fingerprint), ("routing_key", routing_key)):
            if text is not None:
                check_kind(name, text, str, "a text")
            put(self, name, text)
        put(self, "older_than", checked_moment("older_than", older_than))
        put(self, "newer_than", checked_moment("newer_than", newer_than))
        put(self, "attempts", _range("attempts", attempts))
        put(self, "lap", _range("lap", lap))
        put(self, "where", _condition(where))
        put(self, "held", held)
        put(self, "limit", limit)
        self._check()

    def _check(self) -> None:
        if self.fingerprint is not None and not (
            _FINGERPRINT.fullmatch(self.fingerprint) and len(self.fingerprint) >= _SHORTEST_FINGERPRINT
        ):
            raise ConfigurationError(
                f"fingerprint {self.fingerprint!r}: give at least {_SHORTEST_FINGERPRINT} of its hex digits (0-9, a-f)"
            )
        if self.limit is not None:
            if type(self.limit) is not int:
                raise ConfigurationError(f"limit: {self.limit!r} is no whole number")
            if self.limit < 0:
                raise ConfigurationError(f"limit {self.limit}: it is below zero")

    @property
    def everything(self) -> bool:
        """Whether nothing narrows it down, ``limit`` and ``held`` aside."""
        return not (self.ids or self.reasons) and all(
            each is None
            for each in (
                self.error,
                self.fingerprint,
                self.routing_key,
                self.older_than,
                self.newer_than,
                self.attempts,
                self.lap,
                self.where,
            )
        )

    def matches(self, letter: DeadLetter) -> bool:  # noqa: PLR0911 - one return a filter, the cheapest first
        """Whether the letter belongs to it; never raises."""
        if self.ids and letter.id not in self.ids and not (letter.park_id and letter.park_id in self.ids):
            return False
        if self.reasons and letter.reason not in self.reasons:
            return False
        if self.attempts is not None and letter.attempts not in self.attempts:
            return False
        if self.lap is not None and letter.lap not in self.lap:
            return False
        if self.fingerprint is not None and not (
            letter.error is not None and letter.error.fingerprint.startswith(self.fingerprint)
        ):
            return False
        if not self._in_time(letter.moved_to_dlq_at):
            return False
        if self.routing_key is not None and not glob(self.routing_key).match(letter.routing_key):
            return False
        if self.error is not None and not self._error_matches(self.error, letter):
            return False
        return self.where is None or self.where.matches(letter)

    def _in_time(self, parked_at: datetime | None) -> bool:
        if self.older_than is None and self.newer_than is None:
            return True
        if parked_at is None:
            return False
        return (self.older_than is None or parked_at < self.older_than) and (
            self.newer_than is None or parked_at >= self.newer_than
        )

    @staticmethod
    def _error_matches(pattern: str, letter: DeadLetter) -> bool:
        if letter.error is None:
            return False
        wanted = glob(pattern)
        return bool(wanted.match(letter.error.type) or wanted.match(error_line(letter.error)))

    def describe(self) -> str:
        """In words for people and for the journal; "all" where nothing narrows it down.

        >>> Selection(reasons=["exhausted"], error="KeyError*").describe()
        "reason=exhausted error='KeyError*'"
        """
        words: list[str] = []
        if self.ids:
            words.append(_named(self.ids))
        if self.reasons:
            words.append(f"reason={','.join(sorted(self.reasons))}")
        for name, text in (
            ("error", self.error),
            ("fingerprint", self.fingerprint),
            ("routing-key", self.routing_key),
        ):
            if text is not None:
                words.append(f"{name}={text if name == 'fingerprint' else repr(text)}")
        for name, moment in (("older-than", self.older_than), ("newer-than", self.newer_than)):
            if moment is not None:
                words.append(f"{name}={moment.astimezone(UTC).isoformat(timespec='seconds')}")
        words += [f"attempts={self.attempts}"] if self.attempts is not None else []
        words += [f"lap={self.lap}"] if self.lap is not None else []
        words += [f"where={self.where.text!r}"] if self.where is not None else []
        words = words or ["all"]
        words += ["including held"] if self.held else []
        words += [f"limit={self.limit}"] if self.limit is not None else []
        return " ".join(words)


def check_selection(selection: object) -> None:
    """Refuse what is neither a selection nor None."""
    check_kind("selection", selection, (Selection, type(None)), "a Selection, like Selection(ids=[...])")


def checked_moment(key: str, value: datetime | timedelta | str | None) -> datetime | None:
    """The moment that is meant: itself, or so long ago; raises :class:`ConfigurationError` for anything else."""
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ConfigurationError(f"{key} {value.isoformat()}: it has no time zone")
        return value
    try:
        return datetime.now(UTC) - parse_duration(value)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{key}: {value!r} is no time; give a datetime with a time zone, or how long ago: a timedelta or a text "
            'like "2h"'
        ) from error


def _texts(key: str, values: Iterable[str]) -> frozenset[str]:
    """The texts; one alone would be taken for its letters, and match by parts of it."""
    if isinstance(values, str):
        raise ConfigurationError(f"{key}: {values!r} is one text; write a list, like [{values!r}]")
    try:
        texts = list(values)
    except TypeError as error:
        raise ConfigurationError(f"{key}: {values!r} is no list of texts") from error
    for text in texts:
        check_kind(key, text, str, "texts")
    if not texts and not isinstance(values, frozenset):
        # a program that found nothing to name must not delete everything
        raise ConfigurationError(f"{key}: there are none; leave it out if any will do")
    return frozenset(texts)


def _range(key: str, value: NumberRange | int | str | None) -> NumberRange | None:
    if value is None or isinstance(value, NumberRange):
        return value
    if type(value) is int:
        return NumberRange(value, value)
    check_kind(key, value, str, 'a number, or a text like ">=3" or "2-5"')
    try:
        return NumberRange.parse(str(value))
    except ConfigurationError as error:
        raise ConfigurationError(f"{key}: {error}") from error


def _condition(value: Where | str | None) -> Where | None:
    if value is None or isinstance(value, Where):
        return value
    check_kind("where", value, str, 'a condition like "payload.customer.id == 42"')
    return Where(value)


def _named(ids: frozenset[str]) -> str:
    shown = sorted(ids)[:5]
    return f"id={','.join(shown)}{f' and {len(ids) - 5:,} more' if len(ids) > 5 else ''}"


def error_line(failure: Failure) -> str:
    """Gives "Type: first line of the message", or the type alone where there is no message."""
    lines = failure.message.splitlines()
    return f"{failure.type}: {lines[0]}" if lines and lines[0] else failure.type
