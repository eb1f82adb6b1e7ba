"""References to a GPU's memory: checked before they are opened, opened once, and given back whatever happens.

The GPU is a stand-in here; the counts are kept in a real file, as a sender keeps them.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.weight_sync.bucket import FlattenedTensorBucket
from ebbtide.srt.weight_sync.cuda_memory import TorchCudaIpc
from ebbtide.srt.weight_sync.references import CudaStorageRef
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.tensor_source import open_tensor_payload

UUID = "3c1f9e0a-0000-4000-8000-0123456789ab"
OFFSET_BYTES = 512
NUM_COUNTERS = 10_000


class Counters:
    """A sender's file of counters."""

    def __init__(self) -> None:
        self.name = f"/torch_{os.getpid()}_{id(self)}".encode()
        self._path = Path("/dev/shm") / self.name.decode()[1:]
        self._path.write_bytes(bytes(64 + 8 * NUM_COUNTERS))
        self._file = self._path.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), 0)
        self.num_used = 0

    def take(self) -> int:
        """A counter that stands at 1."""
        self.num_used += 1
        self.add(self.num_used - 1, 1)
        return self.num_used - 1

    def add(self, index: int, change: int) -> None:
        at = 64 + 8 * index
        [value] = struct.unpack_from("=q", self._memory, at)
        struct.pack_into("=q", self._memory, at, value + change)

    @property
    def values(self) -> list[int]:
        return list(struct.unpack_from(f"={self.num_used}q", self._memory, 64))

    def close(self) -> None:
        self._memory.close()
        self._file.close()
        self._path.unlink()


@pytest.fixture
def counters() -> Iterator[Counters]:
    counters = Counters()
    yield counters
    counters.close()


class Gpu:
    """A device, and the other process that has tensors on it.

    Attributes:
        log: what was done, in order.
        extents: of the mapped memory, by the address asked about; None: as large as it has to be.
    """

    index = 0
    uuid = UUID

    def __init__(self, counters: Counters) -> None:
        self.log: list[str] = []
        self.broken: set[bytes] = set()
        self.extents: Callable[[int], tuple[int, int] | None] = lambda address: (address, 1 << 40)
        self._counters = counters
        self._storages: dict[bytes, torch.UntypedStorage] = {}

    def share(self, tensor: torch.Tensor, **changes: Any) -> Call:
        """What pickles as a reference to a tensor, with some of its arguments changed."""
        number = len(self._storages)
        handle = b"\x02c" + f"{number}".encode().ljust(64)
        self._storages[handle] = tensor.untyped_storage()
        arguments: dict[str, Any] = {
            "cls": torch.Tensor,
            "size": tensor.size(),
            "stride": tensor.stride(),
            "offset": tensor.storage_offset(),
            "storage_cls": TypedStorage,
            "dtype": tensor.dtype,
            "device": UUID,
            "handle": handle,
            "num_bytes": tensor.untyped_storage().nbytes(),
            "offset_bytes": OFFSET_BYTES,
            "requires_grad": False,
            "counter_file": self._counters.name,
            "counter_index": self._counters.take(),
            "event": f"{number}".encode().ljust(64),
            "must_wait": True,
        }
        assert changes.keys() <= arguments.keys()
        return Call(reductions.rebuild_cuda_tensor, *{**arguments, **changes}.values())

    def open(self, ref: CudaStorageRef) -> torch.UntypedStorage:
        name = ref.handle[2:].decode().strip()
        if ref.handle in self.broken:
            raise RequestRejected(f"memory {name} cannot be opened")
        self.log.append(f"open {name}")
        storage = torch.frombuffer(
            bytearray(bytes(self._storages[ref.handle])), dtype=torch.uint8
        ).untyped_storage()
        weakref.finalize(storage, self._free, name, ref.counter_index)
        return storage

    def _free(self, name: str, counter_index: int) -> None:
        self.log.append(f"free {name}")
        self._counters.add(counter_index, -1)

    def extent(self, address: int) -> tuple[int, int] | None:
        return self.extents(address)

    def wait(self, event: bytes) -> None:
        self.log.append(f"wait {event.decode().strip()}")


class Call:
    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


@pytest.fixture
def gpu(counters: Counters) -> Gpu:
    return Gpu(counters)


