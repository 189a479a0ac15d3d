"""Log lines of the command line: for people on a terminal, JSON lines for machines; always on stderr."""

import json
import logging
import sys
from typing import Any, Literal

import structlog
from pydantic_core import to_json

from rabbitdlq.errors import ConfigurationError

__all__ = ["LOG_FORMATS", "configure_logs"]

LOG_FORMATS = ("auto", "console", "json")


def _json(event: Any, **_: Any) -> str:
    """A third of what the standard library takes, which has the last word: a line of a log must never fail."""
    try:
        return to_json(event, fallback=repr).decode()
    except ValueError:  # bytes, or texts that are no UTF-8
        return json.dumps(event, default=repr, skipkeys=True)


def configure_logs(style: Literal["auto", "console", "json"] | str = "auto", level: str = "info") -> None:
    """Set structlog up for this process. ``auto`` is ``console`` on a terminal and ``json`` elsewhere.

    A program that uses rabbitdlq as a library configures structlog itself; this is for our own commands. Raises
    :class:`ConfigurationError` for a format or a level that is none.
    """
    if style not in LOG_FORMATS:
        raise ConfigurationError(f"log format: {style!r} is none of {', '.join(LOG_FORMATS)}")
    number = logging.getLevelNamesMapping().get(level.upper())
    if not number:
        raise ConfigurationError(f"log level: {level!r} is none of debug, info, warning, error, critical")
    # the client library logs every lost connection with a traceback; ours says the same in one line
    for name in ("aiormq", "aio_pika"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderers: list[structlog.types.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_json)]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # one write a line: several processes may share the terminal
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
