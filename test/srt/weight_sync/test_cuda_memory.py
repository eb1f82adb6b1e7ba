"""References to a GPU's memory: checked before they are opened, opened once, and given back whatever happens.

The GPU is a stand-in here; the counts are kept in a real file, as a sender keeps them.
"""

import ctypes
import os
import pickle
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fixtures.gpu_memory import OFFSET_BYTES, UUID, Call, Counters, Gpu
from fixtures.payloads import open_payload as opened

from ebbtide.formats.bucket import FlattenedTensorBucket
from ebbtide.formats.stored_tensor import whole
from ebbtide.formats.tensor_refs import CudaStorageRef
from ebbtide.srt.config import ONE_RANK, Place
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.memory_saver.virtual_memory.cuda import CudaDriver
from ebbtide.srt.weight_sync.cuda_memory import PEER_COST, CudaIpc
from ebbtide.srt.weight_sync.source import WeightSource


def open_payload(
    gpu: Gpu | None, value: object, load_format: str | None = None, place: Place = ONE_RANK
) -> WeightSource:
    return opened([pickle.dumps(value, 4)], load_format, cuda=gpu, place=place)


def run(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def read(source: WeightSource) -> dict[str, torch.Tensor]:
    return {name: whole(tensor).clone() for name, tensor in source}


TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(12, dtype=torch.int16).reshape(3, 4).t(),
    "c": torch.arange(10.0)[4:7],
}


def test_memory_of_a_peer_is_further(gpu: Gpu) -> None:
    gpu.peer_cost = 6
    near, far = gpu.share(TENSORS["a"]), gpu.share(TENSORS["c"], device=1)
    source = open_payload(gpu, [("a", near), ("c", far)])
    assert source.near_bytes == 6 * 36


def test_tensors_are_opened_in_steps_awaited_when_read_and_freed_in_steps(
    gpu: Gpu, counters: Counters
) -> None:
    source = open_payload(gpu, [(name, gpu.share(tensor)) for name, tensor in TENSORS.items()])
    assert [(entry.name, entry.shape) for entry in source.entries] == [
        ("a", (2, 3)),
        ("b", (4, 3)),
        ("c", (3,)),
    ]
    assert gpu.log == []
    assert source.near_bytes == 60
    assert len(list(source.open())) == 3
    assert gpu.log == ["open 0", "open 1", "open 2"]
    for name, tensor in read(source).items():
        assert torch.equal(tensor, TENSORS[name])
    read(source)
    assert gpu.log[3:] == ["wait 0", "wait 1", "wait 2"]
    assert counters.values == [1, 1, 1]
    assert len(list(source.detach())) == 3
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
    run(source.detach())
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


# Every reference is given back, and nothing is opened that is refused before.


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
        opened([whole[:-10]], None, cuda=gpu)
    assert counters.values[0] == 0
    assert gpu.log == []


def test_another_device_is_refused_with_the_names_of_both(gpu: Gpu, counters: Counters) -> None:
    with pytest.raises(RequestRejected, match=rf"of CUDA device 1, .* UUID {UUID}"):
        open_payload(gpu, [("a", gpu.share(TENSORS["a"], device=1))])
    assert gpu.log == []
    assert counters.values == [0]


def test_an_engine_on_the_cpu_refuses_and_gives_back(gpu: Gpu, counters: Counters) -> None:
    with pytest.raises(RequestRejected, match="this engine runs on the CPU"):
        open_payload(None, [("a", gpu.share(TENSORS["a"]))])
    assert counters.values == [0]


def test_replicas_refuse_to_share_references_all_of_them(gpu: Gpu, counters: Counters) -> None:
    payload = [("a", gpu.share(TENSORS["a"]))]
    for dp_rank, count in ((1, 1), (0, 0)):
        with pytest.raises(RequestRejected, match="one entry per rank"):
            open_payload(gpu, payload, place=Place(dp_rank=dp_rank, dp_size=2))
        # The first one gives back what was meant for one of them.
        assert counters.values == [count]
    assert gpu.log == []


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
        ({"offset_bytes": 513}, "storage offset: expected a multiple of 16"),
        ({"handle": b"\x02x" + b"h" * 64}, "memory handle: not one"),
        ({"counter_file": b"/etc/passwd"}, "counter file: expected the form"),
        ({"counter_file": b"/torch_1_2/../passwd"}, "counter file: expected the form"),
        ({"counter_index": 10_000}, "counter index: expected 0 to 9999"),
        ({"event": b"e" * 63}, "event handle: expected 64 bytes"),
    ],
)
def test_broken_references_are_refused_unopened(gpu: Gpu, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected) as refused:
        open_payload(gpu, [("a", gpu.share(TENSORS["a"], **changes))])
    assert message in refused.value.message
    assert refused.value.status == 400
    assert gpu.log == []


# The real opener, as far as it goes without a GPU: its calls of the driver.


