"""Flattened buckets: many tensors of any dtypes as one contiguous tensor of bytes, with an index.

All positions are in bytes. There is no padding. Source: wire_api section 4.1.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from ebbtide.formats.stored_tensor import StoredTensor
from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.errors import RequestRejected

AnyTensor = TypeVar("AnyTensor", torch.Tensor, torch.Tensor | StoredTensor)


# Tensors in a flat tensor of bytes, each with the offset of its first byte.
Places: TypeAlias = Sequence[tuple[TensorHeader, int]]


def without_padding(headers: Sequence[TensorHeader]) -> Places:
    """The places of tensors that follow each other without gaps."""
    starts = itertools.accumulate((header.num_bytes for header in headers), initial=0)
    return list(zip(headers, starts, strict=False))


def tensors_in(flat: AnyTensor, places: Places) -> Iterator[tuple[str, AnyTensor]]:
    """Yield the tensors in a flat tensor: views, or copies of those that are not aligned to their dtype.

    Args:
        flat: 1-D and contiguous, of any dtype. Every place lies within it.
    """
    if isinstance(flat, StoredTensor):
        for header, start in places:
            first = flat.offset + start
            yield header.name, StoredTensor.contiguous(flat.storage, first, header.shape, header.dtype)
        return
    run = flat.view(torch.uint8)
    for header, start in places:
        piece = run[start : start + header.num_bytes]
        if piece.storage_offset() % header.dtype.itemsize:
            piece = piece.clone()
        yield header.name, piece.view(header.dtype).reshape(header.shape)


@dataclass(frozen=True)
class FlattenedTensorMetadata:
    """Place of a tensor in a bucket: bytes `start_idx` up to `end_idx`. `numel` is the number of bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int

    @property
    def place(self) -> tuple[TensorHeader, int]:
        return TensorHeader(self.name, tuple(self.shape), self.dtype), self.start_idx


class FlattenedTensorBucket:
    """A bucket with copies of tensors.

    Args:
        named_tensors: (name, tensor) pairs, all on one device.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        listed = list(named_tensors)
        self.metadata = _index([TensorHeader(name, tuple(one.shape), one.dtype) for name, one in listed])
        self.flattened_tensor = _flatten(listed, self.metadata)

    def get_flattened_tensor(self) -> torch.Tensor:
        return self.flattened_tensor

    def get_metadata(self) -> list[FlattenedTensorMetadata]:
        return self.metadata


def pack_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[FlattenedTensorBucket]:
    """Pack tensors, in order, into buckets of at most `bucket_bytes`; a larger tensor gets its own.

    `named_tensors` is read lazily: with a generator that gathers shards, only one bucket of gathered tensors
    exists at a time. ValueError: `bucket_bytes` is not positive.
    """
    return map(FlattenedTensorBucket, grouped(named_tensors, bucket_bytes))


def grouped(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group tensors as `pack_buckets` does, without packing them."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes: expected a positive number of bytes, got {bucket_bytes}")
    pending: list[tuple[str, torch.Tensor]] = []
    pending_bytes = 0
    for name, tensor in named_tensors:
        if pending and pending_bytes + tensor.nbytes > bucket_bytes:
            yield pending
            pending, pending_bytes = [], 0
        pending.append((name, tensor))
        pending_bytes += tensor.nbytes
    if pending:
        yield pending


def _index(headers: Sequence[TensorHeader]) -> list[FlattenedTensorMetadata]:
    return [
        FlattenedTensorMetadata(
            one.name, torch.Size(one.shape), one.dtype, start, start + one.num_bytes, one.num_bytes
        )
        for one, start in without_padding(headers)
    ]


def _flatten(
    named_tensors: Sequence[tuple[str, torch.Tensor]], metadata: Sequence[FlattenedTensorMetadata]
) -> torch.Tensor:
    device = named_tensors[0][1].device if named_tensors else torch.device("cpu")
    num_bytes = metadata[-1].end_idx if metadata else 0
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for (_, tensor), entry in zip(named_tensors, metadata, strict=True):
        flat[entry.start_idx : entry.end_idx] = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat


def check_bucket(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    metadata: Sequence[FlattenedTensorMetadata],
) -> None:
    """Check that a bucket is a flat tensor of bytes, and its index fits. Raises RequestRejected.

    Args:
        dtype, shape, stride: of the flat tensor.
    """
    check_bytes(dtype, shape, stride)
    for entry in metadata:
        _check_entry(entry, shape[0])


def check_bytes(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Check that a tensor is 1-D, contiguous, uint8 or int8. Raises RequestRejected."""
    if len(shape) != 1 or dtype not in (torch.uint8, torch.int8) or (shape[0] > 1 and stride != (1,)):
        raise RequestRejected(
            f"flattened_tensor: expected contiguous bytes (1-D uint8 or int8), got {dtype} of shape {shape}"
        )


def _check_entry(entry: FlattenedTensorMetadata, total_bytes: int) -> None:
    where = f"metadata of {entry.name[:200]!r}"
    if not 0 <= entry.start_idx <= entry.end_idx <= total_bytes:
        raise RequestRejected(
            f"{where}: bytes {entry.start_idx} to {entry.end_idx} are not within the {total_bytes} bytes sent"
        )
    if entry.numel != entry.end_idx - entry.start_idx:
        raise RequestRejected(f"{where}: numel (in bytes) is {entry.numel}, expected end_idx - start_idx")
    expected = math.prod(entry.shape) * entry.dtype.itemsize
    if expected != entry.numel:
        raise RequestRejected(
            f"{where}: {entry.dtype} of shape {tuple(entry.shape)} takes {expected} bytes, "
            f"{entry.numel} were sent"
        )
