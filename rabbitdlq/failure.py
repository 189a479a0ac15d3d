"""One failed attempt as a value: what went wrong, in words that fit on the wire."""

import hashlib
import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from rabbitdlq.texts import shorten

__all__ = ["Failure", "fingerprint", "inside"]

#: generous for people, small for a frame; the park's byte budget cuts further where it must
MESSAGE_BYTES = 4_000
TRACEBACK_BYTES = 12_000
#: of a group with very many exceptions so many are looked at, and so many different ones named
LOOKED_INTO, NAMED = 100, 10
#: whose classes are named without their module
_OWN_MODULES = {"builtins", "__main__", "rabbitdlq.errors"}

#: what a fingerprint looks at: of the text as it came, and of what is left of it
_LOOKED_AT, _KEPT = 4_000, 1_000
#: characters of a text up to which its fingerprint is remembered
_REMEMBERED = 300
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_DATE = rf"(?:\b{_DAY},?\s)?\b(?:\d{{1,2}}[\s-]{_MONTH}|{_MONTH}\s{{1,2}}\d{{1,2}}\b)(?:,?[\s-]\d{{4}}\b)?"
#: one second, two seconds: the number decides about the unit
_UNIT = r"GMT|UTC|AM|PM|(?:(?:milli|micro)?second|minute|hour|day|byte|attempt|time)s?|[kKMGT]i?B|ms|s"
#: of items.0.price it is the 0 only: the price is a name
_NUMBER = rf"[^\W\d]*\d(?:[\w-]|[.:,](?=\d))*%?(?:\s(?:{_UNIT})\b)?"
#: before a quoted word: the word is the program's own, and another one is another bug
_OWN_AFTER = (
    *("argument ", "argument: ", "arguments: ", "array key ", "attribute ", "column ", "constraint ", "field "),
    *("import name ", "invoke ", "message=", "module named ", "parameter ", "(reading ", "relation "),
)
#: and after it, or in it: 'NoneType' object has, 'price': ['This field is required.'], '404 Not Found'
_OWN_BEFORE = r"(?!\w{1,60}'(?:: \[| is not defined| is a required| object (?:has|is|does)\b)|\d{3} [A-Z])"


def _opening(quote: str, *own: str) -> str:
    """A quote that opens a value: not the one in "can't", and none that closes. The quote first: it is rare."""
    before = (r"\w", *(re.escape(word) for word in _OWN_AFTER), *own)
    return quote + "".join(f"(?<!{each}{quote})" for each in before)


#: what two texts of one bug differ in. No repetition inside another of the same characters, and none that begins anew
#: at every character without a bound: a long text costs time in proportion to its length
_VARIABLE = re.compile(
    "|".join(
        (
            _opening("'") + _OWN_BEFORE + r"[^'\n]*'(?!\w)",
            _opening('"', r"\d, ") + r"[^\"\n]*\"",  # database drivers put their text into (1054, "…")
            r"b(?<!\wb)(?:'[^'\n]*'|\"[^\"\n]*\")|`[^`\n]*`",
            r"[“„][^“”\n]{0,200}[“”]|«[^»\n]{0,200}»|\u2018[^\u2019\n]{0,200}\u2019(?!\w)",
            r"=\([^()\n]{0,200}\)|\[parameters: [^\n]*",  # PostgreSQL's Key (id)=(17), SQLAlchemy's values
            r"input_value=[^\n]{0,400}(?=, input_type=)",  # pydantic's
            r"\b[a-z][a-z0-9+.-]{1,15}://[^\s'\"<>()\[\],]+",  # URLs
            r"(?<![\w.+-])[\w.+-]{1,64}@\w[\w.-]*",  # mail addresses
            r"[/~](?<![\w/.][/~])(?:(?<=/)|(?<=~)/)[\w.@+%=-]+(?:~?/[\w.@+%=-]+)*/?",  # paths
            r"\b[A-Za-z]:\\[^\s'\"<>|*?]+",  # those of Windows
            _DATE,
            r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",  # UUIDs
            r"\[(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}\](?::\d{1,5})?",  # IPv6 addresses with a port
            r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])",  # without, MAC addresses, times
            r"(?<![\w+/=-])(?=[A-Za-z+/_=-]{0,60}\d)[\w+/=-]{20,}",  # tokens
            r"\b[0-9a-fA-F]{8,}\b",  # digests, also those without a digit
            rf"\b{_NUMBER}|[-+](?<![\w.][-+])\b{_NUMBER}",  # numbers, and ids with some
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
    def of(cls, error: BaseException | str, told: BaseException | None = None) -> "Failure":
        """From an exception, or from a text where there is none.

        Of a group with a single exception in it that one is told, with the group's traceback, which has both; a group
        with several names them. ``told`` says otherwise: the group itself, or what of it is told.
        """
        if isinstance(error, str):
            return cls("Error", shorten(error, MESSAGE_BYTES), None, fingerprint("Error", error))
        if told is None:
            alone = inside(error)
            told = alone[0] if len(alone) == 1 else error
        name, message = _name(told), _text(told)
        if isinstance(told, BaseExceptionGroup):
            errors = inside(told)
            message, mark = f"{message}: {_all_texts(errors)}", _common_fingerprint(name, errors)
        else:
            mark = fingerprint(name, message, _where(told))
        return cls(name, shorten(message, MESSAGE_BYTES), _traceback(error), mark)


def inside(error: BaseException, whole: Callable[[BaseException], bool] | None = None) -> list[BaseException]:
    """The exceptions of a group and of the groups in it, each once; of what is no group, itself.

    ``whole`` says of a group whether it stands for itself.
    """
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    found: dict[int, BaseException] = {}
    seen: set[int] = set()
    ahead: list[BaseException] = [error]
    while ahead:
        each = ahead.pop()
        if not isinstance(each, BaseExceptionGroup) or (whole is not None and whole(each)):
            found[id(each)] = each
        elif id(each) not in seen:
            seen.add(id(each))
            ahead.extend(reversed(each.exceptions))
    return list(found.values())


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ in _OWN_MODULES else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # a SystemExit out of here would end the consumer
        return f"(its text failed: {type(broken).__name__})"


def _all_texts(errors: Sequence[BaseException]) -> str:
    """What is in a group, in its order: the first is often the cause of the others."""
    times = Counter(_named(each) for each in errors[:LOOKED_INTO])
    told = list(times.items())[:NAMED]
    words = [text if count == 1 else f"{text} ({count} times)" for text, count in told]
    more = len(errors) - sum(count for _, count in told)
    return "; ".join([*words, f"and {more} more"] if more else words)


def _named(error: BaseException) -> str:
    text = shorten(_text(error), MESSAGE_BYTES // (NAMED + 1))
    return f"{_name(error)}: {text}" if text else _name(error)


def _common_fingerprint(kind: str, errors: Sequence[BaseException]) -> str:
    """The bug is what is in a group, however often, and in whatever order it was raised."""
    marks = {fingerprint(_name(each), _text(each), _where(each)) for each in errors[:LOOKED_INTO]}
    if len(marks) == 1:
        return marks.pop()
    return hashlib.sha256("\n".join([kind, *sorted(marks)]).encode()).hexdigest()[:16]


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
