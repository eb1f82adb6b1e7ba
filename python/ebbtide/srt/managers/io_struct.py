"""Every control request with its reply, and what the processes send each other. One tagged union per channel.

A control request is its struct, and in it its row: where it is asked, how long it may take, and what replicas
do about it. The structs are the HTTP bodies and the arguments of the Python API too; `control_client` builds
them from loose fields. Source: wire_api sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

from msgspec import field

from ebbtide.srt.managers.wire import merging as merge
from ebbtide.srt.managers.wire.control_request import (
    POST_OR_GET,
    ControlRequest as ControlRequest,
    ControlRow,
    Deadline,
    Outcome as Outcome,
    Turn,
)
from ebbtide.srt.managers.wire.generation import (
    AbortGeneration as AbortGeneration,
    FinishReason as FinishReason,
    LoadGrammar as LoadGrammar,
    LogprobColumns as LogprobColumns,
    LogprobList as LogprobList,
    RequestOutput as RequestOutput,
    RequestStart as RequestStart,
    RoutedExperts as RoutedExperts,
    StreamedTokens as StreamedTokens,
    TokenizedGenerateReqInput as TokenizedGenerateReqInput,
    TokenOutput as TokenOutput,
    VersionContract as VersionContract,
)
from ebbtide.srt.managers.wire.message import (
    STALL_BOUNDS_S as STALL_BOUNDS_S,
    STEP_BOUNDS as STEP_BOUNDS,
    AdapterReport as AdapterReport,
    ChecksumAlgorithm as ChecksumAlgorithm,
    Decision,
    GivenUp as GivenUp,
    Load as Load,
    Message as Message,
    PauseMode as PauseMode,
    Prepared as Prepared,
    RankChecksums as RankChecksums,
    RankReport as RankReport,
    Refusal as Refusal,
    Reply as Reply,
    RetractCause as RetractCause,
    Seconds,
    SessionReport as SessionReport,
    StallCounts as StallCounts,
    StateReport as StateReport,
    TagReport as TagReport,
    TotalsReply as TotalsReply,
    Verdict as Verdict,
    WeightsContent as WeightsContent,
)
from ebbtide.srt.managers.wire.weight_requests import (
    DEFAULT_GROUP as DEFAULT_GROUP,
    AbortWeightUpdateReqInput as AbortWeightUpdateReqInput,
    AnyWeightReply as AnyWeightReply,
    AnyWeightRequest as AnyWeightRequest,
    BeginWeightUpdateReqInput as BeginWeightUpdateReqInput,
    Canary as Canary,
    CheckWeightsReqInput as CheckWeightsReqInput,
    CheckWeightsReqOutput as CheckWeightsReqOutput,
    DestroyWeightsUpdateGroupReqInput as DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput as EndWeightUpdateReqInput,
    GetWeightsByNameReqInput as GetWeightsByNameReqInput,
    GetWeightsByNameReqOutput as GetWeightsByNameReqOutput,
    InitWeightsUpdateGroupReqInput as InitWeightsUpdateGroupReqInput,
    PiecewiseRequest as PiecewiseRequest,
    ReadWeightsReqInput as ReadWeightsReqInput,
    ReadWeightsReqOutput as ReadWeightsReqOutput,
    UpdateWeightFromDiskReqInput as UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput as UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput as UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput as UpdateWeightsFromTensorReqInput,
    UpdateWeightsReqOutput as UpdateWeightsReqOutput,
    UpdateWeightVersionReqInput as UpdateWeightVersionReqInput,
    UpdateWeightVersionReqOutput as UpdateWeightVersionReqOutput,
    WeightPiece as WeightPiece,
    WeightSessionReqOutput as WeightSessionReqOutput,
    WeightsUpdateGroupReqOutput as WeightsUpdateGroupReqOutput,
    WeightUpdateRequest as WeightUpdateRequest,
)
from ebbtide.srt.memory_saver import MemoryTag

# -------------------------------------------------------------------------------------------------- memory


class Preserve(StrEnum):
    """Which KV outlives a release of the pool."""

    NONE = "none"
    LIVE = "live"
    ALL = "all"


class KVGivenUpReply(TotalsReply, frozen=True, kw_only=True):
    """What became of the requests that held KV, and of the device's memory."""

    changed: Annotated[bool, merge.ANY]
    num_retracted: Annotated[int, merge.PER_REPLICA]
    num_parked: Annotated[int, merge.PER_REPLICA] = 0
    parked_bytes: Annotated[int, merge.SUM] = 0
    device_free_bytes_before: Annotated[int | None, merge.DEVICE_LEAST]
    device_free_bytes_after: Annotated[int | None, merge.DEVICE_MOST]
    duration_ms: Annotated[float, merge.MAX]


