"""The Ray actor of a replica, with the methods that verl's agent loops and trainers call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import ray
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from ebbtide import Engine
from ebbtide_verl.settings import engine_arguments

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class EbbtideServer:
    """An engine and its HTTP server.

    Args:
        config: verl's RolloutConfig.
        model_config: verl's HFModelConfig, or the same as an OmegaConf node.
        mode: says whether the trainer shares the engine's GPUs.
        replica_rank: number of this replica.
    """

    def __init__(self, config: Any, model_config: Any, mode: RolloutMode, replica_rank: int = 0) -> None:
        self._config, self._mode = omega_conf_to_dataclass(config), mode
        model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        shares_gpus = mode is not RolloutMode.STANDALONE
        self._arguments = engine_arguments(
            self._config, model, shares_gpus=shares_gpus, replica_rank=replica_rank
        )
        self._engine: Engine | None = None
        self._address = ""

    async def launch_server(self) -> str:
        """Start the engine; returns host:port of its HTTP server."""
        host = ray.util.get_node_ip_address()
        self._engine = await asyncio.to_thread(Engine, host=host, **self._arguments)
        self._address = urlsplit(await asyncio.to_thread(self._engine.serve_http)).netloc
        return self._address

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "launch_server comes first"
        return self._engine

    # -------------------------------------------------------------------------------------------- generation

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """Continue a prompt of token ids.

        Args:
            sampling_params: the engine's, or with vLLM's names `max_tokens`, `logprobs`, `prompt_logprobs`.

        Raises:
            ValueError: images or videos are given, or the prompt does not fit `max_model_len`.
            RequestRejected: the engine refuses the request.
        """
        if image_data or video_data:
            raise ValueError("rollout.name=ebbtide takes text alone: got images or videos")
        params = dict(sampling_params)
        wants_logprobs = bool(params.pop("logprobs", False))
        num_prompt_logprobs = params.pop("prompt_logprobs", None)
        wanted = params.pop("max_new_tokens", None)
        wanted = params.pop("max_tokens", wanted)
        params["max_new_tokens"] = self._room(len(prompt_ids), wanted)
        params.setdefault("ignore_eos", self._config.ignore_eos)
        of_prompt = {} if num_prompt_logprobs is None else {"logprob_start_len": 0}
        if num_prompt_logprobs:
            of_prompt["top_logprobs_num"] = num_prompt_logprobs
        answer = await self.engine.async_generate(
            input_ids=[int(one) for one in prompt_ids],
            sampling_params=params,
            rid=request_id,
            return_logprob=wants_logprobs or bool(of_prompt),
            return_routed_experts=bool(self._config.enable_rollout_routing_replay) or None,
            routed_experts_format="npy" if self._config.enable_rollout_routing_replay else None,
            **of_prompt,
        )
        meta = answer["meta_info"]
        extra = steps_of(meta)
        if num_prompt_logprobs is not None:
            extra.update(prompt_logprobs(meta, num_prompt_logprobs))
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]] if wants_logprobs else None
        return TokenOutput(
            token_ids=answer["output_ids"],
            log_probs=logprobs,
            routed_experts=meta.get("routed_experts"),
            stop_reason=(meta["finish_reason"] or {}).get("type"),
            num_preempted=meta["num_retractions"],
            extra_fields=extra,
        )

    def _room(self, prompt_len: int, wanted: int | None) -> int:
        """The most tokens that an output may have. ValueError: the prompt is too long."""
        config = self._config
        if wanted is None:
            wanted = min(config.response_length, config.prompt_length + config.response_length - prompt_len)
        most = wanted if config.max_model_len is None else config.max_model_len - prompt_len - 1
        if most < 0:
            raise ValueError(
                f"a prompt of {prompt_len} tokens does not fit max_model_len={config.max_model_len}"
            )
        return max(0, min(wanted, most))

    # ----------------------------------------------------------------------------------------------- control

    async def wake_up(self) -> None:
        """Take released memory again. ValueError: in hybrid mode, the trainer does that itself."""
        if self._mode is RolloutMode.HYBRID:
            raise ValueError(
                "wake_up: in hybrid mode the trainer resumes weights and KV cache, and updates them"
            )
        await self.engine.async_resume_memory_occupation(self._slept_tags)

    async def sleep(self) -> None:
        """Release memory for the trainer, if `free_cache_engine` is set."""
        await self.release(self._slept_tags)

    @property
    def _slept_tags(self) -> list[str]:
        return [KV_CACHE] if self._mode is RolloutMode.STANDALONE else [KV_CACHE, WEIGHTS]

    async def release(self, tags: Sequence[str]) -> None:
        if self._config.free_cache_engine:
            await self.engine.async_release_memory_occupation(list(tags))

    async def resume(self, tags: Sequence[str]) -> None:
        if self._config.free_cache_engine:
            await self.engine.async_resume_memory_occupation(list(tags))

    async def release_kv_cache(self) -> None:
        await self.release([KV_CACHE])

    async def resume_kv_cache(self) -> None:
        await self.resume([KV_CACHE])

    async def clear_kv_cache(self) -> None:
        await self.engine.async_flush_cache()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End running requests with their tokens so far; new ones wait for `resume_generation`."""
        await self.engine.async_pause_generation("abort")

    async def resume_generation(self) -> None:
        await self.engine.async_continue_generation()

    async def begin_update(self) -> None:
        await self.engine.async_begin_weight_update()

    async def stage(self, entries: list[bytes]) -> None:
        """Stage a bucket, given as an entry for each rank. It is served after `end_update`."""
        await self.engine.async_update_weights_from_tensor(entries, load_format="flattened_bucket")

    async def end_update(self, global_steps: int | None) -> None:
        """Commit all buckets, as the weights of this step; None: the version stays."""
        version = None if global_steps is None else str(global_steps)
        await self.engine.async_end_weight_update(weight_version=version, flush_cache=True)

    async def abort_update(self) -> None:
        await self.engine.async_abort_weight_update()

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the version of the serving weights."""
        await self.engine.async_update_weight_version(str(global_steps))

    async def start_profile(self, **_: Any) -> None:
        """Does nothing: the engine has no profiler. Use `ebbtide top` or traces."""

    async def stop_profile(self) -> None:
        """Does nothing, as `start_profile`."""


def steps_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """verl's fields about the steps whose weights sampled an output.

    Versions that are not numbers are left out.
    """
    named = [span["version"] for span in meta["weight_versions"]] or [meta["weight_version"]]
    steps = [int(version) for version in named if version.isdecimal()]
    if not steps:
        return {"global_steps": None}
    return {"global_steps": steps[-1], "min_global_steps": min(steps), "max_global_steps": max(steps)}


def prompt_logprobs(meta: Mapping[str, Any], num_top: int) -> dict[str, Any]:
    """Logprobs of prompt tokens in the format of verl's distillation: one row for each token.

    Row i is about token i + 1, since the first token has no logprob. The last row is zeros.

    Args:
        num_top: number of most likely tokens in a row; 0: the prompt's own token.
    """
    if num_top:
        rows = [[entry[:2] for entry in entries] for entries in meta["input_top_logprobs"][1:]]
    else:
        rows = [[entry[:2]] for entry in meta["input_token_logprobs"][1:]]
    width = max(num_top, 1)
    return {
        "prompt_ids": [[int(token_id) for _, token_id in row] for row in rows] + [[0] * width],
        "prompt_logprobs": [[float(logprob) for logprob, _ in row] for row in rows] + [[0.0] * width],
    }
