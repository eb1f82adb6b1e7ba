"""Every message between the processes, and the control requests and replies that clients see.

One tagged union per channel, in MessagePack. The control requests are the HTTP bodies and the arguments of
the Python API too; `request_fields` builds them from loose fields.
Source: wire_api sections 2 and 3.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from ebbtide.srt.managers.wire.commit_messages import GivenUp as GivenUp
from ebbtide.srt.managers.wire.commit_messages import Prepared as Prepared
from ebbtide.srt.managers.wire.commit_messages import Verdict as Verdict
from ebbtide.srt.managers.wire.load_report import Load as Load
from ebbtide.srt.managers.wire.message import Message as Message
from ebbtide.srt.managers.wire.message import Refusal as Refusal
from ebbtide.srt.managers.wire.message import Reply as Reply
from ebbtide.srt.managers.wire.message import TotalsReply as TotalsReply
from ebbtide.srt.managers.wire.rank_reports import RankChecksums as RankChecksums
from ebbtide.srt.managers.wire.rank_reports import RankReport as RankReport
from ebbtide.srt.managers.wire.rank_reports import SessionReport as SessionReport
from ebbtide.srt.managers.wire.rank_reports import TagReport as TagReport
from ebbtide.srt.managers.wire.request_output import FinishReason as FinishReason
from ebbtide.srt.managers.wire.request_output import RequestOutput as RequestOutput
from ebbtide.srt.managers.wire.request_output import RequestStart as RequestStart
from ebbtide.srt.managers.wire.request_output import TokenLogprobs as TokenLogprobs
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.sampling_params import SamplingParams

# Of groups that weights are broadcast in.
DEFAULT_GROUP = "weight_update_group"


class PauseMode(enum.StrEnum):
    """What a pause does with the running requests. The order is that of escalation."""

    WAIT = "wait"
    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"


# ---------------------------------------------------------------------------------------- control requests


class ControlRequest(Message, frozen=True, kw_only=True):
    """A request to the control plane. Carried out between forward passes, answered when its effect holds."""


class ReleaseMemoryOccupationReqInput(ControlRequest, frozen=True):
    """Give the physical memory of these tags back to the device; none or no tags means all of them."""

    tags: tuple[MemoryTag, ...] | None = None


class ResumeMemoryOccupationReqInput(ControlRequest, frozen=True):
    """Take physical memory for these tags again, at the same addresses; none or no tags means all."""

    tags: tuple[MemoryTag, ...] | None = None


class PauseGenerationReqInput(ControlRequest, frozen=True):
    """Run no further forward pass until `ContinueGenerationReqInput`."""

    mode: PauseMode = PauseMode.ABORT
    timeout_s: float | None = None


class ContinueGenerationReqInput(ControlRequest, frozen=True):
    """End a pause. `torch_empty_cache` is accepted and ignored."""

    torch_empty_cache: bool = True


class AbortReq(ControlRequest, frozen=True):
    """End one request, a list of them, or all; an unknown rid is not an error."""

    rid: str | list[str] = ""
    abort_all: bool = False
    report: bool = False


class FlushCacheReqInput(ControlRequest, frozen=True):
    """Empty the prefix cache; wait up to `timeout_s` seconds for requests that hold KV to end."""

    timeout_s: float = 0.0


class WeightUpdateRequest(ControlRequest, frozen=True, kw_only=True):
    """The fields of every weight update. Source: wire_api section 3.3.

    `session_id`: refused unless the session that was begun under this name is open.
    """

    flush_cache: bool = True
    abort_all_requests: bool = False
    pause_mode: PauseMode | None = None
    weight_version: str | int | None = None
    timeout_s: float | None = None
    selector: Literal["target", "draft", "all"] = "all"
    torch_empty_cache: bool = False
    session_id: str | None = None


class UpdateWeightFromDiskReqInput(WeightUpdateRequest, frozen=True, kw_only=True):
    """Take the weights of a Hugging Face checkpoint folder. Fields after `load_format` are ignored."""

    model_path: str
    load_format: str | None = None
    is_async: Any = None
    keep_pause: Any = None
    recapture_cuda_graph: Any = None
    token_step: Any = None
    manifest: Any = None


class UpdateWeightsFromTensorReqInput(WeightUpdateRequest, frozen=True, kw_only=True):
    """Take serialized named tensors, one entry per rank; in JSON each entry is base64. wire_api section 4."""

    serialized_named_tensors: list[bytes]
    load_format: str | None = None


class UpdateWeightsFromDistributedReqInput(WeightUpdateRequest, frozen=True, kw_only=True):
    """Take tensors that rank 0 of a group broadcasts. `name`, `dtype`, `shape` are older words for one."""

    names: list[str] | None = None
    dtypes: list[str] | None = None
    shapes: list[list[int]] | None = None
    group_name: str = DEFAULT_GROUP
    load_format: str | None = None
    name: str | None = None
    dtype: str | None = None
    shape: list[int] | None = None


class UpdateWeightsFromIPCReqInput(WeightUpdateRequest, frozen=True, kw_only=True):
    """Take what checkpoint-engine's senders bring: their addresses by device. wire_api section 4.5."""

    zmq_handles: dict[str, str]


