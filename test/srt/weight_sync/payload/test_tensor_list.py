"""The engine's own payload: what it describes, and what is refused of it."""

from typing import Any

import msgspec
import pytest
import torch

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.payload.tensor_list import (
    MAGIC,
    DeviceStorage,
    HostStorage,
    SharedTensor,
    encode_tensors,
)
from ebbtide.srt.weight_sync.payload.tensor_refs import AnyStorageRef, CudaStorageRef, StorageRef
from ebbtide.srt.weight_sync.tensor_source import decode_by_slices

HOST = HostStorage(b"/tmp/torch-shm-dir-aB3/manager.sock", b"/torch_12_34_5", 96)
DEVICE = DeviceStorage(
    "3c1f9e0a-0000-4000-8000-0123456789ab", b"\x02c" + bytes(64), 64, 512, b"/torch_1_2", 7
)
ROWS = SharedTensor("rows", "float32", (2, 3), (4, 1), 4, 0)
HEAD = SharedTensor("head", "bfloat16", (8,), (1,), 0, 1)


def decoded(data: bytes) -> tuple[dict[str, Any], list[AnyStorageRef]]:
    noted: list[AnyStorageRef] = []
    tensors = finish(decode_by_slices(data, noted.append))
    assert isinstance(tensors, list)
    return dict(tensors), noted


def test_tensors_are_described_and_each_storage_is_noted_once() -> None:
    tied = msgspec.structs.replace(ROWS, name="tied", offset=0)
    tensors, noted = decoded(encode_tensors([HOST, DEVICE], [ROWS, HEAD, tied]))
    assert list(tensors) == ["rows", "head", "tied"]
    rows, head = tensors["rows"], tensors["head"]
    assert (rows.dtype, rows.shape, rows.stride, rows.offset) == (torch.float32, (2, 3), (4, 1), 4)
    assert noted == [rows.storage, head.storage]
    assert tensors["tied"].storage is rows.storage
    assert isinstance(rows.storage, StorageRef)
    assert rows.storage.handle == HOST.handle
    assert isinstance(head.storage, CudaStorageRef)
    assert (head.storage.offset_bytes, head.storage.counter_index, head.storage.event) == (512, 7, None)


@pytest.mark.parametrize(
    ("storage", "tensor", "problem"),
    [
        ({}, {"storage": 2}, "rows: storage 2: the payload has 2"),
        ({}, {"offset": 20}, "rows: the tensor reaches beyond its storage of 96 bytes"),
        ({}, {"shape": (24, 2), "stride": (1, 0), "offset": 0}, "rows: the tensor repeats elements"),
        ({}, {"shape": (2,)}, "rows: 1 sizes but 2 strides"),
        ({}, {"dtype": "quint8"}, "rows: dtype: expected one of float64, "),
        ({}, {"offset": -1}, "expected `int` >= 0|Expected `int` >= 0"),
        ({}, {"offset": 2**63}, "rows: offset: expected an integer|Expected"),
        ({"handle": b"/etc/passwd"}, {}, "storage 0: handle: expected the form"),
        ({"manager": b"/tmp/other.sock"}, {}, "storage 0: manager: expected the path"),
    ],
)
def test_what_is_wrong_is_refused_and_every_reference_was_noted(
    storage: dict[str, Any], tensor: dict[str, Any], problem: str
) -> None:
    data = encode_tensors(
        [msgspec.structs.replace(HOST, **storage), DEVICE], [msgspec.structs.replace(ROWS, **tensor)]
    )
    noted: list[AnyStorageRef] = []
    with pytest.raises(RequestRejected, match=problem):
        finish(decode_by_slices(data, noted.append))
    if "Expected" not in problem:
        assert sum(isinstance(ref, CudaStorageRef) for ref in noted) == 1


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x90\x90\x90", msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_list_of_tensors_is_refused(data: bytes) -> None:
    with pytest.raises(RequestRejected, match="the payload: "):
        finish(decode_by_slices(MAGIC + data, [].append))
