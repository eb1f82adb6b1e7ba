"""vLLM's routes, which make the same control requests as SGLang's. Source: wire_vllm section 1."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.bodies import Body
from ebbtide.srt.entrypoints.http_answers import Endpoint, Json
from ebbtide.srt.entrypoints.request_body import BodyReader
from ebbtide.srt.entrypoints.routing import Route, endpoints
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm.occupation import SLEEPING_TAGS, VllmOccupation
from ebbtide.srt.entrypoints.vllm.parameters import (
    FetchParameters,
    FinishParameters,
    Nothing,
    RpcParameters,
    StartParameters,
    UpdateParameters,
    WakeUpParameters,
    WorldSizeParameters,
    checked,
    read_parameters,
    vllm_route,
)
from ebbtide.srt.entrypoints.vllm.weight_transfer import VllmWeightTransfer
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import (
    LoadLoRAAdapterReqInput,
    Preserve,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UnloadLoRAAdapterReqInput,
    UpdateWeightFromDiskReqInput,
)
from ebbtide.version import __version__

# The version of vLLM whose API this is.
VLLM_VERSION: Final = "0.33.0"


class ServerInfoQuery(Struct, kw_only=True):
    """`config_format`: whether `vllm_config` is an object, or its JSON as text."""

    config_format: Literal["json", "text"] = "text"


def vllm_sections(config: EngineConfig, asked: ServerInfoQuery) -> dict[str, Any]:
    """The fields of vLLM's `/server_info`."""
    adapters = config.model.adapters
    vllm_config = {
        "model_config": {
            "model": config.model.served_model_name,
            "dtype": f"torch.{config.model.dtype}",
            "max_model_len": config.model.context_len,
            "quantization": config.model.quantization,
            "logprobs_mode": config.server_args.logprobs_mode,
        },
        "cache_config": {"cache_dtype": config.cache.dtype},
        "parallel_config": {
            "tensor_parallel_size": config.parallel.tp_size,
            "data_parallel_size": config.parallel.dp_size,
        },
        # Clients expect a backend; the one that is used depends on the trainer's `init_info`.
        "weight_transfer_config": {"backend": "nccl"},
        "lora_config": None
        if adapters is None
        else {"max_lora_rank": adapters.max_rank, "max_loras": config.server_args.max_loras_per_batch},
    }
    as_text = asked.config_format == "text"
    return {
        "vllm_config": json.dumps(vllm_config) if as_text else vllm_config,
        "vllm_env": {},
        "system_env": {},
    }


class SleepKwargs(Struct, kw_only=True):
    """`offload_kv`: keep the KV of live requests in host memory."""

    offload_kv: bool = False


class RemoteCalls:
    """Serves `/collective_rpc`, with the methods that SkyRL and vLLM's own tests call.

    vLLM runs any method of its workers by name. Here there is only a fixed table. Source: wire_vllm
    section 4.3.
    """

    def __init__(self, service: EngineService, weights: VllmWeightTransfer) -> None:
        self._service = service
        self._weights = weights
        # Name → keyword arguments, method, and whether the method's result is returned, once for each rank.
        self._methods: dict[str, tuple[type[Struct], Callable[[Any], Awaitable[Any]], bool]] = {
            "skyrl_start_weight_update": (StartParameters, weights.start, False),
            "skyrl_finish_weight_update": (Nothing, self._finish, False),
            "update_weights_nccl": (UpdateParameters, weights.update, False),
            "update_weights_ipc": (UpdateParameters, weights.update, False),
            "skyrl_sleep_for_weight_sync": (SleepKwargs, self._sleep, True),
            "skyrl_wake_for_weight_sync": (WakeUpParameters, self._wake, False),
            "fetch_weights": (FetchParameters, self._fetch, True),
            "reload_weights": (Nothing, self._reload, False),
            "liveness_probe": (Nothing, self._probe, False),
        }

    @vllm_route("POST", "/collective_rpc")
    async def call(self, asked: RpcParameters) -> Body:
        """Call one of a few methods by its name.

        `results` has an entry for each rank. Raises RequestRejected: 501; the method is unknown.
        """
        if asked.method not in self._methods:
            raise RequestRejected(
                "collective_rpc does not run arbitrary code in the workers here; known methods: "
                f"{', '.join(self._methods)}",
                501,
                param="body.method",
            )
        if asked.args:
            raise RequestRejected(f"{asked.method}: expected keyword arguments alone", param="body.args")
        kind, method, answers = self._methods[asked.method]
        # Not strict, since some clients send values as text.
        result = await method(checked(asked.kwargs, kind, "body.kwargs", strict=False))
        results = [result if answers else None] * self._service.config.parallel.num_ranks
        return {"success": True, "message": f"{asked.method} done.", "results": results}

    async def _finish(self, asked: Nothing) -> Body:
        return await self._weights.finish(FinishParameters())

    async def _sleep(self, asked: SleepKwargs) -> Body:
        preserve = Preserve.LIVE if asked.offload_kv else Preserve.NONE
        release = {"tags": list(SLEEPING_TAGS), "backup": False, "preserve": preserve}
        reply = await self._service.control(ReleaseMemoryOccupationReqInput, release)
        # Requests whose KV did not fit into host memory were retracted.
        return {"kv_offloaded": asked.offload_kv and reply["num_retracted"] == 0}

    async def _wake(self, asked: WakeUpParameters) -> None:
        await self._service.control(ResumeMemoryOccupationReqInput, {"tags": asked.tags})

    async def _fetch(self, asked: FetchParameters) -> Body:
        [result] = (await self._weights.fetch(asked))["result"]
        return {**result}

    async def _reload(self, asked: Nothing) -> None:
        folder = {"model_path": self._service.config.model.path}
        await self._service.control(UpdateWeightFromDiskReqInput, folder)

    async def _probe(self, asked: Nothing) -> None:
        """Do nothing: the answer shows that the server lives."""


