"""One failed attempt as a value: what went wrong, in words that fit on the wire."""

import hashlib
import re
import traceback
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from rabbitdlq.texts import shorten

__all__ = ["Failure", "fingerprint"]

#: generous for people, small for a frame; the park's byte budget cuts further where it must
MESSAGE_BYTES = 4_000
TRACEBACK_BYTES = 12_000

#: what a fingerprint looks at: of the text as it came, and of what is left of it
_LOOKED_AT, _KEPT = 4_000, 1_000
#: characters of a text up to which its fingerprint is remembered
_REMEMBERED = 300
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_DATE = rf"(?:\b{_DAY},?\s)?\b(?:\d{{1,2}}[\s-]{_MONTH}|{_MONTH}\s{{1,2}}\d{{1,2}}\b)(?:,?[\s-]\d{{4}}\b)?"
#: what two texts of one bug differ in. No repetition inside another of the same characters, and none that begins anew
#: at every character without a bound: a long text costs time in proportion to its length
_VARIABLE = re.compile(
    "|".join(
        (
            r"(?<!\w)'[^'\n]*'(?!\w)|\"[^\"\n]*\"|`[^`\n]*`|“[^”\n]{0,200}”|«[^»\n]{0,200}»",  # not the one in "can't"
            r"\b[a-z][a-z0-9+.-]{1,15}://[^\s'\"<>()\[\],]+",  # URLs
            r"(?<![\w.+-])[\w.+-]{1,64}@\w[\w.-]*",  # mail addresses
            r"(?<![\w/.])(?:~?/[\w.@+%=-]+)+/?|\b[A-Za-z]:\\[^\s'\"<>|*?]+",  # paths
            _DATE,
            r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",  # UUIDs
            r"\[(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}\](?::\d{1,5})?",  # IPv6 addresses with a port
            r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])",  # without, MAC addresses, times
            r"(?<![\w+/=-])(?=[A-Za-z+/_=-]{0,60}\d)[\w+/=-]{20,}",  # tokens
            r"\b[0-9a-fA-F]{8,}\b",  # digests, also those without a digit
            r"(?:(?<![\w.])[-+])?\b\w*\d(?:[\w.:-]|,(?=\d))*%?(?:\s(?:GMT|UTC|AM|PM)\b)?",  # numbers, and ids with some
        )
    )
)
_KEY = re.compile(r"'[A-Za-z_]{1,60}'")
_SEVERAL = re.compile(r"#(?:[\s,;/|+-]{0,3}#)+")


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
        except BaseException as broken:  # a SystemExit out of here would end the consumer
            message = f"(its text failed: {type(broken).__name__})"
        return cls(
            type=name,
            message=shorten(message, MESSAGE_BYTES),
            traceback=_traceback(error),
            fingerprint=fingerprint(name, message, _where(error)),
        )


def _where(error: BaseException) -> str:
    """Module and function in which it was raised; no line, which moves with every release."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    if frames is None:
        return ""
    return f"{frames.tb_frame.f_globals.get('__name__')}.{frames.tb_frame.f_code.co_qualname}"


def _traceback(error: BaseException) -> str | None:
    if error.__traceback__ is None:
        return None
    try:
        text = _formatted(error)
    except Exception:
        return None
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= TRACEBACK_BYTES:
        return data.decode()
    # the end says where it broke and with what, the beginning only how it got there
    return "[cut]… " + data[-TRACEBACK_BYTES:].decode("utf-8", "ignore")


def _formatted(error: BaseException) -> str:
    """As :func:`traceback.format_exception` does it, with the frames from what is known.

    Formatting them costs more than everything else about a failure, and a bug fails in the same place each time.
    """
    parts: list[str] = []
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, BaseExceptionGroup | SyntaxError):
            return "".join(traceback.format_exception(error))  # these have more to show
        seen.add(id(each))
        own = _last_line(each)
        if each.__traceback__ is not None:
            own = _frames(tuple((frame.f_code, line) for frame, line in traceback.walk_tb(each.__traceback__))) + own
        parts.append(own)
        before = each.__cause__
        link = "The above exception was the direct cause of the following exception:"
        if before is None and not each.__suppress_context__:
            before, link = each.__context__, "During handling of the above exception, another exception occurred:"
        if before is not None and id(before) not in seen:
            parts.append(f"\n{link}\n\n")
        each = before
    return "".join(reversed(parts))


def _last_line(error: BaseException) -> str:
    """As :func:`traceback.format_exception_only`, which builds a whole traceback for it."""
    try:
        text = str(error)
    except BaseException:  # a SystemExit out of here would end the consumer
        text = None
    if text is None or getattr(error, "__notes__", None):
        return "".join(traceback.format_exception_only(error))
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in {"builtins", "__main__"}:
        name = f"{kind.__module__}.{name}"
    return f"{name}: {text}\n" if text else f"{name}\n"


@lru_cache(maxsize=500)
def _frames(place: tuple[tuple[CodeType, int], ...]) -> str:
    """The frames of a traceback, the last line of each without marks: they would differ from one error to the next."""
    summaries = [traceback.FrameSummary(code.co_filename, line, code.co_name) for code, line in place]
    return "".join(["Traceback (most recent call last):\n", *traceback.StackSummary.from_list(summaries).format()])


def fingerprint(kind: str, message: str, where: str = "") -> str:
    """Sixteen hex digits, the same for the same bug: blind to ids, numbers, dates, addresses, paths, quoted values.

    >>> fingerprint("KeyError", "no order 17 at 0x7f3a") == fingerprint("KeyError", "no order 18 at 0x7f3b")
    True
    """
    looked_at = message[:_LOOKED_AT]
    return (_known if len(looked_at) <= _REMEMBERED else _fingerprint)(kind, looked_at, where)


def _fingerprint(kind: str, message: str, where: str) -> str:
    # a missing key is the bug, unless it is a value
    words = message if kind == "KeyError" and _KEY.fullmatch(message) else _VARIABLE.sub("#", message)
    text = _SEVERAL.sub("#", words)
    # the cut comes after: where a text was cut must not depend on how long the numbers before were
    text = " ".join(text.split())[:_KEPT]
    return hashlib.sha256(f"{kind}\n{where}\n{text}".encode("utf-8", "backslashreplace")).hexdigest()[:16]


#: a message that fails again mostly says the same again: as many as may be on the ladder, of texts that are short
_known = lru_cache(maxsize=10_000)(_fingerprint)
