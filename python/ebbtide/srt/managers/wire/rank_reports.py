"""What a rank says of itself, in the messages of `io_struct`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ebbtide.srt.memory_saver.tags import MemoryTag


class TagReport(Struct, frozen=True, kw_only=True):
    """One memory tag of one rank. `content` speaks of weights only; wire_api section 3.1."""

    state: Literal["resident", "released"]
    virtual_bytes: int
    resident_bytes: int
    backup_bytes: int
    content: Literal["valid", "stale"] | None = None
    num_missing: int | None = None
    missing: list[str] | None = None


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
