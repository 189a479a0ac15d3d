"""What a handler says of itself, so that the command line knows it too: ``@handler(classify=..., ...)``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from rabbitdlq.consumer.classify import Classes, Kind, Rule
from rabbitdlq.consumer.deadlines import HARD_TIMEOUT, SOFT_TIMEOUT, Timeouts
from rabbitdlq.consumer.isolation import IsolatedIn, Isolation
from rabbitdlq.consumer.once import KeyOf
from rabbitdlq.limits import checked_duration, optional_duration

__all__ = ["HandlerOptions", "handler", "options_of"]

T = TypeVar("T", bound=Callable[..., Any])
_ATTRIBUTE = "__rabbitdlq_options__"


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
        """What is given, else the handler's own. Raises :class:`ConfigurationError` for what makes no sense."""
        return Isolation.of(
            self.isolation if where is None else where,
            self.max_memory if max_memory is None else max_memory,
            child_setup,
        )


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

    Raises :class:`ConfigurationError` for a time that is none.
    """
    options = HandlerOptions(
        dict(classify or {}),
        payload_type,
        optional_duration("soft_timeout", soft_timeout),
        optional_duration("hard_timeout", hard_timeout),
        isolation,
        max_memory,
        idempotency_key,
    )

    def mark(function: T) -> T:
        setattr(function, _ATTRIBUTE, options)
        return function

    return mark


def options_of(function: Callable[..., Any]) -> HandlerOptions:
    """What the handler says of itself; nothing where it is not marked."""
    found = getattr(function, _ATTRIBUTE, None)
    return found if isinstance(found, HandlerOptions) else HandlerOptions()
