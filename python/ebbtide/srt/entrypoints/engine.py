"""The engine in Python: the manager that HTTP has too, in a thread of its own. Source: wire_api section 6."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from ebbtide.srt.config import resolve
from ebbtide.srt.entrypoints.engine_weights import WeightMethods
from ebbtide.srt.entrypoints.launch.early_processes import EarlyProcesses
from ebbtide.srt.entrypoints.loop_thread import LoopThread, blocking
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.managers import io_struct
from ebbtide.srt.managers.api.live_generation import LiveGeneration
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.srt.server_args import ServerArgs

T = TypeVar("T")


class Engine(WeightMethods):
    """An engine with processes of its own and no port. Returns when it is ready.

    Methods may be called from any thread. Each method `m` is the plain twin of the coroutine `async_m`, which
    works in any event loop. Control methods return the body of the reply.

    Args:
        server_args: all arguments at once, in place of single ones.
        **kwargs: fields of `ServerArgs`; `log_level` is "error" unless given.

    Raises:
        ConfigurationError: the engine cannot start so.
        EngineError: a process died; none is left. From methods: the engine failed, or was shut down.
        RequestRejected: from methods only: refused, nothing has changed.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise TypeError(f"server_args stands for all arguments, also for {', '.join(sorted(kwargs))}")
        if server_args is None:
            server_args = ServerArgs(**{"log_level": "error", **kwargs})
        self.server_args = server_args
        service = self._service = self._start(server_args)
        self._runner = LoopThread()
        # An engine that is dropped, or still there when the interpreter ends, leaves no process either.
        self._finalizer = weakref.finalize(
            self, self._runner.end, service.close, service.shutdown, os.getpid()
        )
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
        """Generate. `fields` are any others of wire_api section 2.1; the answer is that of section 2.3.

        Returns:
            A dict; a list of dicts for a batch or `n` > 1; with `stream` an iterator of chunks (from
            `async_generate` an asynchronous one). Leaving it early aborts the request.
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
        answer = await self._in_loop(self._start_or_finish(given))
        if isinstance(answer, LiveGeneration):
            return self._runner.stream(self._service.metrics.noting(answer), answer.close)
        return answer

    # ----------------------------------------------------------------------------------- memory and pausing

    async def async_release_memory_occupation(
        self, tags: Sequence[str] | None = None, preserve: str = "none", backup: bool | None = None
    ) -> dict[str, Any]:
        """Give the physical memory of these tags back; none means all of them. wire_api section 3.1.

        Args:
            preserve: which KV is kept in host memory, and comes back with `kv_cache`: "live", that of
                running requests, which go on without a second prefill; "all", the prefix cache too.
            backup: whether the weights survive in host memory; None: as the engine was started.
        """
        return await self._control(
            io_struct.ReleaseMemoryOccupationReqInput, tags=tags, preserve=preserve, backup=backup
        )

    async def async_resume_memory_occupation(
        self, tags: Sequence[str] | None = None, lazy: bool = False
    ) -> dict[str, Any]:
        """Take the memory of these tags again, at the same addresses. wire_api section 3.1.

        Args:
            lazy: return as soon as requests can run: the rest of the KV cache comes beside them.
        """
        return await self._control(io_struct.ResumeMemoryOccupationReqInput, tags=tags, lazy=lazy)

    async def async_resize_memory_occupation(
        self, *, num_tokens: int | None = None, num_bytes: int | None = None, preserve: str = "none"
    ) -> dict[str, Any]:
        """Make the KV cache smaller or larger while it serves: by tokens, or by bytes of each rank.

        Args:
            preserve: "live" keeps the KV of requests that have no room any more in host memory.
        """
        return await self._control(
            io_struct.ResizeMemoryOccupationReqInput,
            num_tokens=num_tokens,
            num_bytes=num_bytes,
            preserve=preserve,
        )

    async def async_memory_occupation(self) -> dict[str, Any]:
        """What is resident, and why nothing can run if nothing can. Never waits for the engine."""
        return await self._in_loop(self._service.memory_occupation())

    async def async_pause_generation(
        self, mode: str = "abort", timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Run no forward pass until `continue_generation`. wire_api section 3.2."""
        return await self._control(io_struct.PauseGenerationReqInput, mode=mode, timeout_s=timeout_s)

    async def async_continue_generation(self) -> dict[str, Any]:
        """End a pause."""
        return await self._control(io_struct.ContinueGenerationReqInput)

    async def async_abort_request(self, rid: str | list[str] = "", abort_all: bool = False) -> dict[str, Any]:
        """End one request, several, or all; they answer with the tokens they have."""
        return await self._control(io_struct.AbortReq, rid=rid, abort_all=abort_all)

    async def async_flush_cache(self, timeout_s: float = 0.0) -> dict[str, Any]:
        """Empty the prefix cache; `fully_flushed` is false where running requests hold on to some of it."""
        return await self._control(io_struct.FlushCacheReqInput, timeout_s=timeout_s)

    # ------------------------------------------------------------------------------------------ information

    async def async_model_info(self) -> dict[str, Any]:
        """What is served, and with which weights. wire_api section 3.4."""
        self._runner.check_open()
        return self._service.model_info()

    async def async_server_info(self) -> dict[str, Any]:
        """Every argument as given or chosen, and the state of the engine. wire_api section 3.4."""
        return await self._in_loop(self._service.server_info())

    async def async_loads(self, include: str = "core", dp_rank: int | None = None) -> dict[str, Any]:
        """What every replica has to do. wire_api section 3.4, `/v1/loads`."""
        return await self._in_loop(self._service.loads_body([include], dp_rank))

    async def async_metrics(self) -> dict[str, float]:
        """Every sample of `GET /metrics`, whose keys are `name{label="value"}` as there."""
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
        """Serve the dashboard's page to this machine, without a key, for as long as the engine lives.

        Args:
            port: of the loopback address; 0 for a free one.

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
        """End the engine: what waits gets an `EngineError`. Returns when its processes are gone. Idempotent.

        Unlike the other plain methods this works in a running event loop too, which it blocks for a moment.
        """
        self._finalizer()
        # The second of two calls at once waits here for the first.
        self._service.shutdown()
        if "_encoder" in vars(self):  # made at the first update of tensors
            self._encoder.close()

    async def async_shutdown(self) -> None:
        """As `shutdown`."""
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
            return generation
        result = await generation.result()
        self._service.metrics.note(result)
        return result

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.wait(work)
