"""What messages between processes, replies and decisions are made of; and what ranks and replicas report.

How ranks end a phase together, and replicas commit an update together: see `managers.committee`. A replica
that is not sent its `Verdict` in time serves nothing until it is: others may have other weights already.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from ebbtide.srt.memory_saver import MemoryTag


class Message(Struct, frozen=True, kw_only=True, tag=True):
    """A message on a channel: its type travels as a tag, and a bad field fails at decode with its path."""

    @property
    def overtakes(self) -> bool:
        """Whether it is read before what was sent earlier."""
        return False


class Reply(Message, frozen=True, kw_only=True):
    """The body of a reply. The defaults are those of a request that had nothing to do."""

    success: bool = True
    message: str = ""

    @property
    def served_version(self) -> str | None:
        """The version of the weights that serve, where this reply has it."""
        return None

    @property
    def has_changed_weights(self) -> bool:
        """Whether other weights serve than before, or the same under another version."""
        return False


class TotalsReply(Reply, frozen=True, kw_only=True):
    """A reply with totals. `ranks`: of several ranks, what each adds, with its `dp_rank` and `tp_rank`."""

    ranks: list[dict[str, Any]] | UnsetType = UNSET


class Refusal(Reply, frozen=True, kw_only=True):
    """A request that was refused or failed: becomes `RequestRejected`, or `EngineError` for 500."""

    success: bool = False
    status: int
    fields: dict[str, Any] = {}


class Decision(Message, frozen=True, kw_only=True):
    """How a phase of a control request has ended, for all ranks at the same place among their messages.

    Attributes:
        phase: its number; every rank counts alike.
        failure: of all who failed, as one; None if all ranks have done their part.
        facts: what each rank said of its part, by tp_rank; empty after a failure.
    """

    phase: int
    failure: Refusal | None = None
    facts: Sequence[Any] = ()


class Prepared(Reply, frozen=True, kw_only=True):
    """Not a replica's last word on a control call: it can commit, and waits for the `Verdict`.

    `is_overdue`: it has waited so long that it serves nothing now.
    """

    is_overdue: bool = False


class GivenUp(Refusal, frozen=True, kw_only=True):
    """What a replica replies that would have done what was asked for, but was told to give up.

    `left`: what it leaves behind that is not as it was; empty if nothing.
    """

    left: str = ""


class Verdict(Message, frozen=True, kw_only=True):
    """What becomes of the control call `id`, on all replicas alike: at the same place among their requests.

    `refusal`: why it is given up; None: it is committed.
    """

    id: str
    refusal: str | None = None


# A time limit of a control request.
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
# What is remembered by name: a version of the weights, a transition.
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
ChecksumAlgorithm: TypeAlias = Literal["sum64", "sha256"]
# Seconds, of `StallCounts`: the largest of each bucket; one more has what is longer.
STALL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# Tokens of forward passes, in the same way. vLLM's bounds.
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class PauseMode(enum.StrEnum):
    """What a pause does with the running requests. The order is that of escalation."""

    WAIT = "wait"
    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"


class WeightsContent(Struct, frozen=True, kw_only=True):
    """Whether the parameters hold a whole set of weights. `missing` names up to ten that are not written."""

    content: Literal["valid", "stale"]
    num_missing: int = 0
    missing: list[str] = []


class TagReport(Struct, frozen=True, kw_only=True):
    """One memory tag of one rank. `content` speaks of weights only; wire_api section 3.1."""

    state: Literal["resident", "released"]
    virtual_bytes: int
    resident_bytes: int
    backup_bytes: int
    content: Literal["valid", "stale"] | None = None
    num_missing: int | UnsetType = UNSET
    missing: list[str] | UnsetType = UNSET


class RankReport(Struct, frozen=True, kw_only=True):
    dp_rank: int
    tp_rank: int
    pid: int
    device: str
    uuid: str | None
    tags: dict[MemoryTag, TagReport]


class SessionReport(Struct, frozen=True, kw_only=True):
    """The open weight update session. `opened_at` is seconds since the epoch."""

    opened_at: float
    num_tensors_staged: int


class Parallelism(Struct, frozen=True, kw_only=True):
    """Which part of which replica a rank is. `rank` and `size` count the ranks of all replicas."""

    role: Literal["target"] = "target"
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    pp_rank: int = 0
    pp_size: int = 1
    rank: int
    size: int


class RankChecksums(Struct, frozen=True, kw_only=True):
    """Checksums in hexadecimal of a rank's own parameters, fused and divided as it holds them."""

    checksums: dict[str, str]
    per_gpu_checksum: str
    parallelism_info: list[Parallelism]


