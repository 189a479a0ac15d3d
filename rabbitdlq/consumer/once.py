"""Once, not twice: a message whose work was done before is acknowledged without another run of the handler."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import structlog

from rabbitdlq.consumer.attempt import Failed
from rabbitdlq.consumer.classify import UNKNOWN, Rule
from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.consumer.outcome import Dropped, Outcome, Postponed, Skipped, Succeeded
from rabbitdlq.errors import ConfigurationError, External, IdempotencyError
from rabbitdlq.failure import Failure
from rabbitdlq.idempotency import Claim, IdempotencyStore, store_of
from rabbitdlq.limits import check_kind, checked_duration
from rabbitdlq.message import Message
from rabbitdlq.texts import printable

__all__ = ["KeyOf", "Once", "checked_key"]

log = structlog.stdlib.get_logger(__name__)

#: by what a message is known among those of its queue; None for one that may run as often as it comes
KeyOf = Callable[[Message], str | None]
#: a lease outlasts the longest run of a handler by this much: with isolation "process" a child may have to start first
LEASE_MARGIN = timedelta(seconds=90)
BUSY = "in progress elsewhere"
#: characters that are shown of what is no key
SHOWN = 100


class Once:
    """Claims a message's key before its handler runs, and says afterwards how that went."""

    def __init__(
        self, store: IdempotencyStore | str, key_of: KeyOf | None, lease: timedelta | str | None, timeouts: Timeouts
    ) -> None:
        """Raises :class:`ConfigurationError` for what is no store, a URL that names none, what cannot tell keys, and a
        lease that a handler outlasts.
        """
        check_kind("idempotency", store, (IdempotencyStore, str), 'a store, or its URL, like "sqlite:done.db"')
        self._owns = isinstance(store, str)
        self._store = store_of(store) if isinstance(store, str) else store
        self._key_of = checked_key(key_of) or _id_of
        self.lease = timeouts.hard + LEASE_MARGIN if lease is None else checked_duration("lease", lease)
        if self.lease < timeouts.hard:
            raise ConfigurationError(
                f"lease: {self.lease.total_seconds():g} s is below hard_timeout, {timeouts.hard.total_seconds():g} s: "
                "it would end while a handler is at work"
            )
        self._keyless_told = False

    @classmethod
    def of(
        cls,
        store: IdempotencyStore | str | None,
        key_of: KeyOf | None,
        handlers_own: KeyOf | None,
        lease: timedelta | str | None,
        timeouts: Timeouts,
    ) -> "Once | None":
        """As a consumer was told, with the handler's own key function where it was told of none; None without a store.

        Raises :class:`ConfigurationError` for what a store makes no sense of, or would be needed for.
        """
        if store is not None:
            return cls(store, handlers_own if key_of is None else key_of, lease, timeouts)
        for name, value in (("idempotency_key", key_of), ("lease", lease)):
            if value is not None:
                raise ConfigurationError(f"{name}: there is no store of what was done; give idempotency, too")
        return None

    async def open(self) -> None:
        """Raises :class:`IdempotencyError` where the store cannot be used."""
        await self._store.open()

    async def close(self) -> None:
        """Close the store if it was made here; one that was given stays open for its owner."""
        if self._owns:
            await self._store.close()

    async def begin(self, message: Message) -> "tuple[Message, Claim | None] | Outcome | Failed":
        """The message as the handler gets it, with the claim on its key; or what becomes of it without a handler."""
        try:
            key = self._key(message)
            if key is None:
                self._tell_keyless(message)
                return message, None
            claim = await self._store.claim(key, self.lease)
        except IdempotencyError as error:  # that the store is out of order is not the message's doing
            return replace(_failed(error), rule=Rule(External), begun=False)
        except Exception as error:  # of a key function, or of a store of somebody else's
            return _failed(error)
        if claim.state == "done":
            log.info("message_skipped", message_id=message.id, queue=message.queue, key=key, reason="done before")
            return Skipped(0.0)
        if claim.state == "busy":
            return Postponed(BUSY, 0.0)
        return replace(message, idempotency_key=key), claim

    async def end(self, message: Message, claim: Claim, outcome: Outcome | None) -> None:
        """Complete the claim of a message that is done with, release that of another.

        One whose handler was given up runs on: its claim stays until the lease ends, so that nobody works beside it.
        """
        key = message.idempotency_key
        if outcome is None or key is None:
            return
        try:
            if not isinstance(outcome, Succeeded | Dropped):
                await self._store.release(key, claim.token)
            elif not await self._store.complete(key, claim.token):
                log.warning("idempotency_lease_lost", message_id=message.id, queue=message.queue, key=key)
        except Exception as error:
            # its work is done or has failed whatever the store says; a lease ends by itself
            log.error("idempotency_unwritten", message_id=message.id, queue=message.queue, key=key, error=str(error))

    def _key(self, message: Message) -> str | None:
        told: object = self._key_of(message)
        if told is None:
            return None
        if not isinstance(told, str) or not told:
            raise _no_key(told)
        # a store may be shared: what one queue's handler has done another's may still have to do
        return f"{message.queue}:{told}"

    def _tell_keyless(self, message: Message) -> None:
        if not self._keyless_told:
            self._keyless_told = True
            log.warning(
                "idempotency_without_key",
                queue=message.queue,
                message_id=message.id,
                consequence="messages without a key run as often as they come; told once",
            )


def checked_key(key_of: KeyOf | None) -> KeyOf | None:
    """The function; raises :class:`ConfigurationError` for what cannot be called, or would have to be awaited."""
    if key_of is not None and not callable(key_of):
        raise ConfigurationError(f"idempotency_key: {key_of!r} cannot be called; give a function of the message")
    if inspect.iscoroutinefunction(key_of) or inspect.iscoroutinefunction(type(key_of).__call__):
        raise ConfigurationError(f"idempotency_key: {key_of!r} is async; give a plain function of the message")
    return key_of


def _id_of(message: Message) -> str | None:
    """The publisher's. A derived one says that two messages are equal, not that they are one."""
    return None if message.id_derived else message.id


def _no_key(told: object) -> ConfigurationError:
    """What is said of what a key function gave."""
    if inspect.iscoroutine(told):
        told.close()
    kind = type(told).__name__ if told != "" else "empty text"
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    shown = printable(repr(told)[:SHOWN])
    return ConfigurationError(f"idempotency_key gave {shown}, {article} {kind}; a text or None is expected")


def _failed(error: Exception) -> Failed:
    # where we say that something is no key, the traceback would tell of our files only
    told = error.with_traceback(None) if isinstance(error, ConfigurationError) else error
    return Failed(Failure.of(told), UNKNOWN, datetime.now(UTC), 0.0)
