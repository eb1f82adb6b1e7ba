"""Decodes the pickles of weight payloads into checked references to tensors, without opening or running
anything.

Source: wire_api section 4. Tensors in a payload are references into the sender's memory; `shared_memory.py`
opens them.
"""

import base64
import binascii
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.bucket import FlattenedTensorMetadata
from ebbtide.srt.weight_sync.pickle_reader import Global, Record, read_pickle

MAX_DIMENSIONS: Final = 64
_MAX_INT: Final = 2**63 - 1
_PICKLE_START: Final = b"\x80"
_HANDLE: Final = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
_MANAGER: Final = re.compile(rb"/(?:[^/\0]+/)*torch-shm-dir-[A-Za-z0-9]+/manager\.sock")


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A block of shared memory on this host. Each instance stands for one reference that the sender has
    counted."""

    manager: bytes
    handle: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor within a shared block, checked to lie inside it. `storage` None: it is empty and needs no
    memory."""

    storage: StorageRef | None
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalSerializedTensor:
    """One tensor for each tensor-parallel rank: `values[tp_rank]` is the raw pickle of that rank's."""

    values: list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class _TypedStorageRef:
    storage: StorageRef | None
    dtype: torch.dtype


def raw_pickle(entry: bytes | str) -> bytes:
    """Returns the pickle inside an entry: base64 text (str or bytes), or the pickle itself (bytes beginning
    0x80)."""
    if isinstance(entry, bytes) and entry.startswith(_PICKLE_START):
        return entry
    data = raw_base64(entry)
    if not data.startswith(_PICKLE_START):
        raise RequestRejected(
            "the payload is not a pickle of protocol 2 or later: its first byte is not 0x80"
        )
    return data


