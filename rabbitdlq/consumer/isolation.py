"""How far a handler is kept away from everything else: on the event loop, in a thread, in a process."""

import importlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from rabbitdlq.consumer.attempt import Attempt, Handler, is_async
from rabbitdlq.consumer.classify import Classes, Classifier
from rabbitdlq.consumer.deadlines import Timeouts
from rabbitdlq.consumer.sizes import format_size, parse_size
from rabbitdlq.errors import ConfigurationError

__all__ = ["IsolatedIn", "Isolation", "abandoned_limit"]

#: ``async``: async handlers on the consumer's event loop, plain functions in a thread each. ``thread``: every handler
#: in a thread, an async one on an event loop of its own there. ``process``: every handler in a child process
IsolatedIn = Literal["async", "thread", "process"]
#: a child's Python takes more than that
LEAST_MEMORY = 32 * 2**20
#: handlers that did not end and were left to themselves, for each that may run at a time
ABANDONED_FACTOR = 2
ABANDONED_AT_LEAST = 10


def abandoned_limit(concurrency: int) -> int:
    """How many handlers may have been left to themselves and still run; each holds a thread, or what it waits for."""
    return max(ABANDONED_AT_LEAST, ABANDONED_FACTOR * concurrency)


@dataclass(frozen=True, slots=True)
class Isolation:
    """Where handlers run, and with how much memory."""

    where: IsolatedIn = "async"
    #: bytes that each child process may have for its own
    max_memory: int | None = None
    #: called in each child before anything else, for instance to set logging up
    child_setup: Callable[[], Any] | None = None

    @classmethod
    def of(
        cls, where: str | None, max_memory: str | int | None, child_setup: Callable[[], Any] | None = None
    ) -> "Isolation":
        """From what was given; raises :class:`ConfigurationError` for what is none or makes no sense."""
        if child_setup is not None and not callable(child_setup):
            raise ConfigurationError(f"child_setup: {child_setup!r} cannot be called")
        where = where or "async"
        if where not in get_args(IsolatedIn):
            raise ConfigurationError(f"isolation: {where!r} is none of {', '.join(get_args(IsolatedIn))}")
        size = None if max_memory is None else parse_size(max_memory)
        if size is not None:
            if where != "process":
                raise ConfigurationError(
                    f"max_memory: with isolation {where!r} handlers share the memory of this process; "
                    'it goes with isolation "process"'
                )
            if sys.platform != "linux":
                raise ConfigurationError("max_memory: only Linux keeps a process to such a limit; leave it out here")
            if size < LEAST_MEMORY:
                raise ConfigurationError(
                    f"max_memory: {size:,} bytes are less than the Python of a child takes; "
                    f"give at least {format_size(LEAST_MEMORY)}, and what the handler needs"
                )
        return cls(cast(IsolatedIn, where), size, child_setup)

    def attempt(self, handler: Handler, classes: Classes, payload_type: Any, timeouts: Timeouts) -> Attempt:
        """What runs the handler; raises :class:`ConfigurationError` where it cannot run like that."""
        classifier = Classifier(classes)
        if self.where != "process":
            return Attempt(handler, classifier, always_thread=self.where == "thread")
        is_async(handler)
        _check_importable("handler", handler)
        _check_importable("classify", dict(classes))
        _check_importable("payload_type", payload_type)
        _check_importable("child_setup", self.child_setup)
        try:
            pool = importlib.import_module("rabbitdlq.consumer.pool")
        except ModuleNotFoundError as error:
            if error.name != "pebble":
                raise
            raise ConfigurationError(
                'isolation: "process" needs pebble, which is not installed: pip install "rabbitdlq[process]"'
            ) from error
        # a payload that a validator made need not come out the same a second time: that one is sent
        attempt: Attempt = pool.ChildAttempt(
            handler, classes, timeouts, self.max_memory, self.child_setup, decodes=payload_type is None
        )
        return attempt


def _check_importable(name: str, value: Any) -> None:
    """A process is told a function or a class by its name, and imports it."""
    main = sys.modules.get("__main__")
    found = getattr(value, "__module__", None)
    if found == "__main__" and not (getattr(main, "__spec__", None) or getattr(main, "__file__", None)):
        raise ConfigurationError(
            f'{name}: {value!r} was typed in or read from stdin; for isolation "process" it has to be in a module'
        )
    try:
        pickle.dumps(value)
    except Exception as error:  # whatever __reduce__ of the user's classes raises
        raise ConfigurationError(
            f'{name}: {value!r} cannot be found by another process, as isolation "process" needs it ({error}); '
            "use what has a name at the top of a module: no lambda, nothing defined inside a function, no method of "
            "an object that cannot be pickled"
        ) from error
