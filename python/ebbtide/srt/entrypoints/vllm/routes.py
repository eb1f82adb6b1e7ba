"""The routes of vLLM's dialect, over the same control requests as SGLang's. Source: wire_vllm section 1."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ebbtide import __version__
from ebbtide.srt.entrypoints.http_answers import Json, error_answer
from ebbtide.srt.entrypoints.metrics import Metrics
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm import parameters as kinds
from ebbtide.srt.entrypoints.vllm.generate import TokensApi
from ebbtide.srt.entrypoints.vllm.information import VLLM_VERSION
from ebbtide.srt.entrypoints.vllm.occupation import Body, VllmOccupation
from ebbtide.srt.entrypoints.vllm.remote_calls import RemoteCalls
from ebbtide.srt.entrypoints.vllm.weight_transfer import VllmWeightTransfer
from ebbtide.srt.errors import RequestRejected

P = TypeVar("P", bound=Struct)
Endpoint = Callable[[Request], Awaitable[Response]]

# Paths of vLLM, and of servers made of it, that this version does not have.
NOT_IMPLEMENTED = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/skyrl/v1/load_lora_adapter",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/init_broadcaster",
    "/receive_weight_update",
    "/fetch_weights",
)


class Nothing(Struct, kw_only=True):
    """No parameters."""


class VllmApi:
    """What is behind vLLM's routes."""

    def __init__(self, service: EngineService, metrics: Metrics) -> None:
        self._service = service
        self._occupation = VllmOccupation(service.control, lambda: service.state)
        self._weights = VllmWeightTransfer(service.control, lambda: service.state, self._num_ranks)
        self._calls = RemoteCalls(
            service.control, self._weights, lambda: service.config.model.path, self._num_ranks
        )
        self._tokens = TokensApi(service, metrics)

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each; every path also with a slash at its end."""
        occupation, weights = self._occupation, self._weights
        routes: list[tuple[str, str, Endpoint]] = [
            ("POST", "/pause", _taking(kinds.PauseParameters, occupation.pause)),
            ("POST", "/resume", _plain(occupation.resume)),
            ("GET", "/is_paused", _plain(self._is_paused)),
            ("POST", "/sleep", _taking(kinds.SleepParameters, occupation.sleep)),
            ("POST", "/wake_up", _taking(kinds.WakeUpParameters, occupation.wake_up)),
            ("GET", "/is_sleeping", _plain(self._is_sleeping)),
            ("POST", "/release_kv_cache_memory", _plain(occupation.release_kv_cache)),
            (
                "POST",
                "/reset_prefix_cache",
                _taking(kinds.ResetCacheParameters, occupation.reset_prefix_cache),
            ),
            ("POST", "/reset_mm_cache", _plain(_nothing_to_do)),
            ("POST", "/reset_encoder_cache", _plain(_nothing_to_do)),
            ("POST", "/abort_requests", _taking(kinds.AbortParameters, occupation.abort)),
            ("POST", "/inference/v1/abort_requests", _taking(kinds.AbortParameters, self._abort_named)),
            ("POST", "/init_weight_transfer_engine", _taking(kinds.InitParameters, weights.init)),
            ("POST", "/shutdown_weight_transfer_engine", _plain(weights.shutdown)),
            ("POST", "/start_weight_update", _taking(kinds.StartParameters, weights.start)),
            ("POST", "/start_draft_weight_update", _plain(_no_draft_model)),
            ("POST", "/update_weights", _taking(kinds.UpdateParameters, weights.update)),
            ("POST", "/finish_weight_update", _taking(kinds.FinishParameters, weights.finish)),
            ("POST", "/weight_checker", _taking(kinds.CheckerParameters, weights.check)),
            ("GET", "/weight_info", _plain(self._weight_info)),
            ("GET", "/get_world_size", _taking(kinds.WorldSizeParameters, self._world_size)),
            ("POST", "/collective_rpc", _taking(kinds.RpcParameters, self._calls.call)),
            ("GET", "/version", _plain(self._version)),
            ("GET", "/load", _plain(self._load)),
            ("GET", "/liveness", _plain(self._liveness)),
            ("POST", "/inference/v1/generate", _refusing(self._tokens.generate)),
            ("POST", "/skyrl/v1/generate", _refusing(self._tokens.generate)),
            *(("POST", path, _not_implemented) for path in NOT_IMPLEMENTED),
        ]
        return [(method, path + end, endpoint) for method, path, endpoint in routes for end in ("", "/")]

    def _num_ranks(self) -> int:
        return self._service.config.parallel.num_ranks

    async def _is_paused(self) -> Body:
        return {"is_paused": self._occupation.is_paused or self._occupation.is_asleep}

    async def _is_sleeping(self) -> Body:
        return {"is_sleeping": self._occupation.is_paused or self._occupation.is_asleep}

    async def _abort_named(self, asked: kinds.AbortParameters) -> Body:
        if not asked.request_ids:
            raise RequestRejected("request_ids: is needed here", param="body.request_ids")
        return await self._occupation.abort(asked)

    async def _weight_info(self) -> Body:
        return {"weight_version": self._service.state.weight_version}

    async def _world_size(self, asked: kinds.WorldSizeParameters) -> Body:
        parallel = self._service.config.parallel
        return {"world_size": parallel.tp_size * (parallel.dp_size if asked.include_dp else 1)}

    async def _version(self) -> Body:
        return {"version": __version__, "vllm_compat": VLLM_VERSION}

    async def _load(self) -> Body:
        return {"server_load": self._service.manager.num_live}

    async def _liveness(self) -> Body:
        await self._service.check_health()
        return {"status": "ok"}


def _taking(kind: type[P], handler: Callable[[P], Awaitable[Body]]) -> Endpoint:
    """The endpoint of a handler that takes parameters of this kind."""

    async def endpoint(request: Request) -> Response:
        asked, ignored = await kinds.read_parameters(request, kind)
        body = {"success": True, "message": "", **await handler(asked)}
        return Json({**body, "ignored_fields": ignored} if ignored else body)

    return _refusing(endpoint)


def _plain(handler: Callable[[], Awaitable[Body]]) -> Endpoint:
    async def without(asked: Nothing) -> Body:
        return await handler()

    return _taking(Nothing, without)


def _refusing(endpoint: Endpoint) -> Endpoint:
    """The endpoint with refusals in vLLM's form: the name of the parameter is a part of `error`."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestRejected as error:
            return Json(_refusal(error), error.status)

    return answer


def _refusal(error: RequestRejected) -> Mapping[str, Any]:
    body = error.body
    param = body.pop("param", None)
    return {**body, "error": {**body["error"], "param": param}}


async def _nothing_to_do() -> Body:
    return {"message": "There is no such cache."}


async def _no_draft_model() -> Body:
    raise RequestRejected("there is no draft model", 409)


async def _not_implemented(request: Request) -> Response:
    return error_answer(f"{request.url.path} is not in this version", 501, param=None)
