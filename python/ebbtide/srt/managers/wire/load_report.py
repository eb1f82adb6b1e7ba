"""What a replica says of its load, in the messages of `io_struct`."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

# Seconds, of `StallCounts`: the largest of each bucket; one more has what is longer.
STALL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class RetractCause(StrEnum):
    """What a request gives up its KV for. It is computed again when the request is admitted again."""

    POOL = "pool"  # older requests needed the room
    PAUSE = "pause"
    UPDATE = "update"
    RELEASE = "release"
    RESIZE = "resize"
    FLUSH = "flush"


class StallCounts(Struct, frozen=True, kw_only=True):
    """How long the control requests of one kind kept forward passes from running.

    Attributes:
        counts: of requests, one for each bucket.
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
