"""Sending from this process: what becomes of the caller's tensors, and of the shared memory."""

import gc
import os
import pickle
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from fixtures.gpu_memory import UUID, Gpu
from fixtures.payloads import open_payload

from ebbtide.formats.bucket import FlattenedTensorBucket
from ebbtide.formats.stored_tensor import whole
from ebbtide.formats.tensor_list import Listing
from ebbtide.srt.config import ONE_RANK, ParallelConfig, Place
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.borrowed_memory import KeptMemory
from ebbtide.trainer import cuda_ipc
from ebbtide.trainer.payload_encoding import (
    PayloadEncoder,
    WholeEncoder,
    serialize,
    serialize_bucket,
    serialize_tensors,
)

LeftBehind = Callable[[], set[Path]]


def shared_objects() -> set[Path]:
    return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


@pytest.fixture
def left_behind() -> LeftBehind:
    """What this process has in shared memory now and had not when the test began."""
    before = shared_objects()
    return lambda: shared_objects() - before


def named() -> list[tuple[str, torch.Tensor]]:
    return [
        ("bytes", torch.arange(5, dtype=torch.uint8)),
        ("transposed", torch.arange(12, dtype=torch.float64).reshape(3, 4).t()),
        ("parameter", torch.nn.Parameter(torch.arange(3).to(torch.bfloat16))),
        ("empty", torch.empty(2, 0)),
        ("scalar", torch.tensor(7)),
    ]


def received(
    *entries: bytes,
    load_format: str | None = None,
    place: Place = ONE_RANK,
    gpu: Gpu | None = None,
    keeper: KeptMemory | None = None,
) -> dict[str, torch.Tensor]:
    source = open_payload(entries, load_format, place=place, cuda=gpu, keeper=keeper)
    for _ in source.open():
        pass
    tensors = {name: whole(tensor).clone() for name, tensor in source}
    source.close()
    return tensors


def references_at(counts: Path) -> list[int]:
    """What each of two readers has yet to give back."""
    return list(struct.unpack_from("=2q", counts.read_bytes(), 64))


def assert_received(tensors: dict[str, torch.Tensor]) -> None:
    assert list(tensors) == [name for name, _ in named()]
    for name, expected in named():
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(tensors[name], expected)


def test_tensors_are_copied_into_shared_memory_for_as_long_as_the_payload_is_open(
    left_behind: LeftBehind,
) -> None:
    sent = [*named(), ("expanded", torch.ones(1, 2).expand(3, 2))]
    addresses = [tensor.data_ptr() for _, tensor in sent]
    with serialize_tensors(iter(sent)) as shared:
        with torch.no_grad():
            sent[0][1].zero_()  # may be overwritten at once
        assert len(left_behind()) == 1
        arrived = received(shared.payload)
        assert arrived.pop("expanded").tolist() == [[1, 1]] * 3
        assert_received(arrived)
    assert left_behind() == set()
    assert [tensor.data_ptr() for _, tensor in sent] == addresses
    assert not any(tensor.is_shared() for _, tensor in sent)


def test_a_payload_that_nobody_opened_leaves_nothing(left_behind: LeftBehind) -> None:
    shared = serialize_tensors(named())
    shared.close()
    shared.close()
    assert left_behind() == set()


@pytest.mark.parametrize("is_received", [False, True])
def test_a_payload_that_is_lost_leaves_nothing(left_behind: LeftBehind, is_received: bool) -> None:
    shared = serialize_tensors(named())
    assert len(left_behind()) == 1
    if is_received:
        assert_received(received(shared.payload))
    del shared
    gc.collect()
    assert left_behind() == set()


def test_a_payload_that_could_not_be_written_leaves_nothing(
    left_behind: LeftBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Listing, "encode", fail)
    with pytest.raises(MemoryError):
        serialize_tensors(named())
    gc.collect()
    assert left_behind() == set()


def test_what_cannot_be_pickled_leaves_nothing(left_behind: LeftBehind) -> None:
    sent = [*named(), ("function", lambda: None)]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        serialize(sent)
    del sent
    gc.collect()
    assert left_behind() == set()


def test_no_tensors_are_a_payload_too() -> None:
    with serialize_tensors([]) as shared:
        assert received(shared.payload) == {}


