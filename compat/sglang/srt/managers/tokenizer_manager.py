"""SGLang's `TokenizerManager`, for frameworks that have the engine in their process.

Source: wire_api section 8.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ebbtide.srt.errors import RequestRejected
from sglang.srt.managers.io_struct import *  # noqa: F403 (clients import the requests from here)
from sglang.srt.managers.io_struct import FlushCacheReqOutput, LoRAUpdateOutput

if TYPE_CHECKING:
    from sglang._core import EngineCore

logger = logging.getLogger(__name__)

# Whether the request succeeded, and the message.
Outcome = tuple[bool, str]


class ServerStatus(enum.Enum):
    """Set by the code that starts the server. Ebbtide's own `/health` does not use it."""

    Up = "Up"
    Starting = "Starting"
    UnHealthy = "UnHealthy"


class TokenizerManager:
    """Sends requests to an engine in this process, from any event loop.

    Methods that return a tuple do not raise on a refusal: they return False and the reason, and log it, since
    some callers ignore the result. If the engine has failed, they raise `EngineError`.

    Attributes:
        rid_to_state: requests that `generate_request` is answering, by rid.
        server_status: set by the code that starts the server, for clients to read.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.server_args = core.server_args
        self.server_status = ServerStatus.Starting
        self.rid_to_state: dict[str, Any] = {}

    def auto_create_handle_loop(self) -> None:
        """Does nothing: the engine's messages are read from its start."""

    # ------------------------------------------------------------------------------------------ generation

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the chunks of a stream; without `stream`, yield the whole answer once.

        Raises:
            RequestRejected: a field is wrong, or asks for something that Ebbtide does not have.
        """
        fields = {name: value for name, value in vars(obj).items() if value is not None}
        prompt = fields.pop("text", None)
        with self._listed(obj, fields):
            answer = await self.core.async_generate(prompt, **fields)
            if fields.get("stream"):
                async for chunk in answer:
                    yield chunk
                return
        # Outside the `with` block: callers get this with `anext`, and never resume the generator.
        yield answer

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort one request, or all; they answer with the tokens so far. Does not wait for that."""
        self.core.start(self.core.async_abort_request(rid, abort_all))

    async def pause_generation(self, obj: Any, request: Any = None) -> dict[str, Any]:
        """Stop forward passes until `continue_generation`. Raises `RequestRejected`."""
        reply: dict[str, Any] = await self.core.ask("PauseGenerationReqInput", vars(obj))
        return reply

    async def continue_generation(self, obj: Any, request: Any = None) -> dict[str, Any]:
        """End a pause. Raises `RequestRejected`."""
        reply: dict[str, Any] = await self.core.ask("ContinueGenerationReqInput", vars(obj))
        return reply

    async def flush_cache(self) -> FlushCacheReqOutput:
        """Empty the prefix cache. `success` is false if running requests still use some of it."""
        reply = await self.core.async_flush_cache()
        return FlushCacheReqOutput(success=reply["fully_flushed"], message=reply["message"])

    async def get_internal_state(self) -> list[dict[str, Any]]:
        """The state of each replica, as in `/server_info`."""
        states: list[dict[str, Any]] = (await self.core.async_server_info())["internal_states"]
        return states

    # --------------------------------------------------------------------------------- memory and weights

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> Outcome:
        return await self._attempt("ReleaseMemoryOccupationReqInput", obj)

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> Outcome:
        return await self._attempt("ResumeMemoryOccupationReqInput", obj)

    async def update_weights_from_disk(self, obj: Any, request: Any = None) -> tuple[bool, str, int]:
        """As the other updates, but also returns the number of requests that were paused."""
        name = "UpdateWeightFromDiskReqInput"
        done, reply = await self._reply_to(name, self._asking(name, obj))
        return done, reply["message"], reply.get("num_paused_requests", 0)

    async def update_weights_from_tensor(self, obj: Any, request: Any = None) -> Outcome:
        return await self._attempt("UpdateWeightsFromTensorReqInput", obj)

    async def update_weights_from_distributed(self, obj: Any, request: Any = None) -> Outcome:
        return await self._attempt("UpdateWeightsFromDistributedReqInput", obj)

    async def update_weights_from_ipc(self, obj: Any, request: Any = None) -> Outcome:
        return await self._attempt("UpdateWeightsFromIPCReqInput", obj)

    async def begin_weight_update(self, obj: Any = None, request: Any = None) -> Outcome:
        return await self._attempt("BeginWeightUpdateReqInput", obj)

    async def end_weight_update(self, obj: Any = None, request: Any = None) -> Outcome:
        return await self._attempt("EndWeightUpdateReqInput", obj)

    async def init_weights_update_group(self, obj: Any, request: Any = None) -> Outcome:
        return await self._attempt("InitWeightsUpdateGroupReqInput", obj)

    async def destroy_weights_update_group(self, obj: Any = None, request: Any = None) -> Outcome:
        return await self._attempt("DestroyWeightsUpdateGroupReqInput", obj)

    # --------------------------------------------------------------------------------------------- adapters

    async def load_lora_adapter(self, obj: Any, request: Any = None) -> LoRAUpdateOutput:
        return await self._change_adapters("LoadLoRAAdapterReqInput", vars(obj))

    async def load_lora_adapter_from_tensors(self, obj: Any, request: Any = None) -> LoRAUpdateOutput:
        fields = dict(vars(obj))
        for_all = fields.pop("serialized_tensors")
        if for_all is not None and not fields["serialized_named_tensors"]:
            fields["serialized_named_tensors"] = [for_all] * self.core.server_args.tp_size
        return await self._change_adapters("LoadLoRAAdapterFromTensorsReqInput", fields)

    async def unload_lora_adapter(self, obj: Any, request: Any = None) -> LoRAUpdateOutput:
        return await self._change_adapters("UnloadLoRAAdapterReqInput", vars(obj))

    async def _change_adapters(self, name: str, fields: dict[str, Any]) -> LoRAUpdateOutput:
        done, reply = await self._reply_to(name, lambda: self.core.ask(name, fields))
        return LoRAUpdateOutput(
            success=done,
            error_message=None if done else reply["message"],
            loaded_adapters=reply.get("loaded_adapters"),
        )

    # -------------------------------------------------------------------------------------------- internals

    async def outcome_of(self, name: str, call: Callable[[], Awaitable[dict[str, Any]]]) -> Outcome:
        """Await a control request; returns its outcome as SGLang does."""
        done, reply = await self._reply_to(name, call)
        return done, reply["message"]

    async def _attempt(self, name: str, obj: Any) -> Outcome:
        return await self.outcome_of(name, self._asking(name, obj))

    def _asking(self, name: str, obj: Any) -> Callable[[], Awaitable[dict[str, Any]]]:
        return lambda: self.core.ask(name, {} if obj is None else vars(obj))

    async def _reply_to(
        self, name: str, call: Callable[[], Awaitable[dict[str, Any]]]
    ) -> tuple[bool, dict[str, Any]]:
        try:
            return True, await call()
        except RequestRejected as error:
            logger.error("%s was refused: %s", name, error.message)
            return False, error.body

    @contextmanager
    def _listed(self, obj: Any, fields: dict[str, Any]) -> Iterator[None]:
        """Keep a request in `rid_to_state` while it is answered. Gives it a rid if it has none."""
        posted = fields.setdefault("rid", uuid.uuid4().hex)
        rids = [posted] if isinstance(posted, str) else list(posted)
        self.rid_to_state.update(dict.fromkeys(rids, obj))
        try:
            yield
        finally:
            for rid in rids:
                self.rid_to_state.pop(rid, None)
