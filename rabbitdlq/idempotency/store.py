"""What a store of claims does, whatever it keeps them in."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Literal, Self

from rabbitdlq.errors import IdempotencyError
from rabbitdlq.idempotency.keys import DEFAULT_KEEP, DEFAULT_NAMESPACE, checked_namespace, span
from rabbitdlq.limits import checked_duration

__all__ = ["Claim", "IdempotencyStore"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a store says to who wants to work on a key."""

    #: new: it is yours, until you complete or release it or the lease ends · done: it was completed, or recorded
    #: with the work's own transaction · busy: somebody else holds it
    state: Literal["new", "done", "busy"]
    #: of a new claim: names its holder to complete and release; empty otherwise
    token: str = ""
    #: of a busy claim: when the other's lease ends, by this machine's clock; None where it is not known
    until: datetime | None = None


class IdempotencyStore(ABC):
    """Who works on a key, and which keys are done. Open it, or use it as an async context manager.

    A key is claimed before its work and completed after it. A claim is a lease: it ends by itself when its holder has
    died, and then the next one gets it. A holder that is only slow works beside the next one from then on; what it
    says of its claim no longer counts once somebody else holds it.

    Keys of different namespaces are different keys. Done keys are kept for ``keep`` and then forgotten: a message that
    comes again later is new. Long keys and keys that are not printable ASCII are stored by their SHA-256 hash.

    All methods raise :class:`IdempotencyError` where the store cannot be reached or refuses, or is not open, and
    :class:`ConfigurationError` for an empty key. After an error it is not known whether the store heard of the call;
    to say the same again is always right.
    """

    def __init__(self, *, namespace: str = DEFAULT_NAMESPACE, keep: timedelta | str = DEFAULT_KEEP) -> None:
        """``keep``: how long a done key is known, a timedelta or a text like ``"7d"``.

        Raises :class:`ConfigurationError` for options that cannot be.
        """
        self.namespace = checked_namespace(namespace)
        self.keep = checked_duration("idempotency: keep", keep)
        self._keep_ms = span("keep", self.keep)
        #: consumers of one process may share a store, and each opens it
        self._opening = asyncio.Lock()

    @property
    @abstractmethod
    def name(self) -> str:
        """What and where it is, for messages to people; without a password."""

    @abstractmethod
    async def open(self) -> None:
        """Connect, and make what is missing. Raises :class:`IdempotencyError` where it cannot be used."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections. Claims stay."""

    @abstractmethod
    async def claim(self, key: str, lease: timedelta) -> Claim:
        """New, done, or busy. A new claim is held for ``lease`` at most: give it longer than the work can take."""

    @abstractmethod
    async def complete(self, key: str, token: str) -> bool:
        """Write down that the work is done. False where somebody else has got the claim since: they work too, or did.

        A lease that ended meanwhile does no harm as long as nobody else took the key.
        """

    @abstractmethod
    async def release(self, key: str, token: str) -> None:
        """Give the key back, for the next one to claim. Nothing happens where it is done, or is no longer held."""

    async def __aenter__(self) -> Self:
        """Open it."""
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    def _error(self, reason: str) -> IdempotencyError:
        return IdempotencyError(f"idempotency store {self.name}: {reason}")

    def _not_open(self) -> IdempotencyError:
        return self._error("not open; call open() first, or use it as an async context manager")
