"""Keys: who may ask what. Source: wire_api section 1."""

from __future__ import annotations

import enum
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ebbtide.srt.entrypoints.http_answers import error_answer
from ebbtide.srt.managers.io_struct import CONTROL_REQUESTS
from ebbtide.srt.server_args import ServerArgs


class Access(enum.Enum):
    """What a request can do: tell whether the engine is well, use it, or change it."""

    OPEN = "open"
    NORMAL = "normal"
    CONTROL = "control"


_OPEN_PATHS = frozenset(
    {
        "/health",
        "/health_generate",
        "/liveness",
        "/ready",
        "/metrics",
        "/openapi.json",
        # Pages hold nothing of the engine: what the dashboard shows comes from /dashboard/events.
        "/",
        "/docs",
        "/dashboard",
    }
)
_NORMAL_PATHS = frozenset(
    {
        "/generate",
        "/inference/v1/generate",
        "/skyrl/v1/generate",
        "/tokenize",
        "/detokenize",
        "/model_info",
        "/get_model_info",
        "/server_info",
        "/get_server_info",
        "/get_load",
        "/is_paused",
        "/is_sleeping",
        "/weight_info",
        "/get_world_size",
        "/version",
        "/load",
        "/get_weight_version",
        "/memory_occupation",
        *(kind.row.path for kind in CONTROL_REQUESTS if not kind.row.is_admin),
    }
)


def access_of(path: str) -> Access:
    """Everything that is not known to be less is control, paths that do not exist included."""
    path = path.rstrip("/") or "/"
    if path in _OPEN_PATHS or path.startswith("/docs/"):
        return Access.OPEN
    return Access.NORMAL if path in _NORMAL_PATHS or path.startswith("/v1/") else Access.CONTROL


@dataclass(frozen=True)
class Keys:
    """The keys of a server. None: there is none."""

    api: str | None = field(repr=False)
    admin: str | None = field(repr=False)

    @classmethod
    def of(cls, args: ServerArgs) -> Self:
        return cls(args.api_key, args.admin_api_key)

    def required(self, access: Access) -> str | None:
        """The key that such a request must bring; None where it needs none."""
        match access:
            case Access.OPEN:
                return None
            case Access.NORMAL:
                return self.api
            case Access.CONTROL:
                return self.admin if self.admin is not None else self.api


class KeyCheck:
    """Answers 401 to a request without its key, before its body is read.

    Args:
        keys: asked for with each request: the application may be built before it has an engine.
    """

    def __init__(self, app: ASGIApp, keys: Callable[[], Keys]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            keys, path = self._keys(), scope["path"]
            key = keys.required(access_of(path))
            if key is not None and not _brings(Headers(scope=scope), key):
                name = "API key" if key is keys.api else "admin key"
                answer = error_answer(f"{path} needs the {name}: Authorization: Bearer KEY", 401)
                answer.headers["WWW-Authenticate"] = "Bearer"
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _brings(headers: Headers, key: str) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not scheme:
        # Anthropic's clients.
        scheme, given = "bearer", headers.get("x-api-key", "")
    # The comparison takes no text but ASCII, so it gets bytes. Headers are decoded as latin-1.
    is_same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    return is_same and scheme.lower() == "bearer"
