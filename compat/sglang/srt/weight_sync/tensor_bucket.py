"""Ebbtide's buckets, with an index whose class is pickled by this path, which a real SGLang reads too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ebbtide.formats import bucket


@dataclass(frozen=True)
class FlattenedTensorMetadata(bucket.FlattenedTensorMetadata):
    """Where one tensor lies in a bucket; `start_idx`, `end_idx` and `numel` are bytes."""


class FlattenedTensorBucket(bucket.FlattenedTensorBucket):
    """A bucket, of `named_tensors`, or of `flattened_tensor` (not copied) and `metadata`."""

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
        """The (name, tensor) pairs; views of the bytes where alignment allows it, copies elsewhere."""
        return list(bucket.tensors_in(self.flattened_tensor, [entry.place for entry in self.metadata]))
