"""Pages of other sites, for which a browser would ask this server. Source: wire_api section 1."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ebbtide.srt.entrypoints.auth import Keys, access_of
from ebbtide.srt.entrypoints.http_answers import Json, error_answer
from ebbtide.srt.managers.io_struct import CONTROL_REQUESTS
from ebbtide.srt.server_args import ServerArgs, is_loopback

# Sent with every answer: no page shows another one of this server within itself.
FRAMED_BY_NONE: Final = ("Content-Security-Policy", "frame-ancestors 'none'")

_PROBES = frozenset({"/health", "/ready"})
# SGLang's clients ask for these by GET, which should change nothing.
_ASKED_BY_GET = frozenset(kind.row.path for kind in CONTROL_REQUESTS if "GET" in kind.row.methods)


class BrowserCheck:
    """Answers 403 to what a browser sends for the page of another site, whose user has not asked for it.

    Such a page has no key, but reaches whatever its browser does: this machine, its network. Its requests
    say where they come from, unless the name of its own site leads here (DNS rebinding): then `Host` says it.

    Args:
        args: of the server, asked for with each request: the application may be built before the engine.
    """

    def __init__(self, app: ASGIApp, args: Callable[[], ServerArgs]) -> None:
        self._app = app
        self._args = args

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _PROBES:
            refusal = _refusal(scope, self._args())
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(scope: Scope, args: ServerArgs) -> Json | None:
    path, method, headers = scope["path"], scope["method"], Headers(scope=scope)
    is_asked_by_get = path in _ASKED_BY_GET and method != "POST"
    if is_asked_by_get and method == "HEAD":
        return error_answer(f"{path} does not take HEAD", 405)
    if Keys.of(args).required(access_of(path)) is not None:
        # A page does not know the key: who does may come from anywhere, and by any name.
        return None
    allowed, host = [name.lower() for name in args.allowed_hosts or ()], headers.get("host", "")
    if _is_of_another_site(headers, allowed, is_asked_by_get=is_asked_by_get):
        return error_answer(
            f"{path}: a browser asks this for the page of another site; --allowed-hosts names those that may "
            "send a POST",
            403,
        )
    # Nobody knows all names of a node or a service: whoever reaches one without a key was said to be trusted.
    is_any = "*" in allowed or (args.allowed_hosts is None and not is_loopback(args.host))
    if args.api_key is None and host and not is_any and not _is_own(host, [*allowed, args.host.lower()]):
        return error_answer(
            f"{path}: this server has no key and is not known as {host[:200]!r}: give it an --api-key, or "
            "its names by --allowed-hosts",
            403,
        )
    return None


def _is_of_another_site(headers: Headers, allowed: Collection[str], *, is_asked_by_get: bool) -> bool:
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and _name_of(origin) in allowed:
        return False
    if site is not None:
        # "none": the user typed the address.
        return site not in ("same-origin", "none")
    if origin is not None:
        return origin.partition("://")[2] != headers.get("host")
    # Over plain HTTP to another machine a browser says neither of a GET.
    return is_asked_by_get and headers.get("user-agent", "").startswith("Mozilla/")


def _is_own(host: str, allowed: Collection[str]) -> bool:
    """Whether this cannot be a name that somebody else has lead to this server."""
    name = _name_of(f"//{host}")
    if name in ("localhost", *allowed) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(url: str) -> str:
    """The name of the host in a URL; of what is none, a name that nobody has."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return "?"
