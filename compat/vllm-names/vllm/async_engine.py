"""vLLM's engine in this process, with the methods and worker calls of OpenRLHF. Source: wire_vllm 3.7.

The parameters of an update are staged one by one, and the last one commits them all, so that running requests
never see half of an update.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, Literal, TypeVar

import torch

import ebbtide
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm.generate import TokensCall, tokens_call
from ebbtide.srt.entrypoints.vllm.occupation import VllmOccupation
from ebbtide.srt.entrypoints.vllm.parameters import (
    FinishParameters,
    InitParameters,
    Nothing,
    PauseParameters,
    ResetCacheParameters,
    SleepParameters,
    StartParameters,
    UpdateParameters,
    VllmPauseMode,
    WakeUpParameters,
)
from ebbtide.srt.entrypoints.vllm.weight_transfer import VllmWeightTransfer
from ebbtide.srt.errors import EbbtideError, RequestRejected
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import SamplingParams

T = TypeVar("T")

# Names of arguments, from vLLM's to Ebbtide's. Their values are the same.
_RENAMED: Final = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "tokenizer_mode": "tokenizer_mode",
    "skip_tokenizer_init": "skip_tokenizer_init",
    "trust_remote_code": "trust_remote_code",
    "revision": "revision",
    "served_model_name": "served_model_name",
    "dtype": "dtype",
    "quantization": "quantization",
    "device": "device",
    "seed": "random_seed",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "gpu_memory_utilization": "mem_fraction_static",
    "tensor_parallel_size": "tp_size",
    "enforce_eager": "disable_cuda_graph",
    "logprobs_mode": "logprobs_mode",
    "max_logprobs": "max_logprobs",
}
# Accepted and ignored: sleep mode is always possible, and worker calls are those of `collective_rpc`.
_UNUSED: Final = ("enable_sleep_mode", "worker_extension_cls", "disable_log_stats", "disable_log_requests")


class AsyncEngineArgs:
    """vLLM's arguments of an engine.

    Args:
        additional_config: `{"ebbtide": {...}}` has arguments of `ebbtide.Engine` by Ebbtide's names.
        **given: vLLM's arguments; None counts as not given.

    Raises:
        ValueError: an argument is not supported. The message says what to do instead.
    """

    def __init__(
        self,
        *,
        enable_prefix_caching: bool | None = None,
        distributed_executor_backend: str | None = None,
        additional_config: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        asked = {name: value for name, value in given.items() if value is not None and name not in _UNUSED}
        unknown = sorted(asked.keys() - _RENAMED.keys())
        if unknown:
            raise ValueError(
                f"AsyncEngineArgs: {', '.join(unknown)}: not in Ebbtide's package of vLLM's names; leave it "
                'out, or put an argument of `ebbtide serve` into additional_config={"ebbtide": {...}}'
            )
        if distributed_executor_backend == "ray" and asked.get("tensor_parallel_size", 1) > 1:
            raise ValueError(
                "distributed_executor_backend=ray: the ranks of one engine are not placed by Ray: expected "
                "tensor_parallel_size=1, with more engines"
            )
        self.arguments: dict[str, Any] = {_RENAMED[name]: value for name, value in asked.items()}
        if enable_prefix_caching is not None:
            self.arguments["disable_radix_cache"] = not enable_prefix_caching
        self.arguments.update((additional_config or {}).get("ebbtide") or {})


class _Core(ebbtide.Engine):
    """An engine that gives access to its service and its event loop."""

    @property
    def service(self) -> EngineService:
        return self._service

    async def there(self, work: Awaitable[T]) -> T:
        """Await something in the engine's event loop."""

        async def run() -> T:
            return await work

        return await self._runner.run(run())

    async def answer(self, fields: Mapping[str, Any]) -> Any:
        """Generate with the fields of `POST /generate`; returns the answer's body."""
        return await self._generate(fields)


