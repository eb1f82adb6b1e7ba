"""The engine in Python: the manager that HTTP has too, in a thread of its own. Source: wire_api section 6."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from threading import Thread
from typing import Any, Self, TypeVar

from ebbtide.srt.config import resolve
from ebbtide.srt.entrypoints.engine_stream import EngineStream
from ebbtide.srt.entrypoints.engine_weights import WeightMethods
from ebbtide.srt.entrypoints.launch.early_processes import EarlyProcesses
from ebbtide.srt.entrypoints.loop_thread import LoopThread, blocking
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.managers import io_struct
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.srt.server_args import ServerArgs

T = TypeVar("T")


def _import_encoder() -> None:
    from ebbtide.trainer import payload_encoding  # noqa: F401


class Engine(WeightMethods):
    """An LLM inference engine in Python: it starts its own processes and opens no port.

    The constructor returns when the engine is ready. Use it as a context manager, or call `shutdown`. Methods
    may be called from any thread. Each method `m` blocks; its coroutine `async_m` works in any event loop.
    Control methods return the reply's JSON body as a dict, as over HTTP (docs/control_plane.md).

    While streams run, Python's garbage collector leaves out what the process had before (`gc.freeze`), unless
    the caller has frozen it: a full collection would stop all streams for as long as it takes to walk that.

    Args:
        server_args: all arguments at once, instead of `kwargs`.
        **kwargs: fields of `ServerArgs`, such as `model_path`; `ebbtide serve --help` explains them.
            `log_level` is "error" unless given.

    Raises:
        ConfigurationError: the engine cannot start with these arguments; the message says why.
        EngineError: a process died at start; none is left running. Methods raise it if the engine has failed
            or was shut down.
        RequestRejected: from methods only: the request was refused, and nothing has changed.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise TypeError(f"server_args stands for all arguments, also for {', '.join(sorted(kwargs))}")
        if server_args is None:
            server_args = ServerArgs(**{"log_level": "error", **kwargs})
        self.server_args = server_args
        if "torch" in sys.modules:
            # Who has torch sends tensors: the first update does not wait for what encodes them.
            Thread(target=_import_encoder, name="importing", daemon=True).start()
        service = self._service = self._start(server_args)
        self._runner = LoopThread()
        # An engine that is dropped, or still there when the interpreter ends, leaves no process either.
        self._finalizer = weakref.finalize(self, self._runner.end, service.close, service.shutdown)
        try:
            self._wait(self._service.open())
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def _start(cls, server_args: ServerArgs) -> EngineService:
        """Other processes behind the same methods: `ebbtide.testing`."""
        with EarlyProcesses(server_args) as early:
            return EngineService(resolve(server_args), early=early)

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
            cache_salt, extra_key: requests share cached prefixes only with requests of the same values.
            routed_dp_rank: the data-parallel replica to use.
            timeout_s: seconds after which the request is aborted.
            **fields: any other field of `POST /generate`; `/openapi.json` of a server lists them.

        Returns:
            A dict with `text`, `output_ids` and `meta_info`; a list of dicts for a batch or `n` > 1; with
            `stream` an iterator of such dicts, for `for` and `async for`. Leaving the iterator early aborts
            the request.

        Raises:
            RequestRejected: status 400, a bad field; 409, weights it asks for are gone; 503, the queue is
                full.
        """
        given = {
            "text": prompt,
            "sampling_params": sampling_params,
            "input_ids": input_ids,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "token_ids_logprob": token_ids_logprob,
            "return_text_in_logprobs": return_text_in_logprobs,
            "return_prompt_token_ids": return_prompt_token_ids,
            "rid": rid,
            "stream": stream,
            "cache_salt": cache_salt,
            "extra_key": extra_key,
            "routed_dp_rank": routed_dp_rank,
            "timeout_s": timeout_s,
            **fields,
        }
        return await self._in_loop(self._start_or_finish(given))

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
        return await self._control(
            io_struct.ReleaseMemoryOccupationReqInput, tags=tags, preserve=preserve, backup=backup
        )

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
        return await self._control(io_struct.ResumeMemoryOccupationReqInput, tags=tags, lazy=lazy)

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
        return await self._control(
            io_struct.ResizeMemoryOccupationReqInput,
            num_tokens=num_tokens,
            num_bytes=num_bytes,
            preserve=preserve,
        )

    async def async_memory_occupation(self) -> dict[str, Any]:
        """Which tags are resident, and if nothing can run, why. Answers at once, whatever the engine does."""
        return await self._in_loop(self._service.memory_occupation())

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
        return await self._control(io_struct.PauseGenerationReqInput, mode=mode, timeout_s=timeout_s)

    async def async_continue_generation(self) -> dict[str, Any]:
        """End a pause; `changed` is false if there was none."""
        return await self._control(io_struct.ContinueGenerationReqInput)

    async def async_abort_request(self, rid: str | list[str] = "", abort_all: bool = False) -> dict[str, Any]:
        """End one request, several, or all; each returns the tokens it has.

        Args:
            rid: an id, or a list of them; unknown ids are no error.
            abort_all: end all requests.
        """
        return await self._control(io_struct.AbortReq, rid=rid, abort_all=abort_all)

    async def async_flush_cache(self, timeout_s: float = 0.0) -> dict[str, Any]:
        """Empty the prefix cache.

        Args:
            timeout_s: how long to wait for running requests, whose KV cannot be dropped.

        Returns:
            `fully_flushed`, false if running requests still hold some of it, and `freed_tokens`.
        """
        return await self._control(io_struct.FlushCacheReqInput, timeout_s=timeout_s)

    # ------------------------------------------------------------------------------------------ information

    async def async_model_info(self) -> dict[str, Any]:
        """The model's path, name and limits, and the version of its weights."""
        self._runner.check_open()
        return self._service.model_info()

    async def async_server_info(self) -> dict[str, Any]:
        """Every argument, as given or chosen, and the state of the engine."""
        return await self._in_loop(self._service.server_info())

    async def async_loads(self, include: str = "core", dp_rank: int | None = None) -> dict[str, Any]:
        """Running and waiting requests and tokens of every replica, as `/v1/loads` reports them.

        Args:
            include: which section to report, see `/v1/loads`.
            dp_rank: one replica only; None: all.
        """
        return await self._in_loop(self._service.loads_body([include], dp_rank))

    async def async_metrics(self) -> dict[str, float]:
        """Every sample of `GET /metrics`, by `name{label="value"}`. Needs no flag."""
        return await self._in_loop(self._service.metric_values())

    generate = blocking(async_generate)
    release_memory_occupation = blocking(async_release_memory_occupation)
    resume_memory_occupation = blocking(async_resume_memory_occupation)
    resize_memory_occupation = blocking(async_resize_memory_occupation)
    memory_occupation = blocking(async_memory_occupation)
    pause_generation = blocking(async_pause_generation)
    continue_generation = blocking(async_continue_generation)
    abort_request = blocking(async_abort_request)
    flush_cache = blocking(async_flush_cache)
    model_info = blocking(async_model_info)
    server_info = blocking(async_server_info)
    loads = blocking(async_loads)
    metrics = blocking(async_metrics)
    # SGLang has other names for the same.
    async_get_model_info, get_model_info = async_model_info, model_info
    async_get_server_info, get_server_info = async_server_info, server_info

    def serve_dashboard(self, port: int = 0) -> str:
        """Serve the dashboard on loopback, without a key, as long as the engine lives.

        Args:
            port: TCP port; 0: a free one.

        Returns:
            The page's URL.

        Raises:
            ConfigurationError: the port is taken.
        """
        return self._wait(self._serve_dashboard(port))

    async def _serve_dashboard(self, port: int) -> str:
        from ebbtide.srt.entrypoints.dashboard.server import DashboardServer

        server = DashboardServer(self._service, port)
        self._service.at_close.append(server.close)
        server.start()
        return server.url

    # --------------------------------------------------------------------------------------------- lifetime

    @property
    def is_down(self) -> bool:
        """Whether the engine has failed."""
        return self._service.is_down

    def shutdown(self) -> None:
        """End the engine. Returns when its processes are gone; waiting calls raise `EngineError`. Idempotent.

        Unlike the other blocking methods it also works inside a running event loop, which it blocks briefly.
        """
        self._finalizer()
        # The second of two calls at once waits here for the first.
        self._service.shutdown()
        if "_encoder" in vars(self):  # made at the first update of tensors
            self._encoder.close()

    async def async_shutdown(self) -> None:
        """Like `shutdown`."""
        await asyncio.to_thread(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.async_shutdown()

    # -------------------------------------------------------------------------------------------- internals

    async def _start_or_finish(self, given: Mapping[str, Any]) -> Any:
        generation = await self._service.manager.prepare(given)
        if generation.is_stream:
            return EngineStream(self._runner, self._service, generation)
        result = await generation.result()
        self._service.metrics.note(result)
        return result

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.wait(work)
