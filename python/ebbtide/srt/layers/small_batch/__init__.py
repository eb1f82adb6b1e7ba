"""Products of up to `MAX_TOKENS` tokens with gate or residual, and of one token the norm, in the same kernel.

Results do not vary from run to run: every sum has a fixed order. The callers capture CUDA graphs, in which
the kernels overlap (see `kernels`); outside of graphs they run too.

Shapes: T tokens, D inputs, O outputs, K columns, I intermediate size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ebbtide.srt.layers.kernels.launch import arrivals, overlap_options
from ebbtide.srt.layers.kernels.tiles import (
    TOKEN_BUCKETS,
    Config,
    MatvecConfig,
    ProductConfig,
    Shape,
    choose_product,
)
from ebbtide.srt.layers.norm import Activation
from ebbtide.srt.layers.small_batch import fp8_products, kernels

MAX_TOKENS = TOKEN_BUCKETS[-1]
# Columns of a program's weights that are brought into the second-level cache while the kernel before ends.
_PREFETCHED_COLUMNS = 512
# Products of eight tokens take longer than those of sixteen, whatever their tiles.
_LEAST_TOKENS = 16
# Columns of x that are summed by one program, and the most parts that a sum is cut into.
_SHRUNK_COLUMNS, _MOST_RANK_SPLITS = 512, 16


class Shrinking(NamedTuple):
    """The first half of adapters, x Aᵀ, which programs of their own compute beside a product's.

    Attributes:
        a_SEPK: as `ProductAdapters` has it, of one expert.
        slots_T: int32, whose adapter each token has; −1: none.
        inner: float32 [splits, T, P·R], parts that add up to it; undefined for tokens without adapter.
    """

    a_SEPK: Tensor
    slots_T: Tensor
    inner: Tensor

    @classmethod
    def of(cls, a_SEPK: Tensor, slots_T: Tensor) -> Shrinking:
        """With room for the result."""
        num_ranks, num_columns = a_SEPK.shape[2:]
        splits = max(1, min(_MOST_RANK_SPLITS, num_columns // _SHRUNK_COLUMNS))
        shape = (splits, len(slots_T), num_ranks)
        return cls(a_SEPK, slots_T, torch.empty(shape, dtype=torch.float32, device=a_SEPK.device))

    def arguments(self, programs_at_once: int) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        """How many program numbers shrink, `programs_at_once` programs each, and what kernels take."""
        num_slots, (splits, num_tokens, num_ranks) = len(self.a_SEPK), self.inner.shape
        tiles = triton.cdiv(num_ranks, kernels.SHRUNK_RANKS.value)
        count = triton.cdiv(splits * tiles * min(num_slots, num_tokens), programs_at_once)
        constants = {"SHRINKING": True, "NUM_RANKS": num_ranks, "RANK_SPLITS": splits}
        constants["BY_TOKEN"] = num_tokens <= num_slots
        return count, (self.a_SEPK, self.slots_T, self.inner, self.a_SEPK.stride(0), count), constants


_NOTHING_BESIDE: tuple[int, tuple[Any, ...], dict[str, Any]] = (
    *(0, (None, None, None, 0, 0)),
    {"SHRINKING": False, "NUM_RANKS": 0, "RANK_SPLITS": 1, "BY_TOKEN": False},
)


def multiply(
    x_TK: Tensor,
    norm_weight_K: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out_TO: Tensor,
    *,
    gated: Activation | None = None,
    add: bool = False,
    config: Config | None = None,
    scales: Tensor | None = None,
    shrinking: Shrinking | None = None,
) -> None:
    """x Wᵀ (+ b), or of rms_norm(x), into `out_TO` [T, O], or added to it, rounded once. 1 ≤ T ≤ MAX_TOKENS.

    Args:
        x_TK, weight, out_TO: contiguous.
        norm_weight_K, eps: of the norm of one token; without a weight there is none.
        config: block sizes; None: those that suit the shape.
        scales: of a weight of 8 bits, one for each block of 128 × 128; of one token, which keeps its dtype.
        gated: the activation of the gates, whose rows of the weight come first: the result is that · up.
        add: whether the result is added.
        shrinking: what is computed beside; nothing is normalised or gated then.
    """
    assert 1 <= len(x_TK) <= (MAX_TOKENS if scales is None else 1), f"{len(x_TK)} tokens"
    assert all(x.is_contiguous() for x in (x_TK, weight, out_TO))
    if scales is not None:
        quantized = (x_TK, norm_weight_K, eps, weight, scales, bias, out_TO)
        fp8_products.multiply_one(*quantized, gated=gated, add=add)
        return
    if config is None:
        config = choose_product(
            len(x_TK), Shape(out_TO.shape[1], x_TK.shape[1], gated is not None), x_TK.device
        )
    switches = {
        "GATED": gated is not None,
        "GELU": gated == "gelu_tanh",
        "BIAS": bias is not None,
        "ADD": add,
    }
    switches |= overlap_options(x_TK)
    if isinstance(config, MatvecConfig):
        _matvec(x_TK, norm_weight_K, eps, weight, bias, out_TO, config, switches, shrinking)
        return
    assert norm_weight_K is None
    _product(x_TK, weight, bias, out_TO, config, switches, shrinking)


def _matvec(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: MatvecConfig,
    switches: dict[str, Any],
    shrinking: Shrinking | None,
) -> None:
    num_rows, num_columns = out.shape[1], x.shape[1]
    count, beside, constants = _NOTHING_BESIDE if shrinking is None else shrinking.arguments(1)
    kernels.matvec[(count + triton.cdiv(num_rows, config.block_rows),)](
        x,
        norm,
        weight,
        bias,
        out,
        *beside,
        num_rows,
        eps,
        NUM_COLUMNS=num_columns,
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLUMNS=config.block_columns,
        FOLD_NORM=norm is not None,
        EVEN=num_rows % config.block_rows == 0 and num_columns % config.block_columns == 0,
        num_warps=config.num_warps,
        num_stages=1,
        **constants,
        **switches,
    )


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: ProductConfig,
    switches: dict[str, Any],
    shrinking: Shrinking | None,
) -> None:
    num_tokens, num_columns = x.shape
    num_rows = out.shape[1]
    # Whole tiles per split, and no split without columns.
    split_columns = (
        triton.cdiv(triton.cdiv(num_columns, config.num_splits), config.block_columns) * config.block_columns
    )
    num_splits = triton.cdiv(num_columns, split_columns)
    num_blocks = triton.cdiv(num_rows, config.block_rows)
    partial = arrived = None
    if num_splits > 1:
        partial = torch.empty(num_splits, num_tokens, len(weight), dtype=torch.float32, device=x.device)
        arrived = arrivals(x.device, triton.next_power_of_2(num_blocks))
    count, beside, constants = _NOTHING_BESIDE if shrinking is None else shrinking.arguments(num_splits)
    kernels.product[(count + num_blocks, num_splits)](
        x,
        weight,
        bias,
        out,
        partial,
        arrived,
        *beside,
        num_tokens,
        num_rows,
        NUM_COLUMNS=num_columns,
        SPLIT_COLUMNS=split_columns,
        BLOCK_TOKENS=max(_LEAST_TOKENS, triton.next_power_of_2(num_tokens)),
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLUMNS=config.block_columns,
        PREFETCHED_COLUMNS=min(_PREFETCHED_COLUMNS, triton.next_power_of_2(split_columns)),
        EVEN=num_rows % config.block_rows == 0 and num_columns % split_columns == 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
        **switches,
    )
