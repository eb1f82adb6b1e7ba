"""SGLang's `Engine`, whose control methods return tuples. Source: wire_api section 8."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, Self, TypeVar

from ebbtide.srt.managers.io_struct import DEFAULT_GROUP
from sglang._core import EngineCore
from sglang._rpc import refuse_rpc
from sglang.srt.entrypoints.EngineBase import EngineBase
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as run_detokenizer_process
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqOutput,
    InitWeightsUpdateGroupReqInput,
    LoadLoRAAdapterReqInput,
    LoRAUpdateOutput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UnloadLoRAAdapterReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
)
from sglang.srt.managers.tokenizer_manager import Outcome, TokenizerManager
from sglang.srt.server_args import PortArgs, ServerArgs

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SchedulerInitResult(dict[str, Any]):
    """What the scheduler reports when it starts. Newer launchers read it as `scheduler_infos[0]`."""

    @property
    def scheduler_infos(self) -> list[dict[str, Any]]:
        return [self]


# Tokenizer manager, template manager, ports, the scheduler's report, and a watchdog: None, since Ebbtide's
# engine has its own.
Started = tuple[TokenizerManager, Any, PortArgs, SchedulerInitResult, None]


def _set_envs_and_config(server_args: ServerArgs) -> None:
    """Does nothing. Called before an engine starts; clients may replace it."""


def init_tokenizer_manager(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises. Clients pass this function on, but Ebbtide starts its processes itself."""
    raise NotImplementedError("init_tokenizer_manager: an engine is started by Engine._launch_subprocesses")


