"""The globals that a pickled weight payload may use; they make checked references to memory, opened later.

Source: wire_api sections 4.2 to 4.4.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ebbtide.formats.pickle_reader import Global, Record
from ebbtide.formats.tensor_refs import (
    DTYPES,
    AnyStorageRef,
    StorageRef,
    TensorRef,
    device_storage,
    host_storage,
    sizes,
    tensor_within,
)
from ebbtide.srt.errors import RequestRejected

# Index of the device among the arguments of rebuild_cuda_tensor.
_DEVICE_SLOT: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class _TypedStorageRef:
    storage: StorageRef | None
    dtype: torch.dtype


# Checks of single values. Messages say where the value is, and never contain it, since it may be very long.


def kind_of(value: object) -> str:
    """Name of a decoded value's type, for messages."""
    if isinstance(value, Record | Global):
        return value.name
    return "a tensor" if isinstance(value, TensorRef) else type(value).__name__


def text(value: object, where: str) -> str:
    if type(value) is not str:
        raise RequestRejected(f"{where}: expected a string, got {kind_of(value)}")
    return value


def tensor_dtype(value: object, where: str) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise RequestRejected(f"{where}: expected a torch.dtype, got {kind_of(value)}")
    return value


def record_fields(value: object, kind: str, expected: Sequence[str]) -> dict[str, Any]:
    """The fields of a record of the class `kind`, or of a dictionary.

    Raises:
        RequestRejected: it is neither, or its fields are not exactly `expected`.
    """
    if isinstance(value, Record) and value.name.rpartition(".")[2] == kind:
        fields = value.fields or {}
    elif isinstance(value, dict):
        fields = value
    else:
        raise RequestRejected(f"expected a {kind}, got {kind_of(value)}")
    if set(fields) != set(expected):
        raise RequestRejected(f"{kind}: expected exactly the fields {', '.join(expected)}")
    return fields


# Implementations of the globals of wire_api 4.4. Each takes the tuple of arguments from the payload.


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
    return {}  # A dict is ordered too.


def _storage_filename(arguments: tuple[object, ...]) -> StorageRef:
    where = "rebuild_storage_filename"
    _expect(arguments, 4, where)
    cls, manager, handle, num_bytes = arguments
    _expect_symbol(cls, _UNTYPED, f"{where}: class")
    return host_storage(where, manager, handle, num_bytes)


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


def _storage_fd(name: str, arguments: tuple[object, ...]) -> None:
    raise RequestRejected(
        f"{name}: tensors shared as file descriptors can be opened by related processes only: call "
        'torch.multiprocessing.set_sharing_strategy("file_system") before serializing'
    )


_NUM_CUDA_ARGUMENTS: Final = 15


def _cuda_tensor(name: str, arguments: tuple[object, ...]) -> TensorRef:
    """The arguments are listed in wire_api section 4.2."""
    _expect(arguments, _NUM_CUDA_ARGUMENTS, name)
    cls, shape, stride, offset, storage_cls, dtype = arguments[:6]
    device, handle, num_bytes, offset_bytes, requires_grad = arguments[6:11]
    counter_file, counter_index, event, must_wait = arguments[11:]
    _expect_symbol(cls, _TENSOR_CLASSES, f"{name}: tensor class")
    _expect_symbol(storage_cls, _TYPED, f"{name}: storage class")
    for slot, flag in (("requires_grad", requires_grad), ("event sync flag", must_wait)):
        if flag is not None and type(flag) is not bool:
            raise RequestRejected(f"{name}: {slot}: expected a bool, got {kind_of(flag)}")
    memory, counter = (device, handle, num_bytes, offset_bytes), (counter_file, counter_index)
    storage = device_storage(name, *memory, *counter, event if must_wait else None)
    return tensor_within(name, storage, tensor_dtype(dtype, f"{name}: dtype"), offset, shape, stride)


def _named(name: str, call: Callable[[str, tuple[object, ...]], object]) -> Global:
    return Global(name, partial(call, name))


_REDUCTIONS: Final = "torch.multiprocessing.reductions"
_PATCHED_CUDA_SENDERS: Final = (
    "sglang.srt.utils.patch_torch",
    "sglang.srt.patch_torch",
    "nemo_rl.models.generation.sglang.utils.train_utils",
    "nemo_rl.models.policy.torch_reductions_utils",
    "roll.utils.send_recv_utils",
)
_CUDA_REBUILDERS: Final = (
    "rebuild_cuda_tensor",
    *(f"{module}._rebuild_cuda_tensor_modified" for module in _PATCHED_CUDA_SENDERS),
)
_RECORDS: Final = ("FlattenedTensorMetadata", "LocalSerializedTensor")

_GLOBALS: Final[Mapping[tuple[str, str], Global]] = {
    ("torch", "Tensor"): Global("torch.Tensor"),
    ("torch", "Size"): Global("torch.Size", _size, is_pure=True),
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
    """The sender gave up; its own message."""

    message: str


def _sender_failure(arguments: tuple[object, ...]) -> SenderFailure:
    return SenderFailure(", ".join(str(one) for one in arguments if isinstance(one, str | int))[:2000])


def cuda_tensor(value: object, device: int) -> TensorRef:
    """A reference to a CUDA tensor, from the arguments of torch's `rebuild_cuda_tensor`.

    Args:
        value: the tuple of arguments, or a pair of the function and these.
        device: replaces the sender's device.

    Raises:
        RequestRejected: `value` is something else.
    """
    match value:
        case (Global(name=name), tuple(arguments)) if name in _CUDA_REBUILDERS:
            pass
        case tuple(arguments):
            pass
        case _:
            raise RequestRejected(f"expected rebuild_cuda_tensor and its arguments, got {kind_of(value)}")
    given = [device if slot == _DEVICE_SLOT else one for slot, one in enumerate(arguments)]
    return _cuda_tensor("rebuild_cuda_tensor", tuple(given))


def resolve_global(module: str, name: str) -> object:
    """The object that a payload's global stands for. RequestRejected: it is not accepted."""
    found = _GLOBALS.get((module, name))
    if found is not None:
        return found
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if name in _RECORDS:
        return Global(f"{module[:200]}.{name}", is_record=True)
    if (module, name) == ("multiprocessing.resource_sharer", "DupFd"):
        _storage_fd("multiprocessing.resource_sharer.DupFd", ())
    raise RequestRejected(
        f"the payload names the global {f'{module}.{name}'[:200]!r}, which weight payloads may not use"
    )


def resolve_offer(module: str, name: str) -> object:
    """As `resolve_global`, but also accepts the error by which a sender gives up. Source: wire_api 4.5."""
    if (module, name) == ("builtins", "RuntimeError"):
        return Global("builtins.RuntimeError", _sender_failure)
    return resolve_global(module, name)


def recording(record: Callable[[AnyStorageRef], None]) -> Callable[[str, str], object]:
    """Make a `resolve_global` that calls `record` with each reference to memory, even an unused one."""

    def recorded(call: Callable[[tuple[object, ...]], object], arguments: tuple[object, ...]) -> object:
        made = call(arguments)
        storage = made.storage if isinstance(made, TensorRef) else made
        if isinstance(storage, AnyStorageRef):
            record(storage)
        return made

    def resolve(module: str, name: str) -> object:
        found = resolve_global(module, name)
        if not isinstance(found, Global) or found.call is None or found.is_pure:
            return found
        return Global(found.name, partial(recorded, found.call), found.is_record)

    return resolve