class InitWeightsUpdateGroupReqInput(ControlRequest, frozen=True, kw_only=True):
    """Join a process group whose rank 0 is the trainer. wire_api section 3.3. `pp_rank` is ignored."""

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    group_name: str = DEFAULT_GROUP
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout_s: float = 300.0
    pp_rank: Any = None


class DestroyWeightsUpdateGroupReqInput(ControlRequest, frozen=True, kw_only=True):
    """Leave a group, also one that is just being joined; an unknown one is not an error."""

    group_name: str = DEFAULT_GROUP


class BeginWeightUpdateReqInput(ControlRequest, frozen=True, kw_only=True):
    """Open a weight update session: updates are staged until `EndWeightUpdateReqInput` commits them all."""

    selector: Literal["target", "draft", "all"] = "all"
    timeout_s: float | None = None
    session_id: str | None = None


class EndWeightUpdateReqInput(ControlRequest, frozen=True, kw_only=True):
    """Commit the open session. `flush_cache` null: if any staged update asked for it."""

    weight_version: str | int | None = None
    flush_cache: bool | None = None
    pause_mode: PauseMode | None = None
    timeout_s: float | None = None
    session_id: str | None = None


class AbortWeightUpdateReqInput(ControlRequest, frozen=True):
    """Discard the open session."""


class UpdateWeightVersionReqInput(ControlRequest, frozen=True, kw_only=True):
    """Give the weights another version; in a session it takes effect with the commit."""

    new_version: str
    abort_all_requests: bool = False


class GetWeightsByNameReqInput(ControlRequest, frozen=True, kw_only=True):
    """Read the first rows of a weight under its checkpoint name."""

    name: str
    truncate_size: int = 100


class CheckWeightsReqInput(ControlRequest, frozen=True, kw_only=True):
    """Sum up the parameters, keep a copy of them, fill them with anything, or compare them with the copy.

    `skip_tensor_list`: what is in the names of parameters to leave out. The rest is accepted and ignored.
    """

    action: Literal["checksum", "snapshot", "reset_tensors", "compare"] = "checksum"
    skip_tensor_list: list[str] | None = None
    allow_quant_error: Any = None
    selector: Any = None


class GetLoadReqInput(ControlRequest, frozen=True):
    """Ask how much every replica has to do. Changes nothing."""


class PingReqInput(ControlRequest, frozen=True):
    """Ask whether the loop of every rank turns. Changes nothing."""


AnyControlRequest = (
    ReleaseMemoryOccupationReqInput
    | ResumeMemoryOccupationReqInput
    | PauseGenerationReqInput
    | ContinueGenerationReqInput
    | AbortReq
    | FlushCacheReqInput
    | UpdateWeightFromDiskReqInput
    | UpdateWeightsFromTensorReqInput
    | UpdateWeightsFromDistributedReqInput
    | UpdateWeightsFromIPCReqInput
    | InitWeightsUpdateGroupReqInput
    | DestroyWeightsUpdateGroupReqInput
    | BeginWeightUpdateReqInput
    | EndWeightUpdateReqInput
    | AbortWeightUpdateReqInput
    | UpdateWeightVersionReqInput
    | GetWeightsByNameReqInput
    | CheckWeightsReqInput
    | GetLoadReqInput
    | PingReqInput
)

# ----------------------------------------------------------------------------------------- control replies


class WeightsContent(Struct, frozen=True, kw_only=True):
    """Whether the parameters hold a whole set of weights. `missing` names up to ten that are not written."""

    content: Literal["valid", "stale"]
    num_missing: int = 0
    missing: list[str] = []


class ReleaseMemoryOccupationReqOutput(TotalsReply, frozen=True, kw_only=True):
    changed: bool
    tags: list[MemoryTag]
    freed_bytes: dict[MemoryTag, int]
    num_retracted: int
    device_free_bytes_before: int
    device_free_bytes_after: int
    duration_ms: float


class ResumeMemoryOccupationReqOutput(TotalsReply, frozen=True, kw_only=True):
    changed: bool
    tags: list[MemoryTag]
    mapped_bytes: dict[MemoryTag, int]
    weights: WeightsContent
    device_free_bytes_before: int
    device_free_bytes_after: int
    duration_ms: float


