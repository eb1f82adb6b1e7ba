"""`/collective_rpc`: a closed list of methods, matched as text. Source: wire_vllm section 4.3.

vLLM runs the method of that name in its workers. Here nothing is looked up or imported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ebbtide.srt.entrypoints.vllm.occupation import SLEEPING_TAGS, Body, Control
from ebbtide.srt.entrypoints.vllm.parameters import (
    FinishParameters,
    RpcParameters,
    StartParameters,
    UpdateParameters,
    checked,
)
from ebbtide.srt.entrypoints.vllm.published import FetchParameters
from ebbtide.srt.entrypoints.vllm.weight_transfer import VllmWeightTransfer
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import (
    Preserve,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)

# A method's keyword arguments → what every rank answers.
Method = Callable[[Mapping[str, Any]], Awaitable[Any]]


class RemoteCalls:
    """The methods that SkyRL and vLLM's own tests call.

    Args:
        model_path: the folder that the engine was started with.
        num_ranks: of all replicas; so many answers there are.
    """

    def __init__(
        self,
        control: Control,
        weights: VllmWeightTransfer,
        model_path: Callable[[], str],
        num_ranks: Callable[[], int],
    ) -> None:
        self._control = control
        self._weights = weights
        self._model_path = model_path
        self._num_ranks = num_ranks
        # Each with the keyword arguments that it takes.
        self._methods: dict[str, tuple[Method, tuple[str, ...]]] = {
            "skyrl_start_weight_update": (self._start, ("is_checkpoint_format",)),
            "skyrl_finish_weight_update": (self._finish, ()),
            "update_weights_nccl": (self._update, ("update_info",)),
            "update_weights_ipc": (self._update, ("update_info",)),
            "skyrl_sleep_for_weight_sync": (self._sleep, ("offload_kv",)),
            "skyrl_wake_for_weight_sync": (self._wake, ("tags",)),
            "fetch_weights": (self._fetch, ("target_version", "sync_dir", "uri")),
            "reload_weights": (self._reload, ()),
            "liveness_probe": (self._probe, ()),
        }

    async def call(self, asked: RpcParameters) -> Body:
        """Carry a method out; `results` has what each rank answers.

        Raises:
            RequestRejected: 501, there is no such method; 400, it takes no such argument.
        """
        if asked.method not in self._methods:
            raise RequestRejected(
                "collective_rpc runs arbitrary code in the worker and is not offered; known methods: "
                f"{', '.join(self._methods)}",
                501,
                param="body.method",
            )
        method, names = self._methods[asked.method]
        unknown = sorted(asked.kwargs.keys() - set(names))
        if asked.args or unknown:
            given = ", ".join(unknown) if unknown else "positional arguments"
            raise RequestRejected(
                f"{asked.method}: expected the keyword arguments ({', '.join(names)}), got {given}",
                param="body.kwargs",
            )
        result = await method(asked.kwargs)
        return {"success": True, "message": f"{asked.method} done.", "results": [result] * self._num_ranks()}

    async def _start(self, kwargs: Mapping[str, Any]) -> None:
        await self._weights.start(
            StartParameters(is_checkpoint_format=_flag(kwargs, "is_checkpoint_format", True))
        )

    async def _finish(self, kwargs: Mapping[str, Any]) -> None:
        await self._weights.finish(FinishParameters())

    async def _update(self, kwargs: Mapping[str, Any]) -> None:
        info = kwargs.get("update_info")
        if not isinstance(info, dict):
            raise RequestRejected(f"update_info: expected an object, got {info!r}", param="body.kwargs")
        await self._weights.update(UpdateParameters(update_info=info))

    async def _sleep(self, kwargs: Mapping[str, Any]) -> Body:
        keeps_kv = _flag(kwargs, "offload_kv", False)
        preserve = Preserve.LIVE if keeps_kv else Preserve.NONE
        release = {"tags": list(SLEEPING_TAGS), "backup": False, "preserve": preserve}
        reply = await self._control(ReleaseMemoryOccupationReqInput, release)
        # What the host has no room for is computed again.
        return {"kv_offloaded": keeps_kv and reply["num_retracted"] == 0}

    async def _wake(self, kwargs: Mapping[str, Any]) -> None:
        await self._control(ResumeMemoryOccupationReqInput, {"tags": kwargs.get("tags")})

    async def _fetch(self, kwargs: Mapping[str, Any]) -> Body:
        fetched = await self._weights.fetch(checked(kwargs, FetchParameters, "body.kwargs"))
        result: Body = fetched["result"][0]
        return result

    async def _reload(self, kwargs: Mapping[str, Any]) -> None:
        await self._control(UpdateWeightFromDiskReqInput, {"model_path": self._model_path()})

    async def _probe(self, kwargs: Mapping[str, Any]) -> None:
        """Whoever answers is alive."""


def _flag(kwargs: Mapping[str, Any], name: str, default: bool) -> bool:
    value = kwargs.get(name, default)
    # Some clients send the text of a Python value.
    known = {"True": True, "true": True, "False": False, "false": False}
    value = known.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise RequestRejected(f"{name}: expected true or false, got {value!r}", param="body.kwargs")
    return value
