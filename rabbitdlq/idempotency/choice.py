"""The store that a URL names."""

from datetime import timedelta

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.idempotency.keys import DEFAULT_KEEP, DEFAULT_NAMESPACE
from rabbitdlq.idempotency.memory import MemoryStore
from rabbitdlq.idempotency.postgres import PostgresStore
from rabbitdlq.idempotency.redis import RedisStore
from rabbitdlq.idempotency.sqlite import SQLiteStore
from rabbitdlq.idempotency.store import IdempotencyStore

__all__ = ["store_of"]


def store_of(url: str, *, namespace: str = DEFAULT_NAMESPACE, keep: timedelta | str = DEFAULT_KEEP) -> IdempotencyStore:
    """The store, not yet open: ``memory:``, ``sqlite:path/to/file.db``, ``redis://...``, ``rediss://...``,
    ``postgresql://...``.

    Raises :class:`ConfigurationError` for any other text, and where what the store needs is not installed.
    """
    scheme, _, rest = url.partition(":")
    match scheme:
        case "memory" if url == "memory:":
            return MemoryStore(namespace=namespace, keep=keep)
        case "sqlite" if rest:
            # other programs write sqlite:///relative.db and sqlite:////absolute.db
            return SQLiteStore(rest.removeprefix("///"), namespace=namespace, keep=keep)
        case "redis" | "rediss":
            return RedisStore(url, namespace=namespace, keep=keep)
        case "postgresql" | "postgres":
            return PostgresStore(url, namespace=namespace, keep=keep)
    # the text may be a URL with a password whose beginning is mistyped
    shown = f" {scheme}:" if rest and scheme.isalpha() else ""
    raise ConfigurationError(
        f"idempotency: the store{shown} is none of memory:, sqlite:path/to/file.db, redis://host:6379/0, "
        "rediss://host:6379/0 and postgresql://host:5432/database"
    )
