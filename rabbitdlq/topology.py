"""One work queue with its ladder, dead-letter queue and journal: the value, and the entities it stands for.

The broker does retry, delay and parking by dead-lettering alone
(https://www.rabbitmq.com/docs/dlx, https://www.rabbitmq.com/docs/ttl); this module only says what has to be declared.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

from rabbitdlq.durations import format_duration, milliseconds
from rabbitdlq.entities import BindingEntity, Entities, ExchangeEntity, QueueEntity
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.fields import encode_value
from rabbitdlq.limits import (
    MAX_EXCHANGE_BYTES,
    MAX_NAME_BYTES,
    check_name,
    check_range,
    check_word,
    checked_delays,
    checked_duration,
)
from rabbitdlq.wire import WireError

__all__ = [
    "Rung",
    "Topology",
    "Version",
    "WorkBinding",
]

#: the broker's version as it introduces itself, for instance (4, 0, 5)
Version = tuple[int, ...]

#: the broker's own default since 4.0 (https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling)
DEFAULT_CRASH_LIMIT = 20

#: the header x-last-death-reason is there from this version on
_LAST_DEATH_SINCE: Version = (3, 13)
#: deaths that no consumer asked for: they lead to the dead-letter queue
_BROKERS_DEATHS = ("delivery_limit", "expired", "maxlen")

QUEUE_TYPES = ("quorum", "classic")
JOURNALS = ("stream", "live")
EXCHANGE_TYPES = ("direct", "fanout", "headers", "topic")


@dataclass(frozen=True, slots=True)
class WorkBinding:
    """One binding of the work queue to an exchange of the application, which is declared durable if missing."""

    exchange: str
    key: str = ""
    type: str = "topic"
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Rung:
    """One retry queue: messages wait in it for one delay."""

    #: 1 for the first; a message that leaves rung N has failed N times
    number: int
    delay: timedelta
    queue: str

    @property
    def key(self) -> str:
        """The routing key with which messages leave this rung, like ``orders.retry.1``.

        A first failure comes with its publisher's key to the exchange that reads these: ``retry.1`` could be one.
        """
        return self.queue.rpartition(".")[0]


@dataclass(frozen=True)
class Topology:
    """A work queue and everything that keeps its failures: frozen, checked when it is made.

    ``Topology("orders", delays=("5s", "30s"))`` gives three attempts: at once, after 5 s, after 30 s more. Raises
    :class:`ConfigurationError` naming the key and the reason for anything a broker could not hold.
    """

    #: the work queue's name, and the prefix of all others
    name: str
    #: 1 to 32, each a timedelta or a text like "500ms", "5s", "2m", "1h"
    delays: tuple[timedelta, ...]
    bindings: tuple[WorkBinding, ...] = ()
    queue_type: Literal["quorum", "classic"] = "quorum"
    #: deliveries that ended in a crash before the broker itself parks the message (quorum queues, from RabbitMQ 3.13)
    crash_limit: int = DEFAULT_CRASH_LIMIT
    #: "stream" keeps the journal in a stream queue; "live" keeps none (for brokers without streams)
    journal: Literal["stream", "live"] = "stream"
    journal_max_age: timedelta = timedelta(days=7)
    journal_max_bytes: int = 1_000_000_000
    #: type of the dead-letter queue; the work queue's type unless given
    dlq_type: Literal["quorum", "classic"] | None = None
    #: a dead letter of this lap or a later one is held: bulk operations leave it out
    max_laps: int = 3

    def __init__(
        self,
        name: str,
        delays: Iterable[str | timedelta],
        *,
        bindings: Iterable[WorkBinding] = (),
        queue_type: Literal["quorum", "classic"] = "quorum",
        crash_limit: int = DEFAULT_CRASH_LIMIT,
        journal: Literal["stream", "live"] = "stream",
        journal_max_age: str | timedelta = timedelta(days=7),
        journal_max_bytes: int = 1_000_000_000,
        dlq_type: Literal["quorum", "classic"] | None = None,
        max_laps: int = 3,
    ) -> None:
        put = object.__setattr__
        put(self, "name", name)
        put(self, "delays", checked_delays(delays))
        put(self, "bindings", tuple(bindings))
        put(self, "queue_type", queue_type)
        put(self, "crash_limit", crash_limit)
        put(self, "journal", journal)
        put(self, "journal_max_age", checked_duration("journal_max_age", journal_max_age))
        put(self, "journal_max_bytes", journal_max_bytes)
        put(self, "dlq_type", dlq_type)
        put(self, "max_laps", max_laps)
        self._check()

    def _check(self) -> None:
        check_word("queue_type", self.queue_type, QUEUE_TYPES)
        check_word("journal", self.journal, JOURNALS)
        if self.dlq_type is not None:
            check_word("dlq_type", self.dlq_type, QUEUE_TYPES)
        if self.name.startswith("amq."):
            raise ConfigurationError(f"name: {self.name!r} cannot name a queue; names starting 'amq.' are the broker's")
        check_name("name", self.name)
        check_range("crash_limit", self.crash_limit, 1, 1_000_000)
        check_range("max_laps", self.max_laps, 1, 1_000_000)
        check_range("journal_max_bytes", self.journal_max_bytes, 1_000_000, 2**62)
        if self.journal_max_age < timedelta(seconds=1):
            raise ConfigurationError("journal_max_age: a journal keeps at least one second")
        own = [exchange.name for exchange in self._exchanges() if not exchange.theirs]
        queues = [*(rung.queue for rung in self.rungs), self.lock_queue]
        for derived, most in (dict.fromkeys(own, MAX_EXCHANGE_BYTES) | dict.fromkeys(queues, MAX_NAME_BYTES)).items():
            if len(derived) > most:
                raise ConfigurationError(f"name: {derived!r}, derived from it, is longer than {most} bytes")
        for place, binding in enumerate(self.bindings):
            key = f"bindings[{place}]"
            check_word(f"{key}.type", binding.type, EXCHANGE_TYPES)
            if not binding.exchange:
                raise ConfigurationError(f"{key}.exchange: the default exchange takes no bindings")
            check_name(f"{key}.exchange", binding.exchange, MAX_EXCHANGE_BYTES)
            if binding.exchange in own:
                raise ConfigurationError(f"{key}.exchange: {binding.exchange!r} is this topology's own")
            if len(binding.key.encode()) > MAX_NAME_BYTES:
                raise ConfigurationError(f"{key}.key: longer than {MAX_NAME_BYTES} bytes")
            try:
                encode_value(binding.arguments)
            except WireError as error:
                raise ConfigurationError(f"{key}.arguments: {error}") from error

    # --- derived words

    @property
    def max_attempts(self) -> int:
        """One attempt more than there are rungs."""
        return len(self.delays) + 1

    @property
    def lap(self) -> timedelta:
        """How long all delays of one lap take together."""
        return sum(self.delays, timedelta())

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """The ladder, first rung first."""
        return tuple(
            Rung(number, delay, f"{self.name}.retry.{number}.{format_duration(delay)}")
            for number, delay in enumerate(self.delays, start=1)
        )

    @property
    def dead_exchange(self) -> str:
        """Every death of the work queue leaves through here."""
        return f"{self.name}.dead"

    @property
    def retry_exchange(self) -> str:
        """Picks the rung by routing key."""
        return f"{self.name}.retry"

    @property
    def first_exchange(self) -> str:
        """Takes the first failures: their key names no rung."""
        return f"{self.name}.retry.first"

    @property
    def ladder_exchange(self) -> str:
        """Carries the ladder's mark, and no message ever."""
        return f"{self.name}.retry.ladder"

    @property
    def ladder_mark(self) -> str:
        """The delays in one word: declaring another ladder over this one is an error, not two ladders at once."""
        return ".".join(format_duration(delay) for delay in self.delays)

    @property
    def return_exchange(self) -> str:
        """Brings a message back to the work queue."""
        return f"{self.name}.return"

    @property
    def dlx(self) -> str:
        """The dead-letter exchange that consumers park through."""
        return f"{self.name}.dlx"

    @property
    def dlq(self) -> str:
        """The dead-letter queue."""
        return f"{self.name}.dlq"

    @property
    def lock_queue(self) -> str:
        """The exclusive queue that the operator at work holds."""
        return f"{self.name}.dlq.lock"

    @property
    def lock_exchange(self) -> str:
        """Says in its arguments who holds the lock; short, because the broker cuts the answer that shows them."""
        name = self.lock_queue
        return name if len(name) <= 40 else f"dlq-lock.{hashlib.sha256(name.encode()).hexdigest()[:16]}"

    @property
    def journal_exchange(self) -> str:
        """Where events of the journal are published."""
        return f"{self.name}.journal"

    @property
    def journal_queue(self) -> str:
        """The stream that keeps them."""
        return f"{self.name}.journal"

    def rung_of(self, queue: str) -> Rung | None:
        """The rung whose queue this is, by its number: also a rung of an earlier ladder that still drains."""
        for rung in self.rungs:
            if rung.queue == queue:
                return rung
        match = re.match(rf"{re.escape(self.name)}\.retry\.([0-9]{{1,2}})\.", queue)
        return Rung(int(match[1]), timedelta(), queue) if match else None

    # --- what a broker has to hold

    def entities(self, version: Version) -> Entities:
        """The exchanges, queues and bindings for a broker of this version."""
        return Entities(self._exchanges(), self._queues(version), self._bindings(version))

    def outdated_bindings(self, version: Version) -> tuple[BindingEntity, ...]:
        """What an older broker needed and this one must not have: it may have been upgraded."""
        return () if version < _LAST_DEATH_SINCE else self._first_deaths()

    def _exchanges(self) -> tuple[ExchangeEntity, ...]:
        theirs = {
            binding.exchange: ExchangeEntity(binding.exchange, binding.type, theirs=True) for binding in self.bindings
        }
        return (
            ExchangeEntity(self.dlx, "fanout"),
            ExchangeEntity(self.ladder_exchange, "fanout", {"alternate-exchange": self.ladder_mark}),
            ExchangeEntity(self.first_exchange, "fanout"),
            ExchangeEntity(self.retry_exchange, "direct", {"alternate-exchange": self.first_exchange}),
            ExchangeEntity(self.dead_exchange, "headers", {"alternate-exchange": self.retry_exchange}),
            ExchangeEntity(self.return_exchange, "fanout"),
            ExchangeEntity(self.journal_exchange, "topic"),
            *theirs.values(),
        )

    def _queues(self, version: Version) -> tuple[QueueEntity, ...]:
        # Below 4.0 a limit of -1 is accepted and deletes on the first requeue; below 3.13 no limit may be set at all.
        unlimited = {"x-delivery-limit": -1} if version >= (4, 0) else {}
        at_least_once = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        quorum = self.queue_type == "quorum"
        dlq_type = self.dlq_type or self.queue_type
        work: dict[str, Any] = {"x-queue-type": self.queue_type, "x-dead-letter-exchange": self.dead_exchange}
        if quorum:
            work |= at_least_once
        if quorum and version >= (3, 13):
            work["x-delivery-limit"] = self.crash_limit + len(self.delays)
        queues = [QueueEntity(self.dlq, {"x-queue-type": dlq_type, **(unlimited if dlq_type == "quorum" else {})})]
        if self.journal == "stream":
            queues.append(QueueEntity(self.journal_queue, self._journal_arguments()))
        for rung in self.rungs:
            # static, not per message: messages expire at the head only, a short delay would wait behind a long one
            arguments: dict[str, Any] = {
                "x-queue-type": self.queue_type,
                "x-message-ttl": milliseconds(rung.delay),
                "x-dead-letter-exchange": self.return_exchange,
                "x-dead-letter-routing-key": rung.key,
            }
            queues.append(QueueEntity(rung.queue, arguments | ((at_least_once | unlimited) if quorum else {})))
        queues.append(QueueEntity(self.name, work))
        return tuple(queues)

    def _journal_arguments(self) -> dict[str, Any]:
        return {
            "x-queue-type": "stream",
            "x-max-age": f"{int(self.journal_max_age.total_seconds())}s",
            "x-max-length-bytes": self.journal_max_bytes,
            # retention drops whole segments: small ones let it follow the limits closely
            "x-stream-max-segment-size-bytes": min(50_000_000, self.journal_max_bytes // 2),
        }

    def _first_deaths(self) -> tuple[BindingEntity, ...]:
        """For brokers that put no header on a message that tells of its last death.

        A message that expires in the work queue would go up the ladder, and the broker drops what comes round without
        a rejection. It can expire there as its first death only: dying takes the expiration away.
        """
        return tuple(
            BindingEntity(
                self.dead_exchange,
                self.dlx,
                "exchange",
                arguments={"x-match": "all-with-x", "x-first-death-queue": self.name, "x-first-death-reason": reason},
            )
            for reason in _BROKERS_DEATHS
        )

    def _bindings(self, version: Version) -> tuple[BindingEntity, ...]:
        deaths = [("rejected", self.retry_exchange)] + [(reason, self.dlx) for reason in _BROKERS_DEATHS]
        ladder = [
            BindingEntity(self.retry_exchange, above.queue, "queue", rung.key)
            for rung, above in zip(self.rungs, self.rungs[1:], strict=False)
        ]
        journal = [BindingEntity(self.journal_exchange, self.journal_queue, "queue", "#")]
        return (
            BindingEntity(self.dlx, self.dlq, "queue"),
            *(journal if self.journal == "stream" else []),
            *(
                BindingEntity(
                    self.dead_exchange,
                    exchange,
                    "exchange",
                    arguments={"x-match": "all-with-x", "x-last-death-reason": reason},
                )
                for reason, exchange in deaths
            ),
            *(self._first_deaths() if version < _LAST_DEATH_SINCE else ()),
            BindingEntity(self.first_exchange, self.rungs[0].queue, "queue"),
            *ladder,
            BindingEntity(self.retry_exchange, self.dlx, "exchange", self.rungs[-1].key),
            BindingEntity(self.return_exchange, self.name, "queue"),
            *(
                BindingEntity(binding.exchange, self.name, "queue", binding.key, dict(binding.arguments))
                for binding in self.bindings
            ),
        )