def open_payload(gpu: Gpu | None, value: object, load_format: str | None = None, **rank: int) -> WeightSource:
    return open_tensor_payload([pickle.dumps(value, 4)], load_format, cuda=gpu, **rank)


def run(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def read(source: WeightSource) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in source}


TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(12, dtype=torch.int16).reshape(3, 4).t(),
    "c": torch.arange(10.0)[4:7],
}


@pytest.mark.parametrize("load_format", [None, "direct"])
def test_tensors_are_opened_in_steps_awaited_when_read_and_freed_in_steps(
    gpu: Gpu, counters: Counters, load_format: str | None
) -> None:
    source = open_payload(gpu, [(name, gpu.share(tensor)) for name, tensor in TENSORS.items()], load_format)
    assert [(entry.name, entry.shape) for entry in source.entries] == [
        ("a", (2, 3)),
        ("b", (4, 3)),
        ("c", (3,)),
    ]
    assert gpu.log == []
    assert len(list(source.open())) == 3
    assert gpu.log == ["open 0", "open 1", "open 2"]
    for name, tensor in read(source).items():
        assert torch.equal(tensor, TENSORS[name])
    read(source)
    assert gpu.log[3:] == ["wait 0", "wait 1", "wait 2"]
    assert counters.values == [1, 1, 1]
    assert len(list(source.drop())) == 3
    assert sorted(gpu.log[6:]) == ["free 0", "free 1", "free 2"]
    source.close()
    source.close()
    assert counters.values == [0, 0, 0]
    assert len(gpu.log) == 9


def test_a_bucket_is_one_reference(gpu: Gpu, counters: Counters) -> None:
    bucket = FlattenedTensorBucket(list(TENSORS.items()))
    metadata = [vars(entry) for entry in bucket.get_metadata()]
    payload = {"flattened_tensor": gpu.share(bucket.get_flattened_tensor()), "metadata": metadata}
    source = open_payload(gpu, payload, "flattened_bucket")
    run(source.open())
    for name, tensor in read(source).items():
        assert torch.equal(tensor, TENSORS[name])
    run(source.drop())
    assert gpu.log == ["open 0", "wait 0", "free 0"]
    assert counters.values == [0]


def test_memory_that_is_ready_is_not_waited_for(gpu: Gpu) -> None:
    source = open_payload(gpu, [("a", gpu.share(TENSORS["a"], must_wait=False))])
    run(source.open())
    assert torch.equal(read(source)["a"], TENSORS["a"])
    assert gpu.log == ["open 0"]
    source.close()


def test_an_empty_tensor_has_no_memory(gpu: Gpu, counters: Counters) -> None:
    nothing = dict.fromkeys(("handle", "counter_file", "event", "must_wait"))
    call = gpu.share(torch.empty(0, 3), num_bytes=0, **nothing)
    source = open_payload(gpu, [("empty", call)])
    run(source.open())
    assert read(source)["empty"].shape == (0, 3)
    assert gpu.log == []


def test_reading_before_opening_is_our_own_mistake(gpu: Gpu) -> None:
    source = open_payload(gpu, [("a", gpu.share(TENSORS["a"]))])
    with pytest.raises(EngineError, match="before it was opened"):
        read(source)
    source.close()


# Every reference is given back, and nothing is opened that is refused before.


def test_closing_gives_back_what_was_never_opened(gpu: Gpu, counters: Counters) -> None:
    open_payload(gpu, [("a", gpu.share(TENSORS["a"])), ("b", gpu.share(TENSORS["b"]))]).close()
    assert gpu.log == []
    assert counters.values == [0, 0]


def test_a_payload_that_is_refused_half_way_is_given_back(gpu: Gpu, counters: Counters) -> None:
    good = [("a", gpu.share(TENSORS["a"])), ("b", gpu.share(TENSORS["b"]))]
    for bad in (("c", 5), ("d", Call(os.getpid)), "e"):
        with pytest.raises(RequestRejected):
            open_payload(gpu, [*good, bad])
        assert counters.values == [0, 0]
        for index in range(2):
            counters.add(index, 1)
    whole = pickle.dumps(good, 4)
    with pytest.raises(RequestRejected, match="broken pickle"):
        open_tensor_payload([whole[:-10]], None, cuda=gpu)
    assert counters.values[0] == 0
    assert gpu.log == []


