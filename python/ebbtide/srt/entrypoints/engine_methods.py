"""The methods that `Engine` and `Client` share: every request of the control plane, with its arguments.

Source: wire_api sections 3 and 6.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

from ebbtide.srt.entrypoints.loop_thread import LoopThread, blocking
from ebbtide.srt.managers import io_struct
from ebbtide.srt.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from ebbtide.formats.tensor_list import Payload
    from ebbtide.trainer.payload_encoding import PayloadEncoder

# These formats all mean whole tensors with checkpoint names. For (name, tensor) pairs, the encoder chooses
# how the bytes are sent, and so the format.
_WHOLE_TENSOR_FORMATS = (None, "flattened_bucket", "safetensors")


def _arguments(names: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a method, from the `locals()` at its start."""
    return {name: value for name, value in names.items() if name != "self"}


class EngineMethods(ABC):
    """An engine's methods, wherever it runs. A method `m` blocks; its coroutine `async_m` is for event loops.

    The arguments of a method are the fields of its request: most are handed on as they are, by `locals()`.

    Updates of weights share these arguments:
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

    _runner: LoopThread
    # Made at the first update from tensors.
    _encoder: PayloadEncoder | None = None

    @abstractmethod
    async def _generate(self, fields: Mapping[str, Any]) -> Any:
        """Carry out `POST /generate` with these fields."""

    @abstractmethod
    async def _carry_out(self, kind: type[io_struct.ControlRequest], fields: Mapping[str, Any]) -> Any:
        """Carry out a control request. Returns the body of its answer."""

    @abstractmethod
    async def _read(self, what: str, **query: Any) -> dict[str, Any]:
        """Carry out a request for information. `what`: the name of its method. None in `query`: not given."""

    @abstractmethod
    async def _transition(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out `POST /transition` with these fields."""

    async def _control(
        self, kind: type[io_struct.ControlRequest], names: Mapping[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = await self._carry_out(kind, _arguments(names))
        return body

    @abstractmethod
    async def _new_encoder(self) -> PayloadEncoder:
        """Make an encoder whose payloads the engine's ranks can read."""

    @abstractmethod
    def _end(self) -> None:
        """End the engine or client after a `with` block. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._end)

    # ------------------------------------------------------------------------------------------ generation

    async def async_generate(
        self,
        /,
        prompt: str | list[str] | None = None,
        sampling_params: Mapping[str, Any]
        | SamplingParams
        | Sequence[Mapping[str, Any] | SamplingParams]
        | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        return_text_in_logprobs: bool = False,
        return_prompt_token_ids: bool = False,
        rid: str | list[str] | None = None,
        stream: bool = False,
        cache_salt: str | list[str] | None = None,
        extra_key: str | list[str] | None = None,
        lora_path: str | list[str | None] | None = None,
        routed_dp_rank: int | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Any:
        """Generate text or token ids, for one prompt or a batch. Give `prompt` or `input_ids`.

        A request waits while generation is paused, memory is released or the weights are incomplete.

        Args:
            prompt: a text, or a list of texts.
            sampling_params: see `SamplingParams`; one for all prompts, or a list with one for each.
            input_ids: token ids of a prompt, or a list of such lists.
            return_logprob: return the logprob of each output token, and of prompt tokens from
                `logprob_start_len` (a position) on.
            top_logprobs_num: also return that many of the most likely tokens per position.
            token_ids_logprob: also return the logprobs of these token ids per position.
            return_text_in_logprobs: also return each token's text.
            return_prompt_token_ids: also return the prompt's token ids.
            rid: the request's id, for `abort_request`; a random one unless given.
            stream: return chunks as they are generated.
            lora_path: the adapter to run on, `name` or `name@version`; one for all prompts, or a list.
            cache_salt, extra_key: requests share cached prefixes only with requests of the same values.
            routed_dp_rank: the data-parallel replica to use.
            timeout_s: seconds after which the request is aborted.
            **fields: any other field of `POST /generate`; `/openapi.json` of a server lists them. One that it
                does not have is ignored, and named in `ignored_fields` of `meta_info`.

        Returns:
            A dict with `text`, `output_ids` and `meta_info`; a list of dicts for a batch or `n` > 1; with
            `stream` an iterator of such dicts, for `for` and `async for`. Leaving the iterator early aborts
            the request.

        Raises:
            RequestRejected: status 400, a bad field; 409, weights it asks for are gone; 503, the queue is
                full.
        """
        fields = _arguments(locals())
        fields["text"] = fields.pop("prompt")
        return await self._generate(fields | fields.pop("fields"))

    # ----------------------------------------------------------------------------------- memory and pausing

    async def async_release_memory_occupation(
        self, tags: Sequence[str] | None = None, preserve: str = "none", backup: bool | None = None
    ) -> dict[str, Any]:
        """Give the physical memory of some tags back to the system. Returns when it is free.

        Running requests that lose their KV are retracted: they wait, and prefill again after the resume.

        Args:
            tags: any of "weights", "kv_cache" and "cuda_graph"; None or empty: all.
            preserve: KV to keep in host memory until `kv_cache` is resumed: "none"; "live", that of running
                requests, which then go on without a second prefill; "all", the prefix cache too.
            backup: keep the weights in host memory; None: as `enable_weights_cpu_backup` says.

        Returns:
            `freed_bytes` by tag, `num_retracted`, `num_parked`, `duration_ms` and more.

        Raises:
            RequestRejected: status 400, an unknown tag; 409, no room for the backup (`needed_bytes`,
                `free_bytes`), or the backend cannot release.
        """
        return await self._control(io_struct.ReleaseMemoryOccupationReqInput, locals())

    async def async_resume_memory_occupation(
        self, tags: Sequence[str] | None = None, lazy: bool = False
    ) -> dict[str, Any]:
        """Take the memory of some tags again, at the same addresses.

        Weights that were released without a backup are stale afterwards: nothing runs until an update has
        written all of them.

        Args:
            tags: any of "weights", "kv_cache" and "cuda_graph"; None or empty: all.
            lazy: return as soon as requests can run, while the rest of the KV cache is still being mapped.

        Returns:
            `mapped_bytes` by tag, `weights` (their content, and which parameters are missing) and more.

        Raises:
            RequestRejected: status 409, not enough free memory (`needed_bytes`, `free_bytes`).
        """
        return await self._control(io_struct.ResumeMemoryOccupationReqInput, locals())

    async def async_resize_memory_occupation(
        self, *, num_tokens: int | None = None, num_bytes: int | None = None, preserve: str = "none"
    ) -> dict[str, Any]:
        """Make the KV cache smaller or larger while it serves. Give one of the sizes.

        Args:
            num_tokens: the new size in tokens, rounded up to whole chunks.
            num_bytes: the new size in bytes per rank, rounded down to whole chunks.
            preserve: "live" keeps the KV of requests that no longer fit in host memory; with "none" they
                prefill again.

        Raises:
            RequestRejected: status 400, not one size, or a size out of bounds (`least_tokens`, `most_tokens`,
                `least_bytes`, `most_bytes`); 409, `kv_cache` is released.
        """
        return await self._control(io_struct.ResizeMemoryOccupationReqInput, locals())

    async def async_pause_generation(
        self, mode: str = "abort", timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Stop forward passes until `continue_generation`. Returns when none is running.

        Args:
            mode: what happens to running requests: "abort", they end with the tokens they have; "retract",
                they give up their KV and prefill again; "in_place", they keep it; "wait", they finish first.
            timeout_s: with "wait", how long they may take; None: no limit.

        Raises:
            RequestRejected: status 409, a "wait" that timed out or was ended by another pause or a continue.
        """
        return await self._control(io_struct.PauseGenerationReqInput, locals())

    async def async_continue_generation(self) -> dict[str, Any]:
        """End a pause; `changed` is false if there was none."""
        return await self._control(io_struct.ContinueGenerationReqInput, {})

    async def async_abort_request(self, rid: str | list[str] = "", abort_all: bool = False) -> dict[str, Any]:
        """End one request, several, or all; each returns the tokens it has.

        Args:
            rid: an id, or a list of them; unknown ids are no error.
            abort_all: end all requests.
        """
        return await self._control(io_struct.AbortReq, locals())

    async def async_flush_cache(self, timeout_s: float = 0.0) -> dict[str, Any]:
        """Empty the prefix cache.

        Args:
            timeout_s: how long to wait for running requests, whose KV cannot be dropped.

        Returns:
            `fully_flushed`, false if running requests still hold some of it, and `freed_tokens`.
        """
        return await self._control(io_struct.FlushCacheReqInput, locals())

    # ----------------------------------------------------------------------------------------------- weights

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
        """Update the weights from tensors of this process. Other arguments: see `EngineMethods`.

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
        fields = _arguments(locals())
        given, keep_mapped = fields.pop("named_tensors"), fields.pop("keep_mapped")
        async with self._as_payload(fields, given, keep_mapped=keep_mapped) as sent:
            return await self._control(io_struct.UpdateWeightsFromTensorReqInput, sent)

    @asynccontextmanager
    async def _as_payload(
        self,
        fields: Mapping[str, Any],
        tensors: Iterable[tuple[str, torch.Tensor]] | list[bytes] | list[str],
        *,
        keep_mapped: bool = False,
        joins: bool = False,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The fields of a request with these tensors, which can be read within the block.

        `joins`: copy tensors on a GPU into one allocation first.
        """
        if isinstance(tensors, list) and all(isinstance(one, bytes | str) for one in tensors):
            yield {**fields, "serialized_named_tensors": tensors}
            return
        if self._encoder is None:
            self._encoder = await self._new_encoder()
        encoder, pairs = self._encoder, cast("Iterable[tuple[str, torch.Tensor]]", tensors)

        def encode() -> Payload:
            if not joins:
                return encoder.encode(pairs, keep_mapped=keep_mapped)
            from ebbtide.trainer.payload_encoding import side_by_side  # needs torch, as tensors do

            return encoder.encode(side_by_side(pairs), keep_mapped=keep_mapped)

        # In a thread, since copying gigabytes would block the caller's event loop.
        with await asyncio.to_thread(encode) as payload:
            sent = {**fields, "serialized_named_tensors": payload.entries}
            if sent.get("load_format") in _WHOLE_TENSOR_FORMATS:
                sent["load_format"] = payload.load_format
            yield sent

    def forget_mapped(self) -> None:
        """Unmap the memory that updates with `keep_mapped` left mapped. It takes up to two seconds."""
        if self._encoder is not None:
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

        Other arguments: see `EngineMethods`.
        """
        model_path = os.fspath(model_path)
        return await self._control(io_struct.UpdateWeightFromDiskReqInput, locals())

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
        """Update the weights from tensors that the trainer broadcasts in a process group.

        Call `init_weights_update_group` first. A failure in mid-broadcast ends the group.

        Args:
            names, dtypes, shapes: of the tensors, in the order of the broadcasts.
            group_name: the group, as in `init_weights_update_group`.
            load_format: None: one broadcast per tensor; "flattened_bucket": a single one with all bytes.

        Other arguments: see `EngineMethods`.
        """
        return await self._control(io_struct.UpdateWeightsFromDistributedReqInput, locals())

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

        Other arguments: see `EngineMethods`.
        """
        return await self._control(io_struct.UpdateWeightsFromIPCReqInput, locals())

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
            world_size: number of ranks in the group, with the trainer's.
            backend: "nccl" or "gloo".
            timeout_s: how long to wait for the others.

        Raises:
            RequestRejected: status 400; a rank could not join, and every rank has left.
        """
        return await self._control(io_struct.InitWeightsUpdateGroupReqInput, locals())

    async def async_destroy_weights_update_group(
        self, group_name: str = io_struct.DEFAULT_GROUP
    ) -> dict[str, Any]:
        """Leave a process group; `changed` is false if there is none of that name."""
        return await self._control(io_struct.DestroyWeightsUpdateGroupReqInput, locals())

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
        return await self._control(io_struct.BeginWeightUpdateReqInput, locals())

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

        Other arguments: see `EngineMethods`.

        Raises:
            RequestRejected: status 409, no session is open, or it is incomplete (`refusals`).
        """
        return await self._control(io_struct.EndWeightUpdateReqInput, locals())

    async def async_abort_weight_update(self) -> dict[str, Any]:
        """Discard the open session; the old weights keep serving. `changed` is false if none was open."""
        return await self._control(io_struct.AbortWeightUpdateReqInput, {})

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
        return await self._control(io_struct.UpdateWeightVersionReqInput, locals())

    # --------------------------------------------------------------------------------------------- adapters

    async def async_load_lora_adapter(
        self,
        lora_name: str,
        lora_path: str,
        pinned: bool = False,
        lora_version: str | int | None = None,
        in_flight: str = "stay",
        timeout_s: float | None = None,
        session_id: str | None = None,
        canary: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load a PEFT folder as a new version of an adapter. New requests for the name use this version.

        Args:
            lora_name: requests ask for `lora_path="name"` or `"name@version"`.
            lora_path: a folder that the engine's processes can read.
            pinned: keep it in device memory.
            lora_version: None: a number. Loading the same contents again under a version changes nothing.
            in_flight: what happens to requests that run on an earlier version of the name: "stay", they keep
                it; "continue", they go on with the new one; "recompute", the same with new KV; "abort".
            canary: a test of the adapter before it serves, see `io_struct.Canary`.
            session_id: commit it with this weight update session, together with the base; needs a
                `lora_version`.

        Returns:
            `lora_version`, `changed`, `num_moved`, `loaded_adapters` and more.

        Raises:
            RequestRejected: status 400, it does not fit the model; 409, the version is there with other
                contents, or pinned adapters take all slots.
        """
        lora_path = os.fspath(lora_path)
        return await self._control(io_struct.LoadLoRAAdapterReqInput, locals())

    async def async_load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | list[bytes] | list[str],
        config_dict: Mapping[str, Any],
        load_format: str | None = None,
        pinned: bool = False,
        lora_version: str | int | None = None,
        in_flight: str = "stay",
        timeout_s: float | None = None,
        session_id: str | None = None,
        keep_mapped: bool = False,
    ) -> dict[str, Any]:
        """Like `load_lora_adapter`, from tensors of this process with PEFT's names.

        Args:
            tensors: as for `update_weights_from_tensor`, or a dict.
            config_dict: the contents of PEFT's adapter_config.json.
            keep_mapped: as for `update_weights_from_tensor`. If false, tensors on a GPU are copied into one
                allocation there first, which is mapped faster than many.
        """
        fields = _arguments(locals())
        given, keep_mapped = fields.pop("tensors"), fields.pop("keep_mapped")
        pairs = given.items() if isinstance(given, Mapping) else given
        async with self._as_payload(fields, pairs, keep_mapped=keep_mapped, joins=not keep_mapped) as sent:
            return await self._control(io_struct.LoadLoRAAdapterFromTensorsReqInput, sent)

    async def async_unload_lora_adapter(
        self, lora_name: str, lora_version: str | int | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Unload an adapter, or one version of it. Requests that run on it end as usual.

        Args:
            lora_version: None: all versions.
            timeout_s: how long to wait for these requests, in seconds; 0: not at all.

        Raises:
            RequestRejected: status 404, it is not loaded.
        """
        return await self._control(io_struct.UnloadLoRAAdapterReqInput, locals())

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
        return await self._transition({"steps": [dict(step) for step in steps], "op_id": op_id})

    async def async_get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """Return the first `truncate_size` rows of a weight as numbers. `name`: its checkpoint name."""
        rows: list[Any] = await self._carry_out(io_struct.GetWeightsByNameReqInput, _arguments(locals()))
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
        return await self._control(io_struct.CheckWeightsReqInput, locals())

    # ------------------------------------------------------------------------------------------ information

    @property
    def weight_version(self) -> str:
        """The version of the serving weights."""
        version: str = self.model_info()["weight_version"]
        return version

    async def async_memory_occupation(self) -> dict[str, Any]:
        """Return which tags are resident, and if nothing can run, why. Never waits for the engine."""
        return await self._read("memory_occupation")

    async def async_model_info(self) -> dict[str, Any]:
        """Return the model's path, name and limits, and the version of its weights."""
        return await self._read("model_info")

    async def async_server_info(self) -> dict[str, Any]:
        """Return every argument, as given or as chosen, and the state of the engine."""
        return await self._read("server_info")

    async def async_loads(self, include: str = "core", dp_rank: int | None = None) -> dict[str, Any]:
        """Return the running and waiting requests and the tokens of every replica, like `/v1/loads`.

        Args:
            include: the section to report, see `/v1/loads`.
            dp_rank: one replica only; None: all.
        """
        return await self._read("loads", include=include, dp_rank=dp_rank)

    async def async_metrics(self) -> dict[str, float]:
        """Return every sample of `GET /metrics`, by `name{label="value"}`."""
        return await self._read("metrics")

    # SGLang's names.
    async_get_model_info, async_get_server_info = async_model_info, async_server_info

    # ---------------------------------------------------------------------------------------- blocking twins

    generate = blocking(async_generate)
    release_memory_occupation = blocking(async_release_memory_occupation)
    resume_memory_occupation = blocking(async_resume_memory_occupation)
    resize_memory_occupation = blocking(async_resize_memory_occupation)
    pause_generation = blocking(async_pause_generation)
    continue_generation = blocking(async_continue_generation)
    abort_request = blocking(async_abort_request)
    flush_cache = blocking(async_flush_cache)
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
    load_lora_adapter = blocking(async_load_lora_adapter)
    load_lora_adapter_from_tensors = blocking(async_load_lora_adapter_from_tensors)
    unload_lora_adapter = blocking(async_unload_lora_adapter)
    transition = blocking(async_transition)
    get_weights_by_name = blocking(async_get_weights_by_name)
    check_weights = blocking(async_check_weights)
    memory_occupation = blocking(async_memory_occupation)
    model_info = blocking(async_model_info)
    server_info = blocking(async_server_info)
    loads = blocking(async_loads)
    metrics = blocking(async_metrics)
    get_model_info = blocking(async_get_model_info)
    get_server_info = blocking(async_get_server_info)
