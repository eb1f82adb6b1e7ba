"""Kernels for weights of 8 bits against float32 torch.

In the interpreter activations are float32. It rounds to e4m3 in a way of its own: quantising kernels are held
to the bit on a GPU alone. It is slow, and given little.
"""

import pytest
import torch
import torch.nn.functional as F
from fixtures.kernels import DEVICE, HAS_GPU as ON_GPU, ON_BOTH, needs_gpu
from torch import Tensor

from ebbtide.srt.layers.fp8 import BLOCKS, CHANNELS, FP8, ScaleLayout, dequantize, quantize_into
from ebbtide.srt.layers.heads import MoeConfig, RoutedTokens
from ebbtide.srt.layers.moe import route, run_experts

pytest.importorskip("triton")
from ebbtide.srt.layers.kernels import tiles
from ebbtide.srt.layers.kernels.fp8 import product, rows
from ebbtide.srt.layers.kernels.fp8.moe import fused_quantized_experts
from ebbtide.srt.layers.kernels.fp8.product import quantize_tokens, room_for_tokens
from ebbtide.srt.layers.kernels.fp8.quantize import widen_blocks
from ebbtide.srt.layers.kernels.fused_moe import fused_experts
from ebbtide.srt.layers.small_batch import fp8_products, multiply
from ebbtide.srt.layers.small_batch.fp8_products import multiply_quantized

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
EPS = 1e-5
# Values of three bits: half a unit of the last place is a sixteenth; on the average it is less.
ROUNDING = 0.04 if ON_GPU else 0.08

pytestmark = ON_BOTH


def random(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE, DTYPE)


def quantized(num_rows: int, num_columns: int, layout: ScaleLayout = BLOCKS) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales, and the weight that they stand for."""
    weight = torch.randn(num_rows, num_columns) / num_columns**0.5
    # No two rows are alike.
    weight *= torch.logspace(-1, 1, num_rows)[:, None] if layout is CHANNELS else 1
    values, scales = torch.empty(weight.shape, dtype=FP8), torch.empty(layout.shape(num_rows, num_columns))
    quantize_into(values, scales, weight, layout)
    return values.to(DEVICE), scales.to(DEVICE), dequantize(values, scales, layout).to(DEVICE)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Up to the rounding of activations and results."""
    distance = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert distance < (8e-3 if ON_GPU else 2e-6)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(256, 128), (192, 256)])
def test_blocks_are_widened_a_last_one_of_fewer_rows_too(num_rows: int, num_columns: int) -> None:
    torch.manual_seed(0)
    values, scales, weight = quantized(num_rows, num_columns)
    assert torch.equal(widen_blocks(values, scales, DTYPE), weight.to(DTYPE))


