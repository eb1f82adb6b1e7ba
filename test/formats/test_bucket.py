"""Buckets: what goes in comes out, bit by bit, whatever the dtypes, shapes and alignments."""

import pytest
import torch
from hypothesis import given, strategies as st

from ebbtide.formats.bucket import (
    FlattenedTensorBucket,
    FlattenedTensorMetadata,
    check_bucket,
    pack_buckets,
    tensors_in,
)
from ebbtide.srt.errors import RequestRejected

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    # Any bits at all: NaNs with payloads too. A bool is one of two.
    high = 2 if dtype is torch.bool else 256
    seed = draw(st.integers(0, 2**32))
    raw = torch.randint(0, high, (num_bytes,), generator=torch.Generator().manual_seed(seed))
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    if tensor.dim() >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor


named_tensors = st.lists(tensors(), max_size=6).map(
    lambda items: [(f"layer.{index}", tensor) for index, tensor in enumerate(items)]
)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def tensors_of(bucket: FlattenedTensorBucket) -> list[tuple[str, torch.Tensor]]:
    return list(tensors_in(bucket.flattened_tensor, [entry.place for entry in bucket.metadata]))


def assert_same(received: list[tuple[str, torch.Tensor]], sent: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (_, got), (_, expected) in zip(received, sent, strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert bits(got) == bits(expected)


@given(named_tensors, st.integers(0, 9))
def test_round_trip_at_any_alignment(sent: list[tuple[str, torch.Tensor]], shift: int) -> None:
    bucket = FlattenedTensorBucket(sent)
    flat, metadata = bucket.get_flattened_tensor(), bucket.get_metadata()
    assert flat.dtype == torch.uint8
    assert flat.numel() == sum(tensor.numel() * tensor.element_size() for _, tensor in sent)
    assert_same(tensors_of(bucket), sent)
    shifted = torch.cat([torch.zeros(shift, dtype=torch.uint8), flat])[shift:]
    for received_as in (shifted, shifted.view(torch.int8)):
        check_bucket(received_as.dtype, tuple(received_as.shape), received_as.stride(), metadata)
        assert_same(list(tensors_in(received_as, [entry.place for entry in metadata])), sent)


@given(named_tensors, st.integers(1, 300))
def test_packed_buckets_hold_everything_in_order(sent: list[tuple[str, torch.Tensor]], limit: int) -> None:
    buckets = list(pack_buckets(iter(sent), limit))
    assert_same([pair for bucket in buckets for pair in tensors_of(bucket)], sent)
    for bucket in buckets:
        assert bucket.get_metadata()
        assert bucket.get_flattened_tensor().numel() <= limit or len(bucket.get_metadata()) == 1


def test_packing_reads_no_further_than_it_must() -> None:
    produced = []

    def gather() -> object:
        for index in range(100):
            produced.append(index)
            yield f"layer.{index}", torch.zeros(10)

    next(pack_buckets(gather(), 80))  # type: ignore[arg-type]
    assert len(produced) <= 3


def test_any_iterable_makes_a_bucket_and_no_tensors_do_too() -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.int8)}
    for pairs in (tensors.items(), iter(tensors.items())):
        assert_same(tensors_of(FlattenedTensorBucket(pairs)), list(tensors.items()))
    empty = FlattenedTensorBucket([])
    assert (empty.flattened_tensor.numel(), empty.metadata) == (0, [])


def test_the_bucket_is_a_copy() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    bucket = FlattenedTensorBucket([("w", weight)])
    with torch.no_grad():
        weight.zero_()
    [(_, aligned)] = tensors_of(bucket)
    assert aligned.tolist() == [1, 1, 1]
    bucket.get_flattened_tensor().zero_()
    assert not aligned.any(), "it is a view"


def entry(**changes: object) -> FlattenedTensorMetadata:
    fields = {
        "name": "w",
        "shape": torch.Size([2]),
        "dtype": torch.float32,
        "start_idx": 0,
        "end_idx": 8,
        "numel": 8,
    }
    return FlattenedTensorMetadata(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (entry(end_idx=9, numel=9), "not within the 8 bytes"),
        (entry(numel=2), r"numel \(in bytes\) is 2"),
        (entry(shape=torch.Size([3])), "takes 12 bytes, 8 were sent"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(metadata: FlattenedTensorMetadata, message: str) -> None:
    with pytest.raises(RequestRejected, match=message) as refusal:
        check_bucket(torch.uint8, (8,), (1,), [metadata])
    assert "'w'" in refusal.value.message


@pytest.mark.parametrize(
    "flat", [torch.zeros(8), torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)[::2]]
)
def test_what_is_not_a_run_of_bytes_is_refused(flat: torch.Tensor) -> None:
    with pytest.raises(RequestRejected, match="contiguous bytes"):
        check_bucket(flat.dtype, tuple(flat.shape), flat.stride(), [])


def test_a_bucket_holds_something() -> None:
    with pytest.raises(ValueError, match="bucket_bytes"):
        next(pack_buckets([], 0))
