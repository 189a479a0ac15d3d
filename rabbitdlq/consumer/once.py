"""Once, not twice: a message whose work was done before is acknowledged without another run of the handler."""

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
from rabbitdlq.limits import checked_duration
from rabbitdlq.message import Message

__all__ = ["KeyOf", "Once"]

log = structlog.stdlib.get_logger(__name__)

#: the key of a message; None for one that may run as often as it comes
KeyOf = Callable[[Message], str | None]
#: a lease outlasts the longest run of a handler by this much: with isolation "process" a child may have to start first
LEASE_MARGIN = timedelta(seconds=90)
BUSY = "in progress elsewhere"


class Once:
    """Claims a message's key before its handler runs, and says afterwards how that went."""

    def __init__(
        self, store: IdempotencyStore | str, key_of: KeyOf | None, lease: timedelta | str | None, timeouts: Timeouts
    ) -> None:
        """Raises :class:`ConfigurationError` for a URL that names no store, and for a lease that a handler outlasts."""
        self._owns = isinstance(store, str)
        self._store = store_of(store) if isinstance(store, str) else store
        self._key_of = key_of or _key_of
        self.lease = timeouts.hard + LEASE_MARGIN if lease is None else checked_duration("lease", lease)
        if self.lease < timeouts.hard:
            raise ConfigurationError(
                f"lease: {self.lease.total_seconds():g} s is below hard_timeout, {timeouts.hard.total_seconds():g} s: "
                "it would end while a handler is at work"
            )
        self._keyless_told = False

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
            key = self._key_of(message)
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

    def _tell_keyless(self, message: Message) -> None:
        if not self._keyless_told:
            self._keyless_told = True
            log.warning(
                "idempotency_without_key",
                queue=message.queue,
                message_id=message.id,
                consequence="messages without a key run as often as they come; told once",
            )


def _key_of(message: Message) -> str | None:
    """By the publisher's id. A derived one says that two messages are equal, not that they are one."""
    return None if message.id_derived else f"{message.queue}:{message.id}"


def _failed(error: Exception) -> Failed:
    return Failed(Failure.of(error), UNKNOWN, datetime.now(UTC), 0.0)
