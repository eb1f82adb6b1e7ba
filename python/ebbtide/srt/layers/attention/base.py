"""What attention needs of a batch, of the KV pool, and of a backend.

Shapes: T tokens, R requests, P pages, N heads, H head_dim.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


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


class AttentionBackend(Protocol):
    """Writes new keys and values into the pool and attends to everything up to each token's position."""

    def prepare(self, batch: PagedBatch) -> None:
        """Plan for one step; called once, before the layers."""
        ...

    def forward(self, layer: int, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor) -> Tensor:
        """Outputs [T, N, H] of the prepared batch; the keys and values have as many heads as the pool."""
        ...
