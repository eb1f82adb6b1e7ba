"""The engine's own payload: what it describes, and what is refused of it."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ebbtide.formats.tensor_list import (
    MAGIC,
    DeviceStorage,
    Listing,
    decode_tensors,
)
from ebbtide.formats.tensor_refs import (
    AnyStorageRef,
    CudaStorageRef,
    StorageRef,
    TensorTable,
)
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.tensor_source import decode_by_slices

HOST = StorageRef(b"/tmp/torch-shm-dir-aB3/manager.sock", b"/torch_12_34_5", 96)
DEVICE = DeviceStorage(
    "3c1f9e0a-0000-4000-8000-0123456789ab", b"\x02c" + bytes(64), 64, 512, b"/torch_1_2", 7
)
NAMED = [
    ("rows", torch.empty(6, 4)[:2, :3]),
    ("head", torch.empty(8, dtype=torch.bfloat16)),
    ("tied", torch.empty(6, 4)[:2, :3]),
]


def encoded(named: list[tuple[str, torch.Tensor]], storage_T: list[int], offset_T: list[int]) -> bytes:
    listing = Listing(named)
    [data] = listing.encode([[HOST, DEVICE]], np.array(storage_T), np.array(offset_T))
    return data


def decoded(data: bytes) -> tuple[TensorTable, list[AnyStorageRef]]:
    recorded: list[AnyStorageRef] = []
    table = finish(decode_tensors(data, recorded.append))
    return table, recorded


def test_tensors_are_described_and_each_storage_is_recorded_once() -> None:
    table, recorded = decoded(encoded(NAMED, [0, 1, 0], [4, 0, 0]))
    tensors = dict(table.refs())
    assert list(tensors) == table.form.names == ["rows", "head", "tied"]
    rows, head = tensors["rows"], tensors["head"]
    assert (rows.dtype, rows.shape, rows.stride, rows.offset) == (torch.float32, (2, 3), (4, 1), 4)
    assert recorded == [rows.storage, head.storage] == table.used_storages
    assert tensors["tied"].storage is rows.storage
    assert isinstance(rows.storage, StorageRef)
    assert rows.storage.handle == HOST.handle
    assert isinstance(head.storage, CudaStorageRef)
    assert (head.storage.offset_bytes, head.storage.counter_index, head.storage.event) == (512, 7, None)
    assert [(one.name, one.shape, one.dtype) for one in table.form.headers] == [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in NAMED
    ]
    assert table.form.num_bytes == sum(tensor.nbytes for _, tensor in NAMED)
    assert table.form.is_contiguous_T.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("tensor", "is_contiguous"),
    [
        (torch.empty(3, 4, 2)[:, :1], False),
        (torch.empty(2, 3).t(), False),
        (torch.empty(4, 0, 2).transpose(0, 1), True),
        (torch.empty(()), True),
    ],
)
def test_what_is_contiguous_is_so_for_torch_too(tensor: torch.Tensor, is_contiguous: bool) -> None:
    table, _ = decoded(encoded([("w", tensor)], [0], [0]))
    assert table.form.is_contiguous_T.tolist() == [is_contiguous] == [tensor.is_contiguous()]


def form(**changes: Any) -> bytes:
    """Of one tensor of one layout, some of it changed."""
    layout = [changes.pop("dtype", "float32"), changes.pop("shape", (2, 3)), changes.pop("stride", (4, 1))]
    given = {"names": ["rows"], "layouts": [layout], "layout_T": np.array([0], "<i4").tobytes()} | changes
    return msgspec.msgpack.encode(list(given.values()))


def payload(given: bytes | None = None, **changes: Any) -> bytes:
    number = np.array([0], "<i8").tobytes()
    told = {"form": form() if given is None else given, "storage_T": number, "offset_T": number} | changes
    return MAGIC + msgspec.msgpack.encode([[HOST, DEVICE], *told.values()])


def numbers(*listed: int) -> bytes:
    return np.array(listed, "<i8").tobytes()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (payload(storage_T=numbers(2)), "rows: storage 2: the payload has 2"),
        (payload(storage_T=numbers(-1)), "rows: storage -1: the payload has 2"),
        (payload(offset_T=numbers(18)), "rows: the tensor reaches beyond its storage of 96 bytes"),
        (payload(offset_T=numbers(-1)), "rows: offset: expected an integer"),
        (payload(offset_T=numbers(0, 0)), "a column of 1 tensors has 16 bytes"),
        (payload(form(shape=(24, 2), stride=(1, 0))), "rows: the tensor repeats elements"),
        (payload(form(shape=(2,))), "rows: 1 sizes but 2 strides"),
        (payload(form(stride=(2**62, 2**62))), "rows: the tensor reaches beyond any storage"),
        (payload(form(shape=(2**40, 2**40))), "rows: shape: the sizes multiply"),
        (payload(form(dtype="quint8")), "rows: dtype: expected one of float64, "),
        (payload(form(layout_T=np.array([1], "<i4").tobytes())), "none of the 1 given"),
        (payload(form(layout_T=b"\0")), "a column of 1 tensors has 1 bytes"),
        (payload(form(names=["rows", 5])), "names and shapes: "),
        (payload(b"\xc1"), "names and shapes: "),
    ],
)
def test_what_is_wrong_is_refused_and_every_reference_was_noted(data: bytes, problem: str) -> None:
    recorded: list[AnyStorageRef] = []
    with pytest.raises(RequestRejected, match=problem):
        finish(decode_by_slices(data, recorded.append))
    assert sum(isinstance(ref, CudaStorageRef) for ref in recorded) == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"handle": b"/etc/passwd"}, "storage 0: handle: expected the form"),
        ({"manager": b"/tmp/other.sock"}, "storage 0: manager: expected the path"),
    ],
)
def test_a_storage_of_another_form_is_refused_and_the_others_were_noted(
    changes: dict[str, Any], problem: str
) -> None:
    storages = [msgspec.structs.replace(HOST, **changes), DEVICE]
    [data] = Listing(NAMED[:1]).encode([storages], np.array([0]), np.array([0]))
    recorded: list[AnyStorageRef] = []
    with pytest.raises(RequestRejected, match=problem):
        finish(decode_by_slices(data, recorded.append))
    assert [type(ref) for ref in recorded] == [CudaStorageRef]


def test_the_check_of_all_places_is_that_of_each_one() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        shape, stride = generator.integers(0, 5, 2).tolist(), generator.integers(0, 6, 2).tolist()
        storage, offset = generator.integers(0, 2), generator.integers(0, 25)
        data = payload(form(shape=shape, stride=stride), storage_T=numbers(storage), offset_T=numbers(offset))
        end = offset + (1 + sum((n - 1) * m for n, m in zip(shape, stride, strict=True)) if all(shape) else 0)
        num_bytes = (96, 64)[storage]
        fits = end * 4 <= num_bytes and math.prod(shape) * 4 <= num_bytes
        try:
            table, _ = decoded(data)
        except RequestRejected:
            assert not fits
        else:
            assert fits
            assert table.ref(0).offset == offset


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x90\x90\x90", msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_list_of_tensors_is_refused(data: bytes) -> None:
    with pytest.raises(RequestRejected, match="the payload: "):
        finish(decode_by_slices(MAGIC + data, [].append))