def raw_base64(entry: bytes | str) -> bytes:
    """Returns what base64 text stands for; raises `RequestRejected` when it is not base64."""
    try:
        return base64.b64decode(entry, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRejected(f"the payload is not base64: {error}") from error


def decode_payload(data: bytes) -> object:
    """Returns what a payload's pickle describes: plain values, `TensorRef`s and the two records of wire_api
    4.1.

    `LocalSerializedTensor` and `FlattenedTensorMetadata` arrive as `Record`s and are checked by `as_metadata`
    and `as_local_serialized`. Raises `RequestRejected`, which names the global, for anything outside wire_api
    section 4.4.
    """
    return read_pickle(data, _resolve)


def as_metadata(value: object) -> FlattenedTensorMetadata:
    """Checks one element of a bucket's metadata: a record or a plain dict with exactly its six fields."""
    fields = _record_fields(value, "FlattenedTensorMetadata", _METADATA_FIELDS)
    where = "FlattenedTensorMetadata"
    return FlattenedTensorMetadata(
        name=_text(fields["name"], f"{where}.name"),
        shape=torch.Size(_shape(fields["shape"], f"{where}.shape")),
        dtype=_dtype(fields["dtype"], f"{where}.dtype"),
        start_idx=_natural(fields["start_idx"], f"{where}.start_idx"),
        end_idx=_natural(fields["end_idx"], f"{where}.end_idx"),
        numel=_natural(fields["numel"], f"{where}.numel"),
    )


def as_local_serialized(value: Record) -> LocalSerializedTensor:
    """Checks a `LocalSerializedTensor` record: one field, a list of pickles as bytes."""
    fields = _record_fields(value, "LocalSerializedTensor", ("values",))
    values = fields["values"]
    if not isinstance(values, list | tuple) or not all(isinstance(item, bytes) for item in values):
        raise RequestRejected("LocalSerializedTensor.values: expected a list of bytes, one per rank")
    return LocalSerializedTensor(values=list(values))


_METADATA_FIELDS: Final = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")


def _record_fields(value: object, kind: str, expected: Sequence[str]) -> dict[str, Any]:
    if isinstance(value, Record) and value.name.rpartition(".")[2] == kind:
        fields = value.fields or {}
    elif isinstance(value, dict):
        fields = value
    else:
        raise RequestRejected(f"expected a {kind}, got {kind_of(value)}")
    if set(fields) != set(expected):
        raise RequestRejected(f"{kind}: expected exactly the fields {', '.join(expected)}")
    return fields


# Checks of single values. Each names the place; none prints a value that the sender could make endless.


def kind_of(value: object) -> str:
    """The type of a decoded value, for messages."""
    if isinstance(value, Record | Global):
        return value.name
    return "a tensor" if isinstance(value, TensorRef) else type(value).__name__


def _natural(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise RequestRejected(f"{where}: expected an integer from 0 to 2^63-1")
    return value


def _text(value: object, where: str) -> str:
    if type(value) is not str:
        raise RequestRejected(f"{where}: expected a string, got {kind_of(value)}")
    return value


def _dtype(value: object, where: str) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise RequestRejected(f"{where}: expected a torch.dtype, got {kind_of(value)}")
    return value


def _sizes(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise RequestRejected(f"{where}: expected a tuple of at most {MAX_DIMENSIONS} integers")
    return tuple(_natural(item, where) for item in value)


def _shape(value: object, where: str) -> tuple[int, ...]:
    shape = _sizes(value, where)
    # Also where a size of 0 makes the tensor empty: torch multiplies the others.
    if math.prod(max(size, 1) for size in shape) > _MAX_INT:
        raise RequestRejected(f"{where}: the sizes multiply to more than 2^63-1")
    return shape


# What the globals of wire_api 4.4 mean here. Each takes the tuple of arguments that the payload gives.


def _expect(arguments: tuple[object, ...], count: int, where: str) -> None:
    if len(arguments) != count:
        raise RequestRejected(f"{where}: expected {count} arguments, got {len(arguments)}")


def _expect_symbol(value: object, allowed: Sequence[str], where: str) -> None:
    if not isinstance(value, Global) or value.name not in allowed:
        raise RequestRejected(f"{where}: expected {' or '.join(allowed)}, got {kind_of(value)}")


_TENSOR_CLASSES: Final = ("torch.Tensor", "torch.nn.parameter.Parameter")
_UNTYPED: Final = ("torch.storage.UntypedStorage",)
_TYPED: Final = ("torch.storage.TypedStorage",)


def _size(arguments: tuple[object, ...]) -> tuple[int, ...]:
    _expect(arguments, 1, "torch.Size")
    return _sizes(arguments[0], "torch.Size")


def _ordered_dict(arguments: tuple[object, ...]) -> dict[str, object]:
    _expect(arguments, 0, "collections.OrderedDict")
    return {}  # A dict keeps the order of insertion.


def _storage_filename(arguments: tuple[object, ...]) -> StorageRef:
    where = "rebuild_storage_filename"
    _expect(arguments, 4, where)
    cls, manager, handle, num_bytes = arguments
    _expect_symbol(cls, _UNTYPED, f"{where}: class")
    if not isinstance(manager, bytes) or not _MANAGER.fullmatch(manager) or b"/../" in manager:
        raise RequestRejected(f"{where}: manager: expected the path of a torch-shm-dir-*/manager.sock")
    if not isinstance(handle, bytes) or not _HANDLE.fullmatch(handle):
        raise RequestRejected(f"{where}: handle: expected the form /torch_<pid>_<n>_<n>")
    return StorageRef(manager, handle, _natural(num_bytes, f"{where}: size"))


def _storage_empty(arguments: tuple[object, ...]) -> None:
    _expect(arguments, 1, "rebuild_storage_empty")
    _expect_symbol(arguments[0], _UNTYPED, "rebuild_storage_empty: class")


def _typed_storage(arguments: tuple[object, ...]) -> _TypedStorageRef:
    where = "rebuild_typed_storage"
    _expect(arguments, 2, where)
    storage, dtype = arguments
    if storage is not None and not isinstance(storage, StorageRef):
        raise RequestRejected(f"{where}: expected an untyped storage, got {kind_of(storage)}")
    return _TypedStorageRef(storage, _dtype(dtype, where))


def _tensor(arguments: tuple[object, ...]) -> TensorRef:
    where = "rebuild_tensor"
    _expect(arguments, 3, where)
    cls, storage, metadata = arguments
    _expect_symbol(cls, _TENSOR_CLASSES, f"{where}: class")
    if not isinstance(storage, _TypedStorageRef):
        raise RequestRejected(f"{where}: expected a typed storage, got {kind_of(storage)}")
    if not isinstance(metadata, tuple):
        raise RequestRejected(f"{where}: expected a tuple of metadata, got {kind_of(metadata)}")
    _expect(metadata, 4, f"{where}: metadata")
    offset, shape, stride, requires_grad = metadata
    if type(requires_grad) is not bool:
        raise RequestRejected(f"{where}: requires_grad: expected a bool, got {kind_of(requires_grad)}")
    ref = TensorRef(
        storage.storage,
        storage.dtype,
        _natural(offset, f"{where}: offset"),
        _shape(shape, f"{where}: shape"),
        _sizes(stride, f"{where}: stride"),
    )
    _check_bounds(ref, where)
    return ref


def _check_bounds(ref: TensorRef, where: str) -> None:
    if len(ref.shape) != len(ref.stride):
        raise RequestRejected(f"{where}: {len(ref.shape)} sizes but {len(ref.stride)} strides")
    available = ref.storage.num_bytes if ref.storage is not None else 0
    itemsize = ref.dtype.itemsize
    num_elements = math.prod(ref.shape)
    last = ref.offset + sum((size - 1) * step for size, step in zip(ref.shape, ref.stride, strict=True))
    end = last + 1 if num_elements else ref.offset
    if end * itemsize > available:
        raise RequestRejected(f"{where}: the tensor reaches beyond its storage of {available} bytes")
    # A copy of an expanded view can be larger than any memory; what is sent must exist.
    if num_elements * itemsize > available:
        raise RequestRejected(f"{where}: the tensor repeats elements: send tensor.contiguous()")


def _storage_fd(name: str, arguments: tuple[object, ...]) -> None:
    raise RequestRejected(
        f"{name}: tensors shared as file descriptors can be opened by related processes only: call "
        'torch.multiprocessing.set_sharing_strategy("file_system") before serializing'
    )


def _is_device(value: object) -> bool:
    if type(value) is int:
        return value >= 0
    return type(value) is str and re.fullmatch(r"[0-9a-fA-F-]{36}", value) is not None


def _is_bytes(value: object) -> bool:
    return value is None or isinstance(value, bytes)


def _is_natural(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _is_sizes(value: object) -> bool:
    return isinstance(value, tuple) and all(type(item) is int and item >= 0 for item in value)


# Slot by slot as in wire_api section 4.2.
_CUDA_SLOTS: Final[tuple[tuple[str, Callable[[object], bool]], ...]] = (
    ("tensor class", lambda value: isinstance(value, Global) and value.name in _TENSOR_CLASSES),
    ("size", _is_sizes),
    ("stride", _is_sizes),
    ("offset", lambda value: type(value) is int and value >= 0),
    ("storage class", lambda value: isinstance(value, Global) and value.name in _TYPED),
    ("dtype", lambda value: isinstance(value, torch.dtype)),
    ("device index or UUID", _is_device),
    ("memory handle", _is_bytes),
    ("storage size", lambda value: type(value) is int and value >= 0),
    ("storage offset", lambda value: type(value) is int and value >= 0),
    ("requires_grad", lambda value: type(value) is bool),
    ("reference counter file", _is_bytes),
    ("reference counter index", _is_natural),
    ("event handle", _is_bytes),
    ("event sync flag", lambda value: value is None or type(value) is bool),
)


def _cuda_tensor(name: str, arguments: tuple[object, ...]) -> None:
    _expect(arguments, len(_CUDA_SLOTS), name)
    for value, (slot, accepts) in zip(arguments, _CUDA_SLOTS, strict=True):
        if not accepts(value):
            raise RequestRejected(f"{name}: {slot}: unexpected {kind_of(value)}")
    raise RequestRejected(
        f"{name}: the payload refers to memory of a CUDA device, and this engine runs on the CPU: "
        "send tensor.cpu()"
    )


def _named(name: str, call: Callable[[str, tuple[object, ...]], object]) -> Global:
    return Global(name, partial(call, name))


_REDUCTIONS: Final = "torch.multiprocessing.reductions"
_PATCHED_CUDA_SENDERS: Final = (
    "sglang.srt.utils.patch_torch",
    "sglang.srt.patch_torch",
    "nemo_rl.models.generation.sglang.utils.train_utils",
    "roll.utils.send_recv_utils",
)
_RECORDS: Final = ("FlattenedTensorMetadata", "LocalSerializedTensor")

_GLOBALS: Final[Mapping[tuple[str, str], Global]] = {
    ("torch", "Tensor"): Global("torch.Tensor"),
    ("torch", "Size"): Global("torch.Size", _size),
    ("torch.nn.parameter", "Parameter"): Global("torch.nn.parameter.Parameter"),
    ("torch.storage", "UntypedStorage"): Global("torch.storage.UntypedStorage"),
    ("torch.storage", "TypedStorage"): Global("torch.storage.TypedStorage"),
    ("collections", "OrderedDict"): Global("collections.OrderedDict", _ordered_dict),
    (_REDUCTIONS, "rebuild_tensor"): Global("rebuild_tensor", _tensor),
    (_REDUCTIONS, "rebuild_typed_storage"): Global("rebuild_typed_storage", _typed_storage),
    (_REDUCTIONS, "rebuild_storage_filename"): Global("rebuild_storage_filename", _storage_filename),
    (_REDUCTIONS, "rebuild_storage_empty"): Global("rebuild_storage_empty", _storage_empty),
    (_REDUCTIONS, "rebuild_storage_fd"): _named(f"{_REDUCTIONS}.rebuild_storage_fd", _storage_fd),
    (_REDUCTIONS, "rebuild_cuda_tensor"): _named("rebuild_cuda_tensor", _cuda_tensor),
    **{
        (module, "_rebuild_cuda_tensor_modified"): _named(
            f"{module}._rebuild_cuda_tensor_modified", _cuda_tensor
        )
        for module in _PATCHED_CUDA_SENDERS
    },
}


def _tensor_dtypes() -> dict[str, torch.dtype]:
    """Every dtype that a plain tensor can have, by its name in `torch`; the quantized ones need more than a
    name."""
    named = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {name: dtype for name, dtype in named.items() if not name.startswith("q")}


_DTYPES: Final = _tensor_dtypes()


def _resolve(module: str, name: str) -> object:
    found = _GLOBALS.get((module, name))
    if found is not None:
        return found
    if module == "torch" and name in _DTYPES:
        return _DTYPES[name]
    if name in _RECORDS:
        return Global(f"{module}.{name}", is_record=True)
    if (module, name) == ("multiprocessing.resource_sharer", "DupFd"):
        _storage_fd("multiprocessing.resource_sharer.DupFd", ())
    raise RequestRejected(
        f"the payload names the global {f'{module}.{name}'[:200]!r}, which weight payloads may not use"
    )
