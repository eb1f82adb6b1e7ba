"""The interfaces of attention: what it needs of a model, a batch and the KV pool, and what a backend is.

Shapes: T tokens, R requests, P pages, B requests of a graph, N query heads, K KV heads, H head_dim.

Latents are a single key head, the last part of which is also the value. Query heads are as long as the latent
row, outputs as long as a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.attention.shared_runs import SharedRuns
from ebbtide.srt.layers.heads import AttentionKind, HeadNorms, Pages, Rope
from ebbtide.srt.layers.kernels.launch import compute_capability
from ebbtide.srt.mem_cache import Latent
from ebbtide.srt.mem_cache.kv_scales import FP8, HeadScales

# Called with a description of the work, how many steps of it are done, and how many there are.
Progress = Callable[[str, int, int], None]


def no_progress(what: str, number: int, total: int) -> None:
    """Ignore progress."""


class KVPages(Protocol):
    """The paged keys and values [P, page_size, K, H] of each layer. `KVPool` implements it."""

    def k(self, layer: int) -> Tensor: ...

    def v(self, layer: int) -> Tensor: ...

    def group(self, layer: int) -> int:
        """The number of the layer's group. In a batch, each group has its own page ids."""
        ...

    def head_scales(self, layer: int) -> HeadScales | None: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all layers of a rank have in common.

    Attributes:
        num_q_heads, num_kv_heads: of this rank.
        dtype: of queries and outputs.
        kv_dtype: of the pool.
        kinds: the different kinds of layers.
        rotates_all: whether whole heads are rotated, not only a part of each.
        has_sinks: whether any layer has sinks, see `LayerAttention`.
        latent: what layers cache instead of keys and values; None: they cache keys and values.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kinds: tuple[AttentionKind, ...]
    rotates_all: bool = True
    has_sinks: bool = False
    latent: Latent | None = None

    @property
    def value_dim(self) -> int:
        """The length of a value, and of a head's output."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def group(self) -> int:
        """How many query heads share a KV head."""
        return self.num_q_heads // self.num_kv_heads


class GroupPages(NamedTuple):
    """The page ids and slots of one group of layers; fields as in `PagedBatch` and `Pages`."""

    page_table_RP: NDArray[np.int32]
    slots_T: Tensor
    kv_indices: Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The requests of a pass, as the layers of one group see them. New tokens are in the order of requests.

    Attributes:
        num_new_R: new tokens of each request.
        lens_R: tokens of each request including the new ones, all of which its last new token may attend to.
        page_table_RP: int32 page ids of each request; only the first ceil(len / page_size) are meaningful.
        kv_indptr_R1, q_indptr_R1: int32, index of each request's first page id and first new token, and the
            ends.
        last_page_len_R: int32, tokens in each request's last page, 1 .. page_size.
        slots_T: int64 on the device, where each new token is stored in the pool: page · page_size + offset.
        pages: the same lengths, and all page ids, on the device.
        others: page ids and slots of the other groups, if this is the first group's batch.
    """

    num_new_R: NDArray[np.int32]
    lens_R: NDArray[np.int32]
    page_table_RP: NDArray[np.int32]
    kv_indptr_R1: NDArray[np.int32]
    q_indptr_R1: NDArray[np.int32]
    last_page_len_R: NDArray[np.int32]
    slots_T: Tensor
    pages: Pages
    others: Sequence[GroupPages] = ()

    @property
    def groups(self) -> list[PagedBatch]:
        """This batch as each group of layers sees it."""
        return [
            self,
            *(
                replace(
                    self,
                    page_table_RP=other.page_table_RP,
                    slots_T=other.slots_T,
                    pages=replace(self.pages, kv_indices=other.kv_indices),
                    others=(),
                )
                for other in self.others
            ),
        ]

    @property
    def num_decoding(self) -> int:
        """How many first requests have one new token each. Kernels for prompts suit these badly."""
        others = np.flatnonzero(self.num_new_R != 1)
        return int(others[0]) if len(others) else len(self.num_new_R)


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """A decode batch at fixed addresses. CUDA graphs of B requests read the first B (or B + 1) entries.

    The caller fills the buffers before a replay. A padding row has slot −1, so that nothing is stored; it may
    attend to anything, and its output means nothing.

    Attributes:
        slots_B: int64.
        kv_indptr_B1, kv_indices, last_page_len_B: int32, as in `Pages`.
        others: slots and page ids of the other groups of layers, if these buffers are the first group's.
    """

    slots_B: Tensor
    kv_indptr_B1: Tensor
    kv_indices: Tensor
    last_page_len_B: Tensor
    others: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def groups(self) -> list[DecodeBuffers]:
        """These buffers as each group of layers sees them."""
        others = [
            replace(self, slots_B=slots_B, kv_indices=kv_indices, others=())
            for slots_B, kv_indices in self.others
        ]
        return [self, *others]

    def pages(self, batch_size: int) -> Pages:
        """The pages that the first `batch_size` requests attend to, with one new token each."""
        return Pages(
            torch.arange(batch_size + 1, dtype=torch.int32, device=self.slots_B.device),
            self.kv_indptr_B1[: batch_size + 1],
            self.kv_indices,
            self.last_page_len_B[:batch_size],
        )


class AttentionStep(Protocol):
    """Attention that is prepared for one pass. Layers call it."""

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        """Normalise heads, rotate, store keys and values, and attend: see `LayerAttention`."""
        ...


