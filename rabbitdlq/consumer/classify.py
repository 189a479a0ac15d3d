"""What kind of failure an exception is: the handler's own word, or what the consumer was told of other people's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rabbitdlq.errors import ConfigurationError, Drop, External, Permanent, Transient

__all__ = ["UNKNOWN", "Classes", "Classifier", "Kind", "Rule"]

Kind = type[Transient] | type[External] | type[Permanent] | type[Drop]
_KINDS: tuple[Kind, ...] = (Transient, External, Permanent, Drop)


@dataclass(frozen=True, slots=True)
class Rule:
    """What is done about exceptions of one class."""

    kind: Kind
    #: fewer than the ladder has; with 1 the first failure parks it
    max_attempts: int | None = None
    #: somebody has named the class; it is not just an exception of which nothing is known
    known: bool = field(default=True, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        """Raises :class:`ConfigurationError` for what is no kind, or no number of attempts."""
        if self.kind not in _KINDS:
            raise ConfigurationError(
                f"classify: {self.kind!r} is none of {', '.join(kind.__name__ for kind in _KINDS)}"
            )
        if self.max_attempts is not None and (type(self.max_attempts) is not int or self.max_attempts < 1):
            raise ConfigurationError(f"classify: max_attempts {self.max_attempts!r} is no whole number above 0")


Classes = Mapping[type[BaseException], Kind | Rule]

#: what is done about exceptions of classes that nobody has named
UNKNOWN = Rule(Transient, known=False)


class Classifier:
    """Tells the kind of an exception: of the most specific class that is known of, transient where none is.

    What a handler raises of our own kinds, or of their subclasses, is what it says, unless that very class or a more
    specific one is mapped to something else.
    """

    def __init__(self, classes: Classes | None = None) -> None:
        """Raises :class:`ConfigurationError` naming what is no class of exceptions, or no kind."""
        self._rules: dict[type[BaseException], Rule] = {kind: Rule(kind) for kind in _KINDS}
        for error, kind in (classes or {}).items():
            if not (isinstance(error, type) and issubclass(error, BaseException)):
                raise ConfigurationError(f"classify: {error!r} is no class of exceptions")
            self._rules[error] = kind if isinstance(kind, Rule) else Rule(kind)
        self._known: dict[type[BaseException], Rule] = {}

    def rule_of(self, error: BaseException) -> Rule:
        """What is done about this exception."""
        kind = type(error)
        rule = self._known.get(kind)
        if rule is None:
            # in the order in which Python looks things up: the class itself, then its bases
            rule = next((self._rules[base] for base in kind.__mro__ if base in self._rules), UNKNOWN)
            if len(self._known) < 1_000:  # some libraries make their classes as they go
                self._known[kind] = rule
        return rule
