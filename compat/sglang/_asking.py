"""HTTP requests to servers that this package has started."""

from __future__ import annotations

import urllib.request
from typing import Any

# Without the proxies of the environment, since the servers are local.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, api_key: str | None, body: bytes | None = None, timeout_s: float | None = None) -> bytes:
    """Send a POST request with a JSON body, or a GET request without; returns the answer's body.

    Args:
        timeout_s: limit of the connection, and of each wait for data; None: no limit.

    Raises:
        OSError: no connection, a timeout, or an HTTP error.
    """
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    limit: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
    with _OPENER.open(urllib.request.Request(url, data=body, headers=headers), **limit) as answer:
        content: bytes = answer.read()
    return content