def run_scheduler_process(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises, as `init_tokenizer_manager`."""
    raise NotImplementedError("run_scheduler_process: an engine is started by Engine._launch_subprocesses")


def _launch_subprocesses(
    server_args: ServerArgs, port_args: PortArgs | None = None, **hooks: Any
) -> tuple[TokenizerManager, Any, dict[str, Any], PortArgs]:
    """Start an engine; returns its parts in an older order: scheduler's report before ports, no watchdog."""
    manager, templates, ports, sizes, _ = Engine._launch_subprocesses(server_args, port_args=port_args)
    return manager, templates, sizes, ports


class Engine(EngineBase):
    """An engine in this process.

    Updates, release and resume return `(success, message)`, see `TokenizerManager`. Methods block, and raise
    RuntimeError in an event loop: there, use the coroutines of `tokenizer_manager`.

    Args:
        **kwargs: `server_args`, or fields of `ServerArgs`.
    """

    def __init__(self, **kwargs: Any) -> None:
        given = kwargs.pop("server_args", None)
        if given is not None and kwargs:
            raise TypeError(f"server_args stands for all arguments, also for {', '.join(sorted(kwargs))}")
        self.server_args = ServerArgs(**{"log_level": "error", **kwargs}) if given is None else given
        started = self._launch_subprocesses(
            server_args=self.server_args,
            init_tokenizer_manager_func=init_tokenizer_manager,
            run_scheduler_process_func=run_scheduler_process,
            run_detokenizer_process_func=run_detokenizer_process,
        )
        self.tokenizer_manager, self.template_manager, self.port_args, self.scheduler_info, _ = started

    @classmethod
    def _launch_subprocesses(
        cls,
        server_args: ServerArgs,
        init_tokenizer_manager_func: Any = None,
        run_scheduler_process_func: Any = None,
        run_detokenizer_process_func: Any = None,
        port_args: PortArgs | None = None,
    ) -> Started:
        """Start an engine. The functions are ignored, since its processes are Ebbtide's own.

        A client's own scheduler would answer at `rpc_ipc_name`, so all calls there are refused.
        """
        _set_envs_and_config(server_args)
        core = EngineCore(server_args=server_args)
        ports = PortArgs.init_new(server_args) if port_args is None else port_args
        if run_scheduler_process_func not in (None, run_scheduler_process):
            reason = f"{run_scheduler_process_func.__name__} does not run: Ebbtide's scheduler is its own"
            logger.warning(reason)
            refuse_rpc(ports.rpc_ipc_name, reason)
        sizes = SchedulerInitResult(core.sizes())
        return TokenizerManager(core), SimpleNamespace(), ports, sizes, None

    # ------------------------------------------------------------------------------------------ generation

    def generate(self, *args: Any, **fields: Any) -> Any:
        """As `ebbtide.Engine.generate`."""
        return self._core.generate(*args, **fields)

    async def async_generate(self, *args: Any, **fields: Any) -> Any:
        """As `ebbtide.Engine.async_generate`."""
        return await self._core.async_generate(*args, **fields)

    def flush_cache(self) -> FlushCacheReqOutput:
        return self._run(self.tokenizer_manager.flush_cache())

    def pause_generation(self, mode: str = "abort") -> dict[str, Any]:
        return self._core.pause_generation(mode)

    def continue_generation(self) -> dict[str, Any]:
        return self._core.continue_generation()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.tokenizer_manager.abort_request(rid, abort_all)

    # --------------------------------------------------------------------------------- memory and weights

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> Outcome:
        obj = ReleaseMemoryOccupationReqInput(tags=tags)
        return self._run(self.tokenizer_manager.release_memory_occupation(obj))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> Outcome:
        obj = ResumeMemoryOccupationReqInput(tags=tags)
        return self._run(self.tokenizer_manager.resume_memory_occupation(obj))

    def update_weights_from_tensor(self, *args: Any, **fields: Any) -> Outcome:
        """As `ebbtide.Engine.update_weights_from_tensor`: of (name, tensor) pairs, or serialized entries."""
        update = partial(self._core.async_update_weights_from_tensor, *args, **fields)
        return self._run(self.tokenizer_manager.outcome_of("update_weights_from_tensor", update))

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, **fields: Any
    ) -> tuple[bool, str, int]:
        obj = UpdateWeightFromDiskReqInput(model_path=model_path, load_format=load_format, **fields)
        return self._run(self.tokenizer_manager.update_weights_from_disk(obj))

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Any],
        group_name: str = DEFAULT_GROUP,
        flush_cache: bool = True,
        **fields: Any,
    ) -> Outcome:
        if isinstance(names, str):  # Older senders broadcast one tensor per call: its name, dtype and shape.
            names, dtypes, shapes = [names], [dtypes], [shapes]
        obj = UpdateWeightsFromDistributedReqInput(
            names=list(names),
            dtypes=[str(dtype) for dtype in dtypes],
            shapes=[list(shape) for shape in shapes],
            group_name=group_name,
            flush_cache=flush_cache,
            **fields,
        )
        return self._run(self.tokenizer_manager.update_weights_from_distributed(obj))

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> LoRAUpdateOutput:
        obj = LoadLoRAAdapterReqInput(lora_name=lora_name, lora_path=lora_path, pinned=pinned)
        return self._run(self.tokenizer_manager.load_lora_adapter(obj))

    def unload_lora_adapter(self, lora_name: str) -> LoRAUpdateOutput:
        obj = UnloadLoRAAdapterReqInput(lora_name=lora_name)
        return self._run(self.tokenizer_manager.unload_lora_adapter(obj))

    def update_weights_from_ipc(self, zmq_handles: dict[str, str], flush_cache: bool = True) -> Outcome:
        obj = UpdateWeightsFromIPCReqInput(zmq_handles=zmq_handles, flush_cache=flush_cache)
        return self._run(self.tokenizer_manager.update_weights_from_ipc(obj))

    def begin_weight_update(self, **fields: Any) -> Outcome:
        return self._run(self.tokenizer_manager.begin_weight_update(BeginWeightUpdateReqInput(**fields)))

    def end_weight_update(self, **fields: Any) -> Outcome:
        return self._run(self.tokenizer_manager.end_weight_update(EndWeightUpdateReqInput(**fields)))

    def init_weights_update_group(self, *args: Any, **fields: Any) -> Outcome:
        obj = InitWeightsUpdateGroupReqInput(*args, **fields)
        return self._run(self.tokenizer_manager.init_weights_update_group(obj))

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> Outcome:
        obj = DestroyWeightsUpdateGroupReqInput(group_name=group_name)
        return self._run(self.tokenizer_manager.destroy_weights_update_group(obj))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        return self._core.get_weights_by_name(name, truncate_size)

    # ------------------------------------------------------------------------------------------------ others

    def get_server_info(self) -> dict[str, Any]:
        return self._core.server_info()

    def shutdown(self) -> None:
        """End the engine. Idempotent."""
        self._core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def _core(self) -> EngineCore:
        return self.tokenizer_manager.core

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        # The name is for the error message. Coroutines have `__name__`, though their type does not say so.
        return self._core.wait(work, f"tokenizer_manager.{getattr(work, '__name__', '')}")
