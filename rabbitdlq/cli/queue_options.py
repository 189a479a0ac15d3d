"""Options that may be told for each queue: ``--concurrency 10 --concurrency payments=4``."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from rabbitdlq.errors import ConfigurationError

__all__ = ["count", "per_queue"]

T = TypeVar("T")


def per_queue(
    option: str, texts: Sequence[str] | None, queues: Sequence[str], parse: Callable[[str, str], T]
) -> dict[str, T]:
    """What was told, by queue: ``QUEUE=VALUE`` is for that queue, a ``VALUE`` alone for all others.

    ``parse`` is given the option's name and the value. Raises :class:`ConfigurationError` for a queue that is not
    consumed, and for what is told twice.
    """
    others: list[T] = []
    told: dict[str, T] = {}
    for text in texts or ():
        queue = next((queue for queue in queues if text.startswith(f"{queue}=")), None)
        if queue is None and "=" in text:
            name = text.partition("=")[0]
            raise ConfigurationError(f"{option}: {name!r} is not consumed here; there are: {', '.join(queues)}")
        value = parse(option, text if queue is None else text[len(queue) + 1 :])
        if queue is None and not others:
            others.append(value)
        elif queue is not None and queue not in told:
            told[queue] = value
        else:
            raise ConfigurationError(f"{option}: told twice for {'all queues' if queue is None else repr(queue)}")
    return {queue: told.get(queue, *others) for queue in queues if queue in told or others}


def count(option: str, text: str) -> int:
    """A whole number above 0; raises :class:`ConfigurationError`."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0):
        raise ConfigurationError(f"{option}: {text!r} is no whole number above 0")
    return int(text)
