"""What ranks and replicas say of their state."""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from ebbtide.srt.managers.wire.message import Message
from ebbtide.srt.memory_saver.tags import MemoryTag


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


ChecksumAlgorithm: TypeAlias = Literal["sum64", "sha256"]


class RankChecksums(Struct, frozen=True, kw_only=True):
    """Checksums in hexadecimal of a rank's own parameters, fused and divided as it holds them."""

    checksums: dict[str, str]
    per_gpu_checksum: str
    parallelism_info: list[Parallelism]


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
