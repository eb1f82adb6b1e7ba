"""What the routes of vLLM's dialect take: by query or in a body. Source: wire_vllm section 1.1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from ebbtide.srt.entrypoints.request_body import BodyReader, of_query
from ebbtide.srt.entrypoints.routing import route
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.lossless import reader_of, valid_values
from ebbtide.srt.managers.api.control_client import refuse_misspelt
from ebbtide.srt.managers.api.generate_fields import said
from ebbtide.srt.managers.io_struct import ChecksumAlgorithm, PauseMode

P = TypeVar("P", bound=Struct)

PACKED_BYTES: Final = 1 << 30
# How vLLM calls the ways of pausing.
VllmPauseMode = Literal["abort", "wait", "keep"]


class Nothing(Struct, kw_only=True):
    """No parameters."""


class PauseParameters(Struct, kw_only=True):
    """`wait_for_inflight_requests`: an older word for the mode `wait`."""

    mode: VllmPauseMode = "abort"
    clear_cache: bool = True
    wait_for_inflight_requests: bool = False

    @property
    def pause_mode(self) -> PauseMode:
        if self.wait_for_inflight_requests:
            return PauseMode.WAIT
        return pause_mode(self.mode, self.clear_cache)


class SleepParameters(Struct, kw_only=True):
    """Level 0 only pauses; level 1 keeps the weights on the host; level 2 drops them."""

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: VllmPauseMode = "abort"


class WakeUpParameters(Struct, kw_only=True):
    """`tags`: of `weights`, `kv_cache`, `cuda_graph`, `scheduling`; none means all."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph", "scheduling"]] | None = None


class ResetCacheParameters(Struct, kw_only=True):
    """`reset_running_requests`: requests that run give up their KV first."""

    reset_running_requests: bool = False
    reset_external: bool = False


class AbortParameters(Struct, kw_only=True):
    """`request_ids`: none means all."""

    request_ids: list[str] | None = None


class AbortNamedParameters(Struct, kw_only=True):
    request_ids: Annotated[list[str], Meta(min_length=1)]


class InitParameters(Struct, kw_only=True):
    init_info: dict[str, Any]


class StartParameters(Struct, kw_only=True):
    """`is_checkpoint_format`: names and shapes are those of a checkpoint."""

    is_checkpoint_format: Annotated[bool, said(enum=[True, None])] = True


class UpdateParameters(Struct, kw_only=True):
    """`update_info`, in vLLM's form; `weight_dir`, in prime-rl's."""

    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_dir: str | None = None


class BroadcasterParameters(Struct, kw_only=True):
    """How prime-rl's trainer is met. `backend`: as in `/init_weight_transfer_engine`."""

    host: Annotated[str, said(minLength=1)]
    port: Annotated[int, said(minimum=1, maximum=65535)]
    rank_offset: Annotated[int, said(minimum=0)]
    inference_world_size: Annotated[int, said(minimum=1)]
    timeout: Annotated[float, said(exclusiveMinimum=0)] = 300.0
    quantize_in_weight_transfer: Annotated[bool, said(enum=[False, None])] = False
    session_id: Annotated[str | None, said(enum=[None])] = None
    backend: Literal["gloo", "nccl", "raw_nccl"] | None = None


class ParameterInfo(Struct, kw_only=True):
    name: str
    shape: list[int]
    dtype: str


class ReceiveParameters(Struct, kw_only=True):
    """What PipelineRL's trainer is about to broadcast, in this order."""

    version: int
    parameters_info: list[ParameterInfo]


class FinishParameters(Struct, kw_only=True):
    weight_version: str | None = None


class CheckerParameters(Struct, kw_only=True):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None
    algorithm: ChecksumAlgorithm = "sha256"


class WorldSizeParameters(Struct, kw_only=True):
    include_dp: bool = True


class RpcParameters(Struct, kw_only=True):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


# An empty path would be the folder in which the server was started.
Folder = Annotated[str, Meta(min_length=1)]


class PullParameters(Struct, kw_only=True):
    """`target_version`: 0 is the checkpoint that the engine was started with. The hook is refused."""

    local_checkpoint_dir: Folder
    source_dir: Folder
    target_version: int
    pre_read_hook: Annotated[str | None, said(enum=["", None])] = None


class FetchInfo(Struct, kw_only=True):
    """How SkyRL's trainer publishes deltas. What is about a whole local copy has no meaning here."""

    local_checkpoint_dir: Folder
    base_model_path: str | None = None
    cloud_download_workers: int | None = None
    checkpoint_load_format: str | None = None
    multi_thread_safetensors_max_workers: int | None = None


