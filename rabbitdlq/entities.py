"""What a broker is asked to hold: exchanges, queues and bindings as values, all durable."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["BindingEntity", "Entities", "ExchangeEntity", "QueueEntity"]


@dataclass(frozen=True, slots=True)
class ExchangeEntity:
    """An exchange to declare, durable. ``theirs``: of the application; an existing one is taken as it is."""

    name: str
    type: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    theirs: bool = False


@dataclass(frozen=True, slots=True)
class QueueEntity:
    """A queue to declare, durable."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class BindingEntity:
    """A binding from an exchange to a queue or to an exchange."""

    source: str
    destination: str
    destination_type: Literal["queue", "exchange"]
    routing_key: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Entities:
    """What one topology asks a broker of one version to hold, in an order in which it can be declared.

    The exchanges and the dead-letter queue come before the work queue: no moment exists in which a message could
    leave the work queue for nowhere.
    """

    exchanges: tuple[ExchangeEntity, ...]
    queues: tuple[QueueEntity, ...]
    bindings: tuple[BindingEntity, ...]