class ReleaseMemoryOccupationReqOutput(KVGivenUpReply, frozen=True, kw_only=True):
    tags: Annotated[list[MemoryTag], merge.SAME]
    freed_bytes: Annotated[dict[MemoryTag, int], merge.SUM_PER_TAG]


class ReleaseMemoryOccupationReqInput(ControlRequest, frozen=True):
    """Give the physical memory of these tags back to the device; none or no tags means all of them.

    `preserve`: which KV is kept in host memory, and comes back with the pool: `live`, that of running
    requests, which go on without a second prefill; `all`, the prefix cache too. `backup`: whether the weights
    survive in host memory; null: as the server was started.
    """

    row = ControlRow(
        *(ReleaseMemoryOccupationReqOutput, "/release_memory_occupation", POST_OR_GET),
        op="release",
        deadline=Deadline.UPDATE,
        subject="memory",
    )

    tags: tuple[MemoryTag, ...] | None = None
    preserve: Preserve = Preserve.NONE
    backup: bool | None = None

    def ends(self, update: ControlRequest) -> bool:
        return not self.tags or MemoryTag.WEIGHTS in self.tags


class ResumeMemoryOccupationReqOutput(TotalsReply, frozen=True, kw_only=True):
    changed: Annotated[bool, merge.ANY]
    tags: Annotated[list[MemoryTag], merge.SAME]
    mapped_bytes: Annotated[dict[MemoryTag, int], merge.SUM_PER_TAG]
    weights: Annotated[WeightsContent, merge.WORSE]
    device_free_bytes_before: Annotated[int | None, merge.DEVICE_MOST]
    device_free_bytes_after: Annotated[int | None, merge.DEVICE_LEAST]
    duration_ms: Annotated[float, merge.MAX]


class ResumeMemoryOccupationReqInput(ControlRequest, frozen=True):
    """Take physical memory for these tags again, at the same addresses; none or no tags means all.

    Of `kv_cache` it comes in parts, and forward passes run from the first one on. `lazy`: the reply does not
    wait for the others.
    """

    row = ControlRow(
        *(ResumeMemoryOccupationReqOutput, "/resume_memory_occupation", POST_OR_GET),
        op="resume",
        deadline=Deadline.UPDATE,
        subject="memory",
    )

    tags: tuple[MemoryTag, ...] | None = None
    lazy: bool = False

    def undo(self, outcome: Outcome) -> Mapping[int, ReleaseMemoryOccupationReqInput]:
        undoing: dict[int, ReleaseMemoryOccupationReqInput] = {}
        for dp_rank in outcome.changed:
            reply = outcome.replies[dp_rank]
            assert isinstance(reply, ResumeMemoryOccupationReqOutput)
            # What was resident before is not in the way: it mapped nothing.
            tags = tuple(tag for tag, num_bytes in reply.mapped_bytes.items() if num_bytes)
            if tags:
                # Weights that are whole now came out of a backup, and must be there for the next resume too.
                backup = reply.weights.content == "valid" if MemoryTag.WEIGHTS in tags else None
                undoing[dp_rank] = ReleaseMemoryOccupationReqInput(
                    tags=tags, preserve=Preserve.LIVE, backup=backup
                )
        return undoing


class ResizeMemoryOccupationReqOutput(KVGivenUpReply, frozen=True, kw_only=True):
    """What the pool has now; `moved_bytes` below 0 have gone to the device.

    `chunk_tokens`, `chunk_bytes`: what sizes are rounded to, of a replica and of a rank.
    """

    num_tokens: Annotated[int, merge.PER_REPLICA]
    num_bytes: Annotated[int, merge.SUM]
    chunk_tokens: Annotated[int, merge.SAME]
    chunk_bytes: Annotated[int, merge.SAME]
    moved_bytes: Annotated[int, merge.SUM]


