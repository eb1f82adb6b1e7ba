"""Requests as SGLang has them: mutable dataclasses, with the fields of Ebbtide's requests.

Source: wire_api sections 2, 3 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any

import msgspec

from ebbtide.srt.managers import io_struct
from ebbtide.srt.managers.api import generate_fields

# Fields of `/generate` that are accepted and ignored.
_IGNORED_FIELDS = (
    "log_metrics",
    "no_logs",
    "custom_labels",
    "routing_key",
    "session_id",
    "conversation_id",
    "background",
    "require_reasoning",
    "modalities",
    "external_trace_header",
    "received_time",
    "use_audio_in_video",
    "mm_processor_kwargs",
    "images_config",
    "max_dynamic_patch",
)


def _mutable(request: type[msgspec.Struct], also: tuple[str, ...] = ()) -> Any:
    """Make a mutable dataclass with the fields of a request. `also`: further fields, None by default."""
    required, optional = [], []
    for known in msgspec.structs.fields(request):
        if known.required:
            required.append((known.name, Any))
        elif known.default_factory is not msgspec.NODEFAULT:
            optional.append((known.name, Any, field(default_factory=known.default_factory)))
        else:
            optional.append((known.name, Any, field(default=known.default)))
    optional += [(name, Any, field(default=None)) for name in also]
    namespace = {"__module__": __name__, "__doc__": request.__doc__}
    return make_dataclass(request.__name__, [*required, *optional], namespace=namespace)


GenerateReqInput = _mutable(
    generate_fields.GenerateReqInput, (*sorted(generate_fields.UNSUPPORTED_FIELDS), *_IGNORED_FIELDS)
)
AbortReq = _mutable(io_struct.AbortReq)
PauseGenerationReqInput = _mutable(io_struct.PauseGenerationReqInput)
ContinueGenerationReqInput = _mutable(io_struct.ContinueGenerationReqInput)
ReleaseMemoryOccupationReqInput = _mutable(io_struct.ReleaseMemoryOccupationReqInput)
ResumeMemoryOccupationReqInput = _mutable(io_struct.ResumeMemoryOccupationReqInput)
UpdateWeightFromDiskReqInput = _mutable(io_struct.UpdateWeightFromDiskReqInput)
# `disable_draft_model` is accepted and ignored: there is no draft model.
UpdateWeightsFromTensorReqInput = _mutable(
    io_struct.UpdateWeightsFromTensorReqInput, ("disable_draft_model",)
)
UpdateWeightsFromDistributedReqInput = _mutable(io_struct.UpdateWeightsFromDistributedReqInput)
UpdateWeightsFromIPCReqInput = _mutable(io_struct.UpdateWeightsFromIPCReqInput)
InitWeightsUpdateGroupReqInput = _mutable(io_struct.InitWeightsUpdateGroupReqInput)
DestroyWeightsUpdateGroupReqInput = _mutable(io_struct.DestroyWeightsUpdateGroupReqInput)
BeginWeightUpdateReqInput = _mutable(io_struct.BeginWeightUpdateReqInput)
EndWeightUpdateReqInput = _mutable(io_struct.EndWeightUpdateReqInput)
UpdateWeightVersionReqInput = _mutable(io_struct.UpdateWeightVersionReqInput)
GetWeightsByNameReqInput = _mutable(io_struct.GetWeightsByNameReqInput)
CheckWeightsReqInput = _mutable(io_struct.CheckWeightsReqInput)
LoadLoRAAdapterReqInput = _mutable(io_struct.LoadLoRAAdapterReqInput)
LoadLoRAAdapterFromTensorsReqInput = _mutable(io_struct.LoadLoRAAdapterFromTensorsReqInput)
UnloadLoRAAdapterReqInput = _mutable(io_struct.UnloadLoRAAdapterReqInput)


@dataclass(kw_only=True)
class LoRAUpdateOutput:
    """Outcome of loading or unloading an adapter. `loaded_adapters`: versions by name."""

    success: bool
    error_message: str | None = None
    loaded_adapters: dict[str, str] | None = None


@dataclass(kw_only=True)
class RpcReqInput:
    """A call of a method of the client's own scheduler, which Ebbtide refuses."""

    method: str
    parameters: dict[str, Any] | None = None


@dataclass(kw_only=True)
class RpcReqOutput:
    """Outcome of an `RpcReqInput`."""

    success: bool
    message: str


@dataclass
class Function:
    """A function that the model may call."""

    description: str | None = None
    name: str | None = None
    parameters: Any = None


@dataclass
class Tool:
    """A tool. Functions are the only type."""

    function: Function
    type: str | None = "function"


@dataclass
class FlushCacheReqOutput:
    """The answer to `flush_cache`."""

    success: bool
    message: str = ""
