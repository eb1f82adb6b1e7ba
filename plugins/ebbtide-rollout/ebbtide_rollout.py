"""An external rollout service for miles, in front of one server: versions from a folder, requests by HTTP.

    python -m ebbtide_rollout --engine http://127.0.0.1:30000 --versions /shared/weight-updates --port 8000

It updates the server to the newest version that the trainer has published, and answers requests that say
which versions they accept: `"weight_version": {"min_version": 3}` or `{"exact_version": 3}`. If another
version serves, the answer is 409, and the client tries again.
Source: miles, docs/advanced/disaggregated-rollout.md.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn
from ebbtide_versions import VersionedEngine, say_versions
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ebbtide.srt.weight_sync.published import INDEX

logger = logging.getLogger(__name__)

GENERATING: Final = ("/generate", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
LOOK_S: Final = 1.0


@dataclass(frozen=True)
class Version:
    """A version that a trainer has published."""

    version: int

    @property
    def identity(self) -> str:
        return f"weight_v{self.version:06d}"


@dataclass(frozen=True)
class _Manifest:
    ref: Version


@dataclass(frozen=True)
class Accepted:
    """The versions that a request accepts. None: no such limit."""

    min_version: int | None = None
    exact_version: int | None = None

    @classmethod
    def read(cls, given: object) -> Accepted:
        """Read a request's `weight_version`; None: any version is accepted. ValueError: it is malformed."""
        fields = {} if given is None else given
        if not isinstance(fields, dict) or fields.keys() - {"min_version", "exact_version"}:
            raise ValueError(f"weight_version: expected min_version or exact_version, got {given!r}"[:300])
        if any(value is not None and type(value) is not int for value in fields.values()):
            raise ValueError(f"weight_version: expected whole numbers, got {given!r}"[:300])
        return cls(**fields)

    def includes(self, version: int) -> bool:
        if self.exact_version is not None:
            return version == self.exact_version
        return self.min_version is None or version >= self.min_version

    def fields(self) -> dict[str, int]:
        """Fields of the request to the engine, which may serve another version by then."""
        if self.exact_version is not None:
            return {"exact_weight_version": self.exact_version}
        return {} if self.min_version is None else {"min_weight_version": self.min_version}


