"""The trainer's encoding of payloads, which refer to tensors in shared memory or on a GPU.

A trainer on the engine's GPU sends its weights in buckets, without a copy through the host:

    for bucket in pack_buckets(gathered_parameters(), bucket_bytes=1 << 30):
        entry = base64.b64encode(serialize_bucket(bucket)).decode()
        post("/update_weights_from_tensor", {
            "serialized_named_tensors": [entry], "load_format": "flattened_bucket",
        })  # After the reply the engine no longer reads the bucket: it may be overwritten or freed.

Between `begin_weight_update` and `end_weight_update`, all buckets are served at once, from the end on.

torch's rules for sharing CUDA tensors:

- The tensors and the process must live until the update is answered.
- Each pickling of a storage adds an event and a counter, which stay until the storage is freed. So pickle
  buckets or copies, not the parameters; `PayloadEncoder` takes either.
- The memory must be of torch's own allocator. Memory of torch_memory_saver cannot be shared. Expandable
  segments are shared as file descriptors, so the engine must be allowed to trace the trainer: the same user,
  and kernel.yama.ptrace_scope 0. Otherwise switch them off for these tensors, or send `tensor.cpu()`.

Source: wire_api sections 4.1 to 4.3.
"""

import io
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.multiprocessing import reductions

from ebbtide.formats.bucket import FlattenedTensorBucket
from ebbtide.formats.stored_tensor import HEADER_BYTES, SHARED_MEMORY, object_path
from ebbtide.formats.tensor_list import Listing, Payload
from ebbtide.formats.tensor_refs import StorageRef
from ebbtide.srt.errors import RequestRejected
from ebbtide.trainer.cuda_ipc import IpcExporter, NamedTensors, remove_own, uuid_of

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
_PLAIN_TYPES: Final = (torch.Tensor, torch.nn.Parameter)
_PICKLE_PROTOCOL: Final = 4
# The most requests to torch's shared-memory manager, which has one second to answer each.
_ATTEMPTS: Final = 30
# Index of the device among the arguments of rebuild_cuda_tensor.
_DEVICE_SLOT: Final = 6

# A function that rebuilds an object, and its arguments.
_Reduced = tuple[object, tuple[Any, ...]]


def serialize(obj: object) -> bytes:
    """Pickle an object for `update_weights_from_tensor`; the pickle refers to tensors in shared memory.

    CPU tensors move to shared memory, as torch's own sharing does it: they stay usable, at a new address.
    CUDA tensors stay in place; the engine reads them after the work launched on the current stream is done.
    Keep `obj` alive until the update is answered, and send each result once. The process's sharing strategy
    is neither used nor changed.

    Raises:
        RequestRejected: not enough shared memory.
    """
    buffer, shared = io.BytesIO(), list[torch.UntypedStorage]()
    _Pickler(buffer, _PICKLE_PROTOCOL, shared).dump(obj)
    for storage in shared:
        _add_reference(storage)
    return buffer.getvalue()


