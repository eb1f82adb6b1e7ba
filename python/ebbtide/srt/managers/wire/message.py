"""Base classes of messages, replies and decisions; and the reports of ranks and replicas.

How ranks end a phase together, and replicas commit an update together: see `managers.committee`. A replica
that does not get its `Verdict` in time serves nothing until it gets it, since others may have other weights
already.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from ebbtide.srt.memory_saver import MemoryTag


class Message(Struct, frozen=True, kw_only=True, tag=True):
    """A message on a channel. Its type is sent as a tag. A bad field fails at decode, with its path."""

    @property
    def overtakes(self) -> bool:
        """Whether it is read before messages that were sent earlier."""
        return False


class Reply(Message, frozen=True, kw_only=True):
    """The body of a reply. The defaults mean that there was nothing to do."""

    success: bool = True
    message: str = ""

    @property
    def served_version(self) -> str | None:
        """The version of the serving weights; None: this reply does not have it."""
        return None

    @property
    def has_changed_weights(self) -> bool:
        """Whether other weights serve than before, or the same under another version."""
        return False


class TotalsReply(Reply, frozen=True, kw_only=True):
    """A reply with totals. `ranks`: if there are several, what each adds, with `dp_rank` and `tp_rank`."""

    ranks: list[dict[str, Any]] | UnsetType = UNSET


class Refusal(Reply, frozen=True, kw_only=True):
    """The reply to a request that was refused or failed: a RequestRejected, or for 5xx an EngineError."""

    success: bool = False
    status: int
    fields: dict[str, Any] = {}


class Decision(Message, frozen=True, kw_only=True):
    """The end of a phase of a control request. All ranks get it at the same place among their messages.

    Attributes:
        phase: number of the phase, the same on all ranks.
        failure: the merged failure of the ranks that failed; None: all ranks have done their part.
        facts: the fact of each rank's part, by tp_rank; empty after a failure.
    """

    phase: int
    failure: Refusal | None = None
    facts: Sequence[Any] = ()


class Prepared(Reply, frozen=True, kw_only=True):
    """Sent before a replica's reply to a control call: it can commit, and waits for the `Verdict`.

    `is_overdue`: it has waited too long, and serves nothing until the verdict comes.
    """

    is_overdue: bool = False


class GivenUp(Refusal, frozen=True, kw_only=True):
    """The reply of a replica that could have done the request, but was told to give up.

    `left`: what it leaves changed; empty: nothing.
    """

    left: str = ""


class Verdict(Message, frozen=True, kw_only=True):
    """Tells replicas to commit the control call `id`, or to give it up; at the same place among their
    requests.

    `refusal`: why to give it up; None: commit.
    """

    id: str
    refusal: str | None = None


# A time limit of a control request.
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
# A name that is remembered: a version of the weights, a transition.
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
ChecksumAlgorithm: TypeAlias = Literal["sum64", "sha256"]
# Upper bounds of the buckets of `StallCounts`, in seconds; one more bucket counts longer stalls.
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
    """The state machines of a replica. Sent when they change, before the reply to the request that changed
    them.

    They are the same on all ranks; `ranks` has what differs. `adapters`: for each name, the version that it
    means comes last.
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
        """Name → the version that it means."""
        return {one.name: one for one in self.adapters}


class RetractCause(StrEnum):
    """Why a request lost its KV, which is computed again when the request is admitted again."""

    POOL = "pool"  # older requests needed the pages
    PAUSE = "pause"
    UPDATE = "update"
    RELEASE = "release"
    RESIZE = "resize"
    FLUSH = "flush"
    MEMORY = "memory"  # a forward pass ran out of memory after it had changed recurrent states


class StallCounts(Struct, frozen=True, kw_only=True):
    """How long the control requests of one kind kept forward passes from running.

    `counts`: of requests, one for each bucket.
    """

    counts: list[int]
    sum_s: float


class Load(Struct, frozen=True, kw_only=True):
    """The load of one replica. wire_api section 3.4.

    Attributes:
        num_running_reqs: requests that the next forward pass may contain.
        num_paused_reqs: requests that hold KV while generation is paused.
        num_used_tokens: tokens' worth of KV pages that are neither free nor evictable.
        num_total_tokens: the same, and the tokens of waiting requests.
        gen_throughput: tokens per second; 0 when nothing runs, while `last_gen_throughput` keeps its value.
        cache_hit_rate: share of all prompt tokens so far that came from the prefix cache.
        parked_bytes: KV of waiting requests in host memory, per rank.
        lent_bytes: memory of the KV cache that a second copy of the weights has, per rank.
        num_parked_reqs: waiting requests with KV in host memory.
        num_held_reqs: waiting requests that wait for a version of the weights.
        step_counts, step_tokens: forward passes by their tokens, in the buckets of `STEP_BOUNDS`; the sum of
            tokens.
        recomputed_tokens: tokens whose KV was lost and is computed again, by `RetractCause`.
        kv_tokens: KV tokens of running requests by weight version; shared ones count for each request.
        gc_pause_s: how long Python's garbage collector has stopped the loop since the start.
        stalls: by name of the control operation.
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
