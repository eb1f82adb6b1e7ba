"""The trainer's side: tensors in shared memory or on a GPU, and the pickle that refers to them.

A trainer on the same GPU as the engine sends buckets of its weights, without a copy through the host:

    for bucket in pack_buckets(gathered_parameters(), bucket_bytes=1 << 30):
        entry = base64.b64encode(serialize_bucket(bucket)).decode()
        post("/update_weights_from_tensor", {
            "serialized_named_tensors": [entry], "load_format": "flattened_bucket",
        })  # the reply says that the engine has let go of the bucket: it may be overwritten, or freed

inside `begin_weight_update` and `end_weight_update`, if all of it is to be served from one moment on.

What torch asks of those who share CUDA tensors:

- The tensors, and the process, live until the update is answered.
- A storage that is shared again and again collects an event and a counter each time, until it is freed. Share
  buckets, or copies, rather than the parameters themselves.
- The memory comes from torch's own allocator. Memory of torch_memory_saver cannot be shared. Expandable
  segments are shared by file descriptors, for which the engine needs leave to trace the trainer: the same
  user, and kernel.yama.ptrace_scope 0. Otherwise switch them off for what is sent, or send `tensor.cpu()`.

Source: wire_api sections 4.1 to 4.3.
"""

import io
import os
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch.multiprocessing import reductions

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.bucket import FlattenedTensorBucket
from ebbtide.srt.weight_sync.shared_memory import HEADER_BYTES, SHARED_MEMORY, object_path

_ALIGNMENT: Final = 64
_PICKLE_PROTOCOL: Final = 4
_DEVICE_SLOT: Final = 6  # of the arguments of rebuild_cuda_tensor


def serialize(obj: object) -> bytes:
    """Pickles an object for `update_weights_from_tensor`; its tensors are referred to, not contained.

    CPU tensors move into shared memory, as with torch's own sharing: they stay usable, at a new address. CUDA
    tensors stay where they are; what has been launched on the current stream is done before the engine reads
    them. Keep `obj` alive until the update is answered, and send each result once. The sharing strategy of
    the process is neither used nor changed. Raises `RequestRejected` when shared memory is short.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, _PICKLE_PROTOCOL).dump(obj)
    return buffer.getvalue()


def serialize_bucket(bucket: FlattenedTensorBucket) -> bytes:
    """Pickles a bucket for `load_format="flattened_bucket"`; keep it alive as `serialize` says."""
    return serialize({"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()})


class SharedTensors:
    """A payload and the shared memory behind it; close it once the update is answered, whatever it says."""

    def __init__(self, payload: bytes, storage: torch.UntypedStorage, handle: bytes) -> None:
        self.payload = payload
        self._storage: torch.UntypedStorage | None = storage
        self._path = object_path(handle)

    def close(self) -> None:
        """Frees the shared memory, also when the payload was never opened. Idempotent."""
        if self._storage is not None:
            self._storage = None
            # What is left now is the reference of a receiver that never took it.
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serialize_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> SharedTensors:
    """Copies tensors, of any device, into one block of shared memory; makes the payload that refers to it.

    The caller's tensors stay as they are and may be overwritten at once. The block takes the sum of their
    bytes until it is closed. Raises `RequestRejected` for what is not a plain tensor, and when shared memory
    is short.
    """
    tensors = list(named_tensors)
    for item in tensors:
        _check_named_tensor(item)
    sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for _, tensor in tensors]
    storage, handle = _allocate(max(sum(sizes), _ALIGNMENT))
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    shared, start = [], 0
    for (name, tensor), size in zip(tensors, sizes, strict=True):
        used = tensor.numel() * tensor.element_size()
        view = flat[start : start + used].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor.detach())
        shared.append((name, view))
        start += size
    return SharedTensors(serialize(shared), storage, handle)


def _check_named_tensor(item: object) -> None:
    match item:
        case (str(name), torch.Tensor() as tensor):
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
                described = f"{tensor.dtype} of layout {tensor.layout} on {tensor.device}"
                raise RequestRejected(f"{name}: expected a dense tensor with data, got {described}")
        case _:
            raise RequestRejected(f"named_tensors: expected pairs (name, Tensor), got {type(item).__name__}")


def _allocate(num_bytes: int) -> tuple[torch.UntypedStorage, bytes]:
    _require_room(num_bytes)
    storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    _, handle, _ = storage._share_filename_cpu_()
    descriptor = os.open(object_path(handle), os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes + HEADER_BYTES)
    except OSError as error:  # Others took the room in the meantime.
        raise _no_room(num_bytes) from error
    finally:
        os.close(descriptor)
    return storage, handle


def _require_room(num_bytes: int) -> None:
    """Refuses now what would end the process (SIGBUS) at the first write beyond the limit of /dev/shm."""
    if num_bytes + HEADER_BYTES > _free_bytes():
        raise _no_room(num_bytes)


def _no_room(num_bytes: int) -> RequestRejected:
    free_bytes = _free_bytes()
    return RequestRejected(
        f"{num_bytes} bytes of shared memory are needed, {SHARED_MEMORY} has {free_bytes}: send the weights "
        "in smaller buckets, or give the container a larger one",
        needed_bytes=num_bytes,
        free_bytes=free_bytes,
    )


def _free_bytes() -> int:
    limits = os.statvfs(SHARED_MEMORY)
    return limits.f_bavail * limits.f_frsize


class _Pickler(ForkingPickler):
    """torch's reductions, but for what only related processes understand.

    CPU storages are shared by name, and devices are named by their UUID: another process may see others.
    """

    dispatch_table: Any

    def __init__(self, buffer: io.BytesIO, protocol: int) -> None:
        super().__init__(buffer, protocol)
        self.dispatch_table = {
            **self.dispatch_table,
            torch.UntypedStorage: _reduce_storage,
            torch.Tensor: _reduce_tensor,
            torch.nn.Parameter: _reduce_tensor,
        }


def _reduce_tensor(tensor: torch.Tensor) -> tuple[object, tuple[Any, ...]]:
    rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if rebuild is reductions.rebuild_cuda_tensor:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE_SLOT], uuid, *arguments[_DEVICE_SLOT + 1 :])
    return rebuild, arguments


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[object, tuple[object, ...]]:
    if not storage.is_shared():
        _require_room(storage.nbytes())
    manager, handle, num_bytes = storage._share_filename_cpu_()
    # The reference that the receiver drops.
    storage._shared_incref()  # type: ignore[no-untyped-call]
    return reductions.rebuild_storage_filename, (torch.UntypedStorage, manager, handle, num_bytes)