@pytest.mark.parametrize("device", [1, "00000000-0000-4000-8000-0123456789ab"])
def test_another_device_is_refused_with_the_names_of_both(gpu: Gpu, counters: Counters, device: Any) -> None:
    with pytest.raises(RequestRejected) as refused:
        open_payload(gpu, [("a", gpu.share(TENSORS["a"], device=device))])
    assert str(device) in refused.value.message
    assert UUID in refused.value.message
    assert gpu.log == []
    assert counters.values == [0]


@pytest.mark.parametrize("device", [0, UUID, UUID.upper()])
def test_this_device_is_known_by_index_and_by_uuid(gpu: Gpu, device: Any) -> None:
    source = open_payload(gpu, [("a", gpu.share(TENSORS["a"], device=device))])
    run(source.open())
    source.close()
    assert gpu.log == ["open 0", "free 0"]


def test_an_engine_on_the_cpu_refuses_and_gives_back(gpu: Gpu, counters: Counters) -> None:
    with pytest.raises(RequestRejected, match="this engine runs on the CPU"):
        open_payload(None, [("a", gpu.share(TENSORS["a"]))])
    assert counters.values == [0]


def test_a_replica_leaves_the_references_of_another_alone(gpu: Gpu, counters: Counters) -> None:
    with pytest.raises(RequestRejected, match="one entry per rank"):
        open_payload(gpu, [("a", gpu.share(TENSORS["a"]))], dp_rank=1, dp_size=2)
    assert gpu.log == []
    assert counters.values == [1]


def test_what_cannot_be_opened_is_given_back_with_the_rest(gpu: Gpu, counters: Counters) -> None:
    source = open_payload(gpu, [(name, gpu.share(tensor)) for name, tensor in TENSORS.items()])
    gpu.broken.add(b"\x02c" + b"1".ljust(64))
    with pytest.raises(RequestRejected, match="memory 1 cannot be opened"):
        run(source.open())
    source.close()
    assert gpu.log == ["open 0", "free 0"]
    assert counters.values == [0, 0, 0]


def test_a_payload_that_comes_twice_is_refused_the_second_time(gpu: Gpu, counters: Counters) -> None:
    payload = [("a", gpu.share(TENSORS["a"]))]
    open_payload(gpu, payload).close()
    source = open_payload(gpu, payload)
    with pytest.raises(RequestRejected, match="given back before: serialize the tensors anew"):
        run(source.open())
    assert gpu.log == []


def test_a_count_that_cannot_be_seen_is_the_senders_loss(gpu: Gpu) -> None:
    source = open_payload(gpu, [("a", gpu.share(TENSORS["a"], counter_file=b"/torch_1_2"))])
    run(source.open())
    assert torch.equal(read(source)["a"], TENSORS["a"])


# The payload's word about the sender's allocation is checked against the mapping.


@pytest.mark.parametrize(
    ("pieces", "is_whole"),
    [
        ([OFFSET_BYTES + 24], True),
        ([1 << 30], True),
        ([OFFSET_BYTES, 16, 8], True),  # an expandable segment
        ([OFFSET_BYTES + 23], False),
        ([OFFSET_BYTES, 16], False),
        ([], True),  # the driver knows nothing of it
    ],
)
def test_a_storage_beyond_its_allocation_is_refused(
    gpu: Gpu, counters: Counters, pieces: list[int], is_whole: bool
) -> None:
    ends: dict[int, int] = {}

    def extent(address: int) -> tuple[int, int] | None:
        number = len(ends)
        if number == len(pieces):
            return None
        ends[address] = pieces[number]
        return address, pieces[number]

    gpu.extents = extent
    source = open_payload(gpu, [("a", gpu.share(TENSORS["a"]))])
    if is_whole:
        run(source.open())
    else:
        with pytest.raises(RequestRejected, match=r"bytes 512 to 536 do not lie in .* of \d+ bytes"):
            run(source.open())
    source.close()
    assert counters.values == [0]


