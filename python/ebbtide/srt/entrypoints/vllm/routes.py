"""The routes of vLLM's dialect, over the same control requests as SGLang's. Source: wire_vllm section 1."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.http_answers import Endpoint, Json
from ebbtide.srt.entrypoints.request_body import BodyReader
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm.adapters import LoadAdapterParameters, UnloadAdapterParameters, VllmAdapters
from ebbtide.srt.entrypoints.vllm.generate import TokensApi
from ebbtide.srt.entrypoints.vllm.occupation import SLEEPING_TAGS, Body, VllmOccupation
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
    checked,
    read_parameters,
)
from ebbtide.srt.entrypoints.vllm.published import FetchParameters, PullParameters, pull
from ebbtide.srt.entrypoints.vllm.weight_transfer import VllmWeightTransfer
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import (
    Preserve,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from ebbtide.version import __version__

# The version of vLLM whose surface this is.
VLLM_VERSION: Final = "0.33.0"


class ServerInfoQuery(Struct, kw_only=True):
    """`config_format`: of `vllm_config`, an object or its JSON as text."""

    config_format: Literal["json", "text"] = "text"


def vllm_sections(config: EngineConfig, config_format: str) -> dict[str, Any]:
    """What vLLM's `/server_info` has in addition to SGLang's fields.

    Refused for an unknown `config_format`.
    """
    if config_format not in ("json", "text"):
        raise RequestRejected(
            f"config_format: expected json or text, got {config_format!r}", param="query.config_format"
        )
    adapters = config.model.adapters
    vllm_config = {
        "model_config": {
            "model": config.model.served_model_name,
            "dtype": f"torch.{config.model.dtype}",
            "max_model_len": config.model.context_len,
            "quantization": config.model.quantization,
            "logprobs_mode": config.runtime.logprobs_mode,
        },
        "cache_config": {"cache_dtype": config.cache.dtype},
        "parallel_config": {
            "tensor_parallel_size": config.parallel.tp_size,
            "data_parallel_size": config.parallel.dp_size,
        },
        # Any trainer may be met: which kind it is, its `init_info` says.
        "weight_transfer_config": {"backend": "nccl"},
        "lora_config": None
        if adapters is None
        else {"max_lora_rank": adapters.max_rank, "max_loras": config.server_args.max_loras_per_batch},
    }
    as_text = config_format == "text"
    return {
        "vllm_config": json.dumps(vllm_config) if as_text else vllm_config,
        "vllm_env": {},
        "system_env": {},
    }


# A method's keyword arguments → what every rank answers.
Method = Callable[[Mapping[str, Any]], Awaitable[Any]]


class RemoteCalls:
    """`/collective_rpc`: the methods that SkyRL and vLLM's own tests call. Source: wire_vllm section 4.3.

    vLLM runs the method of that name in its workers. Here nothing is looked up or imported.
    """

    def __init__(self, service: EngineService, weights: VllmWeightTransfer) -> None:
        self._service = service
        self._weights = weights
        # Each with the keyword arguments that it takes.
        self._methods: dict[str, tuple[Method, tuple[str, ...]]] = {
            "skyrl_start_weight_update": (self._start, ("is_checkpoint_format",)),
            "skyrl_finish_weight_update": (self._finish, ()),
            "update_weights_nccl": (self._update, ("update_info",)),
            "update_weights_ipc": (self._update, ("update_info",)),
            "skyrl_sleep_for_weight_sync": (self._sleep, ("offload_kv",)),
            "skyrl_wake_for_weight_sync": (self._wake, ("tags",)),
            "fetch_weights": (self._fetch, ("target_version", "sync_dir", "uri")),
            "reload_weights": (self._reload, ()),
            "liveness_probe": (self._probe, ()),
        }

    async def call(self, asked: RpcParameters) -> Body:
        """Carry a method out; `results` has what each rank answers. Refused if it is unknown (501)."""
        if asked.method not in self._methods:
            raise RequestRejected(
                "collective_rpc runs arbitrary code in the worker and is not offered; known methods: "
                f"{', '.join(self._methods)}",
                501,
                param="body.method",
            )
        method, names = self._methods[asked.method]
        unknown = sorted(asked.kwargs.keys() - set(names))
        if asked.args or unknown:
            given = ", ".join(unknown) if unknown else "positional arguments"
            raise RequestRejected(
                f"{asked.method}: expected the keyword arguments ({', '.join(names)}), got {given}",
                param="body.kwargs",
            )
        result = await method(asked.kwargs)
        num_ranks = self._service.config.parallel.num_ranks
        return {"success": True, "message": f"{asked.method} done.", "results": [result] * num_ranks}

    async def _start(self, kwargs: Mapping[str, Any]) -> None:
        await self._weights.start(
            StartParameters(is_checkpoint_format=_flag(kwargs, "is_checkpoint_format", True))
        )

    async def _finish(self, kwargs: Mapping[str, Any]) -> None:
        await self._weights.finish(FinishParameters())

    async def _update(self, kwargs: Mapping[str, Any]) -> None:
        info = kwargs.get("update_info")
        if not isinstance(info, dict):
            raise RequestRejected(f"update_info: expected an object, got {info!r}", param="body.kwargs")
        await self._weights.update(UpdateParameters(update_info=info))

    async def _sleep(self, kwargs: Mapping[str, Any]) -> Body:
        keeps_kv = _flag(kwargs, "offload_kv", False)
        preserve = Preserve.LIVE if keeps_kv else Preserve.NONE
        release = {"tags": list(SLEEPING_TAGS), "backup": False, "preserve": preserve}
        reply = await self._service.control(ReleaseMemoryOccupationReqInput, release)
        # What the host has no room for is computed again.
        return {"kv_offloaded": keeps_kv and reply["num_retracted"] == 0}

    async def _wake(self, kwargs: Mapping[str, Any]) -> None:
        await self._service.control(ResumeMemoryOccupationReqInput, {"tags": kwargs.get("tags")})

    async def _fetch(self, kwargs: Mapping[str, Any]) -> Body:
        fetched = await self._weights.fetch(checked(kwargs, FetchParameters, "body.kwargs"))
        result: Body = fetched["result"][0]
        return result

    async def _reload(self, kwargs: Mapping[str, Any]) -> None:
        await self._service.control(
            UpdateWeightFromDiskReqInput, {"model_path": self._service.config.model.path}
        )

    async def _probe(self, kwargs: Mapping[str, Any]) -> None:
        """Whoever answers is alive."""


def _flag(kwargs: Mapping[str, Any], name: str, default: bool) -> bool:
    value = kwargs.get(name, default)
    # Some clients send the text of a Python value.
    known = {"True": True, "true": True, "False": False, "false": False}
    value = known.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise RequestRejected(f"{name}: expected true or false, got {value!r}", param="body.kwargs")
    return value


# A handler takes the parameters and returns the body of the answer, or its text.
Handler = Callable[[Any], Awaitable[Body | str]]


@dataclass(frozen=True)
class VllmRoute:
    """One route of the dialect, for the application and for its document."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    handler: Callable[[VllmApi], Handler]
    parameters: type[Struct] | None = None
    reply: Any = dict[str, Any]


