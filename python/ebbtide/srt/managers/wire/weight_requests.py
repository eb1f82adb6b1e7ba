"""The control requests about weights, with their replies and rows. Source: wire_api section 3.3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from ebbtide.formats import ChangedTensor, IpcTensor
from ebbtide.srt.managers.wire import merging as merge
from ebbtide.srt.managers.wire.control_request import (
    POST_OR_GET,
    ControlRequest,
    ControlRow,
    Deadline,
    Outcome,
    Turn,
)
from ebbtide.srt.managers.wire.message import (
    ChecksumAlgorithm,
    Name,
    PauseMode,
    RankChecksums,
    Reply,
    Seconds,
    TotalsReply,
)

# Which model an update is for: there is one.
Selector: TypeAlias = Literal["target", "all"]
# A weight update group has this name where none is given.
DEFAULT_GROUP = "weight_update_group"
# The format of broadcasts that say by themselves what they are: names, dtypes and shapes are not given then.
STATE_DICTS: Final = "state_dicts"
# Joining a group ends by itself at its limit, with a better reason; the grace is for a rank that does not.
JOIN_GRACE_S: Final = 2.0


class UpdateWeightsReqOutput(TotalsReply, frozen=True, kw_only=True):
    """`base_checked`: of a delta, whether it said which weights it is of, and those are what it changed.
    `num_nonfinite`: tensors with NaN or Inf, of the update or of all that its session has staged.

    `stages_ms`: how long each stage took on the first rank, one after the other.
    """

    weight_version: Annotated[str, merge.AGREED]
    committed: Annotated[bool, merge.ALL]
    staged: Annotated[bool, merge.ALL]
    num_tensors: Annotated[int, merge.SAME]
    num_ignored: Annotated[int, merge.SAME]
    num_bytes: Annotated[int, merge.SUM]
    stall_ms: Annotated[float, merge.MAX]
    num_paused_requests: Annotated[int, merge.PER_REPLICA]
    content: Annotated[Literal["valid", "stale"], merge.STALER]
    num_missing: Annotated[int, merge.MAX]
    num_nonfinite: Annotated[int, merge.MAX] = 0
    base_checked: Annotated[bool | UnsetType, merge.AGREED] = UNSET
    stages_ms: Annotated[dict[str, float], merge.SAME] = field(default_factory=dict)

    @property
    def served_version(self) -> str:
        return self.weight_version

    @property
    def has_changed_weights(self) -> bool:
        return self.committed


class Canary(Struct, frozen=True, kw_only=True):
    """Tokens that new weights must make of what the trainer's make, before they serve.

    Attributes:
        logprobs: the trainer's, of the second token and those behind it (or of all, the first null); None:
            they have to be finite.
        atol: by how much any of them may differ.
    """

    input_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=2)]
    logprobs: list[float | None] | None = None
    atol: Annotated[float, Meta(ge=0)] = 0.5


class WeightUpdateRequest(ControlRequest, frozen=True, kw_only=True):
    """The fields of every weight update. Source: wire_api section 3.3.

    `session_id`: refused unless the session of this name is open. `canary`: not in a
    session, whose end may bring one. `refuse_nonfinite`: refused if it holds NaN or Inf; None: as the server
    argument says.
    """

    flush_cache: bool = True
    abort_all_requests: bool = False
    pause_mode: PauseMode | None = None
    weight_version: Name | int | None = None
    timeout_s: Seconds | None = None
    selector: Selector = "all"
    torch_empty_cache: bool = False
    session_id: str | None = None
    canary: Canary | None = None
    refuse_nonfinite: bool | None = None

    def undo(self, outcome: Outcome) -> Mapping[int, AbortWeightUpdateReqInput]:
        # A part of a session cannot be unstaged, and a commit would bring it to some replicas only.
        replies = outcome.replies
        is_staged = any(
            isinstance(reply, UpdateWeightsReqOutput) and not reply.committed for reply in replies.values()
        )
        return dict.fromkeys(sorted(replies), AbortWeightUpdateReqInput()) if is_staged else {}


def _update(path: str, op: str | None = None, per_rank: str | None = None) -> ControlRow:
    """The row of a weight update."""
    return ControlRow(
        *(UpdateWeightsReqOutput, path),
        op=op,
        deadline=Deadline.UPDATE,
        per_rank=per_rank,
        subject="session",
        turn=Turn.SHARED,
        settles=False,
        is_beside=True,
        is_joint=True,
        undone="The session was discarded, as others had staged this update",
    )


class UpdateWeightFromDiskReqInput(WeightUpdateRequest, frozen=True, kw_only=True):
    """Take the weights of a Hugging Face checkpoint folder. Fields after `load_format` are ignored."""

    row = _update("/update_weights_from_disk", op="update_from_disk")

    model_path: str
    load_format: str | None = None
    is_async: Any = None
    keep_pause: Any = None
    recapture_cuda_graph: Any = None
    token_step: Any = None
    manifest: Any = None


class UpdateWeightsFromTensorReqInput(WeightUpdateRequest, frozen=True, kw_only=True):
    """Take serialized named tensors, one entry per rank; in JSON each entry is base64. wire_api section 4.

    `changed`: with `load_format` "sparse", what the payload changes; `base_version`: of which weights.
    Refused (409) unless these serve, or the open session is to make them serve. `lent`: with "ipc_handles",
    what is behind them, see wire_vllm section 2.4.
    """

    row = _update("/update_weights_from_tensor", per_rank="serialized_named_tensors")

    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    changed: list[ChangedTensor] | None = None
    lent: list[IpcTensor] | None = None
    base_version: str | int | None = None


class UpdateWeightsFromDistributedReqInput(WeightUpdateRequest, frozen=True, kw_only=True):
    """Take tensors that rank 0 of a group broadcasts. `name`, `dtype`, `shape` are older words for one.

    `packed_buffer_bytes`, `num_updates`: of the formats "packed" and "sparse", see wire_vllm section 2.3.
    """

    row = _update("/update_weights_from_distributed")

    names: list[str] | None = None
    dtypes: list[str] | None = None
    shapes: list[list[int]] | None = None
    group_name: str = DEFAULT_GROUP
    load_format: str | None = None
    packed_buffer_bytes: Annotated[int, Meta(gt=0)] = 1 << 30
    num_updates: list[Annotated[int, Meta(ge=0)]] | None = None
    name: str | None = None
    dtype: str | None = None
    shape: list[int] | None = None


class UpdateWeightsFromIPCReqInput(WeightUpdateRequest, frozen=True, kw_only=True):
    """Take what checkpoint-engine's senders bring: their addresses by device. wire_api section 4.5."""

    row = _update("/update_weights_from_ipc")

    zmq_handles: dict[str, str]


