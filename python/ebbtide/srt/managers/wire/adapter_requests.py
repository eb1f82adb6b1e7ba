"""The control requests about adapters, with their replies and rows. Source: control_semantics section 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import field

from ebbtide.srt.managers.wire import merging as merge
from ebbtide.srt.managers.wire.control_request import (
    ControlRequest,
    ControlRow,
    Deadline,
    Outcome,
    Turn,
)
from ebbtide.srt.managers.wire.message import Seconds, TotalsReply
from ebbtide.srt.managers.wire.weight_requests import AbortWeightUpdateReqInput, Canary

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
    """

    row = _load("/load_lora_adapter_from_tensors", per_rank="serialized_named_tensors")

    config_dict: dict[str, Any]
    serialized_named_tensors: list[bytes] = field(default_factory=list)
    serialized_tensors: str | None = None
    load_format: str | None = None
    added_tokens_config: Any = None


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


AnyAdapterRequest = LoadLoRAAdapterReqInput | LoadLoRAAdapterFromTensorsReqInput | UnloadLoRAAdapterReqInput
AnyAdapterReply = LoadLoRAAdapterReqOutput | UnloadLoRAAdapterReqOutput
