"""Middleware: API keys, requests of other sites, forms of paths, request ids. Source: wire_api section 1."""

from __future__ import annotations

import enum
import hmac
import ipaddress
import re
import uuid
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ebbtide.srt.entrypoints.http_answers import Json, error_answer
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.managers.io_struct import CONTROL_REQUESTS
from ebbtide.srt.server_args import ServerArgs, is_loopback


class Access(enum.Enum):
    """What a request may do: check the engine's health, use it, or change it."""

    OPEN = "open"
    NORMAL = "normal"
    CONTROL = "control"


# Pages contain no data of the engine: the dashboard gets its data from /dashboard/events.
_OPEN_PATHS: Final = frozenset(
    (
        *("/health", "/health_generate", "/liveness", "/ready", "/metrics", "/openapi.json"),
        *("/", "/docs", "/dashboard"),
    )
)
_NORMAL_PATHS: Final = frozenset(
    (
        *("/generate", "/inference/v1/generate", "/skyrl/v1/generate", "/tokenize", "/detokenize"),
        *("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/get_load", "/load"),
        *("/is_paused", "/is_sleeping", "/memory_occupation", "/weight_info", "/get_weight_version"),
        *("/get_world_size", "/version"),
    )
)


def access_of(path: str) -> Access:
    """The access that a path needs. Unlisted paths are control, even if they do not exist."""
    path = path.rstrip("/") or "/"
    if path in _OPEN_PATHS or path.startswith("/docs/"):
        return Access.OPEN
    return Access.NORMAL if path in _NORMAL_PATHS or path.startswith("/v1/") else Access.CONTROL


def required_key(args: ServerArgs, path: str) -> str | None:
    """The key that a request for this path must have; None: it needs none."""
    match access_of(path):
        case Access.OPEN:
            return None
        case Access.NORMAL:
            return args.api_key
        case Access.CONTROL:
            return args.admin_api_key if args.admin_api_key is not None else args.api_key


class _Middleware:
    """Base of the middleware. It handles HTTP requests only, and reads the service at each request."""

    def __init__(self, app: ASGIApp, service: EngineService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        layer = self._app if scope["type"] != "http" else self._pass
        await layer(scope, receive, send)

    @property
    def _args(self) -> ServerArgs:
        return self._service.config.server_args

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        raise NotImplementedError


class AccessCheck(_Middleware):
    """Rejects requests that are not allowed, before their bodies are read.

    401: the key is missing or wrong. 403: a browser sent the request for a page of another site. Such a page
    has no key, but it can reach this server whenever its browser can. `Origin` and `Sec-Fetch-Site` reveal
    it; with DNS rebinding, where the other site's name resolves to this server, `Host` does.
    """

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["path"] in _PROBES else _browser_refusal(scope, self._args)
        answer = refusal or _key_refusal(scope, self._args) or self._app
        await answer(scope, receive, send)


def _key_refusal(scope: Scope, args: ServerArgs) -> Json | None:
    path = scope["path"]
    key = required_key(args, path)
    if key is None or _brings(Headers(scope=scope), key):
        return None
    name = "API key" if key is args.api_key else "admin key"
    answer = error_answer(f"{path} needs the {name}: Authorization: Bearer KEY", 401)
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _brings(headers: Headers, key: str) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not scheme:
        # Anthropic's clients send the key so.
        scheme, given = "bearer", headers.get("x-api-key", "")
    # `compare_digest` takes only ASCII strings, so compare bytes. Headers are decoded as latin-1.
    is_same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    return is_same and scheme.lower() == "bearer"


# Sent with every answer, so that no page can embed this server's pages in a frame (clickjacking).
FRAMED_BY_NONE: Final = ("Content-Security-Policy", "frame-ancestors 'none'")

_REQUEST_ID: Final = "X-Request-Id"
_PROBES = frozenset({"/health", "/ready"})
# Control requests that SGLang's clients send by GET. They change something, unlike other GETs.
_ASKED_BY_GET = frozenset(kind.row.path for kind in CONTROL_REQUESTS if "GET" in kind.row.methods)


def _browser_refusal(scope: Scope, args: ServerArgs) -> Json | None:
    path, method, headers = scope["path"], scope["method"], Headers(scope=scope)
    is_asked_by_get = path in _ASKED_BY_GET and method != "POST"
    if is_asked_by_get and method == "HEAD":
        return error_answer(f"{path} does not take HEAD", 405)
    if required_key(args, path) is not None:
        # Another site's page does not know the key; whoever does may use any origin and host.
        return None
    allowed, host = [name.lower() for name in args.allowed_hosts or ()], headers.get("host", "")
    if _is_of_another_site(headers, allowed, is_asked_by_get=is_asked_by_get):
        return error_answer(
            f"{path}: a browser sent this for a page of another site; --allowed-hosts can name sites "
            "that may send POSTs",
            403,
        )
    # Off loopback, the server cannot know its own names. Without a key, its whole network is trusted anyway.
    is_any = "*" in allowed or (args.allowed_hosts is None and not is_loopback(args.host))
    if args.api_key is None and host and not is_any and not _is_own(host, [*allowed, args.host.lower()]):
        return error_answer(
            f"{path}: {host[:200]!r} is not a known name of this server, which has no key: start it with "
            "--api-key, or with its names as --allowed-hosts",
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
    # Over plain HTTP to another machine, browsers send neither header with a GET.
    return is_asked_by_get and headers.get("user-agent", "").startswith("Mozilla/")


def _is_own(host: str, allowed: Collection[str]) -> bool:
    """Whether a `Host` is safe from DNS rebinding: an IP address, localhost, or an allowed name."""
    name = _name_of(f"//{host}")
    if name in ("localhost", *allowed) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(url: str) -> str:
    """The host's name in a URL; "?" if it is not a URL."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return "?"


class OneSpelling(_Middleware):
    """Removes slashes at the end of a path: redirecting instead could lose the request's body.

    Also removes `--root-path` from the start, since not every proxy does. It runs before `AccessCheck`.
    """

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        root, path = self._args.root_path, scope["path"]
        if root and path == root and scope["method"] in ("GET", "HEAD"):
            # The page's links are relative, so its URL must end with a slash.
            await RedirectResponse(f"{root}/")(scope, receive, send)
            return
        path = path.removeprefix(root) if path.startswith(f"{root}/") else path
        await self._app({**scope, "path": path.rstrip("/") or "/"}, receive, send)


class RequestIds(_Middleware):
    """Adds the request's `X-Request-Id`, or a new one, to the answer. 400: the id is not printable ASCII."""

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._args.enable_request_id_headers:
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(_REQUEST_ID) or uuid.uuid4().hex
        if re.fullmatch(r"[ -~]{1,128}", request_id) is None:
            answer = error_answer(
                f"{_REQUEST_ID}: expected 1 to 128 printable ASCII characters, got {len(request_id)} "
                f"characters: {request_id[:128]!a}",
                400,
            )
            await answer(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
