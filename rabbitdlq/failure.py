"""One failed attempt as a value: what went wrong, in words that fit on the wire."""

import hashlib
import re
import traceback
from dataclasses import dataclass

from rabbitdlq.wire import shorten

__all__ = ["Failure", "fingerprint"]

#: generous for people, small for a frame; the park's byte budget cuts further where it must
MESSAGE_BYTES = 4_000
TRACEBACK_BYTES = 12_000

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NUMBERS = re.compile(r"\b0x[0-9a-fA-F]+\b|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b\w*\d[\w.:-]*")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception's type, text, traceback and fingerprint. Texts are cut on a character and marked as cut."""

    type: str
    message: str
    traceback: str | None = None
    fingerprint: str = ""

    @classmethod
    def of(cls, error: BaseException | str) -> "Failure":
        """From an exception, or from a text where there is none."""
        if isinstance(error, str):
            return cls("Error", shorten(error, MESSAGE_BYTES), None, fingerprint("Error", error))
        name = type(error).__qualname__
        if type(error).__module__ not in {"builtins", "__main__", "rabbitdlq.errors"}:
            name = f"{type(error).__module__}.{name}"
        try:
            message = str(error)
        except Exception as broken:
            message = f"(its text failed: {type(broken).__name__})"
        frames = traceback.extract_tb(error.__traceback__)
        where = frames[-1].name if frames else ""
        return cls(
            type=name,
            message=shorten(message, MESSAGE_BYTES),
            traceback=_traceback(error),
            fingerprint=fingerprint(name, message, where),
        )


def _traceback(error: BaseException) -> str | None:
    if error.__traceback__ is None:
        return None
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:
        return None
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= TRACEBACK_BYTES:
        return data.decode()
    # the end says where it broke and with what, the beginning only how it got there
    return "[cut]… " + data[-TRACEBACK_BYTES:].decode("utf-8", "ignore")


def fingerprint(kind: str, message: str, where: str = "") -> str:
    """Sixteen hex digits, the same for the same bug: blind to ids, numbers, addresses and quoted values.

    >>> fingerprint("KeyError", "no order 17 at 0x7f3a") == fingerprint("KeyError", "no order 18 at 0x7f3b")
    True
    """
    text = _NUMBERS.sub("#", _QUOTED.sub("'#'", message[:2_000]))
    return hashlib.sha256(f"{kind}\n{where}\n{text}".encode("utf-8", "backslashreplace")).hexdigest()[:16]
