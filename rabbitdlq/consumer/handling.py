"""What a handler says of itself, so that the command line knows it too: ``@handler(classify=..., ...)``."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import structlog

from rabbitdlq.consumer.acknowledging import Held
from rabbitdlq.consumer.classify import Classes, Kind, Rule
from rabbitdlq.consumer.deadlines import HARD_TIMEOUT, SOFT_TIMEOUT, Timeouts
from rabbitdlq.consumer.isolation import IsolatedIn, Isolation
from rabbitdlq.consumer.once import KeyOf, Once, checked_key
from rabbitdlq.limits import check_kind, checked_duration, optional_duration

__all__ = ["HandlerOptions", "Ignored", "handler", "options_of", "warn_of_ignored"]

log = structlog.stdlib.get_logger(__name__)

T = TypeVar("T", bound=Callable[..., Any])
_ATTRIBUTE = "__rabbitdlq_options__"
_CLASSES_FORM = "a dict from classes of exceptions to kinds, like {ValueError: Permanent}"
#: what was given and does nothing here: the event, and what its line in the log says
Ignored = tuple[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class HandlerOptions:
    """What goes with a handler, whoever runs it."""

    classify: Mapping[type[BaseException], Kind | Rule] = field(default_factory=dict)
    payload_type: Any = None
    soft_timeout: timedelta | None = None
    hard_timeout: timedelta | None = None
    isolation: IsolatedIn | None = None
    max_memory: str | int | None = None
    idempotency_key: KeyOf | None = None

    def classes(self, given: Classes | None) -> Classes:
        """Those given before the handler's own. Raises :class:`ConfigurationError` for what is no mapping."""
        return dict(self.classify) | _classes(given)

    def timeouts(self, soft: timedelta | str | None, hard: timedelta | str | None) -> Timeouts:
        """Those given, else the handler's own, else the usual ones, of which the one fits itself to the other.

        Raises :class:`ConfigurationError` for what makes no sense.
        """
        cancelled = self.soft_timeout if soft is None else checked_duration("soft_timeout", soft)
        given_up = self.hard_timeout if hard is None else checked_duration("hard_timeout", hard)
        if cancelled is None:
            cancelled = SOFT_TIMEOUT if given_up is None else min(SOFT_TIMEOUT, given_up)
        return Timeouts(cancelled, max(HARD_TIMEOUT, cancelled) if given_up is None else given_up)

    def isolated(
        self, where: str | None, max_memory: str | int | None, child_setup: Callable[[], Any] | None
    ) -> Isolation:
        """What is given, else the handler's own. Raises :class:`ConfigurationError` for what makes no sense.

        The handler's ``max_memory`` is of its own process: where it is told to have none, it does not count.
        """
        own_memory = self.max_memory if where in (None, "process") else None
        return Isolation.of(
            self.isolation if where is None else where,
            own_memory if max_memory is None else max_memory,
            child_setup,
        )

    def ignored(self, soft: timedelta | str | None, held: Held, once: Once | None) -> list[Ignored]:
        """What does nothing beside the rest; ``soft`` as the consumer was given it."""
        found: list[Ignored] = []
        timeouts, given = held.timeouts, soft is not None or self.soft_timeout is not None
        if given and not held.cancellable and timeouts.soft < timeouts.hard:
            limits = {
                "soft_timeout_s": timeouts.soft.total_seconds(),
                "hard_timeout_s": timeouts.hard.total_seconds(),
                "consequence": "only hard_timeout limits a plain function here: it cannot be cancelled, unless with "
                'isolation "process"',
            }
            found.append(("soft_timeout_ignored", limits))
        if self.idempotency_key is not None and once is None:
            effect = {
                "consequence": "the handler has an idempotency_key, but without a store (idempotency) messages "
                "run as often as they come"
            }
            found.append(("idempotency_key_ignored", effect))
        return found


def handler(
    *,
    classify: Classes | None = None,
    payload_type: Any = None,
    soft_timeout: timedelta | str | None = None,
    hard_timeout: timedelta | str | None = None,
    isolation: IsolatedIn | None = None,
    max_memory: str | int | None = None,
    idempotency_key: KeyOf | None = None,
) -> Callable[[T], T]:
    """Mark a handler with what :class:`Consumer` takes as its arguments of the same names.

    ::

        @handler(classify={httpx.HTTPStatusError: External, KeyError: Permanent}, payload_type=Order)
        async def handle(message: Message) -> None: ...

    Raises :class:`ConfigurationError` for a time that is none, classes that are no mapping, and what tells no keys.
    """
    options = HandlerOptions(
        _classes(classify),
        payload_type,
        optional_duration("soft_timeout", soft_timeout),
        optional_duration("hard_timeout", hard_timeout),
        isolation,
        max_memory,
        checked_key(idempotency_key),
    )

    def mark(function: T) -> T:
        setattr(function, _ATTRIBUTE, options)
        return function

    return mark


def options_of(function: Callable[..., Any]) -> HandlerOptions:
    """What the handler says of itself; nothing where it is not marked.

    A partial says what its function says, and an object what the method says that is run when it is called.
    """
    for each in (function, type(function).__call__):
        if isinstance(found := getattr(each, _ATTRIBUTE, None), HandlerOptions):
            return found
    return options_of(function.func) if isinstance(function, functools.partial) else HandlerOptions()


def warn_of_ignored(queue: str, ignored: list[Ignored]) -> None:
    """Say in the log what was given and does nothing."""
    for event, told in ignored:
        log.warning(event, queue=queue, **told)


def _classes(given: Classes | None) -> dict[type[BaseException], Kind | Rule]:
    check_kind("classify", {} if given is None else given, Mapping, _CLASSES_FORM)
    return dict(given or {})
