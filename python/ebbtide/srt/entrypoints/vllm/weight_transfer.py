"""vLLM's weight updates, as weight update sessions. Source: wire_vllm sections 2 and 4.2.

A session lasts from start to finish. Its weights serve only after the finish, and a failed update ends it.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, Final

from ebbtide.srt.entrypoints.bodies import Body
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm.parameters import (
    BroadcasterParameters,
    CheckerParameters,
    FetchInfo,
    FetchParameters,
    FinishParameters,
    InitInfo,
    InitParameters,
    LendingInfo,
    LentInfo,
    NamedTensors,
    Nothing,
    PullParameters,
    ReceiveParameters,
    StartParameters,
    UpdateInfo,
    UpdateParameters,
    checked,
    vllm_route,
)
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.hf_folder import has_weights
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseMode,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from ebbtide.srt.managers.wire.weight_requests import STATE_DICTS
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.weight_sync.published import PulledState, read_chain, write_state

GROUP: Final = "vllm"
SESSION: Final = "vllm"
# The group of prime-rl's trainer, and the file in a folder that it broadcasts instead of writing it.
BROADCASTER: Final = "prime-rl"
READY_FILE: Final = "NCCL_READY"
UPDATE_INFO: Final = "body.update_info"
# The version of the weights before any update.
FIRST_VERSION: Final = "default"


class VllmWeightTransfer:
    """Serves vLLM's endpoints for weight updates, and those of trainers that were made for vLLM."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._init_info: InitInfo | None = None
        self._last: UpdateInfo | None = None
        self._fetch_info: FetchInfo | None = None
        # Whether the open session was started here; why the last one failed, if it did.
        self._is_started = False
        self._failure: str | None = None

    @property
    def _num_ranks(self) -> int:
        return self._service.config.parallel.num_ranks

    def _backend(self, asked: str | None) -> str:
        if asked is not None:
            return asked
        return "gloo" if self._service.config.runtime.device == "cpu" else "raw_nccl"

    @vllm_route("POST", "/init_weight_transfer_engine")
    async def init(self, asked: InitParameters) -> Body:
        """Join the process group of a trainer.

        It replaces the previous one. A trainer that lends its memory, or publishes deltas, has no group.
        """
        if "local_checkpoint_dir" in asked.init_info:
            self._fetch_info = checked(asked.init_info, FetchInfo, "body.init_info")
            return {"message": "Weight transfer initialized", "changed": True}
        if not asked.init_info.keys() & set(InitInfo.__struct_fields__) - set(LendingInfo.__struct_fields__):
            checked(asked.init_info, LendingInfo, "body.init_info")
            self._init_info = None
            left: Body = await self._service.control(DestroyWeightsUpdateGroupReqInput, {"group_name": GROUP})
            return {**left, "message": "Weight transfer initialized"}
        info = self._checked_init(asked.init_info)
        fields = {
            "master_address": info.master_address or "",
            "master_port": info.master_port or 0,
            "rank_offset": info.rank_offset,
            "world_size": info.world_size,
            "backend": "raw_nccl" if info.nccl_unique_id_b64 is not None else self._backend(info.backend),
            "nccl_unique_id": info.nccl_unique_id_b64,
            "timeout_s": info.timeout_s,
            "group_name": GROUP,
        }
        self._init_info = None
        reply: Body = await self._service.control(InitWeightsUpdateGroupReqInput, fields)
        self._init_info, self._last = info, None
        return {**reply, "message": "Weight transfer initialized"}

    @vllm_route("POST", "/init_broadcaster")
    async def init_broadcaster(self, asked: BroadcasterParameters) -> Body:
        """Join the process group of prime-rl's trainer.

        Its `inference_world_size` and `rank_offset` do not count the trainer's rank 0.
        """
        if asked.quantize_in_weight_transfer or asked.session_id is not None:
            name = "session_id" if asked.session_id is not None else "quantize_in_weight_transfer"
            raise RequestRejected(f"{name}: not supported in this version", param=f"body.{name}")
        fields = {
            "master_address": asked.host,
            "master_port": asked.port,
            "rank_offset": 1 + asked.rank_offset,
            "world_size": 1 + asked.inference_world_size,
            "backend": self._backend(asked.backend),
            "timeout_s": asked.timeout,
            "group_name": BROADCASTER,
        }
        reply: Body = await self._service.control(InitWeightsUpdateGroupReqInput, fields)
        return {**reply, "status": "ok"}

    @vllm_route("POST", "/shutdown_weight_transfer_engine")
    async def shutdown(self, asked: Nothing) -> Body:
        """Leave the trainer's process group."""
        if self._service.state.session is not None:
            raise RequestRejected("a weight update is open: /finish_weight_update first", 409)
        self._init_info = None
        reply: Body = await self._service.control(DestroyWeightsUpdateGroupReqInput, {"group_name": GROUP})
        return {**reply, "message": "Weight transfer shut down"}

    @vllm_route("POST", "/start_weight_update")
    async def start(self, asked: StartParameters) -> Body:
        """Open a session of weight updates."""
        if not asked.is_checkpoint_format:
            raise RequestRejected(
                "is_checkpoint_format: only true is supported: names and shapes as a checkpoint has them",
                param="body.is_checkpoint_format",
            )
        reply: Body = await self._service.control(BeginWeightUpdateReqInput, {"session_id": SESSION})
        self._is_started, self._failure = True, None
        return {**reply, "message": "Weight update started"}

    @vllm_route("POST", "/update_weights")
    async def update(self, asked: UpdateParameters) -> Body:
        """Update weights by broadcast, from the trainer's memory, or from a folder.

        With `update_info` it is a part of the session; if it fails, the session is discarded, and the old
        weights keep serving. Without, it is an update of its own.
        """
        if asked.update_info is None and self._is_broadcast(asked.weight_dir):
            return await self._update_alone(
                UpdateWeightsFromDistributedReqInput,
                {"group_name": BROADCASTER, "load_format": STATE_DICTS},
                _step_of(asked.weight_dir),
            )
        if asked.weight_dir is not None:
            source = {"model_path": asked.weight_dir}
            return await self._update_alone(UpdateWeightFromDiskReqInput, source, _step_of(asked.weight_dir))
        if asked.update_info is None:
            raise RequestRejected("update_info: is needed", param="body.update_info")
        self._require_session("update")
        self._require_resident()
        try:
            reply: Body = await self._service.control(*await self._request(asked.update_info))
        except (RequestRejected, EngineError) as error:
            self._is_started, self._failure = False, str(error)
            # This fails too if the engine has failed; the caller needs the first error.
            with suppress(EngineError):
                await self._service.control(AbortWeightUpdateReqInput, {})
            raise
        return {**reply, "message": "Weights updated"}

    @vllm_route("POST", "/receive_weight_update")
    async def receive(self, asked: ReceiveParameters) -> Body:
        """Update weights by PipelineRL's broadcasts, one for each tensor."""
        self._require_group()
        infos = asked.parameters_info
        source = {
            "names": [info.name for info in infos],
            "dtypes": [info.dtype.removeprefix("torch.") for info in infos],
            "shapes": [info.shape for info in infos],
            "group_name": GROUP,
        }
        return await self._update_alone(UpdateWeightsFromDistributedReqInput, source, str(asked.version))

    @vllm_route("POST", "/finish_weight_update")
    async def finish(self, asked: FinishParameters) -> Body:
        """Commit the session. Running requests keep their KV."""
        self._require_session("finish")
        fields = {
            "weight_version": asked.weight_version,
            "flush_cache": False,
            "pause_mode": PauseMode.IN_PLACE,
            "session_id": SESSION,
        }
        reply: Body = await self._service.control(EndWeightUpdateReqInput, fields)
        self._is_started = False
        return {**reply, "message": "Weight update finished"}

    @vllm_route("POST", "/weight_checker")
    async def check(self, asked: CheckerParameters) -> Body:
        """Return checksums of the parameters, compare them with a baseline, or overwrite the parameters."""
        if asked.action == "reset":
            reply: Body = await self._service.control(CheckWeightsReqInput, {"action": "reset_tensors"})
            return {**reply, "status": "reset"}
        if asked.action == "compare" and asked.baseline is None:
            raise RequestRejected("baseline: is needed to compare with", param="body.baseline")
        fields = {"action": "checksum", "algorithm": asked.algorithm}
        reply = await self._service.control(CheckWeightsReqInput, fields)
        sums = {
            f"dp{rank['dp_rank']}:pp0:pcp0:tp{rank['tp_rank']}:{name}": checksum
            for rank_reply in reply["ranks"]
            for rank in rank_reply["parallelism_info"][:1]
            for name, checksum in rank_reply["checksums"].items()
        }
        if asked.action == "checksum":
            return {"success": True, "message": reply["message"], "checksums": sums}
        baseline = asked.baseline or {}
        differing = sorted(
            name for name in sums.keys() | baseline.keys() if sums.get(name) != baseline.get(name)
        )
        message = f"{len(differing)} tensors differ."
        return {"success": True, "message": message, "match": not differing, "mismatches": differing}

    def _is_broadcast(self, folder: str | None) -> bool:
        """Whether prime-rl's trainer will broadcast, instead of having written a checkpoint to the folder.

        Its client puts `READY_FILE` into every folder, so it counts only once the trainer's group was joined.

        Raises RequestRejected: 409; the folder has no checkpoint, and no group was joined.
        """
        is_met = BROADCASTER in self._service.state.weight_groups
        if folder is None:
            return is_met
        # Unlike Path.exists, this raises for no name.
        is_ready = os.path.exists(Path(folder, READY_FILE))
        if is_ready and not is_met and not has_weights(Path(folder)):
            raise RequestRejected(
                f"{folder} holds no checkpoint, and no broadcasting trainer is connected: write the weights "
                "there, or call /init_broadcaster",
                409,
            )
        return is_ready and is_met

    async def _update_alone(self, kind: type[Any], source: Body, version: str | None) -> Body:
        """Carry out an update without a session."""
        if self._service.state.session is not None:
            raise RequestRejected("a weight update session is open: finish it first", 409)
        fields = {
            **source,
            "flush_cache": False,
            "pause_mode": PauseMode.IN_PLACE,
            "weight_version": version,
        }
        return {**await self._service.control(kind, fields), "status": "ok"}

    def _require_group(self) -> InitInfo:
        if self._init_info is None or GROUP not in self._service.state.weight_groups:
            raise RequestRejected("no trainer is connected: call /init_weight_transfer_engine", 409)
        return self._init_info

    def _checked_init(self, given: Mapping[str, Any]) -> InitInfo:
        info = checked(given, InitInfo, "body.init_info")
        has_address = info.master_address is not None and info.master_port is not None
        is_met_by_id = info.nccl_unique_id_b64 is not None
        if has_address == is_met_by_id or (is_met_by_id and info.backend not in (None, "raw_nccl")):
            raise RequestRejected(
                "init_info: expected master_address and master_port, or nccl_unique_id_b64",
                param="body.init_info",
            )
        last = info.rank_offset + self._num_ranks
        if info.rank_offset < 1 or last > info.world_size:
            raise RequestRejected(
                f"init_info: ranks {info.rank_offset} to {last - 1} do not fit a world of {info.world_size}, "
                "of which rank 0 is the trainer's",
                param="body.init_info.world_size",
            )
        return info

    @vllm_route("POST", "/pull_weights")
    async def pull(self, asked: PullParameters) -> Body:
        """Choose the published version for the next update from a folder.

        Versions before the serving one are ignored. Raises RequestRejected: a version is missing or not
        ready; 409, the serving version is not one of the trainer's.
        """
        if asked.pre_read_hook:
            raise RequestRejected("pre_read_hook: code of a client's is not run", param="body.pre_read_hook")
        serving = self._service.state.weight_version
        base = 0 if serving == FIRST_VERSION else int(serving) if serving.isdecimal() else None
        if base is None:
            raise RequestRejected(
                f"the engine serves {serving[:200]!r}, which was not published: update all weights first",
                409,
            )
        target = max(base, asked.target_version)
        state = PulledState(Path(asked.source_dir), serving, base, target)
        chain = await asyncio.to_thread(read_chain, state.source_dir, base, target)
        await asyncio.to_thread(write_state, Path(asked.local_checkpoint_dir), state)
        return {
            "message": f"An update from {asked.local_checkpoint_dir} brings version {target}.",
            "version": f"{target:06d}",
            "num_deltas": len(chain),
            "num_tensors": len({name for delta in chain for name in delta.weight_map}),
        }

    @vllm_route("POST", "/fetch_weights")
    async def fetch(self, asked: FetchParameters) -> Body:
        """Choose the published version for the next update, by SkyRL's API.

        Raises RequestRejected: 409, no local folder was given before; 501, the folder is not a local one.
        """
        info, target = self._fetch_info, asked.target_version
        if info is None:
            raise RequestRejected("call /init_weight_transfer_engine with local_checkpoint_dir first", 409)
        if asked.sync_dir is None or asked.uri is not None or "://" in asked.sync_dir:
            raise RequestRejected("sync_dir: expected a folder; those of clouds are not read", 501)
        pulled = await self.pull(
            PullParameters(
                local_checkpoint_dir=info.local_checkpoint_dir,
                source_dir=asked.sync_dir,
                target_version=target,
            )
        )
        if int(pulled["version"]) != target:
            serving = self._service.state.weight_version
            raise RequestRejected(f"target_version: {target} is behind what serves, {serving!r}")
        result = {"status": "ok", "target_version": target, "stats": {}}
        return {**pulled, "status": "ok", "result": [result]}

    async def _fetched(self, given: Mapping[str, Any]) -> Body:
        """The fields of the update to a published version, which is fetched first if a folder is given."""
        info = checked(given, FetchParameters, UPDATE_INFO)
        if info.sync_dir is not None or info.uri is not None:
            await self.fetch(info)
        if self._fetch_info is None:
            raise RequestRejected("no version was fetched: call /fetch_weights", 409)
        return {
            "model_path": self._fetch_info.local_checkpoint_dir,
            "weight_version": str(info.target_version),
        }

    async def _request(self, given: dict[str, Any] | list[dict[str, Any]]) -> tuple[type[Any], Body]:
        """Turn `update_info` into a control request: its type and its fields."""
        entries = given if isinstance(given, list) else [given]
        if len(entries) not in (1, self._num_ranks):
            raise RequestRejected(
                f"update_info: expected one entry, or one for each of {self._num_ranks} ranks, "
                f"got {len(entries)}",
                param=UPDATE_INFO,
            )
        common = {"flush_cache": False, "session_id": SESSION}
        if "target_version" in entries[0]:
            return UpdateWeightFromDiskReqInput, {**await self._fetched(entries[0]), **common}
        if any(entry.get("ipc_handles") is not None for entry in entries):
            raise RequestRejected(
                "ipc_handles: expected ipc_handles_pickled over HTTP", param=f"{UPDATE_INFO}.ipc_handles"
            )
        if any(entry.get("ipc_handles_pickled") is not None for entry in entries):
            return UpdateWeightsFromTensorReqInput, {**_lent(entries, self._num_ranks), **common}
        if any(entry != entries[0] for entry in entries):
            raise RequestRejected("update_info: expected the same for each rank", param=UPDATE_INFO)
        return UpdateWeightsFromDistributedReqInput, {**self._broadcast(entries[0]), **common}

    def _broadcast(self, given: Mapping[str, Any]) -> Body:
        """Turn `update_info` into the fields of an update by broadcast."""
        init = self._require_group()
        info = self._checked_update(given)
        is_packed = init.packed if info.packed is None else info.packed
        size = info.packed_buffer_size_bytes
        fields = {
            "names": info.names,
            "dtypes": info.dtype_names,
            "shapes": info.shapes,
            "group_name": GROUP,
        }
        if info.num_updates_list is not None:
            return {**fields, "load_format": "sparse", "num_updates": info.num_updates_list}
        if is_packed:
            size = init.packed_buffer_size_bytes if size is None else size
            return {**fields, "load_format": "packed", "packed_buffer_bytes": size}
        return fields

    def _checked_update(self, given: Mapping[str, Any]) -> UpdateInfo:
        info = checked(given, UpdateInfo, UPDATE_INFO)
        if not (info.names or info.dtype_names or info.shapes) and self._last is not None:
            info = self._last
        _check_lengths(info)
        self._last = info
        return info

    def _require_session(self, what: str) -> None:
        session = self._service.state.session
        if session is not None and not self._is_started:
            raise RequestRejected(
                "the open weight update session was begun by /begin_weight_update: "
                "/update_weights_from_* take its parts, /end_weight_update commits it, and "
                "/abort_weight_update discards it",
                409,
            )
        if session is None and self._failure is not None:
            raise RequestRejected(f"the update failed; nothing was committed: {self._failure}", 409)
        if session is None:
            raise RequestRejected(f"there is nothing to {what}: call /start_weight_update first", 409)

    def _require_resident(self) -> None:
        ranks = self._service.state.ranks
        if any(rank.tags[MemoryTag.WEIGHTS].state == "released" for rank in ranks):
            raise RequestRejected("the weights are released: /wake_up?tags=weights first", 409)


