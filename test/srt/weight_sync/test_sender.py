"""Sending from this process: what becomes of the caller's tensors, and of the shared memory."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.bucket import FlattenedTensorBucket
from ebbtide.srt.weight_sync.sender import serialize, serialize_bucket, serialize_tensors
from ebbtide.srt.weight_sync.tensor_source import open_tensor_payload

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


def received(payload: bytes, load_format: str | None = None) -> dict[str, torch.Tensor]:
    source = open_tensor_payload([payload], load_format)
    tensors = {name: tensor.clone() for name, tensor in source}
    source.close()
    return tensors


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


def test_a_receiver_that_is_late_keeps_its_memory(left_behind: LeftBehind) -> None:
    with serialize_tensors([("w", torch.arange(1000))]) as shared:
        source = open_tensor_payload([shared.payload], None)
    [(_, tensor)] = source
    assert tensor.sum() == 499_500
    source.close()
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


def test_buckets_are_sent_by_reference(left_behind: LeftBehind) -> None:
    bucket = FlattenedTensorBucket(named())
    payload = serialize_bucket(bucket)
    assert len(left_behind()) == 1
    assert_received(received(payload, "flattened_bucket"))
    del bucket
    assert left_behind() == set()


def test_threads_may_send_at_the_same_time(left_behind: LeftBehind) -> None:
    results: list[bool] = []

    def send(value: int) -> None:
        for _ in range(10):
            with serialize_tensors([("w", torch.full((50,), value))]) as shared:
                results.append(bool((received(shared.payload)["w"] == value).all()))

    threads = [threading.Thread(target=send, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 40
    assert left_behind() == set()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (("w", [1.0]), "expected pairs"),
        (("w",), "expected pairs"),
        ((1, torch.ones(1)), "expected pairs"),
        (torch.ones(2), "expected pairs"),
        (("w", torch.eye(2).to_sparse()), "w: expected a dense tensor"),
        (("w", torch.ones(1, device="meta")), "w: .*meta"),
    ],
)
def test_what_cannot_be_sent_is_refused(item: object, message: str, left_behind: LeftBehind) -> None:
    with pytest.raises(RequestRejected, match=message):
        serialize_tensors([item])  # type: ignore[list-item]
    assert left_behind() == set()


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(RequestRejected, match=r"w: expected a dense tensor.*torch\.qint8"):
        serialize_tensors([("w", torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))])


def test_more_than_shared_memory_holds_is_refused_before_it_is_touched(left_behind: LeftBehind) -> None:
    endless = torch.ones(1).expand(2**44)
    with pytest.raises(RequestRejected, match=r"/dev/shm has \d+.*buckets") as refusal:
        serialize_tensors([("w", endless)])
    assert refusal.value.fields["needed_bytes"] == 2**46
    assert refusal.value.fields["free_bytes"] < 2**46
    assert left_behind() == set()


REMOVED_UNDER_ITS_USERS = """
import os, pathlib, torch
from ebbtide.srt.weight_sync.sender import serialize
from ebbtide.srt.weight_sync.tensor_source import open_tensor_payload

tensor = torch.arange(4)
payload = serialize([("w", tensor)])
open_tensor_payload([payload], None, dp_rank=0, dp_size=2).close()
source = open_tensor_payload([payload], None, dp_rank=1, dp_size=2)
[path] = pathlib.Path("/dev/shm").glob(f"torch_{os.getpid()}_*")
path.unlink()
del tensor
source.close()
del source
print("alive", flush=True)
"""


def test_the_receiver_survives_a_block_that_was_removed_under_it() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", REMOVED_UNDER_ITS_USERS], capture_output=True, text=True, timeout=120
    )
    assert finished.stdout == "alive\n", finished.stderr