class ResizeMemoryOccupationReqInput(ControlRequest, frozen=True):
    """Make the KV cache smaller or larger while it serves, in whole chunks: by tokens or by bytes of a rank.

    It is never larger than at the start, and never smaller than one whole context. Cached pages are dropped,
    live ones moved together, then the youngest requests give up their KV, until there are enough chunks
    without a page in use. `preserve`: `none`, they are retracted; `live` or `all`, it is kept in host memory
    as far as there is room, and they go on from there when the pool has room again.
    """

    row = ControlRow(
        *(ResizeMemoryOccupationReqOutput, "/resize_memory_occupation"),
        op="resize",
        deadline=Deadline.UPDATE,
        subject="memory",
    )

    num_tokens: int | None = None
    num_bytes: int | None = None
    preserve: Preserve = Preserve.NONE


# ---------------------------------------------------------------------------------------- generation state


class PauseGenerationReqOutput(Reply, frozen=True, kw_only=True):
    status: Annotated[Literal["ok"], merge.SAME] = "ok"
    changed: Annotated[bool, merge.ANY]
    mode: Annotated[PauseMode, merge.SAME]
    num_running: Annotated[int, merge.PER_REPLICA]
    num_retracted: Annotated[int, merge.PER_REPLICA]
    num_aborted: Annotated[int, merge.PER_REPLICA]
    num_queued: Annotated[int, merge.PER_REPLICA]


class PauseGenerationReqInput(ControlRequest, frozen=True):
    """Run no further forward pass until `ContinueGenerationReqInput`."""

    row = ControlRow(
        *(PauseGenerationReqOutput, "/pause_generation"),
        op="pause",
        deadline=Deadline.OWN,
        subject="generation",
    )

    mode: PauseMode = PauseMode.ABORT
    timeout_s: Seconds | None = None

    def undo(self, outcome: Outcome) -> Mapping[int, ContinueGenerationReqInput]:
        # The other modes are never refused for the state of one replica.
        if self.mode is not PauseMode.WAIT:
            return {}
        return dict.fromkeys(outcome.changed, ContinueGenerationReqInput())


class ContinueGenerationReqOutput(Reply, frozen=True, kw_only=True):
    status: Annotated[Literal["ok"], merge.SAME] = "ok"
    changed: Annotated[bool, merge.ANY]


class ContinueGenerationReqInput(ControlRequest, frozen=True):
    """End a pause. `torch_empty_cache` is accepted and ignored."""

    row = ControlRow(ContinueGenerationReqOutput, "/continue_generation", op="continue", subject="generation")

    torch_empty_cache: bool = True


class AbortReqOutput(Reply, frozen=True, kw_only=True):
    changed: Annotated[bool, merge.ANY]
    num_aborted: Annotated[int, merge.PER_REPLICA]


class AbortReq(ControlRequest, frozen=True):
    """End one request, a list of them, or all; an unknown rid is not an error."""

    row = ControlRow(AbortReqOutput, "/abort_request", body_if="report")

    rid: str | list[str] = ""
    abort_all: bool = False
    report: bool = False


class FlushCacheReqOutput(Reply, frozen=True, kw_only=True):
    fully_flushed: Annotated[bool, merge.ALL]
    freed_tokens: Annotated[int, merge.PER_REPLICA]


class FlushCacheReqInput(ControlRequest, frozen=True):
    """Empty the prefix cache; wait up to `timeout_s` seconds for requests that hold KV to end.

    `retract_running`: these give up their KV first, and compute it again when they go on.
    """

    row = ControlRow(
        *(FlushCacheReqOutput, "/flush_cache", POST_OR_GET),
        query_aliases={"timeout": "timeout_s"},
        op="flush",
        deadline=Deadline.OWN,
    )

    timeout_s: Seconds = 0.0
    retract_running: bool = False


# ------------------------------------------------------------------------------------------------ adapters

# What becomes of requests that run on the version before: they stay on it; they go on with the new one, with
# the KV that they have or without; they end.
InFlight: TypeAlias = Literal["stay", "continue", "recompute", "abort"]


class LoadLoRAAdapterReqOutput(TotalsReply, frozen=True, kw_only=True):
    """`changed` false: this version was loaded before, with the same contents.

    `loaded_adapters`: by name, the version that it means now. `checksum`: of config and tensors; empty where
    these were sent under no version.
    """

    changed: Annotated[bool, merge.ANY]
    lora_name: Annotated[str, merge.SAME]
    lora_version: Annotated[str, merge.AGREED]
    checksum: Annotated[str, merge.SAME]
    num_tensors: Annotated[int, merge.SAME]
    num_bytes: Annotated[int, merge.SUM]
    num_moved: Annotated[int, merge.PER_REPLICA]
    stall_ms: Annotated[float, merge.MAX]
    loaded_adapters: Annotated[dict[str, str], merge.SAME]


