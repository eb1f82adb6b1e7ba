"""Implements the control plane's interfaces to adapters: opens loads, and copies them to and from slots."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ebbtide.formats.delta import as_hex, matrix_shape, mixed, state_sum
from ebbtide.formats.stored_tensor import whole
from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.device import Device
from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.hf_folder import AdapterConfig, adapter_config
from ebbtide.srt.managers.control import CopyStream
from ebbtide.srt.managers.control.weights.commit_terms import describe_nonfinite
from ebbtide.srt.managers.io_struct import (
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    LoadRequest,
)
from ebbtide.srt.model_executor.adapters import AdapterFit, AdapterSlots, SlotCopy
from ebbtide.srt.model_executor.loader import CheckpointFile
from ebbtide.srt.model_executor.weight_copies import NonFinite, WeightCopies
from ebbtide.srt.slices import Slices
from ebbtide.srt.weight_sync.source import MAX_FIT_BYTES, TENSOR_BYTES, Recent, TableSource, WeightSource
from ebbtide.srt.weight_sync.tensor_source import PayloadReader

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
MAX_CONFIG_BYTES: Final = 1 << 20


@dataclass(eq=False)
class EngineAdapters:
    """Opens loads of adapters, and saves and restores slots.

    Args:
        refuses_nonfinite: whether loads with NaN or Inf are refused.
    """

    _slots: AdapterSlots
    _reader: PayloadReader
    _device: Device
    _: KW_ONLY
    refuses_nonfinite: bool

    def __post_init__(self) -> None:
        self.num_slots = self._slots.num_slots
        self.copies: CopyStream = self._device
        # A trainer sends adapters with the same names and shapes again and again.
        self._fits: Recent[tuple[Hashable, AdapterConfig], AdapterFit] = Recent(MAX_FIT_BYTES)

    def open(self, request: LoadRequest, *, with_digest: bool) -> Slices[AdapterPlan]:
        config, source = yield from self._source(request)
        try:
            fit = self._fit(adapter_config(config), source)
            adapter = AdapterPlan(self._slots, fit, source, self._device, self.refuses_nonfinite)
            yield from source.open()
            if (
                isinstance(request, LoadLoRAAdapterFromTensorsReqInput)
                and request.expected_checksums is not None
            ):
                yield from _compare(request.expected_checksums, source, self._device)
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

    def _fit(self, config: AdapterConfig, source: WeightSource) -> AdapterFit:
        """Check an adapter against the slots. Raises RequestRejected (400): it does not fit."""
        fit = None if source.digest is None else self._fits.get((source.digest, config))
        if fit is None:
            fit = self._slots.fit(config, [(one.name, one.shape, one.dtype) for one in source.entries])
            if source.digest is not None:
                self._fits.put((source.digest, config), fit, TENSOR_BYTES * len(source.entries))
        return fit

    def is_read(self, slot: int) -> bool:
        return self._slots.is_read(slot)

    def save(self, slot: int) -> SlotCopy:
        try:
            return self._slots.save(slot)
        except RuntimeError as error:
            raise RequestRejected(f"no room in host memory for an adapter: {error}", 409) from error

    def restore(self, slot: int, copy: object) -> None:
        assert isinstance(copy, SlotCopy)
        self._slots.restore(slot, copy)


@dataclass(eq=False)
class AdapterPlan:
    """An adapter that fits the slots.

    Args:
        refuses_nonfinite: whether `write` refuses NaN or Inf.
    """

    _slots: AdapterSlots
    _fit: AdapterFit
    _source: WeightSource
    _device: Device
    _refuses_nonfinite: bool
    digest: str = ""
    _is_read: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.num_tensors, self.num_bytes = len(self._source.entries), self._source.num_bytes

    def write(self, slot: int) -> Slices[None]:
        self._is_read = True
        copies, tensors = self._planned(slot)
        looked_at = NonFinite() if self._refuses_nonfinite else None
        self._slots.write(slot, self._fit, tensors, copies, looked_at)
        yield self.num_bytes
        if looked_at is not None:
            while not self._device.copies_done():
                yield 0
            found = looked_at.names() + ([] if copies is None else copies.nonfinite())
            if names := sorted(set(found)):
                raise RequestRejected(f"refuse_nonfinite: nothing was loaded. {describe_nonfinite(names)}")

    def _planned(self, slot: int) -> tuple[WeightCopies | None, Iterator[tuple[str, Tensor]]]:
        """Copies by one kernel, of tensors that are on the device as the slot needs them; and the others."""
        source, runs, device = self._source, self._fit.runs, torch.device(self._device.name)
        is_table = isinstance(source, TableSource) and source.table.form.is_contiguous_T.all()
        if runs is None or source.near_bytes is None or not is_table:
            return None, ((name, whole(tensor)) for name, tensor in source)
        assert isinstance(source, TableSource)
        copies, names, address = WeightCopies(device), source.table.form.names, self._slots.address(slot)
        # The current stream waits for the sender's events, so it must be the stream of the copies.
        with self._device.copying(beside=True):
            left = copies.plan_table(names, source.address_T, runs, address)
            copies.prepare(address)
        return copies, ((names[index], whole(source.tensor(index))) for index in left)

    def detach(self) -> Slices[None]:
        self._is_read = False
        return self._source.detach()

    def close(self) -> None:
        # If the load ended early, copies from the sender's memory may still run.
        if self._is_read and not self._device.copies_done():
            self._device.synchronize()
        self._source.close()


def _look(source: WeightSource, device: Device, at: Callable[[str, Tensor], object]) -> Slices[None]:
    """Have `at` look at each tensor."""
    tensors = iter(source)
    while True:
        # The sender's events are awaited by the current stream, which must be the one of what `at` does.
        with device.copying(beside=True):
            if (named := next(tensors, None)) is None:
                return
            tensor = whole(named[1])
            at(named[0], tensor)
        yield tensor.nbytes


def _compare(expected: Mapping[str, str], source: WeightSource, device: Device) -> Slices[None]:
    """Raises RequestRejected: 400, these are not the tensors whose SHA-256 was sent."""
    sums: dict[str, str] = {}

    def add(name: str, tensor: Tensor) -> None:
        sums[name] = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data).hexdigest()

    yield from _look(source, device, add)
    names = sorted(name[:200] for name in {*expected, *sums} if expected.get(name) != sums.get(name))
    if names:
        raise RequestRejected(f"expected_checksums: {len(names)} tensors differ: {', '.join(names[:5])}")


def _digest(config: Mapping[str, Any], source: WeightSource, device: Device) -> Slices[str]:
    """A checksum of the config's fields and of the bytes of each tensor, on whatever device it is."""
    sums: dict[str, Tensor] = {}
    mix = cache(mixed)  # Hundreds of tensors have a few shapes.

    def add(name: str, tensor: Tensor) -> None:
        sums[name] = state_sum(tensor.reshape(matrix_shape(tuple(tensor.shape))), mix=mix)

    yield from _look(source, device, add)
    while not device.copies_done():
        yield 0
    headers = {header.name: f"{header.name} {header.dtype} {header.shape}" for header in source.entries}
    lines = [json.dumps(config, sort_keys=True, default=str)]
    if sums:
        # Wait for the device once, not for each tensor.
        totals = torch.stack([one.to(device.name) for one in sums.values()]).tolist()
        lines += sorted(f"{headers[name]} {as_hex(total)}" for name, total in zip(sums, totals, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _config_of(folder: Path) -> Mapping[str, Any]:
    """Read a folder's PEFT config. Raises RequestRejected: 400, it is malformed; 404, there is none."""
    file = folder / CONFIG_FILE
    try:
        # Non-blocking: opening a pipe would wait until somebody writes to it.
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1) or b""  # None: a pipe that nobody has written to
        config = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        # 404 can be retried: on a shared file system, the file may appear a moment later.
        status = 404 if isinstance(error, FileNotFoundError) else 400
        message = f"{file} cannot be read: {error}. Expected a PEFT folder"
        raise RequestRejected(message[:1000], status) from error
    if not isinstance(config, dict):
        raise RequestRejected(f"{file}: expected a JSON object of at most {MAX_CONFIG_BYTES} bytes")
    return config


def _open_folder(folder: Path) -> Slices[WeightSource]:
    """Read a folder's PEFT tensors. Raises RequestRejected: 400, they are damaged; 404, there are none."""
    path = next((folder / name for name in TENSORS_FILES if (folder / name).is_file()), None)
    if path is None:
        raise RequestRejected(f"{folder} has none of {', '.join(TENSORS_FILES)}: expected a PEFT folder", 404)
    try:
        file = CheckpointFile(path)
    except ConfigurationError as error:
        raise RequestRejected(str(error)) from error
    tensors: dict[str, Tensor] = {}
    with file.open():
        for name, stored in file.tensors.items():
            tensors[name] = stored.read()
            yield tensors[name].nbytes
    headers = [TensorHeader(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    return WeightSource(headers, tensors.items)
