"""The management HTTP API, as far as it is needed: importing definitions.

See https://www.rabbitmq.com/docs/management#http-api.
"""

from collections.abc import Mapping
from typing import Any

import httpx

from rabbitdlq.broker import shown_url
from rabbitdlq.errors import AccessDenied, BrokerError, BrokerUnavailable, ConfigurationError

__all__ = ["import_definitions"]

TIMEOUT_SECONDS = 30.0


def import_definitions(url: str, definitions: Mapping[str, Any]) -> None:
    """Load definitions into the broker, as its management UI's import does.

    What exists already is skipped by the broker without a word, so check afterwards. Raises :class:`AccessDenied` for
    an account that may not, :class:`BrokerUnavailable` where nothing answers, :class:`ConfigurationError` for a URL
    that is none, and :class:`BrokerError` with the broker's reason.
    """
    shown = shown_url(url)
    try:
        address = httpx.URL(url)
        user, password = address.username, address.password
        # a proxy in front may serve the API below a path of its own
        path = f"{address.path.rstrip('/')}/api/definitions"
        bare = address.copy_with(username=None, password=None, path=path, query=None)
        answer = httpx.post(bare, json=dict(definitions), auth=(user, password), timeout=TIMEOUT_SECONDS)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigurationError(
            f"management URL: {shown!r}: {error}; write http://user:password@host:15672"
        ) from error
    except httpx.HTTPError as error:
        raise BrokerUnavailable(f"management API at {shown}: {error or type(error).__name__}") from error
    if answer.status_code in (401, 403):
        raise AccessDenied(f"management API at {shown}: the account may not import definitions (it needs a tag)")
    if not answer.is_success:
        raise BrokerError(f"management API at {shown}: {answer.status_code} {answer.text[:300]}")
