"""What the globals of a weight payload mean here: checked references to tensors, described but not opened.

Source: wire_api sections 4.2 to 4.4.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.payload.pickle_reader import Global, Record

MAX_DIMENSIONS: Final = 64
_MAX_INT: Final = 2**63 - 1
_HANDLE: Final = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
# torch has named these files with two numbers and with three.
_COUNTER_FILE: Final = re.compile(rb"/torch_[0-9]+_[0-9]+(?:_[0-9]+)?")
NUM_COUNTERS: Final = 10_000
_EVENT_BYTES: Final = 64
# These are arguments of rebuild_cuda_tensor.
_DEVICE_SLOT: Final = 6
# A handle of the driver, bare or behind two bytes that say so; or a longer list of an expandable segment.
DRIVER_HANDLE_BYTES: Final = 64
_HANDLE_KINDS: Final = (b"c", b"e")
_MANAGER: Final = re.compile(rb"/(?:[^/\0]+/)*torch-shm-dir-[A-Za-z0-9]+/manager\.sock")


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A block of shared memory on this host; each instance is one reference that the sender has counted."""

    manager: bytes
    handle: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CudaStorageRef:
    """Device memory of another process on this host; each instance is one reference that the sender counts.

    Attributes:
        device: index as this process counts devices, or UUID.
        handle: what torch opens the allocation by.
        offset_bytes: where the storage begins in the allocation.
        counter_file, counter_index: where the sender counts the reference.
        event: after it the sender's writes are done; None if they are done already.
    """

    device: int | str
    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_file: bytes
    counter_index: int
    event: bytes | None