class LoadRequest(ControlRequest, frozen=True, kw_only=True):
    """The fields of every load: it makes a new version of the name, and the name means that from then on.

    `lora_version`: a load of the same contents under the same version changes nothing, other contents are
    refused (409); null: a number. `pinned`: it keeps its slot. `in_flight`: what becomes of requests that run
    on the version before, where they do not say by `on_update`. `session_id`: it is committed with the weight
    update session of this name, and needs a `lora_version`. `canary`: held against the new version before it
    means anything; not in a session.
    """

    lora_name: str
    lora_version: str | int | None = None
    pinned: bool = False
    in_flight: InFlight = "stay"
    timeout_s: Seconds | None = None
    session_id: str | None = None
    canary: Canary | None = None
    lora_id: Any = None

    @property
    def version(self) -> str | None:
        return None if self.lora_version is None else str(self.lora_version)

    @property
    def subject(self) -> str:
        return "adapters" if self.session_id is None else "session"

    def undo(self, outcome: Outcome) -> Mapping[int, AbortWeightUpdateReqInput]:
        """What only some have staged cannot be committed by all."""
        is_staged = self.session_id is not None and bool(outcome.changed)
        return dict.fromkeys(sorted(outcome.replies), AbortWeightUpdateReqInput()) if is_staged else {}


def _load(path: str, per_rank: str | None = None) -> ControlRow:
    """The row of a load."""
    return ControlRow(
        *(LoadLoRAAdapterReqOutput, path),
        deadline=Deadline.UPDATE,
        per_rank=per_rank,
        turn=Turn.SHARED,
        settles=False,
        is_beside=True,
        is_joint=True,
        undone="The session was discarded, as others had staged this adapter",
    )


class LoadLoRAAdapterReqInput(LoadRequest, frozen=True, kw_only=True):
    """Load an adapter from a PEFT folder that the engine's processes can read.

    `may_leave`: it is unloaded where `max_loaded_loras` others are used after it. `instead_of`: the one of
    these that is unloaded first, where there are so many.
    """

    row = _load("/load_lora_adapter")

    lora_path: str
    may_leave: bool = False
    instead_of: str | None = None


class LoadLoRAAdapterFromTensorsReqInput(LoadRequest, frozen=True, kw_only=True):
    """Load an adapter from serialized named tensors, one entry per rank; in JSON each is base64.

    `config_dict`: what PEFT writes to adapter_config.json. `load_format`: as in updates of the weights.
    `serialized_tensors`: the entry of an engine of one rank, in the place of the list.
    `expected_checksums`: SHA-256 of the bytes of each tensor; where they are others, nothing is loaded.
    """

    row = _load("/load_lora_adapter_from_tensors", per_rank="serialized_named_tensors")

    config_dict: dict[str, Any]
    serialized_named_tensors: list[bytes] = field(default_factory=list)
    serialized_tensors: str | None = None
    load_format: str | None = None
    added_tokens_config: Any = None
    expected_checksums: dict[str, str] | None = None


class UnloadLoRAAdapterReqOutput(TotalsReply, frozen=True, kw_only=True):
    """`num_in_use`: requests that go on with what was unloaded until they end."""

    changed: Annotated[bool, merge.ANY]
    num_in_use: Annotated[int, merge.PER_REPLICA]
    loaded_adapters: Annotated[dict[str, str], merge.SAME]


class UnloadLoRAAdapterReqInput(ControlRequest, frozen=True, kw_only=True):
    """Have a name, or one version of it, mean nothing any more. Requests that run on it come to their ends.

    `timeout_s`: how long the answer waits for them; null: as long as an update may take; 0: not at all.
    """

    row = ControlRow(
        *(UnloadLoRAAdapterReqOutput, "/unload_lora_adapter"),
        deadline=Deadline.UPDATE,
        subject="adapters",
        turn=Turn.SHARED,
        settles=False,
        is_joint=True,
    )

    lora_name: str
    lora_version: str | int | None = None
    timeout_s: Seconds | None = None
    lora_id: Any = None


# --------------------------------------------------------------------------------------------- information

PING_TIMEOUT_S: Final = 17.0