def test_in_place_sharing_leaves_the_strategy_alone_and_lives_as_long_as_the_object(
    left_behind: LeftBehind,
) -> None:
    strategy = torch.multiprocessing.get_sharing_strategy()
    sent = named()
    assert_received(received(serialize(sent)))
    assert_received(received(serialize(sent)))
    assert torch.multiprocessing.get_sharing_strategy() == strategy
    assert left_behind() != set()
    del sent
    assert left_behind() == set()


def test_torchs_process_for_shared_memory_may_be_late(
    monkeypatch: pytest.MonkeyPatch, left_behind: LeftBehind
) -> None:
    share = torch.UntypedStorage._share_filename_cpu_
    failures = iter(["Shared memory manager connection has timed out"] * 2)

    def share_late(storage: torch.UntypedStorage) -> Any:
        for failure in failures:
            raise RuntimeError(failure)
        return share(storage)

    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", share_late)
    assert_received(received(serialize(named())))
    failures = iter(["another one"])
    with pytest.raises(RuntimeError, match="another one"):
        serialize(torch.ones(3))


def test_buckets_are_sent_by_reference(left_behind: LeftBehind) -> None:
    bucket = FlattenedTensorBucket(named())
    payload = serialize_bucket(bucket)
    assert len(left_behind()) == 1
    assert_received(received(payload, load_format="flattened_bucket"))
    del bucket
    assert left_behind() == set()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (("w", [1.0]), "w: expected a Tensor, got list"),
        ("w", "got names: pass state_dict"),
        (torch.ones(2), "expected pairs"),
        (("w", torch.eye(2).to_sparse()), "w: expected a dense tensor"),
        (("w", torch.ones(1, device="meta")), "w: .*meta"),
    ],
)
def test_what_cannot_be_sent_is_refused(item: object, message: str, left_behind: LeftBehind) -> None:
    with pytest.raises(RequestRejected, match=message):
        serialize_tensors([item])  # type: ignore[list-item]
    assert left_behind() == set()


def test_more_than_shared_memory_holds_is_refused_before_it_is_touched(left_behind: LeftBehind) -> None:
    endless = torch.ones(1).expand(2**44)
    with pytest.raises(RequestRejected, match=r"/dev/shm has \d+.*buckets") as refusal:
        serialize_tensors([("w", endless)])
    assert refusal.value.fields["needed_bytes"] == 2**46
    assert refusal.value.fields["free_bytes"] < 2**46
    assert left_behind() == set()


def test_a_block_that_was_removed_under_its_receiver_is_read_and_let_go(left_behind: LeftBehind) -> None:
    with serialize_tensors([("w", torch.arange(4))]) as shared:
        source = open_payload([shared.payload], None)
        [path] = left_behind()
        path.unlink()
        [(_, tensor)] = source
        assert whole(tensor).tolist() == [0, 1, 2, 3]
        source.close()


def test_each_of_several_ranks_opens_an_entry_of_its_own(left_behind: LeftBehind) -> None:
    with serialize_tensors(named(), num_entries=3) as shared:
        assert len(left_behind()) == 1
        for rank in (2, 0, 1):
            place = Place(tp_rank=rank, tp_size=3)
            assert_received(received(*shared.entries, place=place))
        # The sender's own reference is what is left: nobody has dropped another's.
        assert len(left_behind()) == 1
    assert left_behind() == set()