class AsyncLLMEngine:
    """An engine with its processes.

    Attributes:
        output_processor: an object with the method `get_num_unfinished_requests`.
    """

    def __init__(self, core: _Core) -> None:
        self._core = core
        self._occupation = VllmOccupation(core.service)
        self._updates = _Updates(core)
        self._num_unfinished = 0
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self._num_unfinished)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLMEngine:
        """Start an engine; returns when it is ready."""
        return cls(_Core(**engine_args.arguments))

    def shutdown(self) -> None:
        """End the engine. Idempotent."""
        self._core.shutdown()

    # ------------------------------------------------------------------------------------------- generation

    async def generate(
        self,
        prompt: str | TokensPrompt | TextPrompt | Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; yields one output, at the end.

        Raises:
            RequestRejected: the engine refuses the request.
        """
        call = _call(prompt, sampling_params, request_id, self._core.service.config.model.served_model_name)
        self._num_unfinished += 1
        try:
            answer = await self._core.answer(call.generate)
        finally:
            self._num_unfinished -= 1
        yield _output(call, answer if isinstance(answer, list) else [answer], request_id)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        rids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._core.async_abort_request(rids)

    # --------------------------------------------------------------------------------- pausing and sleeping

    async def pause_generation(
        self,
        *,
        mode: VllmPauseMode = "abort",
        clear_cache: bool = True,
        wait_for_inflight_requests: bool = False,
    ) -> None:
        """Stop forward passes. With "keep", running requests wait for `resume_generation`, and then go on."""
        asked = PauseParameters(
            mode=mode, clear_cache=clear_cache, wait_for_inflight_requests=wait_for_inflight_requests
        )
        await self._core.there(self._occupation.pause(asked))

    async def resume_generation(self) -> None:
        await self._core.there(self._occupation.resume(Nothing()))

    async def is_paused(self) -> bool:
        return self._core.service.state.paused is not None

    async def sleep(self, level: int = 1, mode: VllmPauseMode = "abort") -> None:
        """Give memory back. Level 1 keeps the weights in host memory, 2 drops them, 0 only pauses."""
        await self._core.there(self._occupation.sleep(SleepParameters(level=level, mode=mode)))

    async def wake_up(
        self, tags: list[Literal["weights", "kv_cache", "cuda_graph", "scheduling"]] | None = None
    ) -> None:
        """Take memory again. When all of it is there, generation goes on."""
        await self._core.there(self._occupation.wake_up(WakeUpParameters(tags=tags)))

    async def is_sleeping(self) -> bool:
        return self._occupation.is_idle

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        asked = ResetCacheParameters(reset_running_requests=reset_running_requests)
        try:
            await self._core.there(self._occupation.reset_prefix_cache(asked))
        except RequestRejected:  # Requests hold KV.
            return False
        return True

    # ----------------------------------------------------------------------------------------- worker calls

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[None]:
        """Do one of OpenRLHF's worker calls: "init_process_group", "update_weight", "update_weight_cuda_ipc".

        Args:
            timeout: ignored.

        Raises:
            NotImplementedError: another method.
            RequestRejected: the update is refused, and the old weights serve.
        """
        call = self._updates.calls.get(method)
        if call is None:
            raise NotImplementedError(
                f"collective_rpc({method!r}) is not in Ebbtide's package of vLLM's names; known are "
                f"{', '.join(self._updates.calls)}"
            )
        await call(*args, **(kwargs or {}))
        return [None] * self._core.service.config.parallel.num_ranks


class _Updates:
    """Updates that come parameter by parameter. The last one of an update has `empty_cache`."""

    def __init__(self, core: _Core) -> None:
        self._core = core
        self._transfer = VllmWeightTransfer(core.service)
        self._is_open = False
        # Why the rest of the current update is refused.
        self._failure: EbbtideError | None = None
        self.calls: dict[str, Callable[..., Awaitable[None]]] = {
            "init_process_group": self._join,
            "update_weight": self._by_broadcast,
            "update_weight_cuda_ipc": self._by_handles,
        }

    async def _join(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "",
        backend: str = "nccl",
        use_ray: bool = False,
    ) -> None:
        if use_ray:
            raise ValueError("vllm_sync_with_ray: weights are not sent by Ray's collectives: expected False")
        init_info = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
        }
        await self._core.there(self._transfer.init(InitParameters(init_info=init_info)))

    async def _by_broadcast(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False
    ) -> None:
        await self._take(_described(name, dtype, shape), is_last=empty_cache)

    async def _by_handles(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        ipc_handles: Mapping[str, Any],
        empty_cache: bool = False,
    ) -> None:
        pickled = base64.b64encode(pickle.dumps([dict(ipc_handles)])).decode()
        update_info = {**_described(name, dtype, shape), "ipc_handles_pickled": pickled}
        await self._take(update_info, is_last=empty_cache)

    async def _take(self, update_info: dict[str, Any], *, is_last: bool) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            if not self._is_open:
                await self._core.there(self._transfer.start(StartParameters()))
                self._is_open = True
            await self._core.there(self._transfer.update(UpdateParameters(update_info=update_info)))
            if is_last:
                await self._core.there(self._transfer.finish(FinishParameters()))
                self._is_open = False
        except EbbtideError as error:
            # The rest of this update must not be taken for a new one.
            self._is_open, self._failure = False, None if is_last else error
            raise


def _described(name: str, dtype: torch.dtype, shape: Sequence[int]) -> dict[str, Any]:
    return {
        "names": [name],
        "dtype_names": [str(dtype).removeprefix("torch.")],
        "shapes": [list(shape)],
    }


def _call(
    prompt: str | TokensPrompt | TextPrompt | Sequence[int],
    sampling_params: SamplingParams,
    request_id: str,
    model: str,
) -> TokensCall:
    """The request as `/inference/v1/generate` takes it."""
    given: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {}
    if isinstance(prompt, str):
        given = {"prompt": prompt}
    elif not given:
        given = {"prompt_token_ids": list(prompt)}
    if given.get("multi_modal_data"):
        raise ValueError("multi_modal_data: Ebbtide takes text alone")
    body = {
        "token_ids": given.get("prompt_token_ids") or [],
        "sampling_params": sampling_params.fields(),
        "request_id": request_id,
        "cache_salt": given.get("cache_salt"),
        "return_token_ids": True,
    }
    call = tokens_call(body, {}, model)
    if "prompt" in given:
        call.generate["text"] = given["prompt"]
    return call


def _output(call: TokensCall, answers: Sequence[Mapping[str, Any]], request_id: str) -> RequestOutput:
    first = answers[0]["meta_info"]
    return RequestOutput(
        request_id=request_id,
        prompt=call.generate.get("text"),
        prompt_token_ids=answers[0].get("prompt_token_ids"),
        outputs=[_sample(call, index, answer) for index, answer in enumerate(answers)],
        finished=True,
        prompt_logprobs=_prompt_logprobs(first, call.num_prompt_logprobs),
    )


def _sample(call: TokensCall, index: int, answer: Mapping[str, Any]) -> CompletionOutput:
    meta = answer["meta_info"]
    finish = meta["finish_reason"] or {}
    matched = finish.get("matched")
    is_asked_for = isinstance(matched, str) or matched in call.stop_token_ids
    logprobs = None
    if call.num_logprobs is not None:
        logprobs = _logprobs(
            meta["output_token_logprobs"], meta.get("output_top_logprobs"), call.num_logprobs
        )
    own = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
    return CompletionOutput(
        index=index,
        text=answer.get("text") or "",
        token_ids=answer["output_ids"],
        cumulative_logprob=sum(own) if logprobs is not None else None,
        logprobs=logprobs,
        finish_reason=finish.get("type"),
        stop_reason=matched if is_asked_for else None,
    )


def _prompt_logprobs(meta: Mapping[str, Any], num_top: int | None) -> list[dict[int, Logprob] | None] | None:
    if num_top is None:
        return None
    own, top = meta["input_token_logprobs"], meta.get("input_top_logprobs")
    # The first token has no probability.
    return [None, *_logprobs(own[1:], None if top is None else top[1:], num_top)]


def _logprobs(
    own: Sequence[Sequence[Any]], top: Sequence[Any] | None, num_top: int
) -> list[dict[int, Logprob]]:
    """For each token the logprobs of itself and of the most likely tokens, by token id."""
    rows = []
    for place, (logprob, token_id, text) in enumerate(own):
        listed = (top[place] or [])[:num_top] if top is not None else []
        row = {token_id: Logprob(logprob, None, text)}
        for rank, (likely, likely_id, likely_text) in enumerate(listed, 1):
            row[likely_id] = Logprob(likely, rank, likely_text)
        rows.append(row)
    return rows
