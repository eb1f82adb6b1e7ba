"""One engine as its two doors, HTTP and `Engine`, see it: what can be asked of it, as bodies of answers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ebbtide import __version__
from ebbtide.srt.config import EngineConfig
from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.entrypoints.launcher import EngineProcesses
from ebbtide.srt.entrypoints.transition import Transitions
from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers.channel import Receiver, Sender
from ebbtide.srt.managers.generate_request import RequestLimits
from ebbtide.srt.managers.io_struct import (
    GetWeightsByNameReqOutput,
    ManagerInput,
    PingReqInput,
    SchedulerInput,
    StateReport,
)
from ebbtide.srt.managers.request_fields import build_request
from ebbtide.srt.managers.tokenizer import load_tokenizer
from ebbtide.srt.managers.tokenizer_manager import TokenizerManager

HEALTH_TIMEOUT_S = 20.0
# In /server_info the value of a key is nobody's business.
KEY_FIELDS = ("api_key", "admin_api_key")


class EngineService:
    """The processes of an engine and the manager that talks to them.

    Building it starts the processes and returns when they are ready. `open` and everything that is asked
    belong to one event loop; `shutdown` to no loop, and to any thread.

    Args:
        targets: the processes, if not those that the config asks for; see `EngineProcesses`.

    Raises:
        ConfigurationError: the model, the tokenizer or the machine does not do.
        EngineError: a process died. In either case none is left.
    """

    def __init__(self, config: EngineConfig, targets: Mapping[str, str] | None = None) -> None:
        self.config = config
        self._failure: str | None = None
        self._manager: TokenizerManager | None = None
        self.transitions = Transitions(self.control)
        self._processes = EngineProcesses(config, targets)
        try:
            # While the scheduler loads the weights.
            self._tokenizer = (
                None
                if config.model.skip_tokenizer_init
                else load_tokenizer(config.model, config.server_args.revision)
            )
            self._facts = self._processes.wait_ready()
        except BaseException:
            self.shutdown()
            raise

    # -------------------------------------------------------------------------------------------- lifetime

    async def open(self, on_death: Callable[[str], None] | None = None) -> None:
        """Connect to the processes and wait for their first report.

        Args:
            on_death: called in this loop, with the reason, when a process has ended by itself. By then
                everything that waited has been told.
        """
        addresses = self._processes.addresses
        scheduler: Sender[SchedulerInput] = Sender(addresses.scheduler)
        inbox: Receiver[ManagerInput] = Receiver(addresses.manager, ManagerInput)
        limits = RequestLimits.of(self.config, self._facts["max_total_num_tokens"])
        self._manager = TokenizerManager(self.config, scheduler, inbox, limits, self._tokenizer)
        self._manager.start()
        loop = asyncio.get_running_loop()

        def note_death(message: str) -> None:
            self.fail(message)
            if on_death is not None:
                on_death(message)

        def hand_over(message: str) -> None:
            loop.call_soon_threadsafe(note_death, message)

        self._processes.watch(hand_over)
        await self._manager.control(PingReqInput(), HEALTH_TIMEOUT_S)

    def fail(self, message: str) -> None:
        """End everything that waits, and what is asked from now on, with an `EngineError`."""
        self._failure = message
        if self._manager is not None:
            self._manager.fail(message)

    async def close(self) -> None:
        """As `fail`, and close the channels. The processes are `shutdown`'s."""
        if self._manager is not None:
            await self._manager.close()

    def shutdown(self) -> None:
        """End the processes; returns when they are gone. Idempotent."""
        self._processes.shutdown()

    @property
    def is_down(self) -> bool:
        """Whether the engine has ended, or is about to."""
        return self._failure is not None

    @property
    def pids(self) -> dict[str, int]:
        """The process ids by the names of the processes."""
        return self._processes.pids

    # --------------------------------------------------------------------------------------------- requests

    @property
    def manager(self) -> TokenizerManager:
        assert self._manager is not None, "the service has not been opened"
        return self._manager

    @property
    def state(self) -> StateReport:
        """The state machines as last reported."""
        state = self.manager.state
        assert state is not None, "the first report comes ahead of the reply that `open` waits for"
        return state

    async def control(self, kind: type[Any], fields: Mapping[str, Any]) -> Any:
        """Carry out a control request given as loose fields; returns the body of the reply.

        Args:
            kind: a member of `AnyControlRequest`.

        Raises:
            RequestRejected: refused, nothing has changed.
            EngineError: the engine failed.
        """
        request, ignored = build_request(kind, fields)
        reply = await self.manager.control(request)
        if isinstance(reply, GetWeightsByNameReqOutput):
            return reply.values
        body = msgspec.to_builtins(reply)
        del body["type"]  # with which it travelled
        return {**body, "ignored_fields": ignored} if ignored else body

    async def check_health(self) -> None:
        """Return if the loop of every rank turns, paused and asleep included.

        Raises:
            EngineError: otherwise.
        """
        await self.manager.control(PingReqInput(), HEALTH_TIMEOUT_S)

    async def check_generation(self) -> None:
        """As `check_health`; an engine that is idle and may run also generates a token."""
        await self.check_health()
        if self.state.can_run and self.manager.num_live == 0:
            await self.generate_one_token()

    async def generate_one_token(self) -> None:
        """The shortest way through every process. Draws no seed, and leaves nothing in the prefix cache.

        Raises:
            EngineError: there is no answer, although the engine can run.
        """
        params = {"max_new_tokens": 1, "temperature": 0.0, "sampling_seed": 0}
        generation = self.manager.prepare({"input_ids": [0], "sampling_params": params})
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await generation.result()
        except TimeoutError:
            if self.state.can_run:
                raise EngineError(f"no token was generated within {HEALTH_TIMEOUT_S:g} s") from None

    # ------------------------------------------------------------------------------------------ information

    async def memory_occupation(self) -> dict[str, Any]:
        """The body of `GET /memory_occupation`. Never waits for the engine."""
        state = self.state
        [rank] = msgspec.to_builtins(state.ranks)
        tags = {name: _tag_body(report) for name, report in rank["tags"].items()}
        device = await asyncio.to_thread(_device_body, rank["pid"], tags)
        return {
            "success": True,
            "message": "",
            "generation": {"state": "paused", "mode": state.paused.value}
            if state.paused is not None
            else {"state": "running", "mode": None},
            "can_run": state.can_run,
            "reason": state.reason,
            "tags": tags,
            "device": device,
            "ranks": [{**rank, "tags": tags, "device_bytes": device}],
        }

    def model_info(self) -> dict[str, Any]:
        """The body of `GET /model_info`."""
        model, state = self.config.model, self.state
        return {
            "success": True,
            "message": "",
            "model_path": state.model_path,
            "served_model_name": model.served_model_name,
            "tokenizer_path": model.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": state.weight_version,
            "load_format": state.load_format,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model.model_type,
            "architectures": model.architectures,
            "context_len": model.context_len,
            "dtype": model.dtype,
            "vocab_size": model.vocab_size,
        }

    async def server_info(self) -> dict[str, Any]:
        """The body of `GET /server_info`."""
        arguments = dataclasses.asdict(self.config.server_args)
        occupation = await self.memory_occupation()
        del occupation["ranks"]
        replica = {
            "memory_usage": _memory_usage(occupation["tags"], self._facts["max_total_num_tokens"]),
            "effective_max_running_requests_per_dp": self.config.schedule.max_running_requests,
        }
        return {
            "success": True,
            "message": "",
            **arguments,
            **{name: "***" for name in KEY_FIELDS if arguments[name] is not None},
            **self._facts,
            "version": __version__,
            "status": "ready",
            "num_gpus": 0,
            "internal_states": [replica],
            "state": occupation,
            "weight_update": _weight_update_body(self.state),
        }


