"""What attention needs of a model, of a batch, of the KV pool, and of a backend.

Shapes: T tokens, R requests, P pages, B requests of a graph, N query heads, K KV heads, H head_dim.

Latents are one key head, a part of which is the value: N query heads are as long, outputs as long as a value.
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

# What the step is, its number and how many there are.
Progress = Callable[[str, int, int], None]


def no_progress(what: str, number: int, total: int) -> None:
    """Tell nobody."""


class KVPages(Protocol):
    """The paged keys and values of all layers, [P, page_size, K, H] each; `KVPool` is one."""

    def k(self, layer: int) -> Tensor: ...

    def v(self, layer: int) -> Tensor: ...

    def group(self, layer: int) -> int:
        """The group of layers, by the number that their page ids have in a batch."""
        ...

    def head_scales(self, layer: int) -> HeadScales | None: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all layers of a rank have in common.

    Attributes:
        num_q_heads, num_kv_heads: of this rank.
        dtype: of queries and outputs.
        kv_dtype: of the pool.
        kinds: the kinds of layers that there are, each once.
        rotates_all: whether every number of a head is rotated.
        has_sinks: whether there are layers with sinks, see `LayerAttention`.
        latent: what layers keep in the place of keys and values.
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
        """Numbers of a value, and of a head's output."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads


class GroupPages(NamedTuple):
    """Where the tokens of a pass lie in the layers of one group; fields as of `PagedBatch` and `Pages`."""

    page_table_RP: NDArray[np.int32]
    slots_T: Tensor
    kv_indices: Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The requests of a pass, as layers of one group see them. New tokens lie request after request.

    Attributes:
        num_new_R: new tokens of each request.
        lens_R: tokens of each request with the new ones: what its last new token attends to.
        page_table_RP: int32 page ids of each request; only the first ceil(len / page_size) are meaningful.
        kv_indptr_R1, q_indptr_R1: int32, first page id and first new token of each request, and the ends.
        last_page_len_R: int32, tokens of each request's last page, 1 .. page_size.
        slots_T: int64 on the device, place of each new token in the pool: page · page_size + offset.
        pages: the same lengths, and all page ids, on the device.
        others: of the groups behind the first, if this is the first one's.
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
        """The same requests as each group of layers sees them."""
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
        """The requests with one new token that come first: kernels for prompts suit them badly."""
        others = np.flatnonzero(self.num_new_R != 1)
        return int(others[0]) if len(others) else len(self.num_new_R)


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """A decode batch at addresses that stay: CUDA graphs of B requests read the first B (or B + 1) entries.

    The caller fills them before a replay. A row that only fills up the graph has slot −1, so that nothing is
    stored, and may attend to anything. Its output means nothing.

    Attributes:
        slots_B: int64.
        kv_indptr_B1, kv_indices, last_page_len_B: int32, as in `Pages`.
        others: slots and page ids of the groups of layers behind the first, if this is the first one's.
    """

    slots_B: Tensor
    kv_indptr_B1: Tensor
    kv_indices: Tensor
    last_page_len_B: Tensor
    others: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def groups(self) -> list[DecodeBuffers]:
        """The same batch as each group of layers sees it."""
        others = [
            replace(self, slots_B=slots_B, kv_indices=kv_indices, others=())
            for slots_B, kv_indices in self.others
        ]
        return [self, *others]

    def pages(self, batch_size: int) -> Pages:
        """What the first requests attend to, with one new token each."""
        return Pages(
            torch.arange(batch_size + 1, dtype=torch.int32, device=self.slots_B.device),
            self.kv_indptr_B1[: batch_size + 1],
            self.kv_indices,
            self.last_page_len_B[:batch_size],
        )


class AttentionStep(Protocol):
    """Attention that has been prepared for a step: what a model's layers call."""

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        """Normalise heads, rotate, store keys and values, attend: see `LayerAttention`."""
        ...


class CapturedAttention(AttentionStep, Protocol):
    """The attention of a CUDA graph, which reads its batch from `DecodeBuffers`."""

    def plan(
        self,
        kv_indptr_B1: NDArray[np.int32],
        last_page_len_B: NDArray[np.int32],
        runs: SharedRuns | None = None,
    ) -> None:
        """Get ready for the lengths of one step, without waiting for the device. Nothing has to be done where
        kernels read lengths and pages themselves.

        Args:
            kv_indptr_B1, last_page_len_B: what the buffers hold, or will hold when the graph is replayed.
            runs: who shares which pages, in graphs that read these once; None for nobody.
        """
        return