class RolloutService:
    """Updates an engine to the newest published version, and forwards requests that accept it.

    Args:
        versions: folder in which a trainer publishes `weight_vNNNNNN/`, each with its index written last.

    Attributes:
        applied: the serving version; None: not known yet.
        error: why a newer version was not applied; None: no error.
    """

    def __init__(self, engine: VersionedEngine, versions: Path) -> None:
        self._engine, self._versions = engine, versions
        self._http = httpx.AsyncClient(base_url=engine.base_url(), timeout=None, trust_env=False)
        self._wake = asyncio.Event()
        # Digests of the indices of versions, to notice if a version changes after it was published.
        self._published: dict[int, bytes] = {}
        self.applied: int | None = None
        self.error: str | None = None

    def application(self) -> Starlette:
        @asynccontextmanager
        async def following(_: Starlette) -> AsyncIterator[None]:
            task = asyncio.create_task(self._follow())
            yield
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await self._http.aclose()

        routes = [Route(path, self._generate, methods=["POST"]) for path in GENERATING]
        routes += [Route("/health", self._health), Route("/server_info", self._info)]
        return Starlette(
            routes=[*routes, Route("/wake", self._look_now, methods=["POST"])], lifespan=following
        )

    # ---------------------------------------------------------------------------------------------- versions

    async def _follow(self) -> None:
        while True:
            try:
                await self.catch_up()
                self.error = None
            except (RuntimeError, OSError, ValueError) as error:
                # The old weights keep serving. Try again: the trainer may still write, or publish more.
                if self.error != str(error):
                    logger.warning("version not applied: %s", error)
                self.error = str(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            self._wake.clear()

    async def catch_up(self) -> None:
        """Stage and commit the newest version, if it is newer than the serving one.

        Raises:
            RuntimeError: it cannot be applied to the serving version, or has changed since it was published.
        """
        serving, (newest, index) = await self._engine.served(), self._newest()
        known = self._published.setdefault(newest, index)
        ref = Version(newest)
        if known != index:
            raise RuntimeError(f"{ref.identity} was published twice, with different contents")
        if newest > serving:
            folder = self._versions / ref.identity
            await self._engine.stage(_Manifest(ref), str(folder))
            await self._engine.commit(ref)
            serving = await self._engine.served()
        self.applied = serving

    def _newest(self) -> tuple[int, bytes]:
        """The newest complete version, and a digest of its index; (0, b"") if there is none."""
        names = [folder.name for folder in self._versions.glob("weight_v*") if (folder / INDEX).is_file()]
        numbers = [int(name.removeprefix("weight_v")) for name in names if name[8:].isdecimal()]
        if not numbers:
            return 0, b""
        newest = max(numbers)
        index = (self._versions / Version(newest).identity / INDEX).read_bytes()
        return newest, hashlib.sha256(index).digest()

    # ---------------------------------------------------------------------------------------------- requests

    async def _generate(self, request: Request) -> Response:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("expected a JSON object")
            accepted = Accepted.read(body.pop("weight_version", None))
        except ValueError as error:
            return _refused(400, "BadRequestError", str(error))
        if body.get("stream"):
            return _refused(400, "BadRequestError", "stream: this service answers at the end")
        if self.applied is None or not accepted.includes(self.applied):
            return self._not_ready(accepted)
        if request.url.path.startswith("/v1/"):
            body["return_weight_versions"] = True
        sent = await self._http.post(
            request.url.path, json={**body, **accepted.fields()}, headers=_forwarded(request.headers)
        )
        if sent.status_code == 409 or (accepted.exact_version is not None and b'"stale"' in sent.content):
            # Another version was committed meanwhile: nothing was sampled, or a part by another version.
            return self._not_ready(accepted)
        if not sent.is_success:
            return Response(sent.content, sent.status_code, media_type=sent.headers.get("content-type"))
        answer = sent.json()
        for one in answer if isinstance(answer, list) else [answer]:
            say_versions(one)
        return JSONResponse(answer)

    def _not_ready(self, accepted: Accepted) -> Response:
        self._wake.set()
        target = accepted.min_version if accepted.exact_version is None else accepted.exact_version
        message = f"version {self.applied} serves, and the request accepts {accepted.fields() or 'any'}"
        more = {"target_version": target, "applied": self.applied, "retryable": True}
        return _refused(409, "WeightVersionNotReady", message, **more)

    async def _health(self, _: Request) -> Response:
        return JSONResponse(self._state(), 200 if self.applied is not None else 503)

    async def _info(self, _: Request) -> Response:
        return JSONResponse(self._state())

    async def _look_now(self, _: Request) -> Response:
        self._wake.set()
        return JSONResponse(self._state())

    def _state(self) -> dict[str, Any]:
        applied = None if self.applied is None else Version(self.applied).identity
        return {"ready": self.applied is not None, "applied": applied, "reason": self.error}


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name in ("authorization", "x-request-id")}


def _refused(status: int, kind: str, message: str, **more: Any) -> Response:
    headers = {"Retry-After": "1"} if status == 409 else None
    return JSONResponse({"error": {"type": kind, "message": message, **more}}, status, headers)


def main() -> None:
    parser = argparse.ArgumentParser(description="An external rollout service over one Ebbtide server.")
    parser.add_argument("--engine", required=True, help="URL of the server")
    parser.add_argument("--versions", required=True, type=Path, help="folder in which the trainer publishes")
    parser.add_argument(
        "--notes", help="folder on the server's host for notes (default: next to the versions)"
    )
    parser.add_argument("--admin-api-key", help="if the server has one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    notes = given.notes or str(given.versions / ".ebbtide")
    engine = VersionedEngine(given.engine, notes, admin_api_key=given.admin_api_key)
    service = RolloutService(engine, given.versions)
    uvicorn.run(service.application(), host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