class FetchParameters(Struct, kw_only=True):
    target_version: int
    sync_dir: Folder | None = None
    uri: str | None = None


class InitInfo(Struct, kw_only=True):
    """How a trainer is met: by the store at an address, or by the id of its communicator.

    `backend`: our own word; "gloo" and "nccl" are groups of torch's. Without it, raw NCCL between GPUs, and
    gloo where the engine runs on a CPU.
    """

    rank_offset: Annotated[int, said(minimum=1)]
    world_size: Annotated[int, said(minimum=2)]
    master_address: str | None = None
    master_port: int | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = PACKED_BYTES
    packed_num_buffers: int = 2
    backend: Literal["gloo", "nccl", "raw_nccl"] | None = None
    timeout_s: float = 300.0


class NamedTensors(Struct, kw_only=True):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None


class UpdateInfo(NamedTensors, kw_only=True):
    """What rank 0 is going to broadcast; three empty lists: as in the update before."""

    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None
    num_updates_list: list[int] | None = None


class LendingInfo(Struct, kw_only=True):
    """A trainer that lends its memory needs not be met."""

    packed: bool = False


class LentInfo(NamedTensors, kw_only=True):
    """What is behind handles, of each tensor or of one buffer.

    `tensor_sizes`: in bytes, of the tensors in a buffer; `sizes`: SkyRL's word, in elements.
    """

    ipc_handles_pickled: str
    tensor_sizes: list[int] | None = None
    sizes: list[int] | None = None


H = TypeVar("H", bound=Callable[..., Any])


def vllm_route(methods: str, *paths: str) -> Callable[[H], H]:
    """Declare a handler: what it takes and returns, its signature says."""

    def declare(handler: H) -> H:
        hints = get_type_hints(handler)
        takes, reply = hints["asked"], hints["return"]
        media_type = "text/plain" if reply is str else "application/json"
        takes = None if takes is Nothing else takes
        return route(methods, *paths, tag="vLLM", takes=takes, reply=reply, media_type=media_type)(handler)

    return declare


def pause_mode(mode: VllmPauseMode, clear_cache: bool) -> PauseMode:
    """What vLLM's modes are here: with its cache cleared, a frozen request has nothing to go on with."""
    match mode:
        case "abort":
            return PauseMode.ABORT
        case "wait":
            return PauseMode.WAIT
        case "keep":
            return PauseMode.RETRACT if clear_cache else PauseMode.IN_PLACE


async def read_parameters(request: Request, kind: type[P], bodies: BodyReader) -> tuple[P, list[str]]:
    """The parameters in a request's query and body, where the query wins, and the names of unknown fields.

    Raises RequestRejected: 400; `param` says which, as `query.<name>` or `body.<name>`.
    """
    body = await bodies.read(request.stream())
    values: dict[str, Any] = {}
    for known in msgspec.structs.fields(kind):
        if known.name in request.query_params:
            given = of_query(request.query_params, known.name, known.type)
            values[known.name] = _converted(given, known.type, f"query.{known.name}", strict=False)
        elif body.get(known.name) is not None:
            values[known.name] = _converted(body[known.name], known.type, f"body.{known.name}", strict=True)
        elif known.required:
            raise RequestRejected(f"{known.name}: is needed", param=f"body.{known.name}")
    ignored = sorted((body.keys() | request.query_params.keys()) - set(kind.__struct_fields__))
    refuse_misspelt(kind, values, ignored)
    return kind(**values), ignored


def checked(fields: Mapping[str, Any], kind: type[P], where: str, *, strict: bool = True) -> P:
    """A part of a body as its own kind, of which every field must be known; a refusal calls it `where`."""
    unknown = sorted(fields.keys() - set(kind.__struct_fields__))
    if unknown:
        known = ", ".join(kind.__struct_fields__)
        raise RequestRejected(
            f"{where}: unknown {', '.join(unknown)}; known are {known or 'none'}", param=where
        )
    given = {name: value for name, value in fields.items() if value is not None}
    part: P = _converted(given, kind, where, strict=strict)
    return part


def _converted(value: Any, annotation: Any, where: str, *, strict: bool) -> Any:
    try:
        read = reader_of(annotation)
        return msgspec.convert(value if read is None else read(value), annotation, strict=strict)
    except msgspec.ValidationError as error:
        values = valid_values(annotation)
        hint = f"; expected one of {', '.join(values)}" if values else ""
        raise RequestRejected(f"{where}: {error}{hint}", param=where) from None