@dataclass(frozen=True, slots=True)
class GraphFamily:
    """One way in which decode steps attend in CUDA graphs.

    Attributes:
        name: for the log.
        sizes: requests of its graphs, ascending.
        capture: attention of a graph for a number of requests, which reads these buffers.
        suits: whether it is quickest for requests of these lengths, in a graph of this size.
        shares: whether it is the one for steps that are listed by what requests share.
    """

    name: str
    sizes: Sequence[int]
    capture: Callable[[int, DecodeBuffers], CapturedAttention]
    suits: Callable[[NDArray[np.int32], int], bool] = lambda lens_R, size: True
    shares: bool = False


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer: the object that a model calls.

    Attributes:
        layer: its number, which is that of its keys and values in the pool.
        sinks: [N], a score of each query head that takes part in its softmax and has no value; None: none.
    """

    layer: int
    kind: AttentionKind
    sinks: Tensor | None = field(default=None, compare=False)

    def __call__(self, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None, step: AttentionStep) -> Tensor:
        """Normalise heads, rotate, store keys and values, attend.

        Args:
            qkv_TNH: [T, N + 2K, H]: query heads, key heads, value heads, as the projection yields them; of
                latents [T, N + 1, H], with what is rotated first. Whether they hold anything useful
                afterwards is not said.
            rope: cosines and sines of the tokens' positions.
            norms: None for models without.
            step: the attention prepared for the batch.

        Returns:
            Outputs [T, N, H] of the prepared batch, H of a value.
        """
        return step.forward(self, qkv_TNH, rope, norms)


class AttentionBackend(ABC):
    """Writes new keys and values into the pool and attends to everything up to each token's position.

    Attributes:
        captures: whether decode steps can be captured in CUDA graphs.
    """

    captures = False

    @classmethod
    @abstractmethod
    def problem(cls, shape: AttentionShape, device: torch.device) -> str | None:
        """Why it does not serve this shape here, and what would help; None if it does."""

    @classmethod
    def compile(cls, shape: AttentionShape, device: torch.device, progress: Progress, *, whole: bool) -> None:
        """Compile, before any memory is taken, what would otherwise be compiled at first use.

        Args:
            whole: false: what can be done without at first may be compiled later, during forward passes.

        Raises ConfigurationError where a compiler fails.
        """
        return  # as a rule the engine's warm-up is enough

    @abstractmethod
    def __init__(self, kv_pages: KVPages, layers: Sequence[LayerAttention], shape: AttentionShape) -> None:
        """Over a pool, on its device.

        Args:
            kv_pages: the pool; its views stay good whether its memory is there or not.
            layers: of the model.
            shape: one that the backend has no problem with.
        """

    @abstractmethod
    def prepare(self, batch: PagedBatch) -> AttentionStep:
        """Plan for one step, of which there is one at a time."""

    def graph_families(self, batch_sizes: Sequence[int]) -> list[GraphFamily]:
        """How decode steps of these sizes are captured: a step takes the first that suits it.

        The last one suits every step, and has all sizes.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    def is_worth_sharing(self, num_requests: int, num_saved: int, num_pages: int) -> bool:
        """Whether a step is quicker when it does not read `num_saved` of `num_pages` full pages again."""
        return False


# Conversions to and from FP8 are instructions of Ada, Hopper and later.
_FP8_CAPABILITY = (8, 9)


def fp8_problem(shape: AttentionShape, device: torch.device) -> str | None:
    """Why a KV cache in FP8 cannot be had on this device; None where it can, or is not asked for."""
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
    """Outputs that kernels made of stored values, multiplied in place by the values' scales."""
    _, v_scale_K = scales.scales_2K
    num_tokens, _, head_dim = out_TNH.shape
    out_TNH.view(num_tokens, len(v_scale_K), -1, head_dim).mul_(v_scale_K[:, None, None])
    return out_TNH


def kinds_of(layers: Sequence[LayerAttention]) -> tuple[AttentionKind, ...]:
    """The kinds that there are, in the order in which they first occur."""
    return tuple(dict.fromkeys(layer.kind for layer in layers))
