"""Gives a new replica of a fleet the adapters of those that live."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ebbtide.ray.controller import Replica
from ebbtide.srt.errors import RequestRejected

logger = logging.getLogger(__name__)


class _Version(NamedTuple):
    version: str
    checksum: str
    path: str
    pinned: bool


async def take_adapters(replica: Replica, peer: Replica) -> None:
    """Load what a living replica has, from the same folders; note in `lacks` what cannot be had.

    Loads have to wait meanwhile: that is the caller's affair. What a replica lacks is what came as tensors,
    and what is not in its folder any more. It gets a name back with the next load of it.
    """
    theirs, mine = await _adapters_of(peer), await _adapters_of(replica)
    replica.lacks = set(peer.lacks)
    for name in mine.keys() | theirs.keys():
        wanted, given = theirs.get(name, []), mine.get(name, [])
        if wanted == given:
            continue
        if given:
            await replica.ask("unload_lora_adapter", name, timeout_s=0)
        has = [await _load(replica, name, one) for one in wanted]
        if has and not has[-1]:
            # The name would mean an earlier version here.
            if any(has):
                await replica.ask("unload_lora_adapter", name, timeout_s=0)
            has = [False] * len(has)
            replica.lacks.add(name)
        replica.lacks |= {
            f"{name}@{one.version}" for one, there in zip(wanted, has, strict=True) if not there
        }
    if replica.lacks:
        logger.warning(
            "%s has no adapter %s, and gets no requests for it: load it again",
            *(replica.name, ", ".join(sorted(replica.lacks))),
        )


async def _load(replica: Replica, name: str, wanted: _Version) -> bool:
    """Whether it has this version now."""
    if not wanted.path:
        return False
    try:
        reply = await replica.ask(
            "load_lora_adapter", name, wanted.path, lora_version=wanted.version, pinned=wanted.pinned
        )
    except RequestRejected as refusal:
        logger.warning("%s cannot load %s@%s: %s", replica.name, name, wanted.version, refusal)
        return False
    if reply["checksum"] == wanted.checksum:
        return True
    await replica.ask("unload_lora_adapter", name, lora_version=wanted.version, timeout_s=0)
    return False


async def _adapters_of(replica: Replica) -> Mapping[str, Sequence[_Version]]:
    """By name, the versions that it has, the one that the name means last."""
    found: dict[str, list[_Version]] = {}
    reports: Sequence[Mapping[str, Any]] = (await replica.ask("server_info"))["state"]["adapters"]
    for one in reports:
        found.setdefault(one["name"], []).append(
            _Version(one["version"], one["checksum"], one["path"], one["pinned"])
        )
    return found
