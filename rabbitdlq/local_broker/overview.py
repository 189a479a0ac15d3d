"""What a node's management API says of itself; asked with the standard library, as everything here."""

import base64
import http.client
import json
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["overview"]


def overview(url: str, timeout: float) -> dict[str, Any] | None:
    """The answer to ``/api/overview`` for the account in the URL, within so many seconds; None where there is none."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    account = base64.b64encode(f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()).decode()
    try:
        connection.request("GET", "/api/overview", headers={"Authorization": f"Basic {account}"})
        answer = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        # not listening, or not able to answer
        return None
    finally:
        connection.close()
    return answer if isinstance(answer, dict) else None