def _tag_body(report: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only the weights have, where it is another tag's."""
    return {name: value for name, value in report.items() if value is not None or name == "content"}


def _weight_update_body(state: StateReport) -> dict[str, Any]:
    session = state.session
    if session is None:
        return {"session_open": False, "age_s": None, "num_tensors_staged": 0, "groups": state.weight_groups}
    return {
        "session_open": True,
        "age_s": max(0.0, time.time() - session.opened_at),
        "num_tensors_staged": session.num_tensors_staged,
        "groups": state.weight_groups,
    }


def _device_body(pid: int, tags: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The device's memory now; reads /proc, which takes milliseconds where much memory is mapped."""
    try:
        memory = CpuDevice().memory_info(pid)
    except ProcessLookupError:
        raise EngineError(f"the process {pid} has ended") from None
    resident_bytes = sum(tag["resident_bytes"] for tag in tags.values())
    return {
        "total_bytes": memory.total_bytes,
        "free_bytes": memory.free_bytes,
        # State and measurement are of different moments: memory may have gone in between.
        "unmanaged_bytes": max(0, memory.process_bytes - resident_bytes),
    }


def _memory_usage(tags: Mapping[str, Mapping[str, Any]], num_tokens: int) -> dict[str, float]:
    """In GiB, under the names that clients of SGLang read."""
    names = {"weight": "weights", "kvcache": "kv_cache", "graph": "cuda_graph"}
    gib = {name: tags[tag]["resident_bytes"] / 2**30 for name, tag in names.items()}
    return {**gib, "token_capacity": num_tokens}
