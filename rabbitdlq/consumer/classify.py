"""What kind of failure an exception is: the handler's own word, or what the consumer was told of other people's."""

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from rabbitdlq.errors import ConfigurationError, Drop, External, Permanent, RetryAfter, Transient
from rabbitdlq.failure import inside

__all__ = ["OUTAGE", "UNKNOWN", "Classes", "Classifier", "Kind", "Rule", "asked_wait"]

Kind = type[Transient] | type[External] | type[Permanent] | type[Drop]
_KINDS: tuple[Kind, ...] = (Transient, External, Permanent, Drop)
_TRIED_AGAIN = (Transient, External)
#: what says by itself that something outside is out of order, also as the cause of another exception
_SIGNS = (ConnectionError, TimeoutError, socket.gaierror)
#: exceptions of one chain that are looked at
_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Rule:
    """What is done about exceptions of one class."""

    kind: Kind
    #: fewer than the ladder has; with 1 the first failure parks it. Only for what is tried again
    max_attempts: int | None = None
    #: the breaker counts it: somebody has named the class, or it says by itself that something outside is out of order
    known: bool = field(default=True, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        """Raises :class:`ConfigurationError` for what is no kind, or no number of attempts."""
        if self.kind not in _KINDS:
            raise ConfigurationError(
                f"classify: {self.kind!r} is none of {', '.join(kind.__name__ for kind in _KINDS)}"
            )
        if self.max_attempts is not None and (type(self.max_attempts) is not int or self.max_attempts < 1):
            raise ConfigurationError(f"classify: max_attempts {self.max_attempts!r} is no whole number above 0")
        if self.max_attempts is not None and self.kind not in _TRIED_AGAIN:
            raise ConfigurationError(
                f"classify: max_attempts {self.max_attempts!r} with {self.kind.__name__}, which is never tried again: "
                "leave it out"
            )


Classes = Mapping[type[BaseException], Kind | Rule]

#: what is done about exceptions of classes that nobody has named
UNKNOWN = Rule(Transient, known=False)
#: and of those where a connection failed or something did not answer in time
OUTAGE = Rule(Transient)


class Classifier:
    """Tells the kind of an exception: of the most specific class that is known of, transient where none is.

    What a handler raises of our own kinds, or of their subclasses, is what it says, unless that very class or a more
    specific one is mapped to something else. A group, as :class:`asyncio.TaskGroup` raises it, is what is in it, unless
    the class of the group is mapped: the one exception that it has, or of several the kind that loses least: what is
    tried again before Permanent, and Drop only where each is one.
    """

    def __init__(self, classes: Classes | None = None) -> None:
        """Raises :class:`ConfigurationError` naming what is no class of exceptions, or no kind."""
        self._rules: dict[type[BaseException], Rule] = {kind: Rule(kind) for kind in _KINDS}
        for error, kind in (classes or {}).items():
            if not (isinstance(error, type) and issubclass(error, BaseException)):
                raise ConfigurationError(f"classify: {error!r} is no class of exceptions")
            self._rules[error] = kind if isinstance(kind, Rule) else Rule(kind)
        self._known: dict[type[BaseException], Rule] = {}

    def inside(self, error: BaseException) -> list[BaseException]:
        """What counts of it: itself, or what is in a group that stands for nothing else."""
        return inside(error, self._stands_for_itself)

    def rule_of(self, error: BaseException) -> Rule:
        """What is done about this exception."""
        rules = [self._of_class(type(each)) for each in self.inside(error)]
        if all(rule is UNKNOWN for rule in rules):
            return OUTAGE if self._tells_of_an_outage(error) else UNKNOWN
        return _loses_least(rules)

    def _of_class(self, kind: type[BaseException]) -> Rule:
        rule = self._known.get(kind)
        if rule is None:
            # in the order in which Python looks things up: the class itself, then its bases
            rule = next((self._rules[base] for base in kind.__mro__ if base in self._rules), UNKNOWN)
            if len(self._known) < 1_000:  # some libraries make their classes as they go
                self._known[kind] = rule
        return rule

    def _stands_for_itself(self, group: BaseException) -> bool:
        """Whether its class is known of as a group, or as one of our kinds, and not as any exception there is."""
        return any(base in self._rules for base in type(group).__mro__ if base not in (Exception, BaseException))

    def _tells_of_an_outage(self, error: BaseException) -> bool:
        """Whether it, or what led to it, is a sign of one. What somebody says is pointless or needless is none."""
        seen: set[int] = set()
        ahead = [error]
        while ahead and len(seen) < _LOOKED_AT:
            each = ahead.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            group = isinstance(each, BaseExceptionGroup) and not self._stands_for_itself(each)
            if not group and self._of_class(type(each)).kind not in _TRIED_AGAIN:
                continue
            if isinstance(each, _SIGNS):
                return True
            # httpcore, and so httpx, hides what it met with "from None", and has it in the arguments
            made_of = each.args[:_LOOKED_AT] if isinstance(each.args, tuple) else ()
            led_to = (each.__cause__, None if each.__suppress_context__ else each.__context__, *made_of)
            ahead += [one for one in led_to if isinstance(one, BaseException)]
            if isinstance(each, BaseExceptionGroup):
                ahead += each.exceptions[:_LOOKED_AT]
        return False


def asked_wait(errors: Iterable[BaseException]) -> timedelta | None:
    """The longest that these asked to wait; a :class:`RetryAfter` that does not say how long asks for nothing."""
    waits = [getattr(each, "delay", None) for each in errors if isinstance(each, RetryAfter)]
    return max((wait for wait in waits if isinstance(wait, timedelta)), default=None)


def _loses_least(rules: Sequence[Rule]) -> Rule:
    """Of exceptions that were raised together: one too many attempts costs less than a message that nobody sees."""
    if len(rules) == 1:
        return rules[0]
    again = [rule for rule in rules if rule.kind in _TRIED_AGAIN]
    if not again:
        return Rule(Permanent if any(rule.kind is Permanent for rule in rules) else Drop)
    most = [rule.max_attempts for rule in again if rule.max_attempts is not None]
    return Rule(
        External if any(rule.kind is External for rule in again) else Transient,
        max(most) if len(most) == len(again) else None,
        known=any(rule.known for rule in again),
    )
