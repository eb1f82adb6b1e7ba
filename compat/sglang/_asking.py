"""Questions to servers that this package has started."""

from __future__ import annotations

import urllib.request
from typing import Any

# Straight to them: what the environment names as a proxy is for other traffic.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, api_key: str | None, body: bytes | None = None, timeout_s: float | None = None) -> bytes:
    """GET, or POST a body of JSON; the body of the answer.

    Args:
        timeout_s: for the connection, and for each wait after that; None: no limit.

    Raises:
        OSError: nobody listens, nothing comes in time, or the status is not 200.
    """
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    limit: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
    with _OPENER.open(urllib.request.Request(url, data=body, headers=headers), **limit) as answer:
        content: bytes = answer.read()
    return content
