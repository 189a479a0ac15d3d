"""What is written of a key, a claim's token and a store's options."""

import hashlib
import re
import secrets
from datetime import timedelta

from rabbitdlq.errors import AlreadyDone, ConfigurationError
from rabbitdlq.limits import checked_duration

__all__ = [
    "DEFAULT_KEEP",
    "DEFAULT_NAMESPACE",
    "MAX_KEY_LENGTH",
    "NO_TRANSACTION",
    "check_recorded",
    "checked_namespace",
    "new_token",
    "span",
    "stored_key",
]

DEFAULT_NAMESPACE = "rabbitdlq"
DEFAULT_KEEP = timedelta(days=7)
#: longer keys are stored by their hash: ids of messages have up to 255 bytes, and keys of functions any length
MAX_KEY_LENGTH = 200

#: the mark would be committed by itself, with or without the work
NO_TRANSACTION = "record: no transaction is open; begin one, and do the work in it, too"

_HASHED = "sha256:"
_PLAIN = re.compile(rf"(?!{_HASHED})[ -~]{{1,{MAX_KEY_LENGTH}}}")
#: no colon: it ends the namespace in a Redis key
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LONGEST = timedelta(days=3650)


def stored_key(key: str) -> str:
    """The key as every store writes it: itself, where it is printable ASCII of at most 200 characters.

    Anything else is stored as ``sha256:`` and its hash in hexadecimal, and so is a key that begins like that, which
    could pass for another's hash. No two keys are stored alike. Raises :class:`ConfigurationError` for an empty key.

    >>> stored_key("orders:4711")
    'orders:4711'
    >>> stored_key("orders:Größe")[:20]
    'sha256:c6b098f51aec4'
    """
    if _PLAIN.fullmatch(key):
        return key
    if not key:
        raise ConfigurationError("idempotency: the key is empty; messages without an id need a function that makes one")
    # half a surrogate pair, as JSON can write one, is a text like any other here
    return _HASHED + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def checked_namespace(namespace: str) -> str:
    """The namespace; raises :class:`ConfigurationError` for one that no store can write."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigurationError(
            f"idempotency: namespace {namespace!r}: a namespace is made of 1 to 64 of a-z, A-Z, 0-9 and _ . -"
        )
    return namespace


def span(key: str, time: timedelta | str) -> int:
    """Whole milliseconds of a lease or of ``keep``, called ``key`` in errors; a fraction counts as a whole one.

    Raises :class:`ConfigurationError` for what is no duration, is not above zero, or is longer than ten years.
    """
    duration = checked_duration(f"idempotency: {key}", time)
    if not timedelta() < duration <= _LONGEST:
        raise ConfigurationError(f"idempotency: {key} is {duration}; it must be above zero and at most ten years")
    return -(-duration // timedelta(milliseconds=1))


def check_recorded(key: str, count: int) -> None:
    """Raises :class:`AlreadyDone` where recording the key changed no row."""
    if count == 0:
        raise AlreadyDone(f"{key!r} is done already; its work was committed before")


def new_token() -> str:
    """What tells a holder from all others; nobody can guess it."""
    return secrets.token_hex(16)
