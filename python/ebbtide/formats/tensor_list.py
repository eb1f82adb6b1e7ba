"""The engine's own payload: tensors in memory that is shared, as tables in MessagePack.

It says what torch's pickles of shared tensors say, and is read a thousand times quicker. Names and shapes
stand by themselves, and are the same from update to update as a rule: what was worked out of them is kept.

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

# What no pickle, no base64 and no safetensors image of less than a petabyte begins with.
MAGIC: Final = b"\xebEBT\x02\0\0\0"
# The same of memory that stays: it is not to be unmapped before the sender lets go of its file of counts.
MAGIC_STAYS: Final = b"\xebEBT\x02\x01\0\0"
MAGICS: Final = (MAGIC, MAGIC_STAYS)

# How many names make a slice.
NAMES_AT_ONCE: Final = 64

_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class DeviceStorage(Struct, frozen=True, array_like=True, tag="device", forbid_unknown_fields=True):
    """Device memory by torch's IPC handle, with one reference that the sender counts. Its work is done."""

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
    """`layout_T`: the number of each tensor's layout, 32 bits."""

    names: list[str]
    layouts: list[_Layout]
    layout_T: bytes


class _TensorList(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`form`: a `_Form`; `storage_T`, `offset_T`: the number of each tensor's storage, and its offset in
    elements, 64 bits."""

    storages: list[StorageRef | DeviceStorage]
    form: bytes
    storage_T: bytes
    offset_T: bytes


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_TensorList)
_FORM_DECODER: Final = msgspec.msgpack.Decoder(_Form)


class Payload:
    """What is sent, and the memory behind it for as long as it is open: until the update is answered.

    Args:
        load_format: with which the entries are sent.
        memory: held until it is closed.
        release: called once, when it is closed or lost. Must not refer to the payload.
        abandon: called instead of closing it where its context is left by something else than an answer
            (`RequestRejected` is one): the engine may be reading still.

    Attributes:
        entries: of `serialized_named_tensors`.
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
        # Also where nobody closes it: a caller that is interrupted may never get to see it.
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
    # It goes first: torch ends a process whose shared memory it finds removed.
    memory.clear()
    if release is not None:
        release()


class Listing:
    """Tensors as a payload lists them, apart from where they lie.

    `form`: names and shapes, as they are sent.
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
        """A payload for each list of storages, of the same tensors in them.

        Args:
            storage_T, offset_T: see `TensorTable`.
            stays: the memory stays where it is, and may stay mapped, see `borrowed_memory`.
        """
        columns = [column.astype("<i8").tobytes() for column in (storage_T, offset_T)]
        begin = MAGIC_STAYS if stays else MAGIC
        lists = (_TensorList(list(storages), self.form, *columns) for storages in entries)
        return [begin + _ENCODER.encode(listed) for listed in lists]


# Dtype, shape and stride; the stride of a contiguous tensor is None: it follows from the shape, and takes as
# long to ask for.
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
    """The tensors of a payload that begins with one of `MAGICS`, described and not opened; in slices.

    Args:
        record: called with every reference ahead of the first slice, so that all can be given back.
        form_of: reads names and shapes, or knows them; None: `decode_form`.
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
    """The names and shapes that a payload has; in slices."""
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
