"""The routes of vLLM's dialect, over the same control requests as SGLang's. Source: wire_vllm section 1."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ebbtide.srt.entrypoints.http_answers import Endpoint, Json
from ebbtide.srt.entrypoints.request_body import BodyReader
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm.generate import TokensApi
from ebbtide.srt.entrypoints.vllm.information import VLLM_VERSION
from ebbtide.srt.entrypoints.vllm.occupation import Body, VllmOccupation
from ebbtide.srt.entrypoints.vllm.parameters import (
    AbortNamedParameters,
    AbortParameters,
    BroadcasterParameters,
    CheckerParameters,
    FinishParameters,
    InitParameters,
    Nothing,
    PauseParameters,
    ReceiveParameters,
    ResetCacheParameters,
    RpcParameters,
    SleepParameters,
    StartParameters,
    UpdateParameters,
    WakeUpParameters,
    WorldSizeParameters,
    read_parameters,
)
from ebbtide.srt.entrypoints.vllm.published import FetchParameters, PullParameters, pull
from ebbtide.srt.entrypoints.vllm.remote_calls import RemoteCalls
from ebbtide.srt.entrypoints.vllm.weight_transfer import VllmWeightTransfer
from ebbtide.srt.errors import RequestRejected
from ebbtide.version import __version__

# A handler takes the parameters and returns the body of the answer.
Handler = Callable[[Any], Awaitable[Body]]


@dataclass(frozen=True)
class VllmRoute:
    """One route of the dialect, for the application and for its document.

    Attributes:
        parameters: what it takes; None: nothing.
        handler: what is behind it.
    """

    method: Literal["GET", "POST"]
    path: str
    summary: str
    handler: Callable[[VllmApi], Handler]
    parameters: type[Struct] | None = None


GENERATE_PATHS = ("/inference/v1/generate", "/skyrl/v1/generate")


class VllmApi:
    """What is behind vLLM's routes."""

    def __init__(self, service: EngineService, bodies: BodyReader) -> None:
        self._service = service
        self.bodies = bodies
        self.occupation = VllmOccupation(self._control, lambda: service.state)
        self.weights = VllmWeightTransfer(self._control, lambda: service.state, self._num_ranks)
        self.calls = RemoteCalls(
            self._control, self.weights, lambda: service.config.model.path, self._num_ranks
        )
        self._tokens = TokensApi(service, bodies)

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            *((route.method, route.path, _endpoint(route, self)) for route in ROUTES),
            *(("POST", path, self._tokens.generate) for path in GENERATE_PATHS),
        ]

    async def _control(self, kind: type[Any], fields: Mapping[str, Any]) -> Any:
        return await self._service.control(kind, fields)

    def _num_ranks(self) -> int:
        return self._service.config.parallel.num_ranks

    async def is_paused(self, asked: Nothing) -> Body:
        return {"is_paused": self.occupation.is_paused or self.occupation.is_asleep}

    async def is_sleeping(self, asked: Nothing) -> Body:
        return {"is_sleeping": self.occupation.is_paused or self.occupation.is_asleep}

    async def abort_named(self, asked: AbortNamedParameters) -> Body:
        return await self.occupation.abort(AbortParameters(request_ids=asked.request_ids))

    async def weight_info(self, asked: Nothing) -> Body:
        return {"weight_version": self._service.state.weight_version}

    async def pull_weights(self, asked: PullParameters) -> Body:
        return await pull(asked, self._service.state.weight_version)

    async def world_size(self, asked: WorldSizeParameters) -> Body:
        parallel = self._service.config.parallel
        return {"world_size": parallel.tp_size * (parallel.dp_size if asked.include_dp else 1)}

    async def version(self, asked: Nothing) -> Body:
        return {"version": __version__, "vllm_compat": VLLM_VERSION}

    async def load(self, asked: Nothing) -> Body:
        return {"server_load": self._service.manager.num_live}

    async def liveness(self, asked: Nothing) -> Body:
        await self._service.check_health()
        return {"status": "ok"}


def _endpoint(route: VllmRoute, api: VllmApi) -> Endpoint:
    handler, kind = route.handler(api), route.parameters or Nothing

    async def endpoint(request: Request) -> Response:
        asked, ignored = await read_parameters(request, kind, api.bodies)
        body = {"success": True, "message": "", **await handler(asked)}
        return Json({**body, "ignored_fields": ignored} if ignored else body)

    return endpoint