AnyStorageRef: TypeAlias = StorageRef | CudaStorageRef


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor that was checked to lie within its storage. `storage` None: it has no elements."""

    storage: AnyStorageRef | None
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _TypedStorageRef:
    storage: StorageRef | None
    dtype: torch.dtype


# Checks of single values. Each names the place; none prints a value that the sender could make endless.


def kind_of(value: object) -> str:
    """The type of a decoded value, for messages."""
    if isinstance(value, Record | Global):
        return value.name
    return "a tensor" if isinstance(value, TensorRef) else type(value).__name__


def natural(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise RequestRejected(f"{where}: expected an integer from 0 to 2^63-1")
    return value


def text(value: object, where: str) -> str:
    if type(value) is not str:
        raise RequestRejected(f"{where}: expected a string, got {kind_of(value)}")
    return value


def tensor_dtype(value: object, where: str) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise RequestRejected(f"{where}: expected a torch.dtype, got {kind_of(value)}")
    return value


def sizes(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise RequestRejected(f"{where}: expected a tuple of at most {MAX_DIMENSIONS} integers")
    return tuple(natural(item, where) for item in value)


def tensor_shape(value: object, where: str) -> tuple[int, ...]:
    shape = sizes(value, where)
    # Also where a size of 0 makes the tensor empty: torch multiplies the others.
    if math.prod(max(size, 1) for size in shape) > _MAX_INT:
        raise RequestRejected(f"{where}: the sizes multiply to more than 2^63-1")
    return shape


def record_fields(value: object, kind: str, expected: Sequence[str]) -> dict[str, Any]:
    """The fields of a record of this class or of a plain dictionary, which has to have exactly these."""
    if isinstance(value, Record) and value.name.rpartition(".")[2] == kind:
        fields = value.fields or {}
    elif isinstance(value, dict):
        fields = value
    else:
        raise RequestRejected(f"expected a {kind}, got {kind_of(value)}")
    if set(fields) != set(expected):
        raise RequestRejected(f"{kind}: expected exactly the fields {', '.join(expected)}")
    return fields


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
    return sizes(arguments[0], "torch.Size")


def _ordered_dict(arguments: tuple[object, ...]) -> dict[str, object]:
    _expect(arguments, 0, "collections.OrderedDict")
    return {}  # A dict keeps the order of insertion.


def _storage_filename(arguments: tuple[object, ...]) -> StorageRef:
    where = "rebuild_storage_filename"
    _expect(arguments, 4, where)
    cls, manager, handle, num_bytes = arguments
    _expect_symbol(cls, _UNTYPED, f"{where}: class")
    return host_storage(where, manager, handle, num_bytes)


def host_storage(where: str, manager: object, handle: object, num_bytes: object) -> StorageRef:
    """A checked reference to shared memory."""
    if not isinstance(manager, bytes) or not _MANAGER.fullmatch(manager) or b"/../" in manager:
        raise RequestRejected(f"{where}: manager: expected the path of a torch-shm-dir-*/manager.sock")
    if not isinstance(handle, bytes) or not _HANDLE.fullmatch(handle):
        raise RequestRejected(f"{where}: handle: expected the form /torch_<pid>_<n>_<n>")
    return StorageRef(manager, handle, natural(num_bytes, f"{where}: size"))


def _storage_empty(arguments: tuple[object, ...]) -> None:
    _expect(arguments, 1, "rebuild_storage_empty")
    _expect_symbol(arguments[0], _UNTYPED, "rebuild_storage_empty: class")


def _typed_storage(arguments: tuple[object, ...]) -> _TypedStorageRef:
    where = "rebuild_typed_storage"
    _expect(arguments, 2, where)
    storage, dtype = arguments
    if storage is not None and not isinstance(storage, StorageRef):
        raise RequestRejected(f"{where}: expected an untyped storage, got {kind_of(storage)}")
    return _TypedStorageRef(storage, tensor_dtype(dtype, where))


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
    return tensor_within(where, storage.storage, storage.dtype, offset, shape, stride)


def tensor_within(
    where: str,
    storage: AnyStorageRef | None,
    dtype: torch.dtype,
    offset: object,
    shape: object,
    stride: object,
) -> TensorRef:
    """A reference to a tensor, checked to lie within its storage."""
    ref = TensorRef(
        storage,
        dtype,
        natural(offset, f"{where}: offset"),
        tensor_shape(shape, f"{where}: shape"),
        sizes(stride, f"{where}: stride"),
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
    is_uuid = type(value) is str and re.fullmatch(r"[0-9a-fA-F-]{36}", value) is not None
    return _is_count(value) or is_uuid


def _is_bytes(value: object) -> bool:
    return value is None or isinstance(value, bytes)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_sizes(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_count(item) for item in value)


# Slot by slot as in wire_api section 4.2.
_CUDA_SLOTS: Final[tuple[tuple[str, Callable[[object], bool]], ...]] = (
    ("tensor class", lambda value: isinstance(value, Global) and value.name in _TENSOR_CLASSES),
    ("size", _is_sizes),
    ("stride", _is_sizes),
    ("offset", _is_count),
    ("storage class", lambda value: isinstance(value, Global) and value.name in _TYPED),
    ("dtype", lambda value: isinstance(value, torch.dtype)),
    ("device index or UUID", _is_device),
    ("memory handle", _is_bytes),
    ("storage size", _is_count),
    ("storage offset", _is_count),
    ("requires_grad", lambda value: type(value) is bool),
    ("reference counter file", _is_bytes),
    ("reference counter index", lambda value: value is None or _is_count(value)),
    ("event handle", _is_bytes),
    ("event sync flag", lambda value: value is None or type(value) is bool),
)


def _cuda_tensor(name: str, arguments: tuple[object, ...]) -> TensorRef:
    _expect(arguments, len(_CUDA_SLOTS), name)
    for value, (slot, accepts) in zip(arguments, _CUDA_SLOTS, strict=True):
        if not accepts(value):
            raise RequestRejected(f"{name}: {slot}: unexpected {kind_of(value)}")
    _, shape, stride, offset, _, dtype = arguments[:6]
    storage = device_storage(name, *arguments[6:10], *arguments[11:])
    return tensor_within(name, storage, tensor_dtype(dtype, f"{name}: dtype"), offset, shape, stride)


def device_storage(
    name: str,
    device: object,
    handle: object,
    num_bytes: object,
    offset_bytes: object,
    counter_file: object,
    counter_index: object,
    event: object,
    must_wait: object,
) -> CudaStorageRef | None:
    """A checked reference to device memory; None where there is no memory."""
    size = natural(num_bytes, f"{name}: storage size")
    if handle is None or size == 0:
        return None
    if not _is_memory_handle(handle):
        raise RequestRejected(f"{name}: memory handle: not one that torch makes")
    if not isinstance(counter_file, bytes) or not _COUNTER_FILE.fullmatch(counter_file):
        raise RequestRejected(f"{name}: reference counter file: expected the form /torch_<pid>_<n>")
    if type(counter_index) is not int or counter_index >= NUM_COUNTERS:
        raise RequestRejected(f"{name}: reference counter index: expected 0 to {NUM_COUNTERS - 1}")
    if must_wait and (not isinstance(event, bytes) or len(event) != _EVENT_BYTES):
        raise RequestRejected(f"{name}: event handle: expected {_EVENT_BYTES} bytes")
    if not isinstance(device, int | str) or not _is_device(device):
        raise RequestRejected(f"{name}: device: expected an index or a UUID")
    assert isinstance(handle, bytes)
    return CudaStorageRef(
        device,
        handle,
        size,
        natural(offset_bytes, f"{name}: storage offset"),
        counter_file,
        counter_index,
        event if must_wait and isinstance(event, bytes) else None,
    )


def _is_memory_handle(handle: object) -> bool:
    if not isinstance(handle, bytes):
        return False
    if len(handle) == DRIVER_HANDLE_BYTES:
        return True
    kind = handle[1:2]
    return kind in _HANDLE_KINDS and (kind == b"e" or len(handle) == 2 + DRIVER_HANDLE_BYTES)


def _named(name: str, call: Callable[[str, tuple[object, ...]], object]) -> Global:
    return Global(name, partial(call, name))


_REDUCTIONS: Final = "torch.multiprocessing.reductions"
_PATCHED_CUDA_SENDERS: Final = (
    "sglang.srt.utils.patch_torch",
    "sglang.srt.patch_torch",
    "nemo_rl.models.generation.sglang.utils.train_utils",
    "roll.utils.send_recv_utils",
)
_CUDA_REBUILDERS: Final = (
    "rebuild_cuda_tensor",
    *(f"{module}._rebuild_cuda_tensor_modified" for module in _PATCHED_CUDA_SENDERS),
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


@dataclass(frozen=True, slots=True)
class SenderFailure:
    """The sender's reason to give up, as it put it."""

    message: str


