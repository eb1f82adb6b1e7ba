"""A client of a server, with the methods of `Engine`, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import httpx

from ebbtide.formats import request_body
from ebbtide.srt.entrypoints.engine_methods import EngineMethods
from ebbtide.srt.entrypoints.loop_thread import LoopThread, blocking, refuse_in_event_loop
from ebbtide.srt.errors import EngineDown, read_error
from ebbtide.srt.managers import io_struct

if TYPE_CHECKING:
    from ebbtide.trainer.payload_encoding import PayloadEncoder

DEFAULT_URL: Final = "http://127.0.0.1:30000"
# Limit for the connection only. Requests have limits of their own.
CONNECT_TIMEOUT_S: Final = 10.0


class ServerUnreachable(EngineDown):
    """No server answers at the URL, or the connection broke during an answer."""


class Client(EngineMethods):
    """A client of a running server, with the methods of `Engine`.

    Tensors of an update are sent through shared memory or GPU memory if the server is on this host, else in
    the request body.

    Methods raise RequestRejected if the server refuses, and nothing has changed; EngineError if the engine
    failed; and ServerUnreachable.

    Args:
        url: such as "http://127.0.0.1:30000".
        api_key: the key for generation; None: the server has none.
        admin_api_key: the key for control requests; None: `api_key`.

    Raises:
        ValueError: `url` is not an HTTP URL.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str | None = None, admin_api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        parsed = httpx.URL(self.url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"url: expected one such as {DEFAULT_URL}, got {url!r}")
        self._is_local = parsed.host in ("127.0.0.1", "localhost", "::1")
        self._keys = {False: api_key, True: admin_api_key or api_key}
        self._runner = LoopThread("client")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            # No proxy of the environment between this and a server on the same host.
            trust_env=not self._is_local,
        )
        self._finalizer = weakref.finalize(self, self._runner.end, self._http.aclose, lambda: None)

    async def async_metrics(self) -> dict[str, float]:
        from prometheus_client.parser import text_string_to_metric_families

        text = await self._runner.run(self._send("GET", "/metrics"))
        return {
            sample.name + _shown(sample.labels): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }

    async def async_tokenize(
        self, prompt: str | None = None, messages: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a text, or of a conversation in the chat template, up to the start of the answer.

        Args:
            prompt: a text.
            messages: a conversation, given instead: `{"role": …, "content": …}` of each turn.
        """
        given = {"prompt": prompt} if messages is None else {"messages": list(messages)}
        answer = await self._ask("/tokenize", given, is_admin=False)
        token_ids: list[int] = answer["tokens"]
        return token_ids

    async def async_pull_weights(
        self, source_dir: str, local_checkpoint_dir: str, target_version: int
    ) -> dict[str, Any]:
        """Prepare an update to a version that a trainer has published as deltas.

        Args:
            source_dir: folder with the folders of all versions.
            local_checkpoint_dir: folder to call `update_weights_from_disk` with next. Only a note is written
                there.
            target_version: the update applies all deltas from the serving version up to this one.

        Raises:
            RequestRejected: 400, a version is missing or not ready; 409, the serving version is another.
        """
        fields = {
            "source_dir": source_dir,
            "local_checkpoint_dir": local_checkpoint_dir,
            "target_version": target_version,
        }
        pulled: dict[str, Any] = await self._ask("/pull_weights", fields)
        return pulled

    async def async_events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The dashboard's events: its history, then each control operation, and a sample each second."""
        return self._runner.stream(self._events("GET", "/dashboard/events"))

    tokenize = blocking(async_tokenize)
    pull_weights = blocking(async_pull_weights)

    def events(self) -> Generator[dict[str, Any], None, None]:
        """As `async_events`, for a thread without a loop."""
        refuse_in_event_loop("async_events")
        return self._runner.iterate(self._events("GET", "/dashboard/events"))

    def close(self) -> None:
        self._finalizer()
        self.forget_mapped()

    def _end(self) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------- requests

    async def _generate(self, fields: Mapping[str, Any]) -> Any:
        given = {name: value for name, value in fields.items() if value is not None}
        if not given.get("stream"):
            return await self._ask("/generate", given, is_admin=False)
        return self._runner.stream(self._events("POST", "/generate", given, is_admin=False))

    async def _carry_out(self, kind: type[io_struct.ControlRequest], fields: Mapping[str, Any]) -> Any:
        row = kind.row
        assert row.path is not None, f"{kind.__name__} has no endpoint"
        given = {name: value for name, value in fields.items() if value is not None}
        if row.body_if is not None:
            given[row.body_if] = True
        return await self._ask(row.path, given)

    async def _transition(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = await self._ask("/transition", fields)
        return body

    async def _new_encoder(self) -> PayloadEncoder:
        from ebbtide.trainer.payload_encoding import PayloadEncoder, WholeEncoder
        from ebbtide.trainer.targets import devices_of

        args = await self.async_server_info()
        if not self._is_local or args["nnodes"] > 1:
            return WholeEncoder()
        ranks = (await self.async_memory_occupation())["ranks"]
        return PayloadEncoder(devices_of(ranks), args["tp_size"])

    async def _read(self, what: str, **query: Any) -> dict[str, Any]:
        path = "/v1/loads" if what == "loads" else f"/{what}"
        given = {name: value for name, value in query.items() if value is not None}
        asking = self._send("GET", path, params=given, is_admin=False)
        body: dict[str, Any] = json.loads(await self._runner.run(asking))
        return body

    async def _ask(self, path: str, fields: Mapping[str, Any], *, is_admin: bool = True) -> Any:
        body = await asyncio.to_thread(request_body, fields)
        return json.loads(await self._runner.run(self._send("POST", path, body, is_admin=is_admin)))

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        is_admin: bool = True,
    ) -> bytes:
        with self._explained():
            response = await self._http.request(
                method, path, content=body, params=params, headers=self._headers(is_admin)
            )
        _raise_for(response, response.content)
        return response.content

    async def _events(
        self, method: str, path: str, fields: Mapping[str, Any] | None = None, *, is_admin: bool = True
    ) -> AsyncGenerator[Any, None]:
        """Yield bodies of server-sent events up to `[DONE]`; of a GET, up to the end of the connection."""
        body = None if fields is None else request_body(fields)
        with self._explained():
            async with self._http.stream(
                method, path, content=body, headers=self._headers(is_admin)
            ) as response:
                if response.is_error:
                    _raise_for(response, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        return
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        status = event["error"].get("code", 500)
                        raise read_error(event, status, line, is_refusal=status < 500)
                    yield event
        if method != "GET":
            raise ServerUnreachable(f"the server at {self.url} went away in the middle of a stream")

    def _headers(self, is_admin: bool) -> dict[str, str]:
        key = self._keys[is_admin]
        authorization = {} if key is None else {"authorization": f"Bearer {key}"}
        return {"content-type": "application/json", **authorization}

    @contextlib.contextmanager
    def _explained(self) -> Generator[None, None, None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ServerUnreachable(
                f"no server answers at {self.url} ({error or 'no connection'}): "
                "is `ebbtide serve` running there?"
            ) from None
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(f"the server at {self.url} went away: {reason}") from None


def _raise_for(response: httpx.Response, content: bytes) -> None:
    if not response.is_error:
        return
    body = None
    with contextlib.suppress(ValueError):
        body = json.loads(content)
    status = response.status_code
    # A 5xx with Retry-After is a refusal; without, the engine is down for good.
    is_refusal = status < 500 or "retry-after" in response.headers
    otherwise = f"{response.url} answers {status}: {content[:200]!r}"
    raise read_error(body, status, otherwise, is_refusal=is_refusal)


def _shown(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
