"""Ebbtide's buckets, with an index whose class is pickled by this path, which a real SGLang reads too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ebbtide.formats import bucket


@dataclass(frozen=True)
class FlattenedTensorMetadata(bucket.FlattenedTensorMetadata):
    """Where one tensor lies in a bucket; `start_idx`, `end_idx` and `numel` are bytes."""


class FlattenedTensorBucket(bucket.FlattenedTensorBucket):
    """A bucket, of `named_tensors`, or of `flattened_tensor` and `metadata`."""

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
        flattened_tensor: torch.Tensor | None = None,
        metadata: Sequence[bucket.FlattenedTensorMetadata] | None = None,
    ) -> None:
        super().__init__(named_tensors, flattened_tensor, metadata)
        self.metadata = [FlattenedTensorMetadata(**vars(entry)) for entry in self.metadata]