async def _nothing_to_do(asked: Nothing) -> Body:
    return {"message": "There is no such cache."}


async def _no_draft_model(asked: Nothing) -> Body:
    raise RequestRejected("there is no draft model", 409)


def _post(
    path: str, summary: str, handler: Callable[[VllmApi], Handler], parameters: type[Struct] | None = None
) -> VllmRoute:
    return VllmRoute("POST", path, summary, handler, parameters)


def _get(
    path: str, summary: str, handler: Callable[[VllmApi], Handler], parameters: type[Struct] | None = None
) -> VllmRoute:
    return VllmRoute("GET", path, summary, handler, parameters)


ROUTES: Final = (
    _post("/pause", "Run no further forward pass.", lambda api: api.occupation.pause, PauseParameters),
    _post("/resume", "End a pause.", lambda api: api.occupation.resume),
    _get("/is_paused", "Whether nothing runs.", lambda api: api.is_paused),
    _post("/sleep", "Pause, and give memory back.", lambda api: api.occupation.sleep, SleepParameters),
    _post(
        "/wake_up",
        "Take memory again; with the last of it generation goes on.",
        lambda api: api.occupation.wake_up,
        WakeUpParameters,
    ),
    _get("/is_sleeping", "Whether memory is released, or generation paused.", lambda api: api.is_sleeping),
    _post(
        "/release_kv_cache_memory",
        "Give the memory of the KV cache back.",
        lambda api: api.occupation.release_kv_cache,
    ),
    _post(
        "/reset_prefix_cache",
        "Empty the prefix cache.",
        lambda api: api.occupation.reset_prefix_cache,
        ResetCacheParameters,
    ),
    _post("/reset_mm_cache", "Nothing: there is no such cache.", lambda api: _nothing_to_do),
    _post("/reset_encoder_cache", "Nothing: there is no such cache.", lambda api: _nothing_to_do),
    _post(
        "/abort_requests", "End these requests, or all.", lambda api: api.occupation.abort, AbortParameters
    ),
    _post(
        "/inference/v1/abort_requests",
        "End these requests.",
        lambda api: api.abort_named,
        AbortNamedParameters,
    ),
    _post(
        "/init_weight_transfer_engine",
        "Join the group of a trainer.",
        lambda api: api.weights.init,
        InitParameters,
    ),
    _post("/shutdown_weight_transfer_engine", "Leave the trainer's group.", lambda api: api.weights.shutdown),
    _post(
        "/init_broadcaster",
        "Join the group of prime-rl's trainer.",
        lambda api: api.weights.init_broadcaster,
        BroadcasterParameters,
    ),
    _post(
        "/start_weight_update", "Open a session of updates.", lambda api: api.weights.start, StartParameters
    ),
    _post("/start_draft_weight_update", "Refused: there is no draft model.", lambda api: _no_draft_model),
    _post(
        "/update_weights",
        "Take weights by broadcast, or out of a folder.",
        lambda api: api.weights.update,
        UpdateParameters,
    ),
    _post(
        "/receive_weight_update",
        "Take weights by PipelineRL's broadcasts.",
        lambda api: api.weights.receive,
        ReceiveParameters,
    ),
    _post("/finish_weight_update", "Commit the session.", lambda api: api.weights.finish, FinishParameters),
    _post(
        "/weight_checker",
        "Sum the parameters up, or make them invalid, or compare.",
        lambda api: api.weights.check,
        CheckerParameters,
    ),
    _post(
        "/pull_weights",
        "Which published version an update from a folder brings.",
        lambda api: api.pull_weights,
        PullParameters,
    ),
    _post(
        "/fetch_weights",
        "Which published version the next update brings, in SkyRL's words.",
        lambda api: api.weights.fetch,
        FetchParameters,
    ),
    _get("/weight_info", "The version of the weights.", lambda api: api.weight_info),
    _get("/get_world_size", "How many ranks there are.", lambda api: api.world_size, WorldSizeParameters),
    _post("/collective_rpc", "One of a few methods, by its name.", lambda api: api.calls.call, RpcParameters),
    _get("/version", "The versions of this server and of the dialect.", lambda api: api.version),
    _get("/load", "How many requests are answered.", lambda api: api.load),
    _get("/liveness", "Whether every process lives.", lambda api: api.liveness),
)
