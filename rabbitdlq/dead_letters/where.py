"""A condition on a dead letter as people write it: ``payload.customer.id == 42 and reason == 'exhausted'``.

Evaluated by simpleeval, an interpreter of Python's expression syntax; nothing is compiled or run by Python itself.
rule-engine was tried, too: it deprecates ``payload.customer`` on JSON objects in favour of brackets, has a language of
its own to be learnt, and takes 554 µs for such an access where simpleeval takes 14. The holes that simpleeval had were
in functions, modules and objects that it was given. Here it is given JSON and the functions below; a name after a dot
is a key and never an attribute, so that ``payload.items`` is the order's items, and only the methods below can be
called. Powers, shifts and formats are left out: they can eat all time or memory. So are regular expressions.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import translate
from functools import lru_cache
from typing import Any

from simpleeval import DEFAULT_OPERATORS, EvalWithCompoundTypes

from rabbitdlq.dead_letter import SHOWN_PROPERTIES, DeadLetter
from rabbitdlq.durations import parse_duration
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.wire import Properties

__all__ = ["NAMES", "Tally", "Where", "glob"]

#: beyond this it is no condition that a person writes
_LONGEST = 4_000
#: of a name like ``payload.customer.id`` that is told as one
_MOST_STEPS = 20


def _error(letter: DeadLetter) -> dict[str, str] | None:
    error = letter.error
    return None if error is None else {"type": error.type, "message": error.message, "fingerprint": error.fingerprint}


def _properties(properties: Properties) -> dict[str, Any]:
    return {name: getattr(properties, name) for name in SHOWN_PROPERTIES}


#: what a condition can ask for; each is read when it is asked for
NAMES: Mapping[str, Callable[[DeadLetter], Any]] = {
    "payload": lambda letter: letter.payload,
    "headers": lambda letter: letter.properties.table,
    "properties": lambda letter: _properties(letter.properties),
    "id": lambda letter: letter.id,
    "reason": lambda letter: letter.reason,
    "error": _error,
    "attempts": lambda letter: letter.attempts,
    "max_attempts": lambda letter: letter.max_attempts,
    "lap": lambda letter: letter.lap,
    "queue": lambda letter: letter.queue,
    "exchange": lambda letter: letter.exchange,
    "routing_key": lambda letter: letter.routing_key,
    "created_at": lambda letter: letter.created_at,
    "parked_at": lambda letter: letter.moved_to_dlq_at,
    "first_failed_at": lambda letter: letter.first_failed_at,
    "size": lambda letter: len(letter.body),
}
#: as JSON spells them
_CONSTANTS = {"null": None, "true": True, "false": False}


@lru_cache(maxsize=100)
def glob(pattern: str) -> re.Pattern[str]:
    """The pattern compiled: ``*`` is any text, ``?`` one character; brackets are brackets, as in "[Errno 2]"."""
    return re.compile(translate(pattern.replace("[", "[[]")))


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "all": all,
    "any": any,
    "float": float,
    "int": int,
    "len": len,
    "max": max,
    "min": min,
    "str": str,
    "ago": lambda text: datetime.now(UTC) - parse_duration(text),
    "glob": lambda text, pattern: glob(pattern).match(text) is not None,
    "time": _time,
}
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset({"endswith", "lower", "startswith", "strip", "upper"}),
    dict: frozenset({"get"}),
}
_SYNTAX = (
    *(ast.Expression, ast.Name, ast.Load, ast.Store, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice),
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.IfExp, ast.Compare, ast.cmpop),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Call, ast.List, ast.Tuple, ast.Set, ast.ListComp, ast.GeneratorExp, ast.comprehension),
)


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str):  # a format, which can ask for gigabytes
        raise TypeError("% is for numbers here")
    return left % right


class _Evaluator(EvalWithCompoundTypes):  # type: ignore[misc]
    """Evaluates conditions on JSON: a name after a dot is a key."""

    def __init__(self, tally: "Tally", dotted: Mapping[int, str]) -> None:
        super().__init__(
            operators=DEFAULT_OPERATORS | {ast.Mod: _remainder}, functions=dict(_FUNCTIONS), names=self._name
        )
        self.letter: DeadLetter | None = None
        self._tally = tally
        self._dotted = dotted
        self._known: dict[str, Any] = {}
        self.nodes |= {ast.Attribute: self._attribute, ast.Call: self._call}

    def test(self, text: str, tree: ast.expr, letter: DeadLetter) -> bool:
        self.letter, self._known = letter, {}
        return bool(self.eval(text, previously_parsed=tree))

    def _name(self, node: ast.Name) -> Any:
        name = node.id
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name not in self._known:
            if name not in NAMES or self.letter is None:
                raise LookupError(f"{name!r} is known inside its brackets only")
            self._known[name] = NAMES[name](self.letter)
        return self._known[name]

    def _attribute(self, node: ast.Attribute) -> Any:
        return self._asked(node, self._eval(node.value), node.attr)

    def _eval_subscript(self, node: ast.Subscript) -> Any:
        return self._asked(node, self._eval(node.value), self._eval(node.slice))

    def _asked(self, node: ast.expr, owner: Any, key: Any) -> Any:
        name = self._dotted.get(id(node))
        try:
            value = _item(owner, key)
        except LookupError:
            if name is not None:
                self._tally.absent.add(name)
            raise
        if name is not None:
            self._tally.present.add(name)
        return value

    def _call(self, node: ast.Call) -> Any:
        arguments = [self._eval(each) for each in node.args]
        if isinstance(node.func, ast.Name):
            return self.functions[node.func.id](*arguments)
        assert isinstance(node.func, ast.Attribute)
        owner, method = self._eval(node.func.value), node.func.attr
        kind = dict if isinstance(owner, Mapping) else type(owner)
        if method not in _METHODS.get(kind, ()):
            raise TypeError(f"{_kind(owner)} has no method {method}()")
        return getattr(owner, method)(*arguments)

    def _check_disallowed_items(self, item: Any) -> None:
        """Nothing that could be disallowed is within reach, and this would walk through every payload at each step."""


def _item(owner: Any, key: Any) -> Any:
    try:
        return owner[key]
    except KeyError:
        raise LookupError(f"no key {key!r}") from None
    except IndexError:
        raise LookupError(f"no item {key!r}") from None
    except TypeError:
        raise LookupError(f"no {key!r} in {_kind(owner)}") from None


def _kind(value: Any) -> str:  # noqa: PLR0911 - one return a type
    """What JSON calls it."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "an array"
        case Mapping():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


