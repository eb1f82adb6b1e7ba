"""SGLang's `TokenizerManager` as frameworks use it in their own process. Source: wire_api section 8."""

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

# Whether it was done, and the message.
Outcome = tuple[bool, str]


class ServerStatus(enum.Enum):
    """Set by whoever starts the server; Ebbtide's own answer is `/health`."""

    Up = "Up"
    Starting = "Starting"
    UnHealthy = "UnHealthy"


class TokenizerManager:
    """Requests to an engine of this process, from any event loop.

    What SGLang answers with a tuple does not raise when it is refused: it returns False and the reason, and
    logs it, since some callers do not look. An engine that failed raises `EngineError`.

    Attributes:
        rid_to_state: the requests that `generate_request` is answering, by their rids.
        server_status: as set.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.server_args = core.server_args
        self.server_status = ServerStatus.Starting
        self.rid_to_state: dict[str, Any] = {}

    def auto_create_handle_loop(self) -> None:
        """Nothing to do: the engine's messages are read from its start."""

    # ------------------------------------------------------------------------------------------ generation

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the chunks of a stream, or once the whole answer.

        Raises:
            RequestRejected: a field that is wrong, or that asks for what Ebbtide does not have.
        """
        fields = {name: value for name, value in vars(obj).items() if value is not None}
        prompt = fields.pop("text", None)
        with self._listed(obj, fields):
            answer = await self.core.async_generate(prompt, **fields)
            if fields.get("stream"):
                async for chunk in answer:
                    yield chunk
                return
        # Out of the scope: callers take this one with `anext`, and never come back for the end.
        yield answer

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End one request, or all; they answer with the tokens they have. Does not wait for that."""
        self.core.start(self.core.async_abort_request(rid, abort_all))

    async def pause_generation(self, obj: Any, request: Any = None) -> dict[str, Any]:
        """Run no forward pass until `continue_generation`. Raises `RequestRejected` where that is refused."""
        reply: dict[str, Any] = await self.core.ask("PauseGenerationReqInput", vars(obj))
        return reply

    async def continue_generation(self, obj: Any, request: Any = None) -> dict[str, Any]:
        """End a pause."""
        reply: dict[str, Any] = await self.core.ask("ContinueGenerationReqInput", vars(obj))
        return reply

    async def flush_cache(self) -> FlushCacheReqOutput:
        """Empty the prefix cache; `success` is false where running requests hold on to some of it."""
        reply = await self.core.async_flush_cache()
        return FlushCacheReqOutput(success=reply["fully_flushed"], message=reply["message"])

    async def get_internal_state(self) -> list[dict[str, Any]]:
        """What `/server_info` says of each replica."""
        states: list[dict[str, Any]] = (await self.core.async_server_info())["internal_states"]
        return states

    # --------------------------------------------------------------------------------- memory and weights

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> Outcome:
        return await self._attempt("ReleaseMemoryOccupationReqInput", obj)

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> Outcome:
        return await self._attempt("ResumeMemoryOccupationReqInput", obj)

    async def update_weights_from_disk(self, obj: Any, request: Any = None) -> tuple[bool, str, int]:
        """As the others; the third is how many requests were held up."""
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
        """What has become of a control request, told SGLang's way."""
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
        """Have a request in `rid_to_state` while it is answered, under an id made here if it brings none."""
        posted = fields.setdefault("rid", uuid.uuid4().hex)
        rids = [posted] if isinstance(posted, str) else list(posted)
        self.rid_to_state.update(dict.fromkeys(rids, obj))
        try:
            yield
        finally:
            for rid in rids:
                self.rid_to_state.pop(rid, None)
