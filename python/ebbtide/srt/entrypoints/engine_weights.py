"""The methods of `Engine` that bring weights. Source: wire_api section 3.3."""

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
    """What `Engine` inherits to update weights, and to ask for them."""

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
    ) -> dict[str, Any]:
        """Take new weights. wire_api section 3.3.

        Args:
            named_tensors: serialized entries, as over HTTP; or (checkpoint name, tensor) pairs, read where
                they are on a GPU that all ranks reach, else copied once: with several nodes, into the
                request. They must not change until the answer.
            changed, base_version: of the `load_format` "sparse", see `UpdateWeightsFromTensorReqInput`.
            keep_mapped: the tensors stay where they are: what is read on a GPU stays mapped for the next
                update of the same. Memory of theirs that is freed is the device's again when the next one
                brings other memory under these names, or after `forget_mapped`.
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
                session_id=session_id,
                changed=changed,
                base_version=base_version,
            )

    def forget_mapped(self) -> None:
        """Have what updates with `keep_mapped` left mapped given back: within a second or two."""
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
    ) -> dict[str, Any]:
        """Take the weights of a Hugging Face folder of the same architecture. wire_api section 3.3."""
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
    ) -> dict[str, Any]:
        """Take what the trainer broadcasts in a group; a refusal in mid-broadcast ends that. wire_api 3.3."""
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
    ) -> dict[str, Any]:
        """Take what checkpoint-engine's senders bring, on the engine's own GPUs. wire_api section 4.5.

        Args:
            zmq_handles: `GPU-<uuid>` of each device → the `ipc://` address where its sender listens.
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
        """Join a process group whose rank 0 is the trainer. Returns when all of its ranks are there."""
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
        """Leave a group; `changed` is false where there is none of that name."""
        return await self._control(io_struct.DestroyWeightsUpdateGroupReqInput, group_name=group_name)

    async def async_begin_weight_update(
        self, selector: str = "all", timeout_s: float | None = None, session_id: str | None = None
    ) -> dict[str, Any]:
        """Open a session: updates are staged until `end_weight_update` commits them all at once.

        Args:
            session_id: a name for it; what gives that name is refused once the session is over.
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
        """Commit the open session. wire_api section 3.3.

        Args:
            allow_incomplete: also where an update of the session was refused and not made up for.
            canary: what the new weights are tried with before they serve; see `io_struct.Canary`.
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
        """Discard the open session; the old weights serve."""
        return await self._control(io_struct.AbortWeightUpdateReqInput)

    @contextmanager
    def weight_update(
        self,
        weight_version: str | int | None = None,
        flush_cache: bool | None = None,
        pause_mode: str | None = None,
    ) -> Generator[None, None, None]:
        """A session as a scope: committed at its end, discarded if it is left by an exception."""
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
        """Give the weights another version; in a session it takes effect with the commit."""
        return await self._control(
            io_struct.UpdateWeightVersionReqInput,
            new_version=new_version,
            abort_all_requests=abort_all_requests,
        )

    async def async_transition(
        self, steps: Sequence[Mapping[str, Any]], op_id: str | None = None
    ) -> dict[str, Any]:
        """Carry out control requests in order, up to the first refusal; safe to repeat with the same `op_id`.

        Args:
            steps: objects with `op` (pause, release, resume, update_from_disk, flush, continue) and fields.
        """
        fields = {"steps": [dict(step) for step in steps], "op_id": op_id}
        return await self._in_loop(self._service.transition(fields))

    async def async_get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first rows of a weight under its checkpoint name, as float32 numbers."""
        fields = {"name": name, "truncate_size": truncate_size}
        rows: list[Any] = await self._in_loop(
            self._service.control(io_struct.GetWeightsByNameReqInput, fields)
        )
        return rows

    async def async_check_weights(
        self, action: str = "checksum", skip_tensor_list: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Checksums of the parameters, or whether they are those of a snapshot. wire_api section 3.3.

        Args:
            action: checksum, snapshot, reset_tensors or compare.
            skip_tensor_list: what is in the names of parameters to leave out.
        """
        return await self._control(
            io_struct.CheckWeightsReqInput, action=action, skip_tensor_list=skip_tensor_list
        )

    @property
    def weight_version(self) -> str:
        """The version of the weights that serve."""
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
