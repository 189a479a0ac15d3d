"""Claims in this process: for tests, and for one consumer whose repeats come soon or not at all."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.idempotency.keys import DEFAULT_KEEP, DEFAULT_NAMESPACE, new_token, span, stored_key
from rabbitdlq.idempotency.store import Claim, IdempotencyStore

__all__ = ["MemoryStore", "utc_now"]

#: how many entries one call looks at to find what can be forgotten
_LOOKS = 4


def utc_now() -> datetime:
    """The time of this machine's clock."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class _Entry:
    token: str
    ends: datetime


class MemoryStore(IdempotencyStore):
    """A store in this process, for one event loop. Nothing of it survives the process, and no other process sees it."""

    def __init__(
        self,
        *,
        max_keys: int = 100_000,
        namespace: str = DEFAULT_NAMESPACE,
        keep: timedelta | str = DEFAULT_KEEP,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        """``max_keys``: the most done keys; the oldest is forgotten for one more. ``clock``: gives aware datetimes."""
        super().__init__(namespace=namespace, keep=keep)
        if max_keys < 1:
            raise ConfigurationError(f"idempotency: max_keys is {max_keys}; a store that knows nothing is of no use")
        self._max_keys = max_keys
        self._clock = clock
        self._open = False
        self._held: OrderedDict[str, _Entry] = OrderedDict()
        #: the oldest first: all are kept equally long
        self._done: OrderedDict[str, _Entry] = OrderedDict()

    @property
    def name(self) -> str:
        """What it is, for messages to people."""
        return "memory"

    def __len__(self) -> int:
        """How many keys it knows, done or held."""
        return len(self._held) + len(self._done)

    async def open(self) -> None:
        """Take calls. What it knew before it was closed it still knows."""
        self._open = True

    async def close(self) -> None:
        """Take no calls any more."""
        self._open = False

    async def claim(self, key: str, lease: timedelta) -> Claim:
        """New, done, or busy."""
        key, now = stored_key(key), self._now()
        ends = now + timedelta(milliseconds=span("lease", lease))
        done = self._done.get(key)
        if done is not None and done.ends > now:
            return Claim("done")
        held = self._held.get(key)
        if held is not None and held.ends > now:
            return Claim("busy", until=held.ends)
        self._forget(now)
        token = new_token()
        self._done.pop(key, None)
        self._held[key] = _Entry(token, ends)
        self._held.move_to_end(key)
        return Claim("new", token)

    async def complete(self, key: str, token: str) -> bool:
        """Write down that the work is done; False where somebody else has got the claim since."""
        key, now = stored_key(key), self._now()
        for entry in (self._held.get(key), self._done.get(key)):
            if entry is not None and entry.token != token and entry.ends > now:
                return False
        self._held.pop(key, None)
        self._done[key] = _Entry(token, now + self.keep)
        self._done.move_to_end(key)
        self._forget(now)
        return True

    async def release(self, key: str, token: str) -> None:
        """Give the key back; nothing happens where it is done, or is no longer held."""
        key, _ = stored_key(key), self._now()
        held = self._held.get(key)
        if held is not None and held.token == token:
            del self._held[key]

    def _now(self) -> datetime:
        if not self._open:
            raise self._not_open()
        return self._clock()

    def _forget(self, now: datetime) -> None:
        """Look at a few entries: what one call adds, the next ones find."""
        for _ in range(min(_LOOKS, len(self._done))):
            oldest = next(iter(self._done))
            if self._done[oldest].ends > now and len(self._done) <= self._max_keys:
                break
            del self._done[oldest]
        for _ in range(min(_LOOKS, len(self._held))):
            first = next(iter(self._held))
            if self._held[first].ends <= now:
                del self._held[first]
            else:  # leases differ: one that is long must not hide the others
                self._held.move_to_end(first)