def test_ranks_that_close_at_the_same_time_drop_each_its_own_reference(left_behind: LeftBehind) -> None:
    num_ranks = 8
    block = torch.arange(4)
    entries = [serialize([(str(index), block) for index in range(50)]) for _ in range(num_ranks)]
    places = [Place(tp_rank=rank, tp_size=num_ranks) for rank in range(num_ranks)]
    sources = [open_payload(entries, None, place=place) for place in places]
    threads = [threading.Thread(target=source.close) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(left_behind()) == 1
    del block
    assert left_behind() == set()


# ------------------------------------------------------------------------------------ the shorter of two ways


class HostDriver:
    """Stands in for the driver: tensors of the host lie in allocations, which a `Gpu` may open."""

    def __init__(self, gpu: Gpu, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._gpu = gpu
        self._storages = [tensor.untyped_storage() for _, tensor in tensors]
        self.generation = 1

    def range_of(self, address: int) -> tuple[int, int]:
        for storage in self._storages:
            if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                return storage.data_ptr(), storage.nbytes()
        raise RuntimeError("cuMemGetAddressRange_v2: CUDA error 1")

    def handle_of(self, begin: int) -> bytes:
        return self._gpu.handle(next(one for one in self._storages if one.data_ptr() == begin))

    def id_of(self, begin: int) -> int | None:
        is_there = any(one.data_ptr() == begin for one in self._storages)
        return begin + self.generation if is_there else None


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


OnGpu = Callable[[list[tuple[str, torch.Tensor]]], HostDriver]


@pytest.fixture
def on_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    """Makes these tensors count as those of the engine's GPU."""

    def install(tensors: list[tuple[str, torch.Tensor]]) -> HostDriver:
        driver = HostDriver(gpu, tensors)
        monkeypatch.setattr(PayloadEncoder, "_can_share", lambda *_: True)
        monkeypatch.setattr(cuda_ipc, "driver", lambda: driver)
        monkeypatch.setattr(cuda_ipc, "uuid_of", lambda device: UUID)
        return driver

    return install


def test_tensors_that_are_not_on_the_engines_gpu_are_copied() -> None:
    for device in ("cpu", "cuda:0"):
        tensors = named()
        with PayloadEncoder(device).encode(iter(tensors)) as sent:
            with torch.no_grad():
                tensors[0][1].zero_()  # a copy has been made of it
            assert_received(received(sent.payload))


def test_exported_tensors_arrive_and_stay_as_they_are(
    gpu: Gpu, on_gpu: OnGpu, left_behind: LeftBehind
) -> None:
    base = torch.arange(24).reshape(6, 4)
    tensors = [*named(), ("rows", base[2:4]), ("tied", base)]
    on_gpu(tensors)
    addresses = [tensor.data_ptr() for _, tensor in tensors]
    with PayloadEncoder(["cuda:0"] * 2).encode(iter(tensors)) as sent:
        [counts] = left_behind()
        for rank, entry in enumerate(sent.entries):
            assert references_at(counts) == [0] * rank + [5] * (2 - rank)
            place = Place(tp_rank=rank, tp_size=2)
            arrived = received(*sent.entries, place=place, gpu=gpu)
            assert entry != sent.entries[1 - rank]
            assert torch.equal(arrived.pop("tied"), base)
            assert torch.equal(arrived.pop("rows"), base[2:4])
            assert_received(arrived)
        assert references_at(counts) == [0, 0]
    assert left_behind() == set()
    assert [tensor.data_ptr() for _, tensor in tensors] == addresses
    assert not any(tensor.is_shared() for _, tensor in tensors)
    assert sum(entry.startswith("open") for entry in gpu.log) == 2 * 5, "each allocation once by each rank"


def test_handles_are_asked_for_again_where_tensors_lie_elsewhere(
    gpu: Gpu, on_gpu: OnGpu, left_behind: LeftBehind
) -> None:
    tensors = [("a", torch.ones(4)), ("b", torch.ones(6)[2:]), ("none", torch.empty(0, 3))]
    elsewhere = torch.ones(4)
    driver = on_gpu([*tensors, ("elsewhere", elsewhere)])
    encoder = PayloadEncoder("cuda:0")

    def sent(tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        """The memory that was opened for an update."""
        gpu.log.clear()
        for number, (_, tensor) in enumerate(tensors):
            tensor += number + 1
        with encoder.encode(tensors) as payload:
            arrived = received(payload.payload, gpu=gpu)
        assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors)
        assert left_behind() == set()
        return {entry for entry in gpu.log if entry.startswith("open")}

    # The driver of this test gives another handle each time.
    first = sent(tensors)
    assert sent(tensors) == first
    # One of them lies elsewhere; then other memory lies at the same addresses.
    tensors[0] = ("a", elsewhere)
    second = sent(tensors)
    assert second.isdisjoint(first)
    driver.generation += 1
    assert sent(tensors).isdisjoint(second)


def test_what_may_be_read_still_is_held_until_it_was_given_back(
    gpu: Gpu, on_gpu: OnGpu, left_behind: LeftBehind
) -> None:
    named_tensors = [("w", torch.ones(8))]
    on_gpu(named_tensors)
    encoder = PayloadEncoder("cuda:0")
    with pytest.raises(TimeoutError), encoder.encode(named_tensors) as sent:
        raise TimeoutError  # the engine may be reading still
    with pytest.raises(RequestRejected), encoder.encode(named_tensors):
        raise RequestRejected("refused: nothing is read any more")
    assert len(left_behind()) == 1
    assert received(sent.payload, gpu=gpu)["w"].tolist() == [1] * 8
    encoder.encode([]).close()
    assert left_behind() == set()


def test_memory_that_cannot_be_shared_is_copied_and_the_log_says_so_once(
    on_gpu: OnGpu, caplog: pytest.LogCaptureFixture
) -> None:
    on_gpu([])
    encoder = PayloadEncoder("cuda:0")
    for _ in range(2):
        with encoder.encode(named()) as sent:
            assert_received(received(sent.payload))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.endswith("cannot be shared: cuMemGetAddressRange_v2: CUDA error 1")


def test_what_stays_where_it_is_is_mapped_once_until_it_goes(
    gpu: Gpu, on_gpu: OnGpu, left_behind: LeftBehind
) -> None:
    tensors = [("a", torch.ones(4)), ("b", torch.ones(6)[2:]), ("none", torch.empty(0, 3))]
    elsewhere = torch.ones(4)
    driver = on_gpu([*tensors, ("elsewhere", elsewhere)])
    encoder, keeper = PayloadEncoder("cuda:0"), KeptMemory(gpu)

    def sent(tensors: list[tuple[str, torch.Tensor]]) -> int:
        """How many allocations are mapped for an update."""
        gpu.log.clear()
        for number, (_, tensor) in enumerate(tensors):
            tensor += number + 1
        with encoder.encode(tensors, keep_mapped=True) as payload:
            arrived = received(payload.payload, gpu=gpu, keeper=keeper)
        assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors)
        return sum(entry.startswith("open") for entry in gpu.log)

    assert [sent(tensors) for _ in range(3)] == [2, 0, 0]
    assert (len(keeper), len(left_behind())) == (1, 1)

    # One of them lies elsewhere; then other memory lies at the same addresses.
    tensors[0] = ("a", elsewhere)
    assert [sent(tensors) for _ in range(2)] == [2, 0]
    driver.generation += 1
    assert [sent(tensors) for _ in range(2)] == [2, 0]
    keeper.drop_ended()
    assert (len(keeper), len(left_behind())) == (1, 1)

    # A payload that was dropped in between is mapped again; a sender that has ended holds no lock.
    gpu.log.clear()
    encoder.close()
    keeper.drop_ended()
    assert (len(keeper), gpu.log.count("free 4") + gpu.log.count("free 5")) == (0, 2)
    assert left_behind() == set()
    assert sent(tensors) == 2
    # Nobody closes it.
    encoder = PayloadEncoder("cuda:0")
    gc.collect()
    keeper.drop_ended()
    assert (len(keeper), left_behind()) == (0, set())


def test_what_stays_and_may_be_read_still_is_exported_anew(
    gpu: Gpu, on_gpu: OnGpu, left_behind: LeftBehind
) -> None:
    named_tensors = [("w", torch.ones(8))]
    on_gpu(named_tensors)
    encoder, keeper = PayloadEncoder("cuda:0"), KeptMemory(gpu)
    with pytest.raises(TimeoutError), encoder.encode(named_tensors, keep_mapped=True) as first:
        raise TimeoutError  # the engine may be reading still
    with encoder.encode(named_tensors, keep_mapped=True) as second:
        assert second.payload != first.payload
        assert received(second.payload, gpu=gpu, keeper=keeper)["w"].tolist() == [1] * 8
    assert received(first.payload, gpu=gpu, keeper=keeper)["w"].tolist() == [1] * 8
    assert len(keeper) == 1, "what is not held any more is not kept"
    encoder.encode([]).close()
    encoder.close()
    assert left_behind() == set()


def test_whole_tensors_reach_ranks_that_share_no_memory_with_the_sender(left_behind: LeftBehind) -> None:
    with WholeEncoder().encode(named()) as payload:
        assert not left_behind()
        place = ParallelConfig(tp_size=2, nnodes=2, node_rank=1)
        tensors = received(*payload.entries, load_format=payload.load_format, place=place)
    assert tensors.keys() == dict(named()).keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in named())