def _sender_failure(arguments: tuple[object, ...]) -> SenderFailure:
    return SenderFailure(", ".join(str(one) for one in arguments if isinstance(one, str | int))[:2000])


def offered_tensor(value: object, device: int) -> TensorRef:
    """A CUDA tensor that is offered as torch's function and its arguments, for them to be put together here.

    Args:
        device: takes the place of the sender's.

    Raises:
        RequestRejected: it is something else.
    """
    match value:
        case (Global(name=name), tuple(arguments)) if name in _CUDA_REBUILDERS:
            return lent_tensor(arguments, device)
    raise RequestRejected(f"expected rebuild_cuda_tensor and its arguments, got {kind_of(value)}")


def lent_tensor(value: object, device: int) -> TensorRef:
    """As `offered_tensor`, of the arguments alone.

    Raises:
        RequestRejected: they are something else.
    """
    if not isinstance(value, tuple):
        raise RequestRejected(f"expected the arguments of rebuild_cuda_tensor, got {kind_of(value)}")
    given = [device if slot == _DEVICE_SLOT else one for slot, one in enumerate(value)]
    return _cuda_tensor("rebuild_cuda_tensor", tuple(given))


# Those that torch can copy: not the quantized ones, nor those narrower than a byte.
_FLOATING: Final = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
_NARROW: Final = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_INTEGER: Final = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool")
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, name) for name in (*_FLOATING, *_NARROW, *_INTEGER)
}


def dtype_named(name: str, where: str) -> torch.dtype:
    """The dtype of this name, if payloads may use it."""
    if name not in _DTYPES:
        raise RequestRejected(f"{where}: dtype: expected one of {', '.join(_DTYPES)}, got {name[:40]!r}")
    return _DTYPES[name]


def resolve_global(module: str, name: str) -> object:
    """What a global of a payload stands for; raises `RequestRejected` with its name if it is not accepted."""
    found = _GLOBALS.get((module, name))
    if found is not None:
        return found
    if module == "torch" and name in _DTYPES:
        return _DTYPES[name]
    if name in _RECORDS:
        return Global(f"{module[:200]}.{name}", is_record=True)
    if (module, name) == ("multiprocessing.resource_sharer", "DupFd"):
        _storage_fd("multiprocessing.resource_sharer.DupFd", ())
    raise RequestRejected(
        f"the payload names the global {f'{module}.{name}'[:200]!r}, which weight payloads may not use"
    )


def resolve_offer(module: str, name: str) -> object:
    """As `resolve_global`; also for the error that a sender ends an update with. Source: wire_api 4.5."""
    if (module, name) == ("builtins", "RuntimeError"):
        return Global("builtins.RuntimeError", _sender_failure)
    return resolve_global(module, name)


def recording(note: Callable[[AnyStorageRef], None]) -> Callable[[str, str], object]:
    """As `resolve_global`, telling `note` of each reference that the payload makes, wanted or not."""

    def resolve(module: str, name: str) -> object:
        found = resolve_global(module, name)
        if not isinstance(found, Global) or found.call is None:
            return found
        return Global(found.name, partial(_noting, found.call, note), found.is_record)

    return resolve


def _noting(
    call: Callable[[tuple[object, ...]], object],
    note: Callable[[AnyStorageRef], None],
    arguments: tuple[object, ...],
) -> object:
    made = call(arguments)
    storage = made.storage if isinstance(made, TensorRef) else made
    if isinstance(storage, AnyStorageRef):
        note(storage)
    return made
