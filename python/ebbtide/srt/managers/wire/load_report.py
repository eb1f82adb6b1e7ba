"""What a replica says of its load, in the messages of `io_struct`."""

from __future__ import annotations

from msgspec import Struct


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

    @property
    def num_reqs(self) -> int:
        return self.num_running_reqs + self.num_paused_reqs + self.num_waiting_reqs

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / self.max_total_num_tokens