class CapturedAttention(AttentionStep, Protocol):
    """The attention of a CUDA graph, which reads its batch from `DecodeBuffers`."""

    def plan(
        self,
        kv_indptr_B1: NDArray[np.int32],
        last_page_len_B: NDArray[np.int32],
        runs: SharedRuns | None = None,
    ) -> None:
        """Prepare for the lengths of one step, without waiting for the device. The default does nothing, for
        kernels that read lengths and pages themselves.

        Args:
            kv_indptr_B1, last_page_len_B: what the buffers hold, or will hold at the replay.
            runs: which requests share which pages, for graphs that read these once; None: none do.
        """
        return


@dataclass(frozen=True, slots=True)
class GraphFamily:
    """One way of attending in decode steps that is captured in CUDA graphs.

    Attributes:
        name: for the log.
        sizes: batch sizes of its graphs, ascending.
        capture: makes the attention of a graph of a batch size, over these buffers.
        suits: whether it is the fastest for requests of these lengths in a graph of this size.
        shares: whether it is the one for steps whose requests share pages.
    """

    name: str
    sizes: Sequence[int]
    capture: Callable[[int, DecodeBuffers], CapturedAttention]
    suits: Callable[[NDArray[np.int32], int], bool] = lambda lens_R, size: True
    shares: bool = False


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer, which the model calls.

    Attributes:
        layer: its number, under which the pool has its keys and values.
        sinks: [N], for each query head a score that is included in the softmax without a value; None: none.
    """

    layer: int
    kind: AttentionKind
    sinks: Tensor | None = field(default=None, compare=False)

    def __call__(self, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None, step: AttentionStep) -> Tensor:
        """Normalise heads, rotate, store keys and values, and attend.

        Args:
            qkv_TNH: [T, N + 2K, H], query heads, key heads and value heads, as the projection yields them;
                for latents [T, N + 1, H], rotated parts first. Its contents may be overwritten.
            rope: cosines and sines of the tokens' positions.
            norms: None: the model has no norms of heads.
            step: the attention prepared for the batch.

        Returns:
            Outputs [T, N, H], where H is the length of a value.
        """
        return step.forward(self, qkv_TNH, rope, norms)


class AttentionBackend(ABC):
    """Writes new keys and values into the pool, and attends to everything up to each token's position.

    Attributes:
        captures: whether decode steps can be captured in CUDA graphs.
    """

    captures = False

    @classmethod
    @abstractmethod
    def problem(cls, shape: AttentionShape, device: torch.device) -> str | None:
        """Why this backend does not serve the shape on the device, and what would help; None if it does."""

    @classmethod
    def compile(cls, shape: AttentionShape, device: torch.device, progress: Progress, *, whole: bool) -> None:
        """Compile kernels before any memory is taken that would otherwise be compiled at their first use.

        Args:
            whole: false: kernels that have a substitute may be compiled later, during forward passes.

        Raises ConfigurationError: a compiler fails.
        """
        return  # most backends need only the engine's warm-up

    @abstractmethod
    def __init__(self, kv_pages: KVPages, layers: Sequence[LayerAttention], shape: AttentionShape) -> None:
        """Set up for a pool, on its device.

        Args:
            kv_pages: the pool. Its views remain valid while its memory is released.
            layers: of the model.
            shape: one for which `problem` returned None.
        """

    @abstractmethod
    def prepare(self, batch: PagedBatch) -> AttentionStep:
        """Prepare for one pass. Only the latest one is valid."""

    def graph_families(self, batch_sizes: Sequence[int]) -> list[GraphFamily]:
        """The ways in which decode steps of these sizes are captured. A step takes the first that suits it.

        The last one must suit every step and have all sizes.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    def is_worth_sharing(self, num_requests: int, num_saved: int, num_pages: int) -> bool:
        """Whether a step is faster if it reads `num_saved` of its `num_pages` full pages only once."""
        return False


# Ada, Hopper and later have instructions that convert to and from FP8.
_FP8_CAPABILITY = (8, 9)


def fp8_problem(shape: AttentionShape, device: torch.device) -> str | None:
    """Why the KV cache cannot be in FP8 on this device; None if it can, or need not be."""
    if shape.kv_dtype == FP8 and shape.latent is not None:
        return "latents are not kept in FP8: expected kv_cache_dtype=auto"
    if shape.kv_dtype != FP8 or device.type != "cuda":
        return None
    capability = compute_capability(device)
    if capability >= _FP8_CAPABILITY:
        return None
    needed, found = (".".join(map(str, version)) for version in (_FP8_CAPABILITY, capability))
    return f"a KV cache in FP8 needs a GPU of compute capability {needed} or later, this one has {found}"


def scaled_outputs_(out_TNH: Tensor, scales: HeadScales) -> Tensor:
    """Multiply outputs in place by the scales of values, which kernels do not apply."""
    _, v_scale_K = scales.scales_2K
    num_tokens, _, head_dim = out_TNH.shape
    out_TNH.view(num_tokens, len(v_scale_K), -1, head_dim).mul_(v_scale_K[:, None, None])
    return out_TNH


def kinds_of(layers: Sequence[LayerAttention]) -> tuple[AttentionKind, ...]:
    """The different kinds of layers, in order of first occurrence."""
    return tuple(dict.fromkeys(layer.kind for layer in layers))
