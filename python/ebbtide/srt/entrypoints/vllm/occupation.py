"""vLLM's pausing, sleeping and waking, as control requests. Source: wire_vllm section 4.1.

One call is several control requests in a row. If one after the pause fails, the pause ends again, unless
generation was paused before the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from ebbtide.srt.entrypoints.bodies import Body
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm.parameters import (
    AbortNamedParameters,
    AbortParameters,
    Nothing,
    PauseParameters,
    ResetCacheParameters,
    SleepParameters,
    WakeUpParameters,
    pause_mode,
    vllm_route,
)
from ebbtide.srt.errors import EbbtideError
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from ebbtide.srt.memory_saver import MemoryTag

# Tags that `/sleep` releases. CUDA graphs stay resident.
SLEEPING_TAGS = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
# Prefixes of the ids of answers; the request's id follows.
ID_PREFIXES = ("cmpl-", "chatcmpl-", "generate-tokens-")


class VllmOccupation:
    """Serves vLLM's endpoints for pausing, sleeping, waking, aborting and the prefix cache."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    @property
    def _is_paused(self) -> bool:
        return self._service.state.paused is not None

    @property
    def is_idle(self) -> bool:
        """Whether generation is paused, or the weights or the KV cache are released on any rank."""
        return self._is_paused or bool(self._released())

    @vllm_route("POST", "/pause")
    async def pause(self, asked: PauseParameters) -> Body:
        """Pause: run no further forward passes."""
        async with self._paused(asked.pause_mode, flushes=asked.clear_cache) as paused:
            return {**paused, "status": "paused"}

    @vllm_route("POST", "/resume")
    async def resume(self, asked: Nothing) -> Body:
        """End a pause."""
        return {**await self._service.control(ContinueGenerationReqInput, {}), "status": "resumed"}

    @vllm_route("POST", "/sleep")
    async def sleep(self, asked: SleepParameters) -> Body:
        """Pause, and release memory.

        An engine that is already asleep stays as it is, with its backup.
        """
        answer = {"status": "sleeping", "level": asked.level}
        if asked.level > 0 and self._released() == set(SLEEPING_TAGS):
            return {"success": True, "message": "Asleep already.", "changed": False, **answer}
        clears_cache = asked.level > 0
        async with self._paused(pause_mode(asked.mode, clears_cache), flushes=clears_cache) as paused:
            if asked.level == 0:
                return {**paused, **answer}
            release = {"tags": list(SLEEPING_TAGS), "backup": asked.level == 1}
            released = await self._service.control(ReleaseMemoryOccupationReqInput, release)
            return {**released, **answer, "mode": paused["mode"]}

    @vllm_route("POST", "/wake_up")
    async def wake_up(self, asked: WakeUpParameters) -> Body:
        """Resume memory. Once all of it is resident, generation continues, whoever paused it."""
        tags = [tag for tag in asked.tags or () if tag != "scheduling"]
        reply: Body = {"success": True, "message": "Nothing to do.", "changed": False}
        if tags or not asked.tags:
            reply = await self._service.control(ResumeMemoryOccupationReqInput, {"tags": tags})
        resumed = False
        if not self._released():
            resumed = (await self._service.control(ContinueGenerationReqInput, {}))["changed"]
        status = "sleeping" if self._released() else "awake"
        return {**reply, "status": status, "tags": asked.tags or None, "resumed": resumed}

    @vllm_route("POST", "/release_kv_cache_memory")
    async def release_kv_cache(self, asked: Nothing) -> Body:
        """Release the memory of the KV cache."""
        reply = await self._service.control(ReleaseMemoryOccupationReqInput, {"tags": [MemoryTag.KV_CACHE]})
        return {**reply, "status": "kv_cache_released"}

    @vllm_route("POST", "/reset_prefix_cache")
    async def reset_prefix_cache(self, asked: ResetCacheParameters) -> Body:
        """Empty the prefix cache."""
        fields = {"retract_running": asked.reset_running_requests}
        reply: Body = await self._service.control(FlushCacheReqInput, fields)
        return reply

    @vllm_route("POST", "/abort_requests")
    async def abort(self, asked: AbortParameters) -> Body:
        """Abort these requests, or all."""
        if not asked.request_ids:
            reply = await self._service.control(AbortReq, {"abort_all": True})
            return {**reply, "status": "aborted", "aborted": reply["num_aborted"]}
        rids = [rid for given in asked.request_ids for rid in meant_by(given)]
        reply = await self._service.control(AbortReq, {"rid": rids})
        return {**reply, "status": "aborted", "aborted": len(asked.request_ids)}

    @vllm_route("GET", "/is_paused")
    async def is_paused(self, asked: Nothing) -> Body:
        """Return whether generation is paused, or memory released."""
        return {"is_paused": self.is_idle}

    @vllm_route("GET", "/is_sleeping")
    async def is_sleeping(self, asked: Nothing) -> Body:
        """Return whether memory is released, or generation paused."""
        return {"is_sleeping": self.is_idle}

    @vllm_route("POST", "/inference/v1/abort_requests")
    async def abort_named(self, asked: AbortNamedParameters) -> Body:
        """Abort these requests."""
        return await self.abort(AbortParameters(request_ids=asked.request_ids))

    @contextlib.asynccontextmanager
    async def _paused(self, mode: PauseMode, *, flushes: bool) -> AsyncIterator[Body]:
        """Pause. If the block fails, end the pause, unless generation was paused before."""
        was_paused = self._is_paused
        paused: Body = await self._service.control(PauseGenerationReqInput, {"mode": mode})
        try:
            if flushes:
                await self._service.control(FlushCacheReqInput, {})
            yield paused
        except EbbtideError:
            if not was_paused:
                # This fails too if the engine is down; the caller needs the first error.
                with contextlib.suppress(EbbtideError):
                    await self._service.control(ContinueGenerationReqInput, {})
            raise

    def _released(self) -> set[MemoryTag]:
        ranks = self._service.state.ranks
        return {tag for rank in ranks for tag in SLEEPING_TAGS if rank.tags[tag].state == "released"}


def meant_by(given: str) -> list[str]:
    """The request ids that an id may mean: it may be the request's own, or the answer's id."""
    names = [given]
    for prefix in ID_PREFIXES:
        if given.startswith(prefix):
            names.append(given.removeprefix(prefix))
    for name in list(names):
        # One of several outputs: vLLM's `<rid>-<k>` is `<rid>_<k>` here.
        rid, _, index = name.rpartition("-")
        if rid and index.isdecimal():
            names.append(f"{rid}_{index}")
    return names
