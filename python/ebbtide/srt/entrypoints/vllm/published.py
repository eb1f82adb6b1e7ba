"""`/pull_weights`: which published version the next update from a local folder is to bring.

Nothing is copied: what is pulled is checked as far as its indices, and read by the update. Source: wire_vllm
section 5.2.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.srt.entrypoints.vllm.occupation import Body
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.delta.folder import PulledState, read_chain, write_state

# What an engine serves that was not updated.
FIRST_VERSION = "default"
# An empty path would be the folder in which the server was started.
Folder = Annotated[str, Meta(min_length=1)]


class PullParameters(Struct, kw_only=True):
    """`target_version`: 0 is the checkpoint that the engine was started with. The hook is refused."""

    local_checkpoint_dir: Folder
    source_dir: Folder
    target_version: int
    pre_read_hook: str | None = None


async def pull(asked: PullParameters, serving: str) -> Body:
    """Have an update from the local folder bring this version, behind the one that serves.

    RequestRejected: 400, a version is missing or not ready; 409, what serves is none of the trainer's.
    """
    if asked.pre_read_hook:
        raise RequestRejected("pre_read_hook: code of a client's is not run", param="body.pre_read_hook")
    base = 0 if serving == FIRST_VERSION else int(serving) if serving.isdecimal() else None
    if base is None:
        raise RequestRejected(
            f"the engine serves {serving[:200]!r}, which is no version of a chain: update it whole first", 409
        )
    target = max(base, asked.target_version)
    state = PulledState(Path(asked.source_dir), serving, base, target)
    chain = await asyncio.to_thread(read_chain, state.source_dir, base, target)
    await asyncio.to_thread(write_state, Path(asked.local_checkpoint_dir), state)
    num_tensors = len({name for delta in chain for name in delta.weight_map})
    return {
        "message": f"An update from {asked.local_checkpoint_dir} brings version {target}.",
        "version": f"{target:06d}",
        "num_deltas": len(chain),
        "num_tensors": num_tensors,
    }


class FetchInfo(Struct, kw_only=True):
    """How SkyRL's trainer publishes deltas. What is about a whole local copy has no meaning here."""

    local_checkpoint_dir: Folder
    base_model_path: str | None = None
    cloud_download_workers: int | None = None
    checkpoint_load_format: str | None = None
    multi_thread_safetensors_max_workers: int | None = None


class FetchParameters(Struct, kw_only=True):
    target_version: int
    sync_dir: Folder | None = None
    uri: str | None = None


async def fetch(asked: FetchParameters, info: FetchInfo | None, serving: str) -> Body:
    """Pull, in SkyRL's words.

    RequestRejected: 409, it was not said where to; 501, the folder is a cloud's.
    """
    if info is None:
        raise RequestRejected("call /init_weight_transfer_engine with local_checkpoint_dir first", 409)
    if asked.sync_dir is None or asked.uri is not None or "://" in asked.sync_dir:
        raise RequestRejected("sync_dir: expected a folder; those of clouds are not read", 501)
    parameters = PullParameters(
        local_checkpoint_dir=info.local_checkpoint_dir,
        source_dir=asked.sync_dir,
        target_version=asked.target_version,
    )
    pulled = await pull(parameters, serving)
    if int(pulled["version"]) != asked.target_version:
        raise RequestRejected(f"target_version: {asked.target_version} is behind what serves, {serving!r}")
    result = {"status": "ok", "target_version": asked.target_version, "stats": {}}
    return {**pulled, "status": "ok", "result": [result]}