class AdapterReport(Struct, frozen=True, kw_only=True):
    """A version of an adapter that requests may ask for.

    `path`: the folder that it came from, if any. `checksum`: of its config and tensors, if it was summed.
    """

    name: str
    version: str
    path: str = ""
    pinned: bool = False
    checksum: str = ""


class StateReport(Message, frozen=True, kw_only=True):
    """The state machines as they stand. Sent when they change, ahead of the reply to what changed them.

    Those of the ranks of one replica are the same; `ranks` has each of them. `adapters`: of a name, the
    version that it means now comes last.
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
    adapters: list[AdapterReport] = field(default_factory=list)

    @property
    def adapter_versions(self) -> dict[str, AdapterReport]:
        """By name, the version that it means now."""
        return {one.name: one for one in self.adapters}


class RetractCause(StrEnum):
    """What a request gives up its KV for. It is computed again when the request is admitted again."""

    POOL = "pool"  # older requests needed the room
    PAUSE = "pause"
    UPDATE = "update"
    RELEASE = "release"
    RESIZE = "resize"
    FLUSH = "flush"
    MEMORY = "memory"  # a forward pass found too little, and had changed states


class StallCounts(Struct, frozen=True, kw_only=True):
    """How long the control requests of one kind kept forward passes from running.

    `counts`: of requests, one for each bucket.
    """

    counts: list[int]
    sum_s: float


class Load(Struct, frozen=True, kw_only=True):
    """What one replica has to do. wire_api section 3.4.

    Attributes:
        num_running_reqs: those that the next forward pass may contain.
        num_paused_reqs: those that hold KV while generation is paused.
        num_used_tokens: room in the KV pool that neither is free nor could be at once.
        num_total_tokens: those, and the tokens of requests that wait.
        gen_throughput: tokens per second, 0 when nothing runs; `last_gen_throughput` stays then.
        cache_hit_rate: share of all prompt tokens so far that came from the prefix cache.
        parked_bytes: KV of waiting requests in host memory, on each rank.
        lent_bytes: the KV cache's memory that a second copy of the weights has, on each rank.
        num_parked_reqs: of those that wait, those with KV in host memory.
        num_held_reqs: of those that wait, those that wait for a version of the weights.
        step_counts, step_tokens: forward passes by their tokens, in the buckets of `STEP_BOUNDS`; all tokens.
        recomputed_tokens: whose KV was given up and is computed once more, by why: see `RetractCause`.
        kv_tokens: of running requests, by the version of the weights that computed their KV; what several
            share counts for each.
        gc_pause_s: for which Python's garbage collector has stopped the loop since the start.
        stalls: by names of control operations.
    """

    dp_rank: int
    num_running_reqs: int
    num_paused_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    gen_throughput: float
    last_gen_throughput: float
    cache_hit_rate: float
    parked_bytes: int = 0
    lent_bytes: int = 0
    num_parked_reqs: int = 0
    num_held_reqs: int = 0
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS) + 1))
    step_tokens: int = 0
    recomputed_tokens: dict[str, int] = field(default_factory=dict)
    kv_tokens: dict[str, int] = field(default_factory=dict)
    gc_pause_s: float = 0.0
    stalls: dict[str, StallCounts] = field(default_factory=dict)

    @property
    def num_reqs(self) -> int:
        return self.num_running_reqs + self.num_paused_reqs + self.num_waiting_reqs

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / self.max_total_num_tokens