def serialize_bucket(bucket: FlattenedTensorBucket) -> bytes:
    """Pickle a bucket for `load_format="flattened_bucket"`. Keep it alive until the update is answered."""
    return serialize({"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()})


class PayloadEncoder:
    """Makes payloads of (name, tensor) pairs for an engine on this host, with as few copies as possible.

    Tensors on GPUs that every rank can access are read in place. All others, and memory that cannot be
    shared, are copied to shared memory, once for all ranks. The first time that memory cannot be shared, a
    warning is logged.

    Args:
        device: the engine's device, such as "cuda:0", numbered as in this process; for several ranks a list
            of their devices, replica by replica.
        tp_size: ranks of a replica. A payload in shared memory has entries for one replica, and all replicas
            read these.
    """

    def __init__(self, device: str | Sequence[str], tp_size: int = 1) -> None:
        self._devices = [torch.device(one) for one in ([device] if isinstance(device, str) else device)]
        self._tp_size = tp_size
        self._has_explained = False
        self._exporter = IpcExporter(len(self._devices))

    def close(self) -> None:
        """Unmap all memory that stayed mapped. Idempotent; the encoder may be used again."""
        self._exporter.close()

    def encode(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, keep_mapped: bool = False
    ) -> Payload:
        """Make a payload; close it when the update is answered. Until then the tensors must not change.

        Waits for all work on the tensors' devices, on all streams.

        Args:
            keep_mapped: engines may keep the tensors' memory mapped until `close`, see `cuda_ipc`.

        Raises:
            RequestRejected: an item is not a pair of a name and a dense tensor, or not enough shared memory.
        """
        self._exporter.let_go()
        tensors = _checked(named_tensors)
        if tensors and self._can_share(tensors):
            _finish_work(tensors)
            try:
                return self._exporter.export(tensors, keep_mapped=keep_mapped)
            except RuntimeError as error:  # The memory cannot be shared.
                self._explain(error)
        return serialize_tensors(tensors, self._tp_size)

    def _can_share(self, tensors: NamedTensors) -> bool:
        holders = {tensor.device for _, tensor in tensors}
        if not all(_reaches(device, holder) for device in self._devices for holder in holders):
            return False
        return all(_is_plain(tensor) for _, tensor in tensors)

    def _explain(self, error: RuntimeError) -> None:
        if not self._has_explained:
            self._has_explained = True
            reason = str(error).partition("\n")[0]
            logger.warning("new weights are copied through the host, as they cannot be shared: %s", reason)


class WholeEncoder(PayloadEncoder):
    """Makes payloads that contain copies of the tensors, for engines on any host."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def encode(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, keep_mapped: bool = False
    ) -> Payload:
        tensors = _checked(named_tensors)
        _finish_work(tensors)
        # Always copied, since safetensors refuses tensors that share memory, such as tied ones.
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        return Payload([safetensors.torch.save(copies)], "safetensors")


def side_by_side(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    """Copy GPU tensors into one allocation per device and dtype, so that an engine maps few allocations.

    Waits until the tensors are computed. If any tensor is not on a GPU, all are returned as they are.

    Raises:
        RequestRejected: an item is not a pair of a name and a dense tensor.
    """
    tensors = _checked(named_tensors)
    if {tensor.device.type for _, tensor in tensors} != {"cuda"}:
        return tensors
    _finish_work(tensors)
    # Few calls of torch: each releases the GIL, and may then wait for a thread that serves streams.
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
    joined: list[tuple[str, torch.Tensor]] = []
    with torch.no_grad():
        for group in alike.values():
            given = [tensor for _, tensor in group]
            flat = _flatten_dense_tensors(given)  # type: ignore[no-untyped-call]
            copies = _unflatten_dense_tensors(flat, given)  # type: ignore[no-untyped-call]
            joined += zip((name for name, _ in group), copies, strict=True)
    return joined


def _reaches(reader: torch.device, device: torch.device) -> bool:
    if reader.type != "cuda" or device.type != "cuda":
        return False
    return reader == device or torch.cuda.can_device_access_peer(reader, device)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a reference to its memory describes all of a tensor.

    It cannot describe lazy negation or conjugation, repeated elements, or a subclass.
    """
    if type(tensor) not in _PLAIN_TYPES or tensor.is_neg() or tensor.is_conj():
        return False
    return tensor.is_contiguous() or tensor.nbytes <= tensor.untyped_storage().nbytes()


def _finish_work(tensors: NamedTensors) -> None:
    """Wait for the tensors' devices: the tensors may be computed on streams that are not this thread's."""
    for device in {tensor.device for _, tensor in tensors}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def serialize_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]], num_entries: int = 1) -> Payload:
    """Copy tensors of any device into one block of shared memory, and make a payload that refers to it.

    The tensors may be overwritten as soon as this returns. The block takes the sum of their bytes until the
    payload is closed or garbage-collected.

    Args:
        num_entries: entries to make, one for each rank that reads the block.

    Raises:
        RequestRejected: an item is not a pair of a name and a dense tensor, or not enough shared memory.
    """
    tensors = _checked(named_tensors)
    _finish_work(tensors)
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in tensors]
    storage, reference = _allocate(max(sum(sizes), _ALIGNMENT))
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    views, starts = [], [0, *accumulate(sizes)][:-1]
    for (name, tensor), start in zip(tensors, starts, strict=True):
        used = tensor.nbytes
        view = flat[start : start + used].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor.detach())
        views.append((name, view))
    listing = Listing(views)
    storage_T = np.zeros(len(views), dtype=np.int64)
    offset_T = np.array(starts, dtype=np.int64) // listing.itemsize_T
    entries = listing.encode([[reference]] * num_entries, storage_T, offset_T)
    # Also removes the block if some receiver never dropped its reference.
    remove = partial(remove_own, object_path(reference.handle), os.getpid())
    for _ in entries:
        _add_reference(storage)
    return Payload(entries, memory=storage, release=remove)