@dataclass(slots=True)
class Tally:
    """For how many letters a condition could not be evaluated."""

    failures: int = 0
    #: why not, for the first of them
    first_failure: str | None = None
    #: names like ``payload.customer.id`` that some letter was asked for and had, or did not have
    present: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)

    @property
    def unknown(self) -> list[str]:
        """Names that no letter had of those that were asked for them: they may be typos."""
        return sorted(self.absent - self.present)

    def add(self, why: str) -> None:
        """One more."""
        self.failures += 1
        self.first_failure = self.first_failure or why

    def reset(self) -> None:
        """Count anew: the same condition is used for another look."""
        self.failures, self.first_failure = 0, None
        self.present.clear()
        self.absent.clear()


class Where:
    """A condition that a dead letter can be asked; equal to another one of the same text.

    >>> Where("payload.customer.id == 42 and 'vip' in payload.tags").text
    "payload.customer.id == 42 and 'vip' in payload.tags"
    """

    def __init__(self, text: str) -> None:
        """Raises :class:`ConfigurationError` that names the place and the reason where it cannot be understood."""
        self.text = text
        #: letters for which it could not be evaluated; they do not match
        self.tally = Tally()
        self._tree = _parsed(text)
        self._evaluator = _Evaluator(self.tally, _dotted(self._tree))

    def matches(self, letter: DeadLetter) -> bool:
        """Whether it holds; no, and counted in :attr:`tally`, where it cannot be evaluated for this letter."""
        try:
            return self._evaluator.test(self.text, self._tree, letter)
        except RecursionError:
            self.tally.add("nested too deeply")
        except Exception as error:  # whatever a foreign payload and a condition do to each other
            self.tally.add(str(error) or type(error).__name__)
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Where) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Where({self.text!r})"


def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise ConfigurationError(f"where: {len(text):,} characters are too many; at most {_LONGEST:,}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        # at the end of the text it tells no place
        at = (error.offset or len(text.strip()) + 1) - 1
        _refuse(text, at, f"{error.msg}{'; equality is ==' if text.strip()[at : at + 1] == '=' else ''}")
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"where: {text[:80]!r} cannot be read: {error}") from None
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        _check(text, node, bound, is_called=id(node) in called)
    return tree.body


def _dotted(tree: ast.expr) -> dict[int, str]:
    """The nodes that ask for a key of a letter by its name, each with what it asks for."""
    found: dict[int, str] = {}
    for node in ast.walk(tree):
        inner, steps = node, 0
        while steps < _MOST_STEPS and (
            isinstance(inner, ast.Attribute)
            or (isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant))
        ):
            inner, steps = inner.value, steps + 1
        if steps and isinstance(inner, ast.Name) and inner.id in NAMES:
            found[id(node)] = ast.unparse(node)
    return found


def _check(text: str, node: ast.AST, bound: set[str], *, is_called: bool) -> None:
    at = getattr(node, "col_offset", 0)
    match node:
        case ast.Name(id=name) if is_called and name not in _FUNCTIONS:
            _refuse(text, at, f"there is no function {name}(); there are {', '.join(sorted(_FUNCTIONS))}")
        case ast.Name(id=name) if not is_called and name not in NAMES and name not in _CONSTANTS and name not in bound:
            _refuse(text, at, f"there is no {name!r}; there are {', '.join(NAMES)}")
        case ast.Call(func=func, keywords=keywords) if keywords or not isinstance(func, ast.Name | ast.Attribute):
            _refuse(text, at, "only functions and methods can be called, without named arguments")
        case ast.Attribute(attr=name) if is_called and not any(name in known for known in _METHODS.values()):
            known = ", ".join(sorted(name for names in _METHODS.values() for name in names))
            _refuse(text, at, f"there is no method {name}(); there are {known}")
        case ast.comprehension(is_async=1):
            _refuse(text, at, "'async' cannot be used here")
        case _ if not isinstance(node, _SYNTAX):
            _refuse(text, at, f"{type(node).__name__} cannot be used here")


def _refuse(text: str, at: int, why: str) -> Any:
    shown = text.strip()
    raise ConfigurationError(f"where: {shown!r}, column {at + 1}: {why}")
