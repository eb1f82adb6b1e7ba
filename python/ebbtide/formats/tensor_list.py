"""The engine's own payload: tensors in shared memory, as tables in MessagePack.

It contains the same as torch's pickles of shared tensors, and is read a thousand times faster. Names and
shapes are a separate part, mostly the same in each update, so that its decoded form can be cached.

Shapes: T tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Self, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from numpy.typing import NDArray

from ebbtide.formats.tensor_refs import (
    AnyStorageRef,
    StorageRef,
    TensorForm,
    TensorLayout,
    TensorTable,
    checked_layout,
    device_storage,
    host_storage,
)
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import Slices

# No pickle, no base64 text, and no safetensors data of less than a petabyte begins with this.
MAGIC: Final = b"\xebEBT\x02\0\0\0"
# The same, for memory that may stay mapped until the sender unlocks its file of counts.
MAGIC_STAYS: Final = b"\xebEBT\x02\x01\0\0"
MAGICS: Final = (MAGIC, MAGIC_STAYS)

# Names that are read in a slice.
NAMES_AT_ONCE: Final = 64

_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class DeviceStorage(Struct, frozen=True, array_like=True, tag="device", forbid_unknown_fields=True):
    """Device memory by torch's IPC handle, and one reference that the sender counts. Its contents are ready.

    The fields are those of `CudaStorageRef`.
    """

    device: str
    handle: bytes
    num_bytes: _Count
    offset_bytes: _Count
    counter_file: bytes
    counter_index: _Count


class _Layout(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Count, ...]
    stride: tuple[_Count, ...]


class _Form(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names and shapes. `layout_T`: index of each tensor's layout, int32."""

    names: list[str]
    layouts: list[_Layout]
    layout_T: bytes


