"""The URL of a server, checked and shown without its password."""

from urllib.parse import SplitResult, urlsplit

from rabbitdlq.errors import ConfigurationError

__all__ = ["needs_extra", "server_name"]


def server_name(url: str, form: str, schemes: tuple[str, ...]) -> str:
    """The URL as it can be shown: without password and query. ``form`` tells how to write one.

    Raises :class:`ConfigurationError` for what cannot be meant; its text shows nothing of the URL but the scheme, for
    any part of it may be of a password.
    """
    try:
        parts = urlsplit(url)
        shown = _shown(parts)
        # in a password, / ? # and @ end it early, and what follows is read as something else
        sound = parts.scheme in schemes and parts.netloc.count("@") < 2 and "@" not in parts.path + parts.fragment
    except ValueError:  # a port that is no number, or brackets that enclose no address
        sound = False
    if not sound:
        scheme = url.partition(":")[0] if ":" in url else schemes[0]
        raise ConfigurationError(
            f"idempotency: the {scheme} URL cannot be read; write {form}, "
            "with characters like / @ # : of a password as %2F %40 %23 %3A"
        )
    return shown


def needs_extra(name: str) -> ConfigurationError:
    """The error for a store whose client library is not installed."""
    return ConfigurationError(f"idempotency: a {name} store needs more packages: pip install rabbitdlq[{name}]")


def _shown(parts: SplitResult) -> str:
    user = f"{parts.username}@" if parts.username else ""
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{user}{f'[{host}]' if ':' in host else host}{port}{parts.path}"