def checked_pair(item: object) -> tuple[str, torch.Tensor]:
    """Check that an item is a pair of a name and a dense tensor, and return it. Raises TypeError."""
    match item:
        case (str(name), torch.Tensor() as tensor):
            if tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized:
                return name, tensor
            described = f"{tensor.dtype} of layout {tensor.layout} on {tensor.device}"
            raise TypeError(f"{name}: expected a dense tensor with data, got {described}")
        case (str(name), value):
            raise TypeError(f"{name}: expected a Tensor, got {type(value).__name__}")
        case str():
            raise TypeError(
                "named_tensors: expected pairs (name, Tensor), got names: pass state_dict().items()"
            )
    raise TypeError(f"named_tensors: expected pairs (name, Tensor), got {type(item).__name__}")


def _checked(named_tensors: Iterable[Any]) -> NamedTensors:
    tensors = list(named_tensors)
    try:
        return [checked_pair(item) for item in tensors]
    except TypeError as error:
        raise RequestRejected(str(error)) from None


def _allocate(num_bytes: int) -> tuple[torch.UntypedStorage, StorageRef]:
    _require_room(num_bytes)
    storage: torch.UntypedStorage = _insist(lambda: torch.UntypedStorage._new_using_filename_cpu(num_bytes))
    reference = StorageRef(*storage._share_filename_cpu_())
    with object_path(reference.handle).open("r+b", buffering=0) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes + HEADER_BYTES)
        except OSError as error:  # Another process took the memory since the check.
            raise _no_room(num_bytes) from error
    return storage, reference


def _require_room(num_bytes: int) -> None:
    """Refuse more bytes than /dev/shm has left: writing beyond its limit kills the process by SIGBUS."""
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
    """Pickles tensors as torch does, but so that unrelated processes can open them.

    CPU storages are shared by name, and devices are named by UUID, since other processes may number them
    differently.

    Args:
        shared: gets the CPU storages, each as often as a receiver opens it.
    """

    dispatch_table: Any

    def __init__(self, buffer: io.BytesIO, protocol: int, shared: list[torch.UntypedStorage]) -> None:
        super().__init__(buffer, protocol)
        self.dispatch_table = {
            **self.dispatch_table,
            torch.UntypedStorage: partial(_reduce_storage, shared),
            torch.Tensor: _reduce_tensor,
            torch.nn.Parameter: _reduce_tensor,
        }


def _reduce_tensor(tensor: torch.Tensor) -> _Reduced:
    rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if rebuild is reductions.rebuild_cuda_tensor:
        arguments = (*arguments[:_DEVICE_SLOT], uuid_of(tensor.device), *arguments[_DEVICE_SLOT + 1 :])
    return rebuild, arguments


def _reduce_storage(shared: list[torch.UntypedStorage], storage: torch.UntypedStorage) -> _Reduced:
    if not storage.is_shared():
        _require_room(storage.nbytes())
    reference = _insist(storage._share_filename_cpu_)
    shared.append(storage)
    return reductions.rebuild_storage_filename, (torch.UntypedStorage, *reference)


def _add_reference(storage: torch.UntypedStorage) -> None:
    """Add the reference that the receiver will drop.

    This comes last: if the payload were not made after it, the memory would stay for ever.
    """
    storage._shared_incref()  # type: ignore[no-untyped-call]


def _insist(share: Callable[[], Any]) -> Any:
    """Call a function that puts a storage into shared memory; again if torch's manager times out (1 s)."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return share()
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
    return share()