@pytest.mark.parametrize(
    ("num_rows", "num_columns"),
    [(128, 256), (256, 640), (4096, 4096), (512, 14336)] if ON_GPU else [(128, 384)],
)
@pytest.mark.parametrize("most_kept", [8192, 256])
def test_products_of_one_token(
    num_rows: int, num_columns: int, most_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose columns are kept in registers, or pass by."""
    monkeypatch.setattr(tiles, "_MAX_STATIONARY", most_kept)
    if not ON_GPU:
        # Few programs: the interpreter takes its time for each.
        passing = tiles.PassingConfig(64, 64, 4)
        config = passing if most_kept < num_columns else tiles.StationaryConfig(64, 2, 4)
        monkeypatch.setattr(fp8_products, "choose_one", lambda num_columns, gated: config)
    torch.manual_seed(0)
    values, scales, weight = quantized(2 * num_rows, num_columns)
    x, norm, bias = random(1, num_columns), random(num_columns), random(2 * num_rows)
    normed = F.rms_norm(x.float(), norm.shape, norm.float(), EPS)

    out, gated = x.new_empty(1, 2 * num_rows), x.new_empty(1, num_rows)
    multiply(x, norm, EPS, values, bias, out, scales=scales)
    assert_near(out, normed @ weight.T + bias.float())
    gate, up = (normed @ weight.T).chunk(2, dim=1)
    multiply(x, norm, EPS, values, None, gated, gated="silu", scales=scales)
    assert_near(gated, F.silu(gate) * up)
    residual = random(1, 2 * num_rows)
    expected = residual.float() + x.float() @ weight.T
    multiply(x, None, 0.0, values, None, residual, add=True, scales=scales)
    assert_near(residual, expected)


@pytest.mark.parametrize(
    ("layout", "num_tokens", "is_gated"),
    [
        *((BLOCKS, count, True) for count in ([1, 3, 9, 70, 700] if ON_GPU else [3, 9])),
        *((CHANNELS, count, True) for count in ([1, 9, 700] if ON_GPU else [1, 19])),
        (CHANNELS, 19, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_large", [False, True] if ON_GPU else [False])
def test_experts(layout: ScaleLayout, num_tokens: int, is_gated: bool, is_large: bool) -> None:
    torch.manual_seed(1)
    # 208 and 48 are no multiples of a tile.
    hidden, inner, num_experts = (
        (2048, 768, 16) if is_large else (384, 128, 4) if layout is BLOCKS else (208, 48, 4)
    )
    num_rows = num_experts * inner * (2 if is_gated else 1)
    gate_up, gate_up_scales, wide_gate_up = quantized(num_rows, hidden, layout)
    down, down_scales, wide_down = quantized(num_experts * hidden, inner, layout)
    x, residual = random(num_tokens, hidden), random(num_tokens, hidden)
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    weights, experts = route(logits, MoeConfig(num_experts, 2, inner, renormalize=True))
    expected = run_experts(RoutedTokens(x.float(), weights, experts), wide_gate_up, wide_down)

    operands = (RoutedTokens(x, weights, experts.int()), gate_up, down)
    scales = (gate_up_scales, down_scales)
    if layout is CHANNELS:
        out = fused_experts(*operands, scales=scales)
        added = fused_experts(*operands, residual_TD=residual.clone(), scales=scales)
    else:
        plan = None if ON_GPU or num_tokens > 4 else tiles.FewPlan(64, 2, 128)
        out = fused_quantized_experts(*operands, scales, plan=plan)
        added = fused_quantized_experts(*operands, scales, residual.clone(), plan)

    # Of many tokens blocks have activations rounded to 8 bits, twice.
    is_rounded = layout is BLOCKS and num_tokens > 4
    most = 1.5 * ROUNDING if is_rounded else 8e-3 if ON_GPU else 2e-6
    assert (out.float() - expected).norm() / expected.norm() < most
    assert_near(added, residual.float() + out.float())


@pytest.mark.parametrize("num_tokens", [37, 600] if ON_GPU else [37])
@pytest.mark.parametrize("normed", [False, True])
def test_products_of_many_tokens(num_tokens: int, normed: bool) -> None:
    torch.manual_seed(2)
    values, scales, weight = quantized(256, 512)
    x, norm, residual = random(num_tokens, 512), random(512), random(num_tokens, 256)
    x_values, x_scales = quantize_tokens(x, *((norm, EPS) if normed else ()))
    x_wide = x_values[:num_tokens].float().view(num_tokens, 4, 128) * x_scales[:num_tokens, :, None]
    given = F.rms_norm(x.float(), norm.shape, norm.float(), EPS) if normed else x.float()
    assert (x_wide.view(given.shape) - given).norm() / given.norm() < ROUNDING

    expected = x_wide.view(given.shape) @ weight.T
    summed = residual.float() + expected
    product.scaled_product(x_values, x_scales, values, scales, residual, add=True)
    assert_near(residual, summed)
    if ON_GPU:
        found = product.cublas_product(x_values, x_scales, values, scales)
        assert found is not None
        assert_near(found[:num_tokens], expected)


@pytest.mark.parametrize("num_tokens", [2, 9, 37, 64] if ON_GPU else [9])
@pytest.mark.parametrize(
    ("num_rows", "num_columns"), [(256, 1024), (4096, 14336)] if ON_GPU else [(128, 256)]
)
def test_products_of_few_tokens_of_8_bits(num_tokens: int, num_rows: int, num_columns: int) -> None:
    def wide(values: Tensor, scales: Tensor) -> Tensor:
        groups = values[:num_tokens].float().view(num_tokens, -1, 128) * scales[:num_tokens, :, None]
        return groups.flatten(1)

    torch.manual_seed(3)
    values, scales, weight = quantized(2 * num_rows, num_columns)
    tokens = quantize_tokens(random(num_tokens, num_columns))
    expected = wide(*tokens) @ weight.T
    residual = random(num_tokens, 2 * num_rows)
    summed = residual.float() + expected
    config = None if ON_GPU else tiles.QuantizedConfig(16, 64, 2, 4, 3)
    multiply_quantized(*tokens, values, scales, residual, config, add=True)
    assert_near(residual, summed)
    gate, up = expected.chunk(2, dim=1)
    out = random(num_tokens, num_rows)
    multiply_quantized(*tokens, values, scales, out, config, gated="silu")
    assert_near(out, F.silu(gate) * up)

    # In 8 bits again, by the same kernel or by one of its own.
    room = room_for_tokens(num_tokens, num_rows, out.device)
    config = tiles.QuantizedConfig(64 if num_tokens > 32 else 32, 128, 1, 8, 3)
    multiply_quantized(
        *tokens, values, scales, room[0][:num_tokens], config, gated="silu", out_scales_TG=room[1]
    )
    for found in (wide(*room), wide(*product.quantize_gated(expected.to(DTYPE), "silu"))):
        distance = (found - F.silu(gate) * up).norm() / (F.silu(gate) * up).norm()
        assert distance < ROUNDING


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 33, 300] if ON_GPU else [3])
def test_rows_with_a_scale_each(num_tokens: int, normed: bool) -> None:
    torch.manual_seed(4)
    x, norm = random(num_tokens, 464), random(464)
    given = F.rms_norm(x.float(), norm.shape, norm.float(), EPS) if normed else x.float()
    values, scales = rows.quantize_tokens(x, (norm, EPS, 0.0) if normed else None)
    wide = values[:num_tokens].float() * scales[:num_tokens]
    assert (wide - given).norm() / given.norm() < ROUNDING

    # A part of the columns has the scales of all.
    weight = random(96, 464) / 464**0.5
    part, part_scales = torch.empty(96, 64, dtype=FP8, device=DEVICE), torch.empty(96, 1, device=DEVICE)
    rows.quantize_rows(weight, part, part_scales, first_column=128)
    # On a GPU torch multiplies by the inverse of a constant, and does not divide.
    assert torch.equal(part_scales.cpu(), weight.float().abs().amax(1, keepdim=True).cpu() / 448)
    cut = weight[:, 128:192].float()
    assert (part.float() * part_scales - cut).norm() / cut.norm() < ROUNDING
    if ON_GPU:
        whole = torch.empty(96, 464, dtype=FP8, device=DEVICE)
        rows.quantize_rows(weight, whole, part_scales)
        assert torch.equal(whole[:, 128:192].float(), part.float())
        found = rows.product_of_rows(values, scales, whole, part_scales)[:num_tokens]
        assert_near(found, wide @ dequantize(whole, part_scales, CHANNELS).T)


@needs_gpu
@pytest.mark.parametrize("layout", [BLOCKS, CHANNELS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_a_gpu_quantises_as_a_cpu_does(dtype: torch.dtype, layout: ScaleLayout) -> None:
    weight = (torch.randn(384, 640) * torch.logspace(-6, 2, 640)).to(dtype)
    weight[:128, :128] = 0
    weight[7] = 0
    weight[200, 200] = float("nan")
    weight[300, 300] = float("inf")
    found = []
    for device in ("cpu", DEVICE):
        values = torch.empty(384, 640, dtype=FP8, device=device)
        scales = torch.empty(layout.shape(384, 640), device=device)
        quantize_into(values, scales, weight.to(device).t().contiguous().t(), layout)
        found.append((values.cpu(), scales.cpu()))
    (values, scales), (values_there, scales_there) = found
    torch.testing.assert_close(scales_there, scales, rtol=0, atol=0, equal_nan=True)
    if layout is BLOCKS:
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    good = scales.isfinite().expand(384, 640)
    assert torch.equal(values_there.view(torch.uint8)[good], values.view(torch.uint8)[good])


@needs_gpu
def test_tokens_are_quantised_to_the_bit() -> None:
    x = random(33, 4096) * 3
    values, scales = quantize_tokens(x)
    groups = x.float().cpu().view(33, 32, 128)
    expected = groups.abs().amax(-1) / 448
    scales, values = scales[:33], values[:33]
    assert torch.equal(scales.cpu(), expected)
    expected_values = (groups / expected[..., None]).to(FP8).view(33, -1)
    assert torch.equal(values.cpu().view(torch.uint8), expected_values.view(torch.uint8))