class LoadAdapterParameters(Struct, kw_only=True):
    """`load_inplace`: replace an adapter of this name; requests that run on it go on with the new one.

    `is_3d_lora_weight` and `lora_int_id` have no effect.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: Any = None
    lora_int_id: Any = None


class UnloadAdapterParameters(Struct, kw_only=True):
    lora_name: str
    lora_int_id: Any = None


class VllmAdapters:
    """Serves `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, whose answers are plain text."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    @vllm_route("POST", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter")
    async def load(self, asked: LoadAdapterParameters) -> str:
        """Load a PEFT folder as an adapter."""
        name = asked.lora_name
        if not asked.load_inplace and self._service.models.has_adapter(name):
            raise RequestRejected(
                f"the adapter {name[:200]!r} has already been loaded: load_inplace=true replaces it",
                param="body.lora_name",
                kind="InvalidUserInput",
            )
        fields = {"lora_name": name, "lora_path": asked.lora_path, "in_flight": "continue"}
        await self._service.control(LoadLoRAAdapterReqInput, fields)
        return f"Success: LoRA adapter '{name}' added successfully."

    @vllm_route("POST", "/v1/unload_lora_adapter")
    async def unload(self, asked: UnloadAdapterParameters) -> str:
        """Unload an adapter."""
        fields = {"lora_name": asked.lora_name, "timeout_s": 0.0}
        await self._service.control(UnloadLoRAAdapterReqInput, fields)
        return f"Success: LoRA adapter '{asked.lora_name}' removed successfully."


class VllmApi:
    """Serves vLLM's other routes."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    @vllm_route("POST", "/reset_mm_cache", "/reset_encoder_cache")
    async def nothing_to_do(self, asked: Nothing) -> Body:
        """Do nothing: there is no such cache."""
        return {"message": "There is no such cache."}

    @vllm_route("POST", "/start_draft_weight_update")
    async def no_draft_model(self, asked: Nothing) -> Body:
        """Refuse, since there is no draft model."""
        raise RequestRejected("there is no draft model", 409)

    @vllm_route("GET", "/weight_info")
    async def weight_info(self, asked: Nothing) -> Body:
        """Return the version of the weights."""
        return {"weight_version": self._service.state.weight_version}

    @vllm_route("GET", "/get_world_size")
    async def world_size(self, asked: WorldSizeParameters) -> Body:
        """Return the number of ranks."""
        parallel = self._service.config.parallel
        return {"world_size": parallel.tp_size * (parallel.dp_size if asked.include_dp else 1)}

    @vllm_route("GET", "/version")
    async def version(self, asked: Nothing) -> Body:
        """Return the versions of this server, and of the vLLM whose API it has."""
        return {"version": __version__, "vllm_compat": VLLM_VERSION}

    @vllm_route("GET", "/load")
    async def load(self, asked: Nothing) -> Body:
        """Return the number of requests that are being served."""
        return {"server_load": self._service.manager.num_live}

    @vllm_route("GET", "/liveness")
    async def liveness(self, asked: Nothing) -> Body:
        """Check that every process lives."""
        await self._service.check_health()
        return {"status": "ok"}


PARTS_OF_VLLM: Final = (VllmOccupation, VllmWeightTransfer, VllmAdapters, RemoteCalls, VllmApi)


def vllm_endpoints(service: EngineService, bodies: BodyReader) -> Iterator[tuple[Route, Endpoint]]:
    """Yield the routes of `PARTS_OF_VLLM`, each with its endpoint."""
    weights = VllmWeightTransfer(service)
    calls, adapters = RemoteCalls(service, weights), VllmAdapters(service)
    for part in (VllmOccupation(service), weights, adapters, calls, VllmApi(service)):
        for route, handler in endpoints(part):
            yield route, _endpoint(handler, route.takes or Nothing, bodies)


def _endpoint(
    handler: Callable[[Any], Awaitable[Body | str]], kind: type[Struct], bodies: BodyReader
) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        asked, ignored = await read_parameters(request, kind, bodies)
        answer = await handler(asked)
        if isinstance(answer, str):
            return PlainTextResponse(answer)
        body = {"success": True, "message": "", **answer}
        return Json({**body, "ignored_fields": ignored} if ignored else body)

    return endpoint
