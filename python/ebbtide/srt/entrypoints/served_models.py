"""Finds what the `model` of a request means: the base model, or an adapter, which is loaded if needed."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from ebbtide.srt.config import ANY_NAME, EngineConfig
from ebbtide.srt.errors import ConfigurationError, RequestRejected, first_few
from ebbtide.srt.managers.io_struct import LoadLoRAAdapterReqInput, StateReport
from ebbtide.srt.memory_saver import MemoryTag

# The version of adapters from `lora_folder`. Loading other contents under the same name is refused.
FOLDER_VERSION: Final = "1"


class Engine(Protocol):
    """What `ServedModels` needs of the engine: its last reported state, and control requests."""

    @property
    def state(self) -> StateReport: ...

    async def next_report(self) -> None: ...

    async def control(self, kind: type[Any], fields: Mapping[str, Any]) -> Any: ...


class ServedModels:
    """The names that requests may give as their model."""

    def __init__(self, config: EngineConfig, engine: Engine) -> None:
        self._model = config.model
        self._args = config.server_args
        self._engine = engine
        # Adapter's name → the load that requests wait for.
        self._loads: dict[str, asyncio.Task[Any]] = {}
        # Loaded adapters of the folder, the least recently requested first.
        self._asked: dict[str, None] = {}
        # With a limit, adapters are loaded one at a time; each may replace one, the leaving adapter.
        self._turn = asyncio.Lock()
        self._leaving: str | None = None
        # Adapter's name → number of requests for it that have not reached the engine yet.
        self._on_way: Counter[str] = Counter()
        self._has_arrived = asyncio.Event()

    async def load_given(self) -> None:
        """Load the adapters of `lora_paths`. Raises ConfigurationError: one cannot be loaded."""
        for given in self._args.lora_paths or ():
            name, equals, path = given.partition("=")
            try:
                fields = {"lora_name": name, "lora_path": path if equals else name}
                if given.startswith("{"):
                    fields = msgspec.json.decode(given, type=dict[str, Any])
                await self._engine.control(LoadLoRAAdapterReqInput, fields)
            except (RequestRejected, msgspec.MsgspecError) as error:
                raise ConfigurationError(f"lora_paths: {given[:200]}: {error}") from error

    def has_adapter(self, asked: str) -> bool:
        """Whether an adapter is loaded. `asked`: its name, or name@version."""
        name, at, version = asked.partition("@")
        adapters = self._engine.state.adapters
        return any(one.name == name and (not at or one.version == version) for one in adapters)

    def require(self, name: object) -> str | None:
        """Find the adapter that a request names as its model; None: it means the base model.

        The base model has names and a path. An adapter is `adapter` or `adapter@version`, which may follow
        `base:`.

        Raises RequestRejected: 404; there is no such model.
        """
        if name is None:
            return None
        given, known = str(name), self._base_names()
        if given.rstrip("/") in known:
            return None
        for asked in (given, *(given.removeprefix(f"{base}:") for base in known)):
            if self.has_adapter(asked):
                return asked
        if ANY_NAME in known:
            return None
        adapters = [f"{one.name}@{one.version}" for one in self._engine.state.adapters]
        also = f", with the adapters {first_few(adapters)}" if adapters else ""
        if self._model.adapters is None:
            also = ", without adapters (LoRA is not enabled: --enable-lora)"
        raise RequestRejected(
            f"model: there is no {given[:200]!r} here: {self._model.served_model_name!r} is served{also} "
            "(with --served-model-name '*' any name means it)",
            404,
            param="body.model",
        )

    @asynccontextmanager
    async def held(self, name: object) -> AsyncIterator[str | None]:
        """Like `require`, but load the adapter from `lora_folder` first if needed.

        Within the block no other adapter of the folder replaces it, so that the request can reach the engine.

        Raises RequestRejected: the adapter cannot be loaded, or as `require`.
        """
        plain = str(name).partition("@")[0]
        for base in self._base_names():
            plain = plain.removeprefix(f"{base}:")
        while self._leaving == plain:
            await asyncio.wait(self._loads.values(), return_when=asyncio.FIRST_COMPLETED)
        self._on_way[plain] += 1
        try:
            if self._args.lora_folder is not None and isinstance(name, str):
                await self._fetch(Path(self._args.lora_folder), plain)
            yield self.require(name)
        finally:
            self._on_way[plain] -= 1
            if not self._on_way[plain]:
                del self._on_way[plain]
                self._has_arrived.set()

    async def _fetch(self, folder: Path, name: str) -> None:
        is_beside = "/" in name or name in ("", ".", "..")
        if is_beside or self.has_adapter(name) or name in self._base_names():
            if name in self._asked:
                self._note_asked(name)
            return
        # Unlike Path.is_file, this raises for no name.
        is_there = await asyncio.to_thread(os.path.isfile, folder / name / "adapter_config.json")
        if not is_there or self.has_adapter(name):
            return
        if name not in self._loads:
            self._loads[name] = asyncio.ensure_future(self._load(folder, name))
            # Retrieve the error even if all waiting clients have gone, else asyncio logs it.
            self._loads[name].add_done_callback(lambda load: load.cancelled() or load.exception())
        # A client that disconnects must not cancel the load for others.
        await asyncio.shield(self._loads[name])

    async def _load(self, folder: Path, name: str) -> None:
        fields: dict[str, Any] = {"lora_name": name, "lora_path": str(folder / name)}
        fields |= {"lora_version": FOLDER_VERSION, "may_leave": True}
        limit = self._args.max_loaded_loras
        try:
            async with self._turn if limit is not None else nullcontext():
                if limit is not None:
                    fields["instead_of"] = await self._left_by(limit)
                await self._load_awake(fields)
            self._note_asked(name)
        finally:
            self._leaving = None
            del self._loads[name]

    async def _load_awake(self, fields: Mapping[str, Any]) -> None:
        """Load the adapter. If the weights are released, and the adapters' slots with them, wait for them."""
        while True:
            while self._are_weights_released():
                await self._engine.next_report()
            try:
                await self._engine.control(LoadLoRAAdapterReqInput, fields)
                return
            except RequestRejected:
                if not self._are_weights_released():
                    raise

    def _are_weights_released(self) -> bool:
        return any(rank.tags[MemoryTag.WEIGHTS].state == "released" for rank in self._engine.state.ranks)

    async def _left_by(self, limit: int) -> str | None:
        """Choose the adapter to replace, and wait until no request for it is on its way; None: none is."""
        loaded = {one.name for one in self._engine.state.adapters}
        self._asked = {name: None for name in self._asked if name in loaded}
        if len(loaded) >= limit:
            # Not one that is being loaded, since requests wait for it.
            self._leaving = next((one for one in self._asked if one not in self._loads), None)
        while self._leaving is not None and self._on_way[self._leaving]:
            self._has_arrived.clear()
            await self._has_arrived.wait()
        return self._leaving

    def _note_asked(self, name: str) -> None:
        self._asked.pop(name, None)
        self._asked[name] = None

    def _base_names(self) -> set[str]:
        names = (*self._model.names_answered, self._engine.state.model_path)
        return {one.rstrip("/") for one in names}