# These are brought piece by piece.
PiecewiseRequest: TypeAlias = UpdateWeightsFromIPCReqInput | UpdateWeightsFromDistributedReqInput


class WeightsUpdateGroupReqOutput(Reply, frozen=True, kw_only=True):
    """A group was joined or left. `replaced`: a live one of that name was left first."""

    changed: Annotated[bool, merge.ANY]
    replaced: Annotated[bool, merge.ANY] = False


class InitWeightsUpdateGroupReqInput(ControlRequest, frozen=True, kw_only=True):
    """Join a process group whose rank 0 is the trainer. wire_api section 3.3. `pp_rank` is ignored.

    `backend`: with "raw_nccl" the trainer uses no process group of torch's, see wire_vllm section 2.2;
    `nccl_unique_id`, its communicator's id in base64, then takes the place of the address.
    """

    row = ControlRow(
        WeightsUpdateGroupReqOutput, "/init_weights_update_group", deadline=Deadline.OWN, grace_s=JOIN_GRACE_S
    )

    master_address: str
    master_port: int | str
    rank_offset: Annotated[int, Meta(ge=1)]
    world_size: Annotated[int, Meta(ge=2)]
    group_name: Annotated[str, Meta(min_length=1)] = DEFAULT_GROUP
    backend: Literal["nccl", "gloo", "raw_nccl"] = "nccl"
    nccl_unique_id: str | None = None
    timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    pp_rank: Any = None

    @property
    def subject(self) -> str:
        return f"group {self.group_name}"

    def undo(self, outcome: Outcome) -> Mapping[int, DestroyWeightsUpdateGroupReqInput]:
        leaving = DestroyWeightsUpdateGroupReqInput(group_name=self.group_name)
        return dict.fromkeys(outcome.changed, leaving)


