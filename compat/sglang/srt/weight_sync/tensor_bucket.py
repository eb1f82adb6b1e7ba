"""Ebbtide's buckets, with an index class that pickles under SGLang's path, so that SGLang can read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ebbtide.formats import bucket


@dataclass(frozen=True)
class FlattenedTensorMetadata(bucket.FlattenedTensorMetadata):
    """Place of a tensor in a bucket. `start_idx`, `end_idx` and `numel` are in bytes."""


class FlattenedTensorBucket(bucket.FlattenedTensorBucket):
    """A bucket, made of `named_tensors`, or of `flattened_tensor` (not copied) and `metadata`.

    Raises:
        ValueError: neither of these, or both.
        RequestRejected: the metadata does not fit the tensor.
    """

    supports_multi_dtypes: ClassVar[bool] = True

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
        flattened_tensor: torch.Tensor | None = None,
        metadata: Sequence[bucket.FlattenedTensorMetadata] | None = None,
    ) -> None:
        if named_tensors is not None and flattened_tensor is None and metadata is None:
            super().__init__(named_tensors)
        elif named_tensors is None and flattened_tensor is not None and metadata is not None:
            flat = flattened_tensor
            bucket.check_bucket(flat.dtype, tuple(flat.shape), flat.stride(), metadata)
            self.flattened_tensor, self.metadata = flat.view(torch.uint8), list(metadata)
        else:
            raise ValueError("give named_tensors, or flattened_tensor and metadata, and not both")
        self.metadata = [FlattenedTensorMetadata(**vars(entry)) for entry in self.metadata]

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The (name, tensor) pairs: views, or copies of those that are not aligned to their dtype."""
        return list(bucket.tensors_in(self.flattened_tensor, [entry.place for entry in self.metadata]))
