"""Every error that a caller can meet. This module imports nothing of ours but how durations are written.

::

    RabbitDLQError
    ├── ConfigurationError            a topology, setting or argument that cannot be used (exit code 2)
    │   └── ReadOnly                  a change was asked for where only looking is allowed
    ├── BrokerError                   the broker said no, or nothing (exit code 1)
    │   ├── BrokerUnavailable         cannot connect, or the connection was lost
    │   ├── AccessDenied              credentials, virtual host or permission
    │   ├── EntityNotFound            a queue or exchange is missing
    │   ├── TopologyMismatch          an entity exists with other arguments
    │   ├── Unroutable                a mandatory publish reached no queue
    │   ├── PublishRefused            the broker nacked a publish or closed the channel over it
    │   └── PublishUnconfirmed        no confirm before the deadline: it may or may not have arrived
    ├── DeadLetterError
    │   ├── DeadLetterNotFound        no dead letter has that id
    │   ├── AmbiguousDeadLetter       several have it
    │   ├── ArchiveError              an archive file cannot be written, or a line of it is broken
    │   ├── DeadLettersInUse          another operator holds the dead-letter queue
    │   └── RunNotFound               the journal knows of no such run
    ├── LocalBrokerError              the private node cannot be installed, started or stopped
    ├── HandlersAbandoned             too many handlers did not end when they had to
    ├── IdempotencyError              the store of what was done cannot be reached, or refuses
    ├── AlreadyDone                   raised by ``record`` in a handler: this message's work was committed before
    ├── Transient                     raised by handlers: try again
    │   └── RetryAfter                ... not before some time has gone by
    ├── External                      raised by handlers: a provider answered with an error; try again
    ├── Permanent                     raised by handlers: do not try again, park now
    └── Drop                          raised by handlers: nobody needs this message
"""

from datetime import timedelta
from typing import ClassVar

from rabbitdlq.durations import parse_duration

__all__ = [
    "AccessDenied",
    "AlreadyDone",
    "AmbiguousDeadLetter",
    "ArchiveError",
    "BrokerError",
    "BrokerUnavailable",
    "ConfigurationError",
    "DeadLetterError",
    "DeadLetterNotFound",
    "DeadLettersInUse",
    "Drop",
    "EntityNotFound",
    "External",
    "HandlersAbandoned",
    "IdempotencyError",
    "LocalBrokerError",
    "Permanent",
    "PublishRefused",
    "PublishUnconfirmed",
    "RabbitDLQError",
    "ReadOnly",
    "RetryAfter",
    "RunNotFound",
    "TopologyMismatch",
    "Transient",
    "Unroutable",
]


class RabbitDLQError(Exception):
    """The root of every error of this package. ``str()`` of it says what is wrong, where, and what to do."""

    #: what a command ends with that cannot go on
    exit_code: ClassVar[int] = 1


class ConfigurationError(RabbitDLQError):
    """A topology, a setting or an argument that cannot be used; names the file, the key and the reason."""

    exit_code = 2


class ReadOnly(ConfigurationError):
    """A change was asked for where only looking is allowed."""


class BrokerError(RabbitDLQError):
    """The broker refused, or did not answer."""


class BrokerUnavailable(BrokerError):
    """No connection could be made, or the one there was is gone."""


class AccessDenied(BrokerError):
    """The account may not do this: wrong credentials, no such virtual host, or a missing permission."""


class EntityNotFound(BrokerError):
    """A queue or an exchange that is needed does not exist."""


class TopologyMismatch(BrokerError):
    """A queue or an exchange exists with other arguments than the topology asks for. Nothing was changed."""


class Unroutable(BrokerError):
    """A mandatory publish reached no queue: the broker returned the message."""


class PublishRefused(BrokerError):
    """The broker nacked a publish, or closed the channel over it. The message was not taken."""

    #: it was nacked, since a queue is full or has no leader: the same may be taken later
    later = False


class PublishUnconfirmed(BrokerError):
    """No confirm came before the deadline or before the connection was lost: the message may have arrived or not."""


class DeadLetterError(RabbitDLQError):
    """An operation on dead letters that cannot be done."""


class DeadLetterNotFound(DeadLetterError):
    """No dead letter in the queue has that id."""


class AmbiguousDeadLetter(DeadLetterError):
    """Several dead letters have that id; one of them has to be named by its park id."""


class ArchiveError(DeadLetterError):
    """An archive file that cannot be written, or a broken line of one. Names the file, the line and the reason."""


class RunNotFound(DeadLetterError):
    """The journal knows of no run with that id."""


class DeadLettersInUse(DeadLetterError):
    """Another operator is looking at, replaying or dropping the same dead letters."""


class LocalBrokerError(RabbitDLQError):
    """The private RabbitMQ node could not be installed, started or stopped."""


class HandlersAbandoned(RabbitDLQError):
    """So many handlers did not end when they had to that the process is better started anew."""


class IdempotencyError(RabbitDLQError):
    """The store of what was done cannot be reached, or refuses; whether it took the last word to it is not known."""


class AlreadyDone(RabbitDLQError):
    """Raised by ``record`` in a handler: this message's work was committed before. Roll back; the message is done."""


class Transient(RabbitDLQError):
    """Raised by a handler: it may go better the next time. So is every exception that is not known to be another."""


class RetryAfter(Transient):
    """Raised by a handler: try again, and wait at least so long. The attempt counts as any other.

    The message waits on the ladder's next rung that is slow enough, or on the slowest one ahead where none is; also
    while the breaker is open, and then it spends no attempt. A subclass whose constructor does not call this one, and
    sets no ``delay``, asks for no wait: it is :class:`Transient`.
    """

    def __init__(self, delay: timedelta | str | float, message: str = "") -> None:
        """``delay``: a timedelta, a text like ``"30s"``, or seconds as in the ``Retry-After`` of HTTP.

        Raises :class:`ConfigurationError` for anything else; in a handler that is a failure like any other.
        """
        try:
            self.delay = timedelta(seconds=delay) if isinstance(delay, int | float) else parse_duration(delay)
        except (ValueError, OverflowError) as error:  # no duration; nan or inf
            raise ConfigurationError(f"RetryAfter: delay: {error}") from error
        super().__init__(message or f"not before {self.delay.total_seconds():g} s have gone by")


class External(RabbitDLQError):
    """Raised by a handler: a service that it depends on answered with an error, or not at all. Tried again."""


class Permanent(RabbitDLQError):
    """Raised by a handler: trying again is pointless, park the message now."""


class Drop(RabbitDLQError):
    """Raised by a handler: nobody needs this message any more. It is acknowledged, and the journal has the reason."""
