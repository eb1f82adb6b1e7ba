"""Products of up to `MAX_TOKENS` tokens, fused with gate or residual, and for one token with the norm.

Results are the same in every run, since every sum has a fixed order. Callers capture CUDA graphs, in which
the kernels overlap (see `kernels`); they also run outside of graphs.

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
# Columns of a program's weights that are prefetched into the L2 cache while the previous kernel ends.
_PREFETCHED_COLUMNS = 512
# Tiles of eight tokens are slower than tiles of sixteen, whatever their other sizes.
_LEAST_TOKENS = 16
# How many columns of x a program sums, and the most splits of such a sum.
_SHRUNK_COLUMNS, _MOST_RANK_SPLITS = 512, 16


class Shrinking(NamedTuple):
    """The first half of adapters, x Aᵀ, computed by extra programs of a product's kernel.

    Attributes:
        a_SEPK: as in `ProductAdapters`, of one expert.
        slots_T: int32, the slot of each token's adapter; −1: none.
        inner: float32 [splits, T, P·R], partial sums of the result; undefined for tokens without adapter.
    """

    a_SEPK: Tensor
    slots_T: Tensor
    inner: Tensor

    @classmethod
    def of(cls, a_SEPK: Tensor, slots_T: Tensor) -> Shrinking:
        """Allocate `inner` for the tokens of a pass."""
        num_ranks, num_columns = a_SEPK.shape[2:]
        splits = max(1, min(_MOST_RANK_SPLITS, num_columns // _SHRUNK_COLUMNS))
        shape = (splits, len(slots_T), num_ranks)
        return cls(a_SEPK, slots_T, torch.empty(shape, dtype=torch.float32, device=a_SEPK.device))

    def arguments(self, programs_at_once: int) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        """How many extra ids of `programs_at_once` programs each are needed, and arguments of the kernel."""
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
    """Write x Wᵀ (+ b), or rms_norm(x) Wᵀ (+ b), into `out_TO` [T, O], or add it; rounds once.

    1 ≤ T ≤ MAX_TOKENS.

    Args:
        x_TK, weight, out_TO: contiguous.
        norm_weight_K, eps: of the norm, only for one token; None: there is no norm.
        config: tile sizes; None: the best ones for the shape.
        scales: of an 8-bit weight, one for each block of 128 × 128; only for one token, which keeps its
            dtype.
        gated: the activation; the result is activation(gate) · up, with the gates' rows of the weight first.
        add: whether to add the result to `out_TO`.
        shrinking: adapters' first half to compute too; only without norm and gate.
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
    # Splits have whole tiles, and none is empty.
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
