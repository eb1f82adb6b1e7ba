"""What attention needs of a batch, of the KV pool, and of a backend.

Shapes: T tokens, R requests, P pages, N query heads, K KV heads, H head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.rotary import Rope


class KVPages(Protocol):
    """The paged keys and values of all layers; `KVPool` is one."""

    def k(self, layer: int) -> Tensor: ...

    def v(self, layer: int) -> Tensor: ...


class PagedBatch(Protocol):
    """The part of a forward batch that attention reads. New tokens lie request after request.

    Attributes:
        num_new_R: new tokens of each request.
        lens_R: tokens of each request with the new ones: what its last new token attends to.
        page_table_RP: int32 page ids of each request; only the first ceil(len / page_size) are meaningful.
        slots_T: int64, place of each new token in the pool: page · page_size + offset.
    """

    @property
    def num_new_R(self) -> NDArray[np.int32]: ...

    @property
    def lens_R(self) -> NDArray[np.int32]: ...

    @property
    def page_table_RP(self) -> NDArray[np.int32]: ...

    @property
    def slots_T(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS normalisation of every query and key head, before the rotation.

    Attributes:
        q_weight, k_weight: [H].
        eps: added to the mean of squares.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class AttentionBackend(Protocol):
    """Writes new keys and values into the pool and attends to everything up to each token's position."""

    def prepare(self, batch: PagedBatch) -> None:
        """Plan for one step; called once, before the layers."""
        ...

    def forward(self, layer: int, qkv_TNH: Tensor, rope: Rope, head_norms: HeadNorms | None) -> Tensor:
        """Normalise heads, rotate, store keys and values, attend.

        Args:
            qkv_TNH: [T, N + 2K, H]: query heads, key heads, value heads, as the projection yields them.
                Whether they hold anything useful afterwards is not said.
            rope: cosines and sines of the tokens' positions.
            head_norms: None for models without.

        Returns:
            Outputs [T, N, H] of the prepared batch.
        """
        ...