class DestroyWeightsUpdateGroupReqInput(ControlRequest, frozen=True, kw_only=True):
    """Leave a group, also one that is just being joined; an unknown one is not an error."""

    row = ControlRow(WeightsUpdateGroupReqOutput, "/destroy_weights_update_group", deadline=Deadline.UPDATE)

    group_name: str = DEFAULT_GROUP

    @property
    def subject(self) -> str:
        return f"group {self.group_name}"


class WeightSessionReqOutput(Reply, frozen=True, kw_only=True):
    """A session was opened or discarded."""

    changed: Annotated[bool, merge.ANY]


class BeginWeightUpdateReqInput(ControlRequest, frozen=True, kw_only=True):
    """Open a weight update session: updates are staged until `EndWeightUpdateReqInput` commits them all."""

    row = ControlRow(
        *(WeightSessionReqOutput, "/begin_weight_update"),
        deadline=Deadline.UPDATE,
        subject="session",
        turn=Turn.ALONE,
        settles=False,
    )

    selector: Selector = "all"
    timeout_s: Seconds | None = None
    session_id: str | None = None

    def undo(self, outcome: Outcome) -> Mapping[int, AbortWeightUpdateReqInput]:
        return dict.fromkeys(outcome.changed, AbortWeightUpdateReqInput())


class EndWeightUpdateReqInput(ControlRequest, frozen=True, kw_only=True):
    """Commit the open session. `flush_cache` null: if any staged update asked for it.

    `allow_incomplete`: also where an update of the session was refused and not made up for.
    """

    row = ControlRow(
        *(UpdateWeightsReqOutput, "/end_weight_update"),
        deadline=Deadline.UPDATE,
        subject="session",
        turn=Turn.ALONE,
        settles=False,
        is_joint=True,
        undone="The session was discarded, as others have it",
    )

    weight_version: Name | int | None = None
    flush_cache: bool | None = None
    pause_mode: PauseMode | None = None
    timeout_s: Seconds | None = None
    session_id: str | None = None
    allow_incomplete: bool = False
    canary: Canary | None = None

    def undo(self, outcome: Outcome) -> Mapping[int, AbortWeightUpdateReqInput]:
        if all(outcome.has_session.values()):
            return {}
        # What is gone on one replica can never be committed on all.
        open_on = [dp_rank for dp_rank, is_open in sorted(outcome.has_session.items()) if is_open]
        return dict.fromkeys(open_on, AbortWeightUpdateReqInput())


class AbortWeightUpdateReqInput(ControlRequest, frozen=True):
    """Discard the open session."""

    row = ControlRow(WeightSessionReqOutput, "/abort_weight_update", subject="session")

    def ends(self, update: ControlRequest) -> bool:
        return isinstance(update, EndWeightUpdateReqInput)


class UpdateWeightVersionReqOutput(Reply, frozen=True, kw_only=True):
    new_version: Annotated[str, merge.AGREED]

    @property
    def served_version(self) -> str:
        return self.new_version

    @property
    def has_changed_weights(self) -> bool:
        return True