class PauseGenerationReqOutput(Reply, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"
    changed: bool
    mode: PauseMode
    num_running: int
    num_retracted: int
    num_aborted: int
    num_queued: int


class ContinueGenerationReqOutput(Reply, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"
    changed: bool


class AbortReqOutput(Reply, frozen=True, kw_only=True):
    changed: bool
    num_aborted: int


class FlushCacheReqOutput(Reply, frozen=True, kw_only=True):
    fully_flushed: bool
    freed_tokens: int


class UpdateWeightsReqOutput(TotalsReply, frozen=True, kw_only=True):
    weight_version: str
    committed: bool
    staged: bool
    num_tensors: int
    num_ignored: int
    num_bytes: int
    stall_ms: float
    num_paused_requests: int
    content: Literal["valid", "stale"]
    num_missing: int


class WeightsUpdateGroupReqOutput(Reply, frozen=True, kw_only=True):
    """A group was joined or left. `replaced`: a live one of that name was left first."""

    changed: bool
    replaced: bool = False


class WeightSessionReqOutput(Reply, frozen=True, kw_only=True):
    """A session was opened or discarded."""

    changed: bool


class UpdateWeightVersionReqOutput(Reply, frozen=True, kw_only=True):
    new_version: str


class GetWeightsByNameReqOutput(Reply, frozen=True, kw_only=True):
    """`values` is the bare list that clients get: numbers for 1-D weights, rows for 2-D ones."""

    values: list[Any]


class CheckWeightsReqOutput(Reply, frozen=True, kw_only=True):
    """Of checksums, those of every rank, and what they come to; replicas with the same weights agree."""

    per_engine_checksum: str | UnsetType = UNSET
    by_rank: list[RankChecksums] | UnsetType = field(default=UNSET, name="ranks")


class GetLoadReqOutput(Reply, frozen=True, kw_only=True):
    """`loads` by dp_rank."""

    loads: list[Load]


class PingReqOutput(Reply, frozen=True, kw_only=True):
    pass


AnyReply = (
    ReleaseMemoryOccupationReqOutput
    | ResumeMemoryOccupationReqOutput
    | PauseGenerationReqOutput
    | ContinueGenerationReqOutput
    | AbortReqOutput
    | FlushCacheReqOutput
    | UpdateWeightsReqOutput
    | WeightsUpdateGroupReqOutput
    | WeightSessionReqOutput
    | UpdateWeightVersionReqOutput
    | GetWeightsByNameReqOutput
    | CheckWeightsReqOutput
    | GetLoadReqOutput
    | PingReqOutput
    | Prepared
    | GivenUp
    | Refusal
)

# ------------------------------------------------------------------------------------------- state reports


class StateReport(Message, frozen=True, kw_only=True):
    """The state machines as they stand. Sent when they change, ahead of the reply to what changed them.

    Those of the ranks of one replica are the same; `ranks` has each of them.
    """

    dp_rank: int = 0
    paused: PauseMode | None
    can_run: bool
    reason: str
    ranks: list[RankReport]
    weight_version: str
    model_path: str
    load_format: str
    session: SessionReport | None = None
    weight_groups: list[str] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------- generation


class TokenizedGenerateReqInput(Message, frozen=True, kw_only=True):
    """One output to generate. Everything in it has been checked by the TokenizerManager.

    Attributes:
        logprob_start: first prompt position whose logprob is wanted; None for none of the prompt.
        cache_namespace: prefixes are shared only between requests with equal namespaces.
        max_new_tokens: how many tokens the context leaves room for, at most what was asked for.
        arrival_s: when the request arrived, on the clock of `time.monotonic`.
        dp_rank: the replica that it is for; None as long as none has been chosen, or if there is only one.
    """

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    max_new_tokens: int
    seed: int
    stream: bool = False
    stream_interval: int = 1
    return_logprob: bool = False
    logprob_start: int | None = None
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    cache_namespace: tuple[str, ...] = ()
    arrival_s: float = 0.0
    dp_rank: int | None = None


class AbortGeneration(Message, frozen=True, kw_only=True):
    """End one request from the API process itself: its client went away, or its time is up."""

    rid: str
    message: str


class ControlCall(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A control request with the id that its reply will carry.

    `is_joint`: several replicas commit it together, so each waits for a `Verdict`.
    """

    id: str
    request: AnyControlRequest
    is_joint: bool = False


class Expire(Message, frozen=True, kw_only=True):
    """The deadline of the waiting control request `id` has passed: it ends with a refusal.

    Time enters the schedulers as a message, so that every rank sees it at the same iteration.
    """

    id: str


class TokenOutput(Message, frozen=True, kw_only=True):
    """The outputs of one step, for the detokenizer (or, without a tokenizer, for the TokenizerManager)."""

    weight_version: str
    outputs: list[RequestOutput]


class TextOutput(Message, frozen=True, kw_only=True):
    """`outputs` with the text that each adds; the text never ends in half a character."""

    weight_version: str
    outputs: list[RequestOutput]
    texts: list[str]


SchedulerInput = TokenizedGenerateReqInput | AbortGeneration | ControlCall | Verdict | Expire
DetokenizerInput = TokenOutput


class ControlReply(Message, frozen=True, kw_only=True):
    """The one reply to the control request `id` of all ranks of a replica."""

    dp_rank: int = 0
    id: str
    reply: AnyReply


ManagerInput = TextOutput | TokenOutput | ControlReply | StateReport