class EventHandle:
    """As the driver's bindings have it: bytes at an address."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)

    @property
    def reserved(self) -> bytes:
        return self._bytes.value


class Driver(types.SimpleNamespace):
    """Stands for the module of the driver's calls; `status` is what opening comes to, 0 for success."""

    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_OUT_OF_MEMORY=2)
    CUipcEventHandle = CUipcMemHandle = EventHandle
    CUipcMem_flags = types.SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS="lazily")

    def __init__(self, status: int = 0) -> None:
        super().__init__()
        self.log: list[tuple[Any, ...]] = []
        self._opened = status
        self.cuGetErrorString = lambda status: (0, b"invalid argument")
        self.cuIpcOpenMemHandle = self._open
        self.cuIpcCloseMemHandle = lambda address: self.log.append(("close", address)) or (0,)
        self.cuIpcOpenEventHandle = lambda handle: (status, f"event {handle.reserved!r}")
        self.cuStreamWaitEvent = lambda *arguments: self.log.append(("wait", *arguments)) or (0,)
        self.cuEventDestroy = lambda event: self.log.append(("destroy", event)) or (0,)
        self.cuMemGetAddressRange = lambda address: (status, address - 1, 10)

    def _open(self, handle: EventHandle, flags: object) -> tuple[Any, int]:
        self.log.append(("open", handle.reserved, flags))
        return self._opened, 4096


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = types.SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)


def opener(driver: Driver) -> CudaIpc:
    ipc = CudaIpc(0, f"GPU-{UUID}")
    ipc.__dict__["_driver"] = CudaDriver(driver)
    return ipc


@pytest.mark.usefixtures("stream")
def test_events_are_awaited_on_the_current_stream_and_destroyed() -> None:
    driver = Driver()
    ipc = opener(driver)
    assert ipc.uuid == UUID
    ipc.wait(b"e")
    assert driver.log == [("wait", 77, "event b'e'", 0), ("destroy", "event b'e'")]
    assert ipc.extent(100) == (99, 10)


@pytest.mark.usefixtures("stream")
def test_an_event_whose_sender_has_ended_is_refused() -> None:
    ipc = opener(Driver(1))
    with pytest.raises(RequestRejected, match=r"invalid argument.*until the update is answered"):
        ipc.wait(b"e")
    assert ipc.extent(100) is None


def test_one_mapping_serves_all_references_into_an_allocation(gpu: Gpu, counters: Counters) -> None:
    memory = torch.arange(32, dtype=torch.float32)
    first = gpu.share(memory[:8].clone())
    handle = b"\x02c" + b"0".ljust(64)
    second = gpu.share(memory[8:12].clone(), handle=handle, num_bytes=16, offset_bytes=OFFSET_BYTES + 16)
    source = open_payload(gpu, [("a", first), ("b", second)])
    run(source.open())
    assert torch.equal(read(source)["b"], memory[4:8])
    assert len(list(source.detach())) == 1
    assert [entry for entry in gpu.log if not entry.startswith("wait")] == ["open 0", "free 0"]
    assert counters.values == [0, 0]


HANDLE = b"\x02c" + b"h" * 64
REF = CudaStorageRef(UUID, HANDLE, 8, 16, b"/torch_1_2_3", 4, None)


def test_an_allocation_that_is_mapped_already_is_neither_opened_nor_closed_again() -> None:
    driver = Driver()
    ipc = opener(driver)
    first, second = ipc.open(REF), ipc.open(replace(REF, offset_bytes=64))
    other = ipc.open(replace(REF, handle=b"\x02c" + b"i" * 64))
    opened = [("open", letter * 64, "lazily") for letter in (b"h", b"i")]
    first.close()
    assert (driver.log, second.address) == (opened, 4096), "others read there still"
    second.close()
    other.close()
    assert driver.log == [*opened, ("close", 4096), ("close", 4096)]
    ipc.open(REF)
    assert driver.log[-1] == opened[0]


def test_what_the_driver_cannot_open_is_refused_with_its_reason() -> None:
    with pytest.raises(RequestRejected, match=r"_3\[4\] cannot be opened \(cuIpcOpenMemHandle: inv"):
        opener(Driver(1)).open(REF)


def test_expandable_segments_are_left_to_torch_which_takes_a_reference_of_its_own(
    gpu: Gpu, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = torch.UntypedStorage(8)
    asked: list[tuple[object, ...]] = []

    def open_shared(*arguments: object) -> torch.UntypedStorage:
        asked.append(arguments)
        if len(asked) == 2:
            raise RuntimeError("CUDA error: invalid argument\nand much more")
        return storage

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_shared)
    counter = (counters.name, counters.take())
    ref = CudaStorageRef(UUID, b"\x02e" + b"h" * 80, 8, 16, *counter, None)
    mapping = CudaIpc(0, UUID).open(ref)
    assert mapping.address == storage.data_ptr() - 16
    assert mapping.storage(16, 8).data_ptr() == storage.data_ptr()
    assert asked == [(0, ref.handle, 8, 16, *counter, b"", False)]
    assert counters.values == [2]
    with pytest.raises(RequestRejected, match=r"cannot be opened \(CUDA error: invalid argument\)"):
        CudaIpc(0, UUID).open(ref)
    assert counters.values == [2]


def test_a_gpu_reads_its_own_memory_and_that_of_visible_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = [UUID, UUID.replace("3c", "4d"), UUID.replace("3c", "5e")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuids[index])
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: (own, other) == (0, 1))
    ipc = CudaIpc(0, UUID)
    costs = [1, PEER_COST, None, None]
    assert [ipc.cost(index) for index in range(4)] == costs
    assert [ipc.cost(uuid.upper()) for uuid in uuids] == costs[:3]
    assert ipc.cost(UUID.replace("3c", "6f")) is None