class UpdateWeightVersionReqInput(ControlRequest, frozen=True, kw_only=True):
    """Give the weights another version; in a session it takes effect with the commit."""

    row = ControlRow(
        *(UpdateWeightVersionReqOutput, "/update_weight_version"),
        deadline=Deadline.UPDATE,
        subject="session",
        turn=Turn.ALONE,
        settles=False,
        is_joint=True,
        undone="The session was discarded, as others have none",
    )

    new_version: Name
    abort_all_requests: bool = False

    def undo(self, outcome: Outcome) -> Mapping[int, AbortWeightUpdateReqInput]:
        # Only a session's version is answered without the others.
        return {
            dp_rank: AbortWeightUpdateReqInput()
            for dp_rank, reply in sorted(outcome.replies.items())
            if isinstance(reply, UpdateWeightVersionReqOutput)
        }


class GetWeightsByNameReqOutput(Reply, frozen=True, kw_only=True):
    """`values` is the bare list that clients get: numbers for 1-D weights, rows for 2-D ones."""

    values: Annotated[list[Any], merge.SAME]


class GetWeightsByNameReqInput(ControlRequest, frozen=True, kw_only=True):
    """Read the first rows of a weight under its checkpoint name."""

    row = ControlRow(GetWeightsByNameReqOutput, "/get_weights_by_name", POST_OR_GET, body_field="values")

    name: Annotated[str, Meta(min_length=1)]
    truncate_size: Annotated[int, Meta(ge=0)] = 100


class WeightPiece(Struct, frozen=True, kw_only=True):
    """Bytes of one of a rank's own parameters, fused and divided as it holds them.

    Attributes:
        num_parameters: that the rank has.
        generation: another number once something has been written to any of them.
        dtype: as torch spells it, without "torch.".
    """

    num_parameters: int
    generation: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class ReadWeightsReqOutput(Reply, frozen=True, kw_only=True):
    """`pieces`: of consecutive parameters, by tp_rank."""

    pieces: Annotated[list[list[WeightPiece]], merge.LISTED_OF_FIRST_REPLICA]


class ReadWeightsReqInput(ControlRequest, frozen=True, kw_only=True):
    """Read what the ranks of replica 0 hold, for another engine like this one.

    Attributes:
        index: which of the parameters, in the order in which every rank has them.
        first_byte: of that parameter. From 0 on, those that follow it come along.
        num_bytes: at most, of all of them; a parameter that is longer comes alone, in several pieces.
    """

    row = ControlRow(ReadWeightsReqOutput)

    index: Annotated[int, Meta(ge=0)]
    first_byte: Annotated[int, Meta(ge=0)]
    num_bytes: Annotated[int, Meta(gt=0)]


class CheckWeightsReqOutput(Reply, frozen=True, kw_only=True):
    """The checksums, if they were asked for: of every rank, and of all, alike where the weights are."""

    per_engine_checksum: Annotated[str | UnsetType, merge.AGREED] = UNSET
    by_rank: Annotated[list[RankChecksums] | UnsetType, merge.LISTED_PER_REPLICA] = field(
        default=UNSET, name="ranks"
    )


class CheckWeightsReqInput(ControlRequest, frozen=True, kw_only=True):
    """Sum up the parameters, keep a copy of them, fill them with anything, or compare them with the copy.

    `skip_tensor_list`: what is in the names of parameters to leave out. `algorithm`, of checksums: `sum64`
    adds up 64 bits where the parameters are; `sha256` reads their bytes on the host. The rest is ignored.
    """

    # Copies are kept, and freed, by all replicas together.
    row = ControlRow(CheckWeightsReqOutput, "/weights_checker", POST_OR_GET, is_joint=True)

    action: Literal["checksum", "snapshot", "reset_tensors", "compare"] = "checksum"
    skip_tensor_list: list[str] | None = None
    algorithm: ChecksumAlgorithm = "sum64"
    allow_quant_error: Any = None
    selector: Any = None


AnyWeightRequest = (
    UpdateWeightFromDiskReqInput
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
    | ReadWeightsReqInput
    | CheckWeightsReqInput
)

AnyWeightReply = (
    UpdateWeightsReqOutput
    | WeightsUpdateGroupReqOutput
    | WeightSessionReqOutput
    | UpdateWeightVersionReqOutput
    | GetWeightsByNameReqOutput
    | ReadWeightsReqOutput
    | CheckWeightsReqOutput
)
