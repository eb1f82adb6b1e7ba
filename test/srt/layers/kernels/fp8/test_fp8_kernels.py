"""Kernels for weights of 8 bits against float32 torch: in Triton's interpreter, and on a GPU if there is one.

The interpreter multiplies no bfloat16, so there activations are float32; and it rounds to e4m3 in a way of
its own, so that quantising kernels are held to the bit on a GPU alone. It is slow, and given little.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ebbtide.srt.layers.fp8 import BLOCKS, CHANNELS, FP8, ScaleLayout, dequantize, quantize_into
from ebbtide.srt.layers.moe import MoeConfig, route, run_experts
from ebbtide.srt.layers.norm import RMSNorm

ON_GPU = torch.cuda.is_available()  # noqa: TID251
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
EPS = 1e-5


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> None:
    if not ON_GPU:
        # Triton reads this when it is imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    language = pytest.importorskip("triton.language")
    if not ON_GPU and type(language.sum).__name__ != "InterpretedFunction":
        pytest.skip("Triton was imported before TRITON_INTERPRET was set")


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
    from ebbtide.srt.layers.kernels.fp8.quantize import widen_blocks

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
    from ebbtide.srt.layers.kernels import tiles
    from ebbtide.srt.layers.small_batch import fp8_products, multiply

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


@pytest.mark.parametrize("num_tokens", [1, 3, 9, 70, 700] if ON_GPU else [3, 9])
@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts"),
    [(384, 128, 4), (2048, 768, 16)] if ON_GPU else [(384, 128, 4)],
)
def test_experts(num_tokens: int, hidden: int, inner: int, num_experts: int) -> None:
    from ebbtide.srt.layers.kernels.fp8.moe import fused_quantized_experts
    from ebbtide.srt.layers.kernels.tiles import FewPlan

    torch.manual_seed(1)
    gate_up, gate_up_scales, wide_gate_up = quantized(num_experts * 2 * inner, hidden)
    down, down_scales, wide_down = quantized(num_experts * hidden, inner)
    x, residual = random(num_tokens, hidden), random(num_tokens, hidden)
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    weights, experts = route(logits, MoeConfig(num_experts, 2, inner, renormalize=True))
    expected = run_experts(x.float(), wide_gate_up, wide_down, weights, experts)

    plan = None if ON_GPU or num_tokens > 4 else FewPlan(64, 2, 128)
    operands = (x, gate_up, down, weights, experts.int(), (gate_up_scales, down_scales))
    out = fused_quantized_experts(*operands, plan=plan)
    added = fused_quantized_experts(*operands, residual.clone(), plan)

    # Of many tokens activations are rounded to 8 bits, twice.
    most = 8e-3 if num_tokens <= 4 else 0.06 if ON_GPU else 0.12
    assert (out.float() - expected).norm() / expected.norm() < most
    assert_near(added, residual.float() + out.float())


@pytest.mark.parametrize(
    ("num_tokens", "per_inner"),
    # With gates, and without.
    [(1, 2), (9, 2), (70, 2), (700, 2), (9, 1), (700, 1)] if ON_GPU else [(1, 2), (19, 2), (19, 1)],
)
@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts"),
    # 208 and 48 are no multiples of a tile.
    [(208, 48, 4), (2048, 768, 16)] if ON_GPU else [(208, 48, 4)],
)
def test_experts_with_a_scale_for_each_row(
    num_tokens: int, per_inner: int, hidden: int, inner: int, num_experts: int
) -> None:
    from ebbtide.srt.layers.kernels.fused_moe import fused_experts

    torch.manual_seed(5)
    gate_up, gate_up_scales, wide_gate_up = quantized(num_experts * per_inner * inner, hidden, CHANNELS)
    down, down_scales, wide_down = quantized(num_experts * hidden, inner, CHANNELS)
    x, residual = random(num_tokens, hidden), random(num_tokens, hidden)
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    weights, experts = route(logits, MoeConfig(num_experts, 2, inner, renormalize=True))
    expected = run_experts(x.float(), wide_gate_up, wide_down, weights, experts)

    operands, scales = (x, gate_up, down, weights, experts.int()), (gate_up_scales, down_scales)
    assert_near(fused_experts(*operands, scales=scales), expected)
    added = fused_experts(*operands, residual_TD=residual.clone(), scales=scales)
    assert_near(added, residual.float() + expected)


@pytest.mark.parametrize("num_tokens", [37, 600] if ON_GPU else [37])
@pytest.mark.parametrize("normed", [False, True])
def test_products_of_many_tokens(num_tokens: int, normed: bool) -> None:
    from ebbtide.srt.layers.kernels.fp8.product import cublas_product, quantize_tokens, scaled_product

    torch.manual_seed(2)
    values, scales, weight = quantized(256, 512)
    x, norm, residual = random(num_tokens, 512), random(512), random(num_tokens, 256)
    x_values, x_scales = quantize_tokens(x, *((norm, EPS) if normed else ()))
    x_wide = x_values[:num_tokens].float().view(num_tokens, 4, 128) * x_scales[:num_tokens, :, None]
    given = F.rms_norm(x.float(), norm.shape, norm.float(), EPS) if normed else x.float()
    # Three bits of mantissa: half a unit of the last place is a sixteenth; on the average it is less.
    assert (x_wide.view(given.shape) - given).norm() / given.norm() < (0.04 if ON_GPU else 0.08)

    expected = x_wide.view(given.shape) @ weight.T
    summed = residual.float() + expected
    scaled_product(x_values, x_scales, values, scales, residual, add=True)
    assert_near(residual, summed)
    if ON_GPU:
        product = cublas_product(x_values, x_scales, values, scales)
        assert product is not None
        assert_near(product[:num_tokens], expected)


def test_a_residual_is_added_to_and_quantised_at_once() -> None:
    """To the bit what adding and quantising come to one after the other."""
    from ebbtide.srt.layers.kernels.fp8.product import add_and_quantize, quantize_tokens

    torch.manual_seed(4)
    count, columns = (70, 4096) if ON_GPU else (3, 384)
    norm, residual, product = random(columns), random(count, columns), random(count + 2, columns)
    expected = residual + product[:count]

    values, scales = add_and_quantize(residual, product, norm, EPS, 1.0)

    assert torch.equal(residual, expected)
    expected_values, expected_scales = quantize_tokens(expected, norm, EPS, 1.0)
    assert torch.equal(values[:count].view(torch.uint8), expected_values[:count].view(torch.uint8))
    assert torch.equal(scales[:count], expected_scales[:count])


@pytest.mark.parametrize(("num_tokens", "without", "with_it"), [(37, 40, 64), (65, 68, 128), (258, 260, 260)])
def test_only_flashinfers_kernel_has_tokens_filled_up_to_its_tiles(
    num_tokens: int, without: int, with_it: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbtide.srt.layers.kernels.fp8 import blockscale
    from ebbtide.srt.layers.kernels.fp8.product import room_for_tokens

    for is_available, num_rows in ((False, without), (True, with_it)):
        monkeypatch.setattr(blockscale, "is_available", lambda device, answer=is_available: answer)
        values, scales = room_for_tokens(num_tokens, 256, torch.device("cpu"))
        assert (values.shape, scales.shape) == ((num_rows, 256), (num_rows, 2))


@pytest.mark.parametrize("num_tokens", [2, 9, 37, 64] if ON_GPU else [9])
@pytest.mark.parametrize(
    ("num_rows", "num_columns"), [(256, 1024), (4096, 14336)] if ON_GPU else [(128, 256)]
)
def test_products_of_few_tokens_of_8_bits(num_tokens: int, num_rows: int, num_columns: int) -> None:
    from ebbtide.srt.layers.kernels.fp8.product import quantize_gated, quantize_tokens, room_for_tokens
    from ebbtide.srt.layers.kernels.tiles import QuantizedConfig
    from ebbtide.srt.layers.small_batch.fp8_products import multiply_quantized

    def wide(values: Tensor, scales: Tensor) -> Tensor:
        groups = values[:num_tokens].float().view(num_tokens, -1, 128) * scales[:num_tokens, :, None]
        return groups.flatten(1)

    torch.manual_seed(3)
    values, scales, weight = quantized(2 * num_rows, num_columns)
    tokens = quantize_tokens(random(num_tokens, num_columns))
    expected = wide(*tokens) @ weight.T
    residual = random(num_tokens, 2 * num_rows)
    summed = residual.float() + expected
    config = None if ON_GPU else QuantizedConfig(16, 64, 2, 4, 3)
    multiply_quantized(*tokens, values, scales, residual, config, add=True)
    assert_near(residual, summed)
    gate, up = expected.chunk(2, dim=1)
    out = random(num_tokens, num_rows)
    multiply_quantized(*tokens, values, scales, out, config, gated="silu")
    assert_near(out, F.silu(gate) * up)

    # In 8 bits again, by the same kernel or by one of its own.
    room = room_for_tokens(num_tokens, num_rows, out.device)
    config = QuantizedConfig(64 if num_tokens > 32 else 32, 128, 1, 8, 3)
    multiply_quantized(
        *tokens, values, scales, room[0][:num_tokens], config, gated="silu", out_scales_TG=room[1]
    )
    for found in (wide(*room), wide(*quantize_gated(expected.to(DTYPE), "silu"))):
        distance = (found - F.silu(gate) * up).norm() / (F.silu(gate) * up).norm()
        assert distance < (0.04 if ON_GPU else 0.08)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 33, 300] if ON_GPU else [3])
def test_rows_with_a_scale_each(num_tokens: int, normed: bool) -> None:
    from ebbtide.srt.layers.kernels.fp8.rows import product_of_rows, quantize_rows, quantize_tokens

    torch.manual_seed(4)
    x, norm = random(num_tokens, 464), RMSNorm(464, eps=EPS, dtype=DTYPE)
    norm.weight = torch.nn.Parameter(random(464), requires_grad=False)
    given = (norm(x) if normed else x).float()
    values, scales = quantize_tokens(x, (norm.weight, EPS, 0.0) if normed else None)
    wide = values[:num_tokens].float() * scales[:num_tokens]
    assert (wide - given).norm() / given.norm() < (0.04 if ON_GPU else 0.08)

    # A part of the columns has the scales of all.
    weight = random(96, 464) / 464**0.5
    part, part_scales = torch.empty(96, 64, dtype=FP8, device=DEVICE), torch.empty(96, 1, device=DEVICE)
    quantize_rows(weight, part, part_scales, first_column=128)
    # On a GPU torch multiplies by the inverse of a constant, and does not divide.
    assert torch.equal(part_scales.cpu(), weight.float().abs().amax(1, keepdim=True).cpu() / 448)
    cut = weight[:, 128:192].float()
    assert (part.float() * part_scales - cut).norm() / cut.norm() < (0.04 if ON_GPU else 0.08)
    if ON_GPU:
        whole = torch.empty(96, 464, dtype=FP8, device=DEVICE)
        quantize_rows(weight, whole, part_scales)
        assert torch.equal(whole[:, 128:192].float(), part.float())
        product = product_of_rows(values, scales, whole, part_scales)[:num_tokens]
        assert_near(product, wide @ dequantize(whole, part_scales, CHANNELS).T)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
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


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
def test_tokens_are_quantised_to_the_bit() -> None:
    from ebbtide.srt.layers.kernels.fp8.product import quantize_tokens

    x = random(33, 4096) * 3
    values, scales = quantize_tokens(x)
    groups = x.float().cpu().view(33, 32, 128)
    expected = groups.abs().amax(-1) / 448
    scales, values = scales[:33], values[:33]
    assert torch.equal(scales.cpu(), expected)
    expected_values = (groups / expected[..., None]).to(FP8).view(33, -1)
    assert torch.equal(values.cpu().view(torch.uint8), expected_values.view(torch.uint8))