class _TensorList(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A payload, after the magic bytes.

    Attributes:
        form: an encoded `_Form`.
        storage_T, offset_T: index of each tensor's storage, and its offset there in elements, int64.
    """

    storages: list[StorageRef | DeviceStorage]
    form: bytes
    storage_T: bytes
    offset_T: bytes


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_TensorList)
_FORM_DECODER: Final = msgspec.msgpack.Decoder(_Form)


class Payload:
    """Entries of a request, and the memory that they refer to. Keep it open until the request is answered.

    Args:
        entries: for `serialized_named_tensors`.
        load_format: of the request; None: the default.
        memory: kept alive until the payload is closed.
        release: called once, when the payload is closed or garbage-collected. Must not refer to the payload.
        abandon: called instead of `close` if the context is left by an exception other than
            `RequestRejected`: then the engine may still be reading.
    """

    def __init__(
        self,
        entries: Sequence[bytes],
        load_format: str | None = None,
        *,
        memory: object = None,
        release: Callable[[], object] | None = None,
        abandon: Callable[[Payload], None] | None = None,
    ) -> None:
        self.entries = list(entries)
        self.load_format = load_format
        # Runs even if nobody calls `close`: a caller that is interrupted may never get the payload.
        self._give_back = weakref.finalize(self, _give_back, [memory], release)
        self._abandon = abandon

    @property
    def payload(self) -> bytes:
        """The only entry, for an engine of one rank."""
        [entry] = self.entries
        return entry

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._abandon is None or kind is None or issubclass(kind, RequestRejected):
            self.close()
        else:
            self._abandon(self)


def _give_back(memory: list[object], release: Callable[[], object] | None) -> None:
    # Before `release`: torch kills the process if it frees shared memory whose file is removed already.
    memory.clear()
    if release is not None:
        release()


class Listing:
    """Names and layouts of tensors, independent of their addresses.

    Attributes:
        itemsize_T, num_bytes_T: bytes of an element, and of all elements, of each tensor.
        form: names and layouts, encoded.
    """

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        numbers: dict[_LayoutKey, int] = {}
        layout_T = np.array(
            [numbers.setdefault(_layout_key(tensor), len(numbers)) for _, tensor in tensors], dtype=np.int64
        )
        layouts = [_layout(*key) for key in numbers]
        itemsize_L = np.array([dtype.itemsize for dtype, _, _ in numbers], dtype=np.int64)
        num_elements_L = np.array([shape.numel() for _, shape, _ in numbers], dtype=np.int64)
        self.itemsize_T = itemsize_L[layout_T]
        self.num_bytes_T = (itemsize_L * num_elements_L)[layout_T]
        names = [name for name, _ in tensors]
        self.form = _ENCODER.encode(_Form(names, layouts, layout_T.astype("<i4").tobytes()))

    def encode(
        self,
        entries: Sequence[Sequence[StorageRef | DeviceStorage]],
        storage_T: NDArray[np.int64],
        offset_T: NDArray[np.int64],
        *,
        stays: bool = False,
    ) -> list[bytes]:
        """Encode a payload of these tensors for each of several readers.

        Args:
            entries: for each reader, its references to the storages.
            storage_T, offset_T: see `TensorTable`.
            stays: whether the memory may stay mapped, see `borrowed_memory`.
        """
        columns = [column.astype("<i8").tobytes() for column in (storage_T, offset_T)]
        begin = MAGIC_STAYS if stays else MAGIC
        lists = (_TensorList(list(storages), self.form, *columns) for storages in entries)
        return [begin + _ENCODER.encode(listed) for listed in lists]


# Dtype, shape and stride. The stride is None for a contiguous tensor: it follows from the shape, and getting
# it costs time.
_LayoutKey: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...] | None]


def _layout_key(tensor: torch.Tensor) -> _LayoutKey:
    return tensor.dtype, tensor.shape, None if tensor.is_contiguous() else tensor.stride()


def _layout(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...] | None) -> _Layout:
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    return _Layout(str(dtype).removeprefix("torch."), tuple(shape), stride)


def decode_tensors(
    data: bytes,
    record: Callable[[AnyStorageRef], None],
    form_of: Callable[[bytes], Slices[TensorForm]] | None = None,
) -> Slices[TensorTable]:
    """Decode and check a payload that begins with one of `MAGICS`, in slices. No memory is opened.

    Args:
        record: called with all references before the first slice ends, so that they can be given back.
        form_of: decodes names and shapes, for example with a cache; None: `decode_form`.

    Raises:
        RequestRejected: the payload is broken, or a tensor does not lie within its storage.
    """
    try:
        listed = _DECODER.decode(memoryview(data)[len(MAGIC) :])
    except msgspec.DecodeError as error:
        raise RequestRejected(f"the payload: {error}"[:500]) from error
    storages: list[AnyStorageRef | None] = []
    problems: list[RequestRejected] = []
    for number, storage in enumerate(listed.storages):
        try:
            storages.append(_reference(storage, number))
        except RequestRejected as problem:
            problems.append(problem)
            continue
        if (reference := storages[-1]) is not None:
            record(reference)
    if problems:
        raise problems[0]
    yield len(data)
    form = yield from (form_of or decode_form)(listed.form)
    num_tensors = len(form.names)
    columns = (_column(data, "<i8", num_tensors) for data in (listed.storage_T, listed.offset_T))
    return TensorTable.checked(form, storages, *columns)


def decode_form(data: bytes) -> Slices[TensorForm]:
    """Decode and check a payload's names and shapes, in slices. Raises RequestRejected."""
    try:
        found = _FORM_DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise RequestRejected(f"the payload's names and shapes: {error}"[:500]) from error
    layout_T = _column(found.layout_T, "<i4", len(found.names))
    if len(layout_T) and not 0 <= layout_T.min() <= layout_T.max() < len(found.layouts):
        raise RequestRejected(f"the payload: a tensor's layout is none of the {len(found.layouts)} given")
    first_by_layout = dict(zip(layout_T[::-1].tolist(), reversed(found.names), strict=True))
    layouts: list[TensorLayout] = []
    for number, layout in enumerate(found.layouts):
        where = first_by_layout.get(number, "a layout of no tensor")[:200]
        layouts.append(checked_layout(where, layout.dtype, layout.shape, layout.stride))
        yield 1
    form = TensorForm(found.names, layouts, layout_T)
    for first in range(0, len(found.names), NAMES_AT_ONCE):
        form.describe(first, first + NAMES_AT_ONCE)
        yield 1
    return form


def _column(data: bytes, kind: str, num_tensors: int) -> NDArray[np.int64]:
    if len(data) != num_tensors * np.dtype(kind).itemsize:
        raise RequestRejected(f"the payload: a column of {num_tensors} tensors has {len(data)} bytes")
    return np.frombuffer(data, kind).astype(np.int64)


def _reference(storage: StorageRef | DeviceStorage, number: int) -> AnyStorageRef | None:
    where = f"the payload: storage {number}"
    if isinstance(storage, StorageRef):
        return host_storage(where, storage.manager, storage.handle, storage.num_bytes)
    return device_storage(
        where,
        storage.device,
        storage.handle,
        storage.num_bytes,
        storage.offset_bytes,
        storage.counter_file,
        storage.counter_index,
        None,
    )
