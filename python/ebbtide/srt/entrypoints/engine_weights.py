"""The methods of `Engine` that update weights. Source: wire_api section 3.3."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ebbtide.srt.entrypoints.loop_thread import LoopThread, blocking
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.managers import io_struct
from ebbtide.srt.server_args import ServerArgs

if TYPE_CHECKING:
    import torch

    from ebbtide.trainer.payload_encoding import PayloadEncoder

T = TypeVar("T")

# For (name, tensor) pairs the engine chooses how the bytes travel: these all mean whole tensors under their
# checkpoint names.
_WHOLE_TENSOR_FORMATS = (None, "flattened_bucket", "safetensors")


class WeightMethods:
    """The methods of `Engine` that update weights, and read them.

    Updates share these arguments:
        flush_cache: empty the prefix cache at the commit.
        weight_version: the version of the new weights; None keeps the current one.
        pause_mode: what happens to running requests. None or "wait": they finish first. "in_place", "retract"
            and "abort": as in `pause_generation`; generation continues after the commit.
        abort_all_requests: the same as `pause_mode="abort"`.
        timeout_s: how long the update may wait; None: the engine's `weight_update_timeout_s`.
        session_id: the session that the update must belong to, see `begin_weight_update`.
        canary: a test of the new weights before they serve, see `io_struct.Canary`.
        refuse_nonfinite: refuse the update if it holds NaN or Inf; None: as the server argument says.

    Each returns a dict with `weight_version`, `committed`, `staged`, `num_tensors`, `stall_ms` and more, and
    raises `RequestRejected` (400 or 409) if it is refused or fails; the old weights then keep serving.
    """

    server_args: ServerArgs
    _service: EngineService
    _runner: LoopThread

    @cached_property
    def _encoder(self) -> PayloadEncoder:
        # torch: whoever has tensors has it too
        from ebbtide.trainer.payload_encoding import PayloadEncoder, WholeEncoder

        if self.server_args.nnodes > 1:
            # Ranks of another machine open neither what is shared with this one nor what lies on its GPUs.
            return WholeEncoder()
        return PayloadEncoder(self._service.rank_devices, self.server_args.tp_size)

    async def async_update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | list[bytes] | list[str],
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | int | None = None,
        pause_mode: str | None = None,
        abort_all_requests: bool = False,
        timeout_s: float | None = None,
        session_id: str | None = None,
        changed: list[Any] | None = None,
        base_version: str | int | None = None,
        canary: Mapping[str, Any] | None = None,
        keep_mapped: bool = False,
        refuse_nonfinite: bool | None = None,
    ) -> dict[str, Any]:
        """Update the weights from tensors of this process. Other arguments: see `WeightMethods`.

        Args:
            named_tensors: (checkpoint name, whole tensor) pairs. Tensors on a GPU that all ranks reach are
                read in place; others are copied once, with several nodes into the request. They must not
                change until this returns. Serialized entries, as over HTTP, are accepted too.
            load_format: how entries are encoded; leave it out for pairs, or name a custom weight loader.
            changed, base_version: for `load_format="sparse"`, see `UpdateWeightsFromTensorReqInput`.
            keep_mapped: the tensors keep their addresses, so the engine keeps their GPU memory mapped for the
                next update. Memory that this process frees goes back to the device when an update brings
                other memory under these names, or after `forget_mapped`.

        Raises:
            RequestRejected: status 400; `errors` lists names, shapes or dtypes that do not fit.
        """
        with ExitStack() as shared:
            if isinstance(named_tensors, list) and all(isinstance(one, bytes | str) for one in named_tensors):
                entries: Any = named_tensors
            else:
                # Gigabytes may be copied, and the loop of the caller is to go on meanwhile.
                sent = await asyncio.to_thread(
                    self._encoder.encode,
                    named_tensors,  # type: ignore[arg-type]
                    keep_mapped=keep_mapped,
                )
                entries = shared.enter_context(sent).entries
                load_format = sent.load_format if load_format in _WHOLE_TENSOR_FORMATS else load_format
            return await self._control(
                io_struct.UpdateWeightsFromTensorReqInput,
                serialized_named_tensors=entries,
                load_format=load_format,
                flush_cache=flush_cache,
                weight_version=weight_version,
                pause_mode=pause_mode,
                abort_all_requests=abort_all_requests,
                timeout_s=timeout_s,
                canary=canary,
                refuse_nonfinite=refuse_nonfinite,
                session_id=session_id,
                changed=changed,
                base_version=base_version,
            )

    def forget_mapped(self) -> None:
        """Unmap what updates with `keep_mapped` left mapped, within a second or two."""
        self._encoder.close()

    async def async_update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | int | None = None,
        pause_mode: str | None = None,
        abort_all_requests: bool = False,
        timeout_s: float | None = None,
        canary: Mapping[str, Any] | None = None,
        session_id: str | None = None,
        refuse_nonfinite: bool | None = None,
    ) -> dict[str, Any]:
        """Update the weights from a Hugging Face checkpoint folder of the same architecture.

        Args:
            model_path: a folder that the engine's processes can read.
            load_format: "auto" (also None), "safetensors" or "pt".

        Other arguments: see `WeightMethods`.
        """
        return await self._control(
            io_struct.UpdateWeightFromDiskReqInput,
            model_path=os.fspath(model_path),
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
            pause_mode=pause_mode,
            abort_all_requests=abort_all_requests,
            timeout_s=timeout_s,
            canary=canary,
            refuse_nonfinite=refuse_nonfinite,
            session_id=session_id,
        )

    async def async_update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str = io_struct.DEFAULT_GROUP,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | int | None = None,
        pause_mode: str | None = None,
        abort_all_requests: bool = False,
        timeout_s: float | None = None,
        session_id: str | None = None,
        canary: Mapping[str, Any] | None = None,
        refuse_nonfinite: bool | None = None,
    ) -> dict[str, Any]:
        """Update the weights from what the trainer broadcasts in a process group.

        Call `init_weights_update_group` first. A failure in mid-broadcast ends the group.

        Args:
            names, dtypes, shapes: of the tensors, in the order in which they are broadcast.
            group_name: of the group.
            load_format: None, one broadcast per tensor; "flattened_bucket", a single one with all bytes.

        Other arguments: see `WeightMethods`.
        """
        return await self._control(
            io_struct.UpdateWeightsFromDistributedReqInput,
            names=list(names),
            dtypes=list(dtypes),
            shapes=[list(shape) for shape in shapes],
            group_name=group_name,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
            pause_mode=pause_mode,
            abort_all_requests=abort_all_requests,
            timeout_s=timeout_s,
            canary=canary,
            refuse_nonfinite=refuse_nonfinite,
            session_id=session_id,
        )

    async def async_update_weights_from_ipc(
        self,
        zmq_handles: Mapping[str, str],
        flush_cache: bool = True,
        weight_version: str | int | None = None,
        pause_mode: str | None = None,
        abort_all_requests: bool = False,
        timeout_s: float | None = None,
        session_id: str | None = None,
        canary: Mapping[str, Any] | None = None,
        refuse_nonfinite: bool | None = None,
    ) -> dict[str, Any]:
        """Update the weights from checkpoint-engine's senders, on the engine's own GPUs.

        Args:
            zmq_handles: for each device, `GPU-<uuid>` → the `ipc://` address on which its sender listens.

        Other arguments: see `WeightMethods`.
        """
        return await self._control(
            io_struct.UpdateWeightsFromIPCReqInput,
            zmq_handles=dict(zmq_handles),
            flush_cache=flush_cache,
            weight_version=weight_version,
            pause_mode=pause_mode,
            abort_all_requests=abort_all_requests,
            timeout_s=timeout_s,
            canary=canary,
            refuse_nonfinite=refuse_nonfinite,
            session_id=session_id,
        )

    async def async_init_weights_update_group(
        self,
        master_address: str,
        master_port: int | str,
        rank_offset: int,
        world_size: int,
        group_name: str = io_struct.DEFAULT_GROUP,
        backend: str = "nccl",
        timeout_s: float = 300.0,
    ) -> dict[str, Any]:
        """Join a process group whose rank 0 is the trainer. Returns when all of its ranks have joined.

        Args:
            master_address, master_port: of the trainer's TCP store.
            rank_offset: the group rank of the engine's first rank; the others follow it.
            world_size: of the group, trainer included.
            backend: "nccl" or "gloo".
            timeout_s: how long to wait for the others.

        Raises:
            RequestRejected: status 400; a rank could not join, and every rank has left.
        """
        return await self._control(
            io_struct.InitWeightsUpdateGroupReqInput,
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            timeout_s=timeout_s,
        )

    async def async_destroy_weights_update_group(
        self, group_name: str = io_struct.DEFAULT_GROUP
    ) -> dict[str, Any]:
        """Leave a process group; `changed` is false if there is none of that name."""
        return await self._control(io_struct.DestroyWeightsUpdateGroupReqInput, group_name=group_name)

    async def async_begin_weight_update(
        self, selector: str = "all", timeout_s: float | None = None, session_id: str | None = None
    ) -> dict[str, Any]:
        """Open a session: updates are only staged until `end_weight_update` commits them all at once.

        Args:
            timeout_s: seconds after which an open session is discarded; None: `weight_update_timeout_s`.
            session_id: a name for the session. Updates that give it are refused after the session has ended.

        Raises:
            RequestRejected: status 409, a session is open already.
        """
        return await self._control(
            io_struct.BeginWeightUpdateReqInput, selector=selector, timeout_s=timeout_s, session_id=session_id
        )

    async def async_end_weight_update(
        self,
        weight_version: str | int | None = None,
        flush_cache: bool | None = None,
        pause_mode: str | None = None,
        timeout_s: float | None = None,
        session_id: str | None = None,
        allow_incomplete: bool = False,
        canary: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Commit all updates of the open session, between the same two forward passes.

        Args:
            allow_incomplete: commit although an update of the session was refused and not repeated.

        Other arguments: see `WeightMethods`.

        Raises:
            RequestRejected: status 409, no session is open, or it is incomplete (`refusals`).
        """
        return await self._control(
            io_struct.EndWeightUpdateReqInput,
            weight_version=weight_version,
            flush_cache=flush_cache,
            pause_mode=pause_mode,
            timeout_s=timeout_s,
            session_id=session_id,
            allow_incomplete=allow_incomplete,
            canary=canary,
        )

    async def async_abort_weight_update(self) -> dict[str, Any]:
        """Discard the open session; the old weights keep serving. `changed` is false if none was open."""
        return await self._control(io_struct.AbortWeightUpdateReqInput)

    @contextmanager
    def weight_update(
        self,
        weight_version: str | int | None = None,
        flush_cache: bool | None = None,
        pause_mode: str | None = None,
    ) -> Generator[None, None, None]:
        """A session as a `with` block: committed at its end, discarded if an exception leaves it."""
        self.begin_weight_update()
        try:
            yield
        except BaseException:
            self.abort_weight_update()
            raise
        self.end_weight_update(weight_version, flush_cache, pause_mode)

    async def async_update_weight_version(
        self, new_version: str, abort_all_requests: bool = False
    ) -> dict[str, Any]:
        """Rename the version of the weights; in a session this takes effect with the commit."""
        return await self._control(
            io_struct.UpdateWeightVersionReqInput,
            new_version=new_version,
            abort_all_requests=abort_all_requests,
        )

    async def async_transition(
        self, steps: Sequence[Mapping[str, Any]], op_id: str | None = None
    ) -> dict[str, Any]:
        """Carry out control requests in order, up to the first that is refused.

        Args:
            steps: dicts with `op` (pause, release, resume, update_from_disk, flush, continue) and its fields.
            op_id: a unique id; repeating the call with it returns the recorded outcome and repeats nothing.

        Raises:
            RequestRejected: a step was refused; `num_done` says how many steps before it took effect.
        """
        fields = {"steps": [dict(step) for step in steps], "op_id": op_id}
        return await self._in_loop(self._service.transition(fields))

    async def async_get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first `truncate_size` rows of a weight, by its checkpoint name, as float32 numbers."""
        fields = {"name": name, "truncate_size": truncate_size}
        rows: list[Any] = await self._in_loop(
            self._service.control(io_struct.GetWeightsByNameReqInput, fields)
        )
        return rows

    async def async_check_weights(
        self,
        action: str = "checksum",
        skip_tensor_list: Sequence[str] | None = None,
        algorithm: str = "sum64",
    ) -> dict[str, Any]:
        """Checksum the parameters, or compare them with a snapshot.

        Args:
            action: "checksum"; "snapshot", copy them to host memory; "reset_tensors", overwrite them with
                random bytes; "compare", with the snapshot, bit for bit.
            skip_tensor_list: leave out parameters whose names contain any of these strings.
            algorithm: of checksums: "sum64", computed where the parameters are, or "sha256", of their bytes.

        Raises:
            RequestRejected: status 400, a comparison that found differences; 409, the weights changed
                meanwhile, or are released; stale ones cannot be copied.
        """
        return await self._control(
            io_struct.CheckWeightsReqInput,
            action=action,
            skip_tensor_list=skip_tensor_list,
            algorithm=algorithm,
        )

    @property
    def weight_version(self) -> str:
        """The version of the serving weights."""
        self._runner.check_open()
        return self._service.state.weight_version

    update_weights_from_tensor = blocking(async_update_weights_from_tensor)
    update_weights_from_disk = blocking(async_update_weights_from_disk)
    update_weights_from_distributed = blocking(async_update_weights_from_distributed)
    update_weights_from_ipc = blocking(async_update_weights_from_ipc)
    init_weights_update_group = blocking(async_init_weights_update_group)
    destroy_weights_update_group = blocking(async_destroy_weights_update_group)
    begin_weight_update = blocking(async_begin_weight_update)
    end_weight_update = blocking(async_end_weight_update)
    abort_weight_update = blocking(async_abort_weight_update)
    update_weight_version = blocking(async_update_weight_version)
    transition = blocking(async_transition)
    get_weights_by_name = blocking(async_get_weights_by_name)
    check_weights = blocking(async_check_weights)

    async def _control(self, kind: type[Any], **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = await self._in_loop(self._service.control(kind, fields))
        return body

    async def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._runner.run(work)
