"""Parameters of vLLM's routes, from the query or the body. Source: wire_vllm section 1.1."""

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
# vLLM's names of the ways to pause.
VllmPauseMode = Literal["abort", "wait", "keep"]


class Nothing(Struct, kw_only=True):
    """No parameters."""


class PauseParameters(Struct, kw_only=True):
    """`wait_for_inflight_requests`: an older form of the mode `wait`."""

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
    """`tags`: any of `weights`, `kv_cache`, `cuda_graph`, `scheduling`; null or empty: all."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph", "scheduling"]] | None = None


class ResetCacheParameters(Struct, kw_only=True):
    """`reset_running_requests`: retract running requests first, so that the whole cache is emptied."""

    reset_running_requests: bool = False
    reset_external: bool = False


class AbortParameters(Struct, kw_only=True):
    """`request_ids`: null or empty: all."""

    request_ids: list[str] | None = None


class AbortNamedParameters(Struct, kw_only=True):
    request_ids: Annotated[list[str], Meta(min_length=1)]


class InitParameters(Struct, kw_only=True):
    init_info: dict[str, Any]


class StartParameters(Struct, kw_only=True):
    """`is_checkpoint_format`: whether names and shapes are those of a checkpoint."""

    is_checkpoint_format: Annotated[bool, said(enum=[True, None])] = True


class UpdateParameters(Struct, kw_only=True):
    """`update_info` in vLLM's form, or `weight_dir` in prime-rl's."""

    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_dir: str | None = None


class BroadcasterParameters(Struct, kw_only=True):
    """How to join the group of prime-rl's trainer. `backend`: as in `/init_weight_transfer_engine`."""

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
    """The tensors that PipelineRL's trainer will broadcast, in this order."""

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


# Not empty, since an empty path would mean the working directory.
Folder = Annotated[str, Meta(min_length=1)]


class PullParameters(Struct, kw_only=True):
    """`target_version`: 0 is the checkpoint that the engine was started with. `pre_read_hook` is rejected."""

    local_checkpoint_dir: Folder
    source_dir: Folder
    target_version: int
    pre_read_hook: Annotated[str | None, said(enum=["", None])] = None


class FetchInfo(Struct, kw_only=True):
    """How SkyRL's trainer publishes deltas. Only `local_checkpoint_dir` has an effect."""

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
    """How to join a trainer's group: by the address of its store, or by the id of its NCCL communicator.

    `backend`: our own addition; "gloo" and "nccl" are torch's process groups. Null: "raw_nccl" on GPUs,
    "gloo" on CPUs.
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
    """The tensors that rank 0 will broadcast. Three empty lists: the same as in the previous update."""

    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None
    num_updates_list: list[int] | None = None


class LendingInfo(Struct, kw_only=True):
    """Parameters of a trainer that lends its memory, without a process group."""

    packed: bool = False


class LentInfo(NamedTensors, kw_only=True):
    """Tensors behind CUDA IPC handles, which are of each tensor or of one buffer.

    `tensor_sizes`: bytes of each tensor in the buffer. `sizes`: the same from SkyRL, in elements.
    """

    ipc_handles_pickled: str
    tensor_sizes: list[int] | None = None
    sizes: list[int] | None = None


H = TypeVar("H", bound=Callable[..., Any])


def vllm_route(methods: str, *paths: str) -> Callable[[H], H]:
    """Declare the route that a method answers. Its signature has the types of parameters and reply."""

    def declare(handler: H) -> H:
        hints = get_type_hints(handler)
        takes, reply = hints["asked"], hints["return"]
        media_type = "text/plain" if reply is str else "application/json"
        takes = None if takes is Nothing else takes
        return route(methods, *paths, tag="vLLM", takes=takes, reply=reply, media_type=media_type)(handler)

    return declare


def pause_mode(mode: VllmPauseMode, clear_cache: bool) -> PauseMode:
    """Our mode for vLLM's. With a cleared cache, "keep" retracts requests, since they lose their KV."""
    match mode:
        case "abort":
            return PauseMode.ABORT
        case "wait":
            return PauseMode.WAIT
        case "keep":
            return PauseMode.RETRACT if clear_cache else PauseMode.IN_PLACE


async def read_parameters(request: Request, kind: type[P], bodies: BodyReader) -> tuple[P, list[str]]:
    """Read a request's parameters from its query, else from its body. Also returns unknown fields' names.

    Raises RequestRejected: 400; its `param` is `query.<name>` or `body.<name>`.
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
    """Convert a part of a body to type `kind`. `where`: its name in errors.

    Raises RequestRejected: 400; a field is unknown or has another type.
    """
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
