"""From the client library's errors to ours: the only place that knows both."""

import asyncio
import errno
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

__all__ = [
    "AT_BEHIND_HOST",
    "LOWER_ERRORS",
    "Difference",
    "cancelled_by_us",
    "difference",
    "nacked",
    "shown_url",
    "translate",
    "translated",
    "unroutable",
]

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
_INEQUIVALENT_CUT = re.compile(r"inequivalent arg '(?P<argument>[^']+)' for (?:queue|exchange) ")
#: in whatever text an error below may have put a URL
_PASSWORD = re.compile(r"(?<=://)([^\s/@:]*):[^\s/]*@")
#: a password with a character that ends it early: what was to be the host follows behind the @
AT_BEHIND_HOST = re.compile(r"://[^/?#]*[/?#].*@")
_TYPED = re.compile(r"(?:the value )?'(.*?)'(?: of type '\w+')?", re.DOTALL)


class Difference(tuple[str, str, str]):
    """An argument's name, the value asked for and the value there is, out of the broker's 406."""

    __slots__ = ()


def difference(error: BaseException) -> Difference | None:
    """What differs, where ``error`` is the broker's refusal of a declaration with other arguments."""
    text = str(error)
    match = _INEQUIVALENT.search(text)
    if match is not None:
        received, current = (_untyped(match[part]) for part in ("received", "current"))
        return Difference((match["argument"], received, current))
    # the broker cuts its answer at 255 bytes, and long names and arguments leave no room for both values
    match = _INEQUIVALENT_CUT.search(text)
    return (
        Difference((match["argument"], "as the topology says", "something else, which does not fit")) if match else None
    )


def _untyped(text: str) -> str:
    match = _TYPED.fullmatch(text)
    if match:
        return match[1]
    # cut by the broker: what is left must not pass for a whole value
    return text.removeprefix("the value ").lstrip("'").removesuffix("...") + "…" if text.endswith("...") else text


def shown_url(url: str) -> str:
    """The URL without its password, and without the query, where client certificates and keys are named."""
    if AT_BEHIND_HOST.search(url):
        return "(a URL with an @ behind the host)"
    try:
        parsed = URL(url)
        if "@" in url and parsed.user is None and parsed.password is None:  # without a scheme it is read as a path
            return f"***@{url.rpartition('@')[2].partition('?')[0]}"
        return str((parsed.with_password("***") if parsed.password else parsed).with_query(None))
    except ValueError:
        return "(an unreadable URL)"


def translate(error: BaseException, what: str) -> BrokerError:  # noqa: PLR0911, PLR0912 - one case a kind of error
    """Our error for a lower one; ``what`` says what was being done."""
    if isinstance(error.__cause__, lower.ConnectionClosed):
        error = error.__cause__  # the broker's own words, in the wrapping of the library's frame reading
    text = _PASSWORD.sub(r"\1:***@", _text(error))
    match error:
        case BrokerError():
            return error
        case lower.PublishError():
            return unroutable(what)
        case lower.DeliveryError():
            return nacked(what)
        case lower.ProbableAuthenticationError() | lower.AuthenticationError() | lower.ConnectionNotAllowed():
            return AccessDenied(f"{what}: {text.rstrip('.')}; check user, password and virtual host in the URL")
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
        case _ if tls := _tls_error(error):
            return BrokerUnavailable(f"{what}: TLS failed: {_tls_reason(tls)}")
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


def unroutable(what: str) -> Unroutable:
    """The error of a publish that came back."""
    return Unroutable(
        f"{what}: no queue took the message; 'rabbitdlq topology apply' declares the queues and bindings of the"
        " topology file"
    )


def nacked(what: str) -> PublishRefused:
    """The error of a publish that the broker answered with a nack."""
    error = PublishRefused(f"{what}: the broker refused the message; is the queue full or unavailable?")
    error.later = True
    return error


def _text(error: BaseException) -> str:
    cause = error.__cause__
    text = " ".join(str(part) for part in error.args if part not in (None, "")) if error.args else str(error)
    for system in (error, cause):
        # the library's errors are OSErrors too, with whatever they were given as "strerror"
        if isinstance(system, OSError) and isinstance(system.strerror, str) and system.strerror:
            if system.errno == errno.ECONNREFUSED:
                return "connection refused; does the broker run, and is the port right?"
            return system.strerror
    return text or type(error).__name__


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """The failed handshake; the library hides it behind an error of its own."""
    return next((each for each in (error, error.__cause__) if isinstance(each, ssl.SSLError)), None)


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in error.verify_message:
            return f"the broker's certificate is for another host: {error.verify_message}"
        return (
            f"the broker's certificate is not trusted: {error.verify_message}; name its authority's certificate with "
            "?cafile=/path/ca.pem at the end of the URL"
        )
    reason = getattr(error, "reason", None)
    if reason == "WRONG_VERSION_NUMBER":
        return "what listens on that port does not speak TLS; the usual port for amqps:// is 5671"
    return f"{reason or error}; check the certificates and the port"


def cancelled_by_us() -> bool:
    """Whether somebody asked this very task to end, and not the library what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of the client library inside leave as ours, with ``what`` in front."""
    try:
        yield
    except LOWER_ERRORS as error:
        raise translate(error, what) from error
    except asyncio.CancelledError as error:
        # the library cancels its own calls when a channel or connection dies under them: that is not our cancellation
        if cancelled_by_us():
            raise
        raise BrokerUnavailable(f"{what}: the connection was lost") from error