def _step_of(folder: str | None) -> str | None:
    """prime-rl's version: the number at the end of the folder's name; None: there is none."""
    step = re.search(r"\d+$", PurePath(folder or "").name)
    return None if step is None else str(int(step[0]))


def _check_lengths(info: NamedTensors) -> None:
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise RequestRejected(
            f"update_info: expected lists of one length, got {len(info.names)} names, "
            f"{len(info.dtype_names)} dtype_names and {len(info.shapes)} shapes",
            param=UPDATE_INFO,
        )


def _lent(entries: Sequence[Mapping[str, Any]], num_ranks: int) -> Body:
    """Turn `update_info` with CUDA IPC handles into the fields of an update. Ranks get equal tensors."""
    infos = [checked(entry, LentInfo, UPDATE_INFO) for entry in entries]
    first = infos[0]
    _check_lengths(first)
    if any((info.names, info.shapes) != (first.names, first.shapes) for info in infos):
        raise RequestRejected("update_info: expected the same names and shapes for each rank")
    sizes: Sequence[int | None] = first.tensor_sizes or [None] * len(first.names)
    num_elements = [math.prod(shape) for shape in first.shapes]
    if len(sizes) != len(first.names) or (first.sizes or num_elements) != num_elements:
        raise RequestRejected(
            "update_info: expected a size for each tensor: tensor_sizes in bytes, or sizes in elements",
            param=UPDATE_INFO,
        )
    rows = zip(first.names, first.dtype_names, first.shapes, sizes, strict=True)
    handles = [info.ipc_handles_pickled for info in infos]
    return {
        "serialized_named_tensors": handles * (num_ranks // len(handles)),
        "load_format": "ipc_handles",
        "lent": [
            {"name": name, "dtype": dtype.removeprefix("torch."), "shape": shape, "num_bytes": size}
            for name, dtype, shape, size in rows
        ],
    }
