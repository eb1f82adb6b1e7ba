"""Adapters in vLLM's words: one of a name, replaced only where the client says so. wire_vllm section 1.4."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput


class LoadAdapterParameters(Struct, kw_only=True):
    """`load_inplace`: one of this name may be there; requests that run on it go on with the new one.

    The last two have no meaning here.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: Any = None
    lora_int_id: Any = None


class UnloadAdapterParameters(Struct, kw_only=True):
    lora_name: str
    lora_int_id: Any = None


class VllmAdapters:
    """What is behind `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`. Answers are texts."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def load(self, asked: LoadAdapterParameters) -> str:
        name = asked.lora_name
        if not asked.load_inplace and self._service.has_adapter(name):
            raise RequestRejected(
                f"the adapter {name[:200]!r} is loaded already: load_inplace=true replaces it",
                param="body.lora_name",
            )
        fields = {"lora_name": name, "lora_path": asked.lora_path, "in_flight": "continue"}
        await self._service.control(LoadLoRAAdapterReqInput, fields)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, asked: UnloadAdapterParameters) -> str:
        fields = {"lora_name": asked.lora_name, "timeout_s": 0.0}
        await self._service.control(UnloadLoRAAdapterReqInput, fields)
        return f"Success: LoRA adapter '{asked.lora_name}' removed successfully."