class GetLoadReqOutput(Reply, frozen=True, kw_only=True):
    """`loads` by dp_rank."""

    loads: Annotated[list[Load], merge.LISTED_PER_REPLICA]


class GetLoadReqInput(ControlRequest, frozen=True):
    """Ask how much every replica has to do. Changes nothing."""

    row = ControlRow(GetLoadReqOutput, is_beside=True)


class PingReqOutput(Reply, frozen=True, kw_only=True):
    pass


class PingReqInput(ControlRequest, frozen=True):
    """Ask whether the loop of every rank turns. Changes nothing.

    Its deadline has the rank that does not named before whoever asks gives up.
    """

    row = ControlRow(PingReqOutput, deadline=Deadline.OWN, is_beside=True)
    timeout_s: ClassVar[float] = PING_TIMEOUT_S


# ---------------------------------------------------------------------------------- on the channels

AnyControlRequest = (
    ReleaseMemoryOccupationReqInput
    | ResizeMemoryOccupationReqInput
    | ResumeMemoryOccupationReqInput
    | PauseGenerationReqInput
    | ContinueGenerationReqInput
    | AbortReq
    | FlushCacheReqInput
    | AnyWeightRequest
    | LoadLoRAAdapterReqInput
    | LoadLoRAAdapterFromTensorsReqInput
    | UnloadLoRAAdapterReqInput
    | GetLoadReqInput
    | PingReqInput
)
CONTROL_REQUESTS: Final[tuple[type[ControlRequest], ...]] = get_args(AnyControlRequest)

AnyReply = (
    ReleaseMemoryOccupationReqOutput
    | ResizeMemoryOccupationReqOutput
    | ResumeMemoryOccupationReqOutput
    | PauseGenerationReqOutput
    | ContinueGenerationReqOutput
    | AbortReqOutput
    | FlushCacheReqOutput
    | AnyWeightReply
    | LoadLoRAAdapterReqOutput
    | UnloadLoRAAdapterReqOutput
    | GetLoadReqOutput
    | PingReqOutput
    | Prepared
    | GivenUp
    | Refusal
)


class ControlCall(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A control request with the id that its reply will carry.

    `is_joint`: several replicas commit it together, so each waits for a `Verdict`.
    """

    id: str
    request: AnyControlRequest
    is_joint: bool = False

    @property
    def overtakes(self) -> bool:
        # Whether the engine is well is asked by who restarts it, whatever the number of prompts in line.
        return isinstance(self.request, PingReqInput)


class Expire(Message, frozen=True, kw_only=True):
    """The deadline of the waiting control request `id` has passed: it ends with a refusal.

    Time enters the schedulers as a message, so that every rank sees it at the same iteration.
    """

    id: str


class ControlReply(Message, frozen=True, kw_only=True):
    """The one reply to the control request `id` of all ranks of a replica.

    `aborts_before`: how many messages with aborted requests the replica had sent by then. They take a longer
    way, and nobody is to have the reply before them.
    """

    dp_rank: int = 0
    id: str
    reply: AnyReply
    aborts_before: int = 0


SchedulerInput = TokenizedGenerateReqInput | AbortGeneration | LoadGrammar | ControlCall | Verdict | Expire
DetokenizerInput = TokenOutput
ManagerInput = TokenOutput | ControlReply | StateReport
# What a turn of the scheduler's loop begins with.
TurnInput = SchedulerInput | Decision

# --------------------------------------------------------------------------- between the ranks of a replica


class Tick(Message, frozen=True, kw_only=True):
    """One turn of the leader's loop: each follower turns once, with the same messages."""

    messages: list[TurnInput]


class RankVote(Message, frozen=True, kw_only=True):
    """A rank has done its part of a phase, or failed at it.

    Attributes:
        ends: this failure ends the phase, whatever the others are doing: they wait for what will not come.
    """

    tp_rank: int
    phase: int
    failure: Refusal | None = None
    fact: Any = None
    ends: bool = False


class RankReply(Message, frozen=True, kw_only=True):
    """A follower's reply to the control request `id`."""

    tp_rank: int
    id: str
    reply: AnyReply


class RankUpdate(Message, frozen=True, kw_only=True):
    """A follower's memory as it stands. Sent when it changes, ahead of the reply to what changed it."""

    report: RankReport


# From followers to the leader of a replica.
RankMessage = RankVote | RankReply | RankUpdate
