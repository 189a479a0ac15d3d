"""What is published for a dead letter: back to its work queue, somewhere else, or as it is into another queue."""

from dataclasses import dataclass
from datetime import timedelta

from rabbitdlq.broker import Outgoing
from rabbitdlq.dead_letters.browse import Held
from rabbitdlq.limits import checked_duration
from rabbitdlq.parking import quick_replay_properties, replay_properties, restored_properties
from rabbitdlq.wire import Properties

__all__ = ["Canary", "Target", "outgoing_move", "outgoing_replay"]

#: of a message whose properties are known by their bytes only
_UNREAD = Properties()


@dataclass(frozen=True, slots=True)
class Target:
    """Where replayed letters are published to."""

    exchange: str
    routing_key: str

    @classmethod
    def of_queue(cls, name: str) -> "Target":
        """A queue itself, past every exchange that siblings listen to."""
        return cls("", name)

    @property
    def queue(self) -> str | None:
        """The queue that is meant; None where an exchange decides."""
        return None if self.exchange else self.routing_key

    def __str__(self) -> str:
        if self.exchange:
            return f"exchange {self.exchange!r}, key {self.routing_key!r}"
        return f"queue {self.routing_key!r}"


@dataclass(frozen=True, slots=True)
class Canary:
    """Replay a few first, and go on only if few enough of them fail again."""

    count: int
    #: for each of them to succeed or fail
    wait: timedelta
    #: of those sent, from 0 to 1
    abort_above: float

    def __init__(self, count: int = 20, wait: timedelta | str = timedelta(minutes=2), abort_above: float = 0.1) -> None:
        """``wait``: a timedelta, or a text like ``"2m"``; raises :class:`ConfigurationError` for what is none."""
        put = object.__setattr__
        put(self, "count", count)
        put(self, "wait", checked_duration("canary: wait", wait))
        put(self, "abort_above", abort_above)


def outgoing_replay(held: Held, target: Target | None) -> Outgoing:
    """The message that goes back to work; to the queue that the letter failed in unless a target is given."""
    traits = held.traits
    exchange, key = (target.exchange, target.routing_key) if target else ("", traits.queue)
    if traits.plain:
        encoded = quick_replay_properties(held.encoded, traits.lap, traits.key)
        return Outgoing(exchange, key, held.body, _UNREAD, encoded, traits.id)
    properties = replay_properties(held.letter)
    return Outgoing(exchange, key, held.body, properties, None, properties.message_id)


def outgoing_move(held: Held, queue: str) -> Outgoing:
    """The letter as it is, for another queue."""
    properties = restored_properties(held.wire, held.traits.id)
    return Outgoing("", queue, held.body, properties, None, properties.message_id)
