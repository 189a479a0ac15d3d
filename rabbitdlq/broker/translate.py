"""From the client library's errors to ours: the only place that knows both."""

import asyncio
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import aiormq.exceptions as lower
import pamqp.exceptions
from yarl import URL

from rabbitdlq.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnavailable,
    EntityNotFound,
    PublishRefused,
    TopologyMismatch,
    Unroutable,
)

__all__ = ["LOWER_ERRORS", "Difference", "difference", "shown_url", "translate", "translated"]

#: everything that a call into the client library raises because of the broker, the network or a closed channel
LOWER_ERRORS = (
    lower.AMQPError,
    lower.ChannelInvalidStateError,
    pamqp.exceptions.PAMQPException,
    ConnectionError,
    TimeoutError,
    OSError,
    EOFError,
)

_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' for (?P<kind>queue|exchange) '(?P<name>.*)' in vhost '.*': "
    r"received (?P<received>.*) but current is (?P<current>.*)",
    re.DOTALL,
)
_TYPED = re.compile(r"(?:the value )?'(.*)'(?: of type '\w+')?")


class Difference(tuple[str, str, str]):
    """An argument's name, the value asked for and the value there is, out of the broker's 406."""

    __slots__ = ()


def difference(error: BaseException) -> Difference | None:
    """What differs, where ``error`` is the broker's refusal of a declaration with other arguments."""
    match = _INEQUIVALENT.search(str(error))
    if match is None:
        return None
    received, current = (_TYPED.sub(r"\1", match[part]) for part in ("received", "current"))
    return Difference((match["argument"], received, current))


def shown_url(url: str) -> str:
    """The URL without its password, and without the query, where client certificates and keys are named."""
    try:
        parsed = URL(url)
        return str((parsed.with_password("***") if parsed.password else parsed).with_query(None))
    except ValueError:
        return "(an unreadable URL)"


def translate(error: BaseException, what: str) -> BrokerError:  # noqa: PLR0911, PLR0912 - one case a kind of error
    """Our error for a lower one; ``what`` says what was being done."""
    text = _text(error)
    match error:
        case BrokerError():
            return error
        case lower.PublishError():
            return Unroutable(f"{what}: no queue took the message ({_returned(error)}); is the queue declared?")
        case lower.DeliveryError():
            return PublishRefused(f"{what}: the broker refused the message; is the queue full or unavailable?")
        case lower.ProbableAuthenticationError() | lower.AuthenticationError() | lower.ConnectionNotAllowed():
            return AccessDenied(f"{what}: {text}; check user, password, virtual host and permissions in the URL")
        case lower.ChannelAccessRefused():
            return AccessDenied(f"{what}: {text}; grant the permission, or use an account that has it")
        case lower.ChannelNotFoundEntity():
            return EntityNotFound(f"{what}: {text}; 'rabbitdlq topology apply' declares what is missing")
        case lower.ChannelPreconditionFailed() if difference(error):
            return TopologyMismatch(f"{what}: {text}")
        case lower.ChannelPreconditionFailed() | lower.ChannelLockedResource() | lower.DuplicateConsumerTag():
            return BrokerError(f"{what}: {text}")
        case lower.MethodNotImplemented():
            return BrokerError(f"{what}: the broker does not implement {text}")
        case ssl.SSLError():
            return BrokerUnavailable(f"{what}: TLS failed: {text}; check the certificate, the host name and the port")
        case asyncio.TimeoutError():
            return BrokerUnavailable(f"{what}: no answer in time")
        case lower.AMQPConnectionError() | ConnectionError() | OSError() | EOFError():
            return BrokerUnavailable(f"{what}: {text}")
        case lower.ChannelInvalidStateError():
            return BrokerUnavailable(f"{what}: the channel is closed")
        case lower.ChannelClosed():
            return BrokerError(f"{what}: {text}")
        case _:
            return BrokerUnavailable(f"{what}: {text or type(error).__name__}")


def _text(error: BaseException) -> str:
    cause = error.__cause__
    text = " ".join(str(part) for part in error.args if part not in (None, "")) if error.args else str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif isinstance(cause, OSError) and cause.strerror:
        text = cause.strerror
    return text or type(error).__name__


def _returned(error: lower.PublishError) -> str:
    frame = error.frame
    exchange = getattr(frame, "exchange", "") or "the default exchange"
    return f"{getattr(frame, 'reply_text', '')}: {exchange}, key {getattr(frame, 'routing_key', '')!r}"


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of the client library inside leave as ours, with ``what`` in front."""
    try:
        yield
    except LOWER_ERRORS as error:
        raise translate(error, what) from error
    except asyncio.CancelledError as error:
        # the library cancels its own calls when a channel or connection dies under them: that is not our cancellation
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BrokerUnavailable(f"{what}: the connection was lost") from error
