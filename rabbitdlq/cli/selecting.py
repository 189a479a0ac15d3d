"""The options that say which dead letters are meant: the same ones for looking at them, sending back and deleting."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from rabbitdlq import names
from rabbitdlq.cli.options import say
from rabbitdlq.cli.render import plain
from rabbitdlq.dead_letters import NumberRange, Selection, Where
from rabbitdlq.durations import parse_duration
from rabbitdlq.errors import ConfigurationError

__all__ = ["Json", "Queue", "moment", "tell_failures", "tell_unknown_reasons", "with_selection"]

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The work queue, one of the topology file.")]
#: for which we and the broker's own routes park
_REASONS = frozenset(
    {names.PERMANENT, names.UNDECODABLE, names.INVALID, names.TIMEOUT, names.CRASHED, names.PUSHED}
) | frozenset(names.BROKER_REASONS.values())

Json = Annotated[bool, typer.Option("--json", help="As JSON Lines.")]

_OPTIONS: dict[str, Any] = {
    "reason": Annotated[
        list[str] | None, typer.Option("--reason", metavar="REASON", help="Parked for this reason; may be repeated.")
    ],
    "error": Annotated[
        str | None, typer.Option("--error", metavar="GLOB", help="'Type: first line of the message', or the type.")
    ],
    "fingerprint": Annotated[
        str | None, typer.Option("--fingerprint", metavar="HEX", help="The bug; its first 6 digits or more will do.")
    ],
    "routing_key": Annotated[
        str | None, typer.Option("--routing-key", metavar="GLOB", help="As the publisher set it.")
    ],
    "older_than": Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Parked before: 2h ago, or a time in ISO 8601.")
    ],
    "newer_than": Annotated[
        str | None, typer.Option("--newer-than", metavar="AGE", help="Parked since: 2h ago, or a time in ISO 8601.")
    ],
    "attempts": Annotated[str | None, typer.Option("--attempts", metavar="RANGE", help="3, >=3, <3 or 2-5.")],
    "lap": Annotated[
        str | None, typer.Option("--lap", metavar="RANGE", help="1 is the first time here, >1 came back.")
    ],
    "where": Annotated[
        str | None,
        typer.Option("--where", metavar="EXPRESSION", help="A condition, like 'payload.customer.id == 42'."),
    ],
}


def with_selection(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a selection in place of its parameter ``selection``, which is made of them.

    Options that cannot be used raise :class:`ConfigurationError` before the command is called.
    """
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def selecting(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in _OPTIONS}
        command(**given, selection=_selection(**chosen))

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name != "selection":
            parameters.append(parameter)
            continue
        for option, kind in _OPTIONS.items():
            parameters.append(
                inspect.Parameter(option, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)
            )
    # typer reads the one or the other, by its version
    selecting.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    selecting.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
    del selecting.__wrapped__
    return selecting


def _selection(
    *,
    reason: list[str] | None,
    error: str | None,
    fingerprint: str | None,
    routing_key: str | None,
    older_than: str | None,
    newer_than: str | None,
    attempts: str | None,
    lap: str | None,
    where: str | None,
) -> Selection:
    return Selection(
        reasons=frozenset(reason or ()),
        error=error,
        fingerprint=fingerprint,
        routing_key=routing_key,
        older_than=None if older_than is None else moment("--older-than", older_than),
        newer_than=None if newer_than is None else moment("--newer-than", newer_than),
        attempts=_number_range("--attempts", attempts),
        lap=_number_range("--lap", lap),
        where=None if where is None else Where(where),
    )


def _number_range(option: str, text: str | None) -> NumberRange | None:
    try:
        return None if text is None else NumberRange.parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from error


def moment(option: str, text: str) -> datetime:
    """So long ago (``2h``), or a time in ISO 8601, a local one where it names no zone, as the tables show it.

    Raises :class:`ConfigurationError` with the option's name for anything else.
    """
    try:
        return datetime.now(UTC) - parse_duration(text)
    except (ValueError, OverflowError) as error:
        problem = str(error)
    try:
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{option}: {problem}, or a time in ISO 8601, like 2026-03-01T12:00:00Z") from None


def tell_failures(selection: Selection) -> None:
    """Say for how many letters the condition could not be evaluated, and what no letter has: it may be a typo."""
    if selection.where is None:
        return
    tally = selection.where.tally
    if tally.failures:
        letters = "1 letter" if tally.failures == 1 else f"{tally.failures:,} letters"
        say(f"where: could not be evaluated for {letters}, which did not match: {plain(tally.first_failure or '')}")
    if tally.unknown:
        say(f"where: no letter that was asked has {plain(', '.join(tally.unknown))}")


def tell_unknown_reasons(selection: Selection, found: Iterable[str]) -> None:
    """Say which reason nobody parks for, if no letter was found that has it: it may be a typo.

    ``found``: the reasons of the letters that were found; other programs may park for reasons of their own.
    """
    for reason in sorted(selection.reasons - _REASONS - set(found)):
        alike = difflib.get_close_matches(reason, _REASONS, 1)
        meant = f"is {alike[0]!r} meant?" if alike else f"known are {', '.join(sorted(_REASONS))}"
        say(f"--reason: no letter was found that has {plain(reason)!r}, which is no reason of ours; {meant}")