def test_a_mapping_that_begins_elsewhere_is_refused(gpu: Gpu) -> None:
    gpu.extents = lambda address: (address - 64, 1 << 30)
    source = open_payload(gpu, [("a", gpu.share(TENSORS["a"]))])
    with pytest.raises(RequestRejected, match="do not lie in"):
        run(source.open())
    source.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 1}, "reaches beyond its storage of 24 bytes"),
        ({"size": (3, 3)}, "beyond"),
        ({"stride": (2**62, 1)}, "beyond"),
        ({"stride": (1,)}, "2 sizes but 1 strides"),
        ({"size": (2**40,), "stride": (0,)}, "repeats elements"),
        ({"size": (2**62, 2**62, 0), "stride": (1, 1, 1)}, "multiply to more"),
        ({"num_bytes": 20}, "beyond its storage of 20 bytes"),
        ({"num_bytes": 2**63}, "storage size: expected an integer"),
        ({"offset_bytes": 2**63}, "storage offset: expected an integer"),
        ({"handle": b""}, "memory handle: not one"),
        ({"handle": b"\x02x" + b"h" * 64}, "memory handle: not one"),
        ({"handle": b"\x02c" + b"h" * 63}, "memory handle: not one"),
        ({"handle": None}, "beyond its storage of 0 bytes"),
        ({"counter_file": b"/etc/passwd"}, "counter file: expected the form"),
        ({"counter_file": b"/torch_1_2/../passwd"}, "counter file: expected the form"),
        ({"counter_file": None}, "counter file: expected the form"),
        ({"counter_index": 10_000}, "counter index: expected 0 to 9999"),
        ({"counter_index": None}, "counter index: expected"),
        ({"event": b"e" * 63}, "event handle: expected 64 bytes"),
        ({"event": None}, "event handle: expected 64 bytes"),
    ],
)
def test_broken_references_are_refused_unopened(gpu: Gpu, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected) as refused:
        open_payload(gpu, [("a", gpu.share(TENSORS["a"], **changes))])
    assert message in refused.value.message
    assert refused.value.status == 400
    assert gpu.log == []


# The real opener, as far as it goes without a GPU: its calls of the driver.


class Driver(types.SimpleNamespace):
    """Stands for the module of the driver's calls; `status` is what opening an event comes to."""

    def __init__(self, status: str) -> None:
        super().__init__()
        self.CUresult = types.SimpleNamespace(CUDA_SUCCESS=types.SimpleNamespace(name="CUDA_SUCCESS"))
        success = self.CUresult.CUDA_SUCCESS
        self.log: list[tuple[Any, ...]] = []
        opened = success if status == success.name else types.SimpleNamespace(name=status)
        self.CUipcEventHandle = types.SimpleNamespace
        self.cuIpcOpenEventHandle = lambda handle: (opened, f"event {handle.reserved!r}")
        self.cuStreamWaitEvent = lambda *arguments: self.log.append(("wait", *arguments)) or (success,)
        self.cuEventDestroy = lambda event: self.log.append(("destroy", event)) or (success,)
        self.cuMemGetAddressRange = lambda address: (opened, address - 1, 10)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = types.SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)


def opener(driver: Driver) -> TorchCudaIpc:
    ipc = TorchCudaIpc(0, f"GPU-{UUID}")
    ipc.__dict__["_driver"] = driver
    return ipc


@pytest.mark.usefixtures("stream")
def test_events_are_awaited_on_the_current_stream_and_destroyed() -> None:
    driver = Driver("CUDA_SUCCESS")
    ipc = opener(driver)
    assert ipc.uuid == UUID
    ipc.wait(b"e")
    assert driver.log == [("wait", 77, "event b'e'", 0), ("destroy", "event b'e'")]
    assert ipc.extent(100) == (99, 10)


@pytest.mark.usefixtures("stream")
def test_an_event_whose_sender_has_ended_is_refused() -> None:
    ipc = opener(Driver("CUDA_ERROR_INVALID_VALUE"))
    with pytest.raises(RequestRejected, match=r"CUDA_ERROR_INVALID_VALUE.*until the update is answered"):
        ipc.wait(b"e")
    assert ipc.extent(100) is None


def test_what_torch_cannot_open_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: invalid argument\nand much more")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", fail)
    ref = CudaStorageRef(UUID, b"h" * 64, 8, 0, b"/torch_1_2_3", 4, None)
    with pytest.raises(RequestRejected) as refused:
        TorchCudaIpc(0, UUID).open(ref)
    assert refused.value.message == (
        "CUDA memory counted in /torch_1_2_3[4] cannot be opened (CUDA error: invalid argument): keep the "
        "sending process and its tensors alive until the update is answered"
    )
