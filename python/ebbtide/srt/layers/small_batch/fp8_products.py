"""Products of few tokens with weights of 8 bits: how the kernels of `fp8_kernels` are launched.

Shapes: T tokens, K columns, O outputs, G = K / 128 groups.
"""

import torch
from torch import Tensor

from ebbtide.srt.layers.kernels.launch import overlap_options
from ebbtide.srt.layers.kernels.tiles import (
    PassingConfig,
    QuantizedConfig,
    StationaryConfig,
    choose_one,
    choose_quantized,
)
from ebbtide.srt.layers.norm import Activation
from ebbtide.srt.layers.small_batch import fp8_kernels

_COMBINED_ROWS = 512


def multiply_one(
    x_1K: Tensor,
    norm_weight_K: Tensor | None,
    eps: float,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_1O: Tensor,
    config: StationaryConfig | PassingConfig | None = None,
    *,
    gated: Activation | None = None,
    add: bool = False,
) -> None:
    """x Wᵀ (+ b) of one token; arguments as in `small_batch.multiply`."""
    num_columns, num_rows = x_1K.shape[1], out_1O.shape[1]
    config = config or choose_one(num_columns, gated=gated is not None)
    words = torch.int64 if x_1K.is_cuda else x_1K.dtype
    operands = (
        x_1K.view(words),
        norm_weight_K.view(words) if norm_weight_K is not None else None,
        weight.view(torch.int32),
        scales,
        bias,
        out_1O,
        num_rows,
        eps,
    )
    switches = {
        "NUM_COLUMNS": num_columns,
        "BLOCK_ROWS": config.block_rows,
        "FOLD_NORM": norm_weight_K is not None,
        "GATED": gated is not None,
        "GELU": gated == "gelu_tanh",
        "BIAS": bias is not None,
        "ADD": add,
        "ASM": x_1K.is_cuda,
        "num_warps": config.num_warps,
        "num_stages": 1,
        **overlap_options(x_1K),
    }
    if isinstance(config, PassingConfig):
        grid = (num_rows // config.block_rows,)
        fp8_kernels.passing[grid](*operands, BLOCK_WORDS=config.block_words, **switches)
        return
    fp8_kernels.stationary[(num_rows // (config.block_rows * config.num_steps),)](
        *operands, BLOCK_WORDS=1 << (num_columns // 4 - 1).bit_length(), STEPS=config.num_steps, **switches
    )


def multiply_quantized(
    values_TK: Tensor,
    x_scales_TG: Tensor,
    weight: Tensor,
    scales: Tensor,
    out_TO: Tensor,
    config: QuantizedConfig | None = None,
    *,
    gated: Activation | None = None,
    add: bool = False,
    out_scales_TG: Tensor | None = None,
) -> None:
    """x Wᵀ into `out_TO` [T, O], or added to it, or activation(gate) · up of it. 1 ≤ T ≤ 64.

    Args:
        values_TK, x_scales_TG: of `quantize_tokens`; they and `out_scales_TG` have more rows than T.
        weight, scales: of 8 bits, by blocks of 128 × 128.
        out_scales_TG: the gated product is to be quantised, as `quantize_tokens` would do it; its values go
            into `out_TO`. Not where the columns are divided: see `tiles.gates_at_once`.
    """
    num_columns, num_rows = values_TK.shape[1], out_TO.shape[1]
    num_tokens = len(out_TO)
    config = config or choose_quantized(num_tokens, num_rows, num_columns)
    partial = None
    if config.num_splits > 1:
        shape = config.num_splits, num_tokens, len(weight)
        partial = torch.empty(shape, dtype=torch.float32, device=weight.device)
    switches = {
        "GATED": gated is not None,
        "GELU": gated == "gelu_tanh",
        "ADD": add,
        **overlap_options(values_TK),
    }
    grid = (num_rows // config.block_rows, config.num_splits, -(-num_tokens // config.block_tokens))
    fp8_kernels.quantized[grid](
        values_TK,
        x_scales_TG,
        weight,
        scales,
        out_TO,
        out_scales_TG,
        partial,
        num_tokens,
        len(values_TK),
        num_rows,
        NUM_COLUMNS=num_columns,
        SPLIT_COLUMNS=num_columns // config.num_splits,
        BLOCK_TOKENS=config.block_tokens,
        BLOCK_ROWS=config.block_rows,
        QUANTIZED=out_scales_TG is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **switches,
    )
    if partial is not None:
        fp8_kernels.combine[(-(-num_rows // _COMBINED_ROWS), num_tokens)](
            partial,
            out_TO,
            num_tokens,
            num_rows,
            NUM_SPLITS=config.num_splits,
            BLOCK_ROWS=_COMBINED_ROWS,
            num_warps=4,
            **switches,
        )
