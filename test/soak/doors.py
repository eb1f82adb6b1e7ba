"""The two doors of an engine: a server's, and `Engine`'s in this process."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
from fixtures.servers import running_server, url_of

from ebbtide import Engine
from ebbtide.srt.errors import RequestRejected

# Longer than any operation of the storm may take: a reply that has not come by then is a hang.
REPLY_TIMEOUT_S: Final = 120.0
MAX_TOTAL_TOKENS: Final = 16384


class Door(Protocol):
    """How clients reach the engine.

    Attributes:
        target: of a `WeightSender`.
        pid: of the process that the engine's others are children of.
    """

    target: Any
    pid: int

    async def call(self, name: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """The status of HTTP, and the reply, of a request that is known by this name. Raises OSError."""
        ...

    def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a generation; left early, it is aborted. Raises OSError or ValueError."""
        ...

    async def leave(self) -> None:
        """Close what is kept open for the next request, as a client that goes does."""
        ...


class HttpDoor:
    """A server at this address."""

    def __init__(self, url: str, pid: int) -> None:
        self.target = url
        self.pid = pid
        self._client = self._new_client()

    async def call(self, name: str, **body: Any) -> tuple[int, dict[str, Any]]:
        try:
            if name == "memory_occupation":
                response = await self._client.get(f"/{name}")
            else:
                response = await self._client.post(f"/{name}", json=body)
        except httpx.HTTPError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        try:
            return response.status_code, response.json()
        except ValueError:
            return response.status_code, {"success": response.status_code == 200, "text": response.text}

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        timeout = httpx.Timeout(None)
        body = body | {"stream": True}
        try:
            async with self._client.stream("POST", "/generate", json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    raise ValueError(f"{response.status_code} {(await response.aread())[:300]!r}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line[len("data: ") :])
        except httpx.HTTPError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    async def leave(self) -> None:
        await self._client.aclose()
        self._client = self._new_client()

    def _new_client(self) -> httpx.AsyncClient:
        limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(REPLY_TIMEOUT_S)
        # Proxies that the environment names are for other traffic.
        return httpx.AsyncClient(base_url=self.target, timeout=timeout, limits=limits, trust_env=False)


class EngineDoor:
    """An engine whose methods are called here."""

    def __init__(self, engine: Engine) -> None:
        self.target = engine
        self.pid = os.getpid()
        self._engine = engine

    async def call(self, name: str, **body: Any) -> tuple[int, dict[str, Any]]:
        if "serialized_named_tensors" in body:
            body["named_tensors"] = body.pop("serialized_named_tensors")
        if body.pop("report", None) is not None and not body.get("abort_all"):
            raise AssertionError("only an abort of all is reported")
        try:
            reply: dict[str, Any] = await getattr(self._engine, f"async_{name}")(**body)
        except RequestRejected as error:
            return error.status, {"success": False, "message": error.message}
        except Exception as error:
            return 500, {"success": False, "message": f"{type(error).__name__}: {error}"}
        return 200, reply

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(await self._engine.async_generate(**body, stream=True)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def leave(self) -> None:
        pass


@contextmanager
def open_door(args: argparse.Namespace, folder: Path) -> Iterator[Door]:
    """Start the engine on the tiny model."""
    if args.door == "engine":
        with Engine(
            model_path=str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="float32",
            device=args.device,
            max_total_tokens=MAX_TOTAL_TOKENS,
            log_level="warning",
        ) as engine:
            yield EngineDoor(engine)
        return
    flags = ("--skip-tokenizer-init", "--dtype", "float32", "--device", args.device, "--log-level", "warning")
    flags += ("--max-total-tokens", str(MAX_TOTAL_TOKENS), *args.server_flags)
    with running_server(folder / "model", *flags) as server:
        try:
            yield HttpDoor(url_of(server), server.process.pid)
        finally:
            if server.log:
                print(f"the end of the server's log:\n{server.log[-2000:]}", file=sys.stderr)
