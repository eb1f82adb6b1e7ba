"""Products of activations and weights in 8 bits (e4m3), with a scale for every 128 columns.

Activations are quantised by token and group of 128 columns, weights by blocks of 128 × 128. Tensor cores add
up 128 products at a time, and these sums are scaled and added up in float32, as in DeepSeek-V3's report
(https://arxiv.org/abs/2412.19437, section 3.3). cuBLAS, called through torch, takes half the time of the
kernel here, which serves for sizes that cuBLAS does not take.

Shapes: T tokens, K columns, O outputs, G = K / 128 groups.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.fp8 import blockscale
from ebbtide.srt.layers.kernels.fp8.quantize import in_eight_bits
from ebbtide.srt.layers.kernels.instructions import announce, lead, wait
from ebbtide.srt.layers.kernels.launch import overlap_options
from ebbtide.srt.layers.kernels.norm import activate

GROUP = 128
_GROUPS_AT_ONCE = 16


def quantize_tokens(
    x_TK: Tensor, norm_weight_K: Tensor | None = None, eps: float = 0.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Quantise x, or rms_norm(x), to e4m3. Returns values [T', K] and scales [T', G], contiguous along T'.

    T' is T rounded up to a multiple of 4, which cuBLAS requires, and to at least 32, for which it is as fast;
    or to whole tiles of FlashInfer's kernel, if that is available. Rows after T are padding without meaning.

    Args:
        x_TK: contiguous. K must be a multiple of 128.
        norm_weight_K, eps, offset: of the norm; None: there is no norm.
    """
    num_tokens, num_columns = x_TK.shape
    values_TK, scales_TG = room_for_tokens(num_tokens, num_columns, x_TK.device)
    _quantize[(num_tokens,)](
        x_TK,
        norm_weight_K,
        values_TK,
        scales_TG,
        len(values_TK),
        eps,
        offset,
        COLUMNS=num_columns,
        GROUPS=triton.next_power_of_2(num_columns // GROUP),
        NORM=norm_weight_K is not None,
        num_warps=8 if num_columns > 2048 else 4,
        **overlap_options(x_TK),
    )
    return values_TK, scales_TG


@triton.jit(do_not_specialize=["padded_tokens"])
def _quantize(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    values_ptr,
    scales_ptr,
    padded_tokens,
    eps,
    offset,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Each program quantises one token."""
    announce(OVERLAPPED)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = columns < COLUMNS
    if NORM:
        weight = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    wait(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + token * COLUMNS + columns, mask=inside, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares = tl.sum(tl.sum(wide * wide, axis=1), axis=0)
        # Rounded like the output of the norm's own kernel.
        x = (wide * (1.0 / tl.sqrt(squares / COLUMNS + eps)) * weight).to(x.dtype)
    values, scale = in_eight_bits(x.to(tl.float32), 1, GROUPS)
    tl.store(values_ptr + token * COLUMNS + columns, values.to(tl.float8e4nv), mask=inside)
    tl.store(scales_ptr + groups * padded_tokens + token, scale, mask=groups < COLUMNS // 128)


def quantize_gated(gate_up_T2I: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """As `quantize_tokens`, for activation(gate) · up, [T', I] and [T', G]. The gates are the first half.

    The gated product is rounded to bfloat16 first, as it would be without quantization.
    """
    gate_up_T2I = gate_up_T2I.contiguous()
    num_tokens, inner = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    values_TI, scales_TG = room_for_tokens(num_tokens, inner, gate_up_T2I.device)
    _quantize_gated[(num_tokens, triton.cdiv(inner // GROUP, _GROUPS_AT_ONCE))](
        gate_up_T2I,
        values_TI,
        scales_TG,
        inner,
        len(values_TI),
        GELU=activation == "gelu_tanh",
        GROUPS=_GROUPS_AT_ONCE,
        num_warps=4,
        **overlap_options(gate_up_T2I),
    )
    return values_TI, scales_TG


@triton.jit(do_not_specialize=["padded_tokens"])
def _quantize_gated(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    values_ptr,
    scales_ptr,
    inner,
    padded_tokens,
    GELU: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Each program quantises some groups of one token."""
    lead(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = columns < inner
    gates = gate_up_ptr + token * 2 * inner + columns
    gate = tl.load(gates, mask=inside, other=0.0)
    up = tl.load(gates + inner, mask=inside, other=0.0)
    x = (activate(gate.to(tl.float32), GELU) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    values, scale = in_eight_bits(x, 1, GROUPS)
    tl.store(values_ptr + token * inner + columns, values.to(tl.float8e4nv), mask=inside)
    tl.store(scales_ptr + groups * padded_tokens + token, scale, mask=groups < inner // 128)


def room_for_tokens(num_tokens: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate the values [T', K] and the scales [T', G] of tokens."""
    padded_tokens = max(32, -(-num_tokens // 4) * 4)
    if blockscale.MIN_TOKENS <= num_tokens <= blockscale.MAX_TOKENS and blockscale.is_available(device):
        # Whole tiles, since FlashInfer's kernel is slower for a tile that goes beyond the end of a matrix.
        multiple = 64 if num_tokens <= 64 else 128
        padded_tokens = -(-num_tokens // multiple) * multiple
    values_TK = torch.empty((padded_tokens, num_columns), dtype=torch.float8_e4m3fn, device=device)
    scales_GT = torch.empty((num_columns // GROUP, padded_tokens), dtype=torch.float32, device=device)
    return values_TK, scales_GT.t()


def cublas_product(x_TK: Tensor, x_scales_TG: Tensor, weight_OK: Tensor, scales: Tensor) -> Tensor | None:
    """x Wᵀ by cuBLAS, [T', O] in bfloat16; None if cuBLAS does not take these sizes.

    Args:
        x_TK, x_scales_TG: from `quantize_tokens`.
    """
    if scales.shape[1] % 4 or len(weight_OK) % 16:
        return None
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    product: Tensor = F.scaled_mm(
        x_TK, weight_OK.t(), x_scales_TG, kinds[0], scales.t(), kinds[1], output_dtype=torch.bfloat16
    )
    return product


def scaled_product(
    x_TK: Tensor,
    x_scales_TG: Tensor,
    weight_OK: Tensor,
    scales: Tensor,
    out_TO: Tensor,
    *,
    add: bool,
    tile: tuple[int, int, int, int] | None = None,
) -> None:
    """Write x Wᵀ into `out_TO`, or add it, with a Triton kernel.

    Args:
        x_TK, x_scales_TG: from `quantize_tokens`.
        tile: tokens and rows of a program, warps, stages; None: chosen by the number of tokens.
    """
    num_tokens, num_rows = out_TO.shape
    num_columns = x_TK.shape[1]
    tile = tile or _tile(num_tokens)
    tokens, rows, num_warps, num_stages = tile
    grid = (triton.cdiv(num_tokens, tokens) * triton.cdiv(num_rows, rows),)
    _product[grid](
        x_TK,
        x_scales_TG,
        weight_OK,
        scales,
        out_TO,
        num_tokens,
        len(x_TK),
        num_rows,
        num_columns,
        TOKENS=tokens,
        ROWS=rows,
        ADD=add,
        num_warps=num_warps,
        num_stages=num_stages,
        **overlap_options(x_TK),
    )


def _tile(num_tokens: int) -> tuple[int, int, int, int]:
    return (64, 128, 4, 4) if num_tokens < 512 else (128, 128, 8, 4)


@triton.jit(do_not_specialize=["num_tokens", "padded_tokens"])
def _product(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    num_tokens,
    padded_tokens,
    num_rows,
    num_columns,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Each program multiplies some tokens by some rows. Neighbours share rows, so these stay cached."""
    announce(OVERLAPPED)
    token_blocks = tl.cdiv(num_tokens, TOKENS)
    first_row = tl.program_id(0) // token_blocks * ROWS
    tokens = tl.program_id(0) % token_blocks * TOKENS + tl.arange(0, TOKENS)
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, 128)
    # Lanes out of range read a valid place and are not stored.
    token_places = tl.where(tokens < num_tokens, tokens, 0)
    row_places = tl.where(rows < num_rows, rows, 0)
    x_pointers = x_ptr + token_places.to(tl.int64)[:, None] * num_columns + columns[None, :]
    weight_pointers = weight_ptr + row_places.to(tl.int64)[None, :] * num_columns + columns[:, None]
    groups = num_columns // 128
    scale_pointers = scales_ptr + first_row // 128 * groups
    wait(OVERLAPPED)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for group in range(groups):
        x = tl.load(x_pointers + group * 128)
        weight = tl.load(weight_pointers + group * 128)
        scale = tl.load(x_scales_ptr + group * padded_tokens + token_places) * tl.load(scale_pointers + group)
        total += tl.dot(x, weight) * scale[:, None]
    places = out_ptr + tokens.to(tl.int64)[:, None] * num_rows + rows[None, :]
    stored = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    if ADD:
        total += tl.load(places, mask=stored, other=0.0).to(tl.float32)
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=stored)