GENERATE_PATHS = ("/inference/v1/generate", "/skyrl/v1/generate")


class VllmApi:
    """What is behind vLLM's routes."""

    def __init__(self, service: EngineService, bodies: BodyReader) -> None:
        self._service = service
        self.bodies = bodies
        self.occupation = VllmOccupation(service)
        self.weights = VllmWeightTransfer(service)
        self.calls = RemoteCalls(service, self.weights)
        self.adapters = VllmAdapters(service)
        self._tokens = TokensApi(service, bodies)

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            *((route.method, route.path, _endpoint(route, self)) for route in ROUTES),
            *(("POST", path, self._tokens.generate) for path in GENERATE_PATHS),
        ]

    async def is_paused(self, asked: Nothing) -> Body:
        return {"is_paused": self.occupation.is_idle}

    async def is_sleeping(self, asked: Nothing) -> Body:
        return {"is_sleeping": self.occupation.is_idle}

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
        answer = await handler(asked)
        if isinstance(answer, str):
            return PlainTextResponse(answer)
        body = {"success": True, "message": "", **answer}
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
    *(
        VllmRoute(
            *("POST", path, "Load a PEFT folder as an adapter.", lambda api: api.adapters.load),
            *(LoadAdapterParameters, str),
        )
        for path in ("/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter")
    ),
    VllmRoute(
        *("POST", "/v1/unload_lora_adapter", "Remove an adapter.", lambda api: api.adapters.unload),
        *(UnloadAdapterParameters, str),
    ),
    _get("/weight_info", "The version of the weights.", lambda api: api.weight_info),
    _get("/get_world_size", "How many ranks there are.", lambda api: api.world_size, WorldSizeParameters),
    _post("/collective_rpc", "One of a few methods, by its name.", lambda api: api.calls.call, RpcParameters),
    _get("/version", "The versions of this server and of the dialect.", lambda api: api.version),
    _get("/load", "How many requests are answered.", lambda api: api.load),
    _get("/liveness", "Whether every process lives.", lambda api: api.liveness),
)
