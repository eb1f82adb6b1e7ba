"""The control plane's view of adapters: where loads come from, and the slots that they are written to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ebbtide.formats.delta import as_hex, matrix_shape, state_sum
from ebbtide.formats.stored_tensor import whole
from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.adapter_config import AdapterConfig, adapter_config
from ebbtide.srt.device.base import Device
from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.managers.control.ports import CopyStream, Slices
from ebbtide.srt.managers.control.weights.commit_terms import describe_nonfinite
from ebbtide.srt.managers.io_struct import (
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    LoadRequest,
)
from ebbtide.srt.model_executor.adapters import AdapterSlots, SlotCopy
from ebbtide.srt.model_executor.loader import CheckpointFile
from ebbtide.srt.model_executor.weight_copies import NonFinite
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.tensor_source import PayloadReader

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
MAX_CONFIG_BYTES: Final = 1 << 20


class EngineAdapters:
    """Opens loads of adapters, and moves what slots hold.

    Args:
        refuses_nonfinite: loads that hold NaN or Inf are refused.
    """

    def __init__(
        self, slots: AdapterSlots, reader: PayloadReader, device: Device, *, refuses_nonfinite: bool
    ) -> None:
        self.num_slots = slots.num_slots
        self._slots = slots
        self._refuses_nonfinite = refuses_nonfinite
        self._reader = reader
        self._device = device

    @property
    def copies(self) -> CopyStream:
        return self._device

    def open(self, request: LoadRequest, *, with_digest: bool) -> Slices[AdapterPlan]:
        config, source = yield from self._source(request)
        try:
            looked_at = NonFinite() if self._refuses_nonfinite else None
            adapter = AdapterPlan(self._slots, adapter_config(config), source, self._device, looked_at)
            yield from source.open()
            if with_digest:
                adapter.digest = yield from _digest(config, source, self._device)
        except BaseException:
            source.close()
            raise
        return adapter

    def _source(self, request: LoadRequest) -> Slices[tuple[Mapping[str, Any], WeightSource]]:
        match request:
            case LoadLoRAAdapterReqInput():
                folder = Path(request.lora_path)
                config = _config_of(folder)
                return config, (yield from _open_folder(folder))
            case LoadLoRAAdapterFromTensorsReqInput():
                entries: list[bytes | str] = [*request.serialized_named_tensors]
                if request.serialized_tensors is not None and not entries:
                    entries.append(request.serialized_tensors)
                source = yield from self._reader.open(entries, request.load_format)
                return request.config_dict, source
            case _:
                raise RequestRejected(f"{type(request).__name__} is no load of an adapter")

    def save(self, slot: int) -> SlotCopy:
        try:
            return self._slots.save(slot)
        except RuntimeError as error:
            raise RequestRejected(f"no room in host memory for an adapter: {error}", 409) from error

    def restore(self, slot: int, copy: object) -> None:
        assert isinstance(copy, SlotCopy)
        self._slots.restore(slot, copy)


class AdapterPlan:
    """An adapter that fits the slots.

    Raises:
        RequestRejected: 400, it does not.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        config: AdapterConfig,
        source: WeightSource,
        device: Device,
        looked_at: NonFinite | None,
    ) -> None:
        slots.check(config, [(entry.name, entry.shape, entry.dtype) for entry in source.entries])
        self.digest = ""
        self.num_tensors, self.num_bytes = len(source.entries), source.num_bytes
        self._slots = slots
        self._config = config
        self._source = source
        self._device = device
        self._looked_at = looked_at
        self._is_read = False

    def write(self, slot: int) -> Slices[None]:
        self._is_read = True
        tensors = ((name, whole(tensor)) for name, tensor in self._source)
        self._slots.write(slot, self._config, tensors, self._looked_at)
        yield self.num_bytes
        if self._looked_at is not None:
            while not self._device.copies_done():
                yield 0
            if names := sorted(set(self._looked_at.names())):
                raise RequestRejected(f"refuse_nonfinite: nothing was loaded. {describe_nonfinite(names)}")

    def detach(self) -> Slices[None]:
        self._is_read = False
        return self._source.detach()

    def close(self) -> None:
        # After an early end, copies from the sender's memory may still be under way.
        if self._is_read and not self._device.copies_done():
            self._device.synchronize()
        self._source.close()


def _digest(config: Mapping[str, Any], source: WeightSource, device: Device) -> Slices[str]:
    """Of the fields that are there, and the bytes of each tensor, wherever it lies."""
    sums: dict[str, torch.Tensor] = {}
    for name, given in source:
        tensor = whole(given)
        with device.copying(beside=True):
            sums[name] = state_sum(tensor.reshape(matrix_shape(tuple(tensor.shape))))
        yield tensor.nbytes
    while not device.copies_done():
        yield 0
    headers = {header.name: f"{header.name} {header.dtype} {header.shape}" for header in source.entries}
    lines = [json.dumps(config, sort_keys=True, default=str)]
    lines += [f"{headers[name]} {as_hex(int(sums[name]))}" for name in sorted(sums)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _config_of(folder: Path) -> Mapping[str, Any]:
    """What PEFT has written to a folder. Raises RequestRejected: 400."""
    file = folder / CONFIG_FILE
    try:
        # Opening a pipe would wait for somebody to write to it.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1) or b""  # None: a pipe that nobody has written to
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise RequestRejected(f"{file} cannot be read: {error}. Expected a PEFT folder"[:1000]) from error
    if not isinstance(config, dict) or len(text) > MAX_CONFIG_BYTES:
        raise RequestRejected(f"{file}: expected a JSON object of at most {MAX_CONFIG_BYTES} bytes")
    return config


def _open_folder(folder: Path) -> Slices[WeightSource]:
    """The tensors of a PEFT folder. Raises RequestRejected: 400."""
    path = next((folder / name for name in TENSORS_FILES if (folder / name).is_file()), None)
    if path is None:
        raise RequestRejected(f"{folder} has none of {', '.join(TENSORS_FILES)}: expected a PEFT folder")
    try:
        file = CheckpointFile(path)
    except ConfigurationError as error:
        raise RequestRejected(str(error)) from error
    tensors: dict[str, torch.Tensor] = {}
    with file.open():
        for name, stored in file.tensors.items():
            tensors[name] = stored.read()
            yield tensors[name].nbytes
    headers = [TensorHeader(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    return WeightSource(headers, tensors.items)
