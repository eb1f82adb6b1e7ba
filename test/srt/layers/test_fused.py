"""What a layer does in one go equals its parts, one after the other.

Shapes: T tokens, D inputs, O outputs, I intermediate size.
"""

import pytest
import torch
import torch.nn.functional as F

from ebbtide.srt.distributed.parallel_group import SoloGroup
from ebbtide.srt.layers.fused import linear_add_, norm_gate_up, norm_linear

EPS = 1e-5
T, D, O, I = 5, 24, 16, 12  # noqa: E741


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_norm_and_product(dtype: torch.dtype, biased: bool, normalised: bool) -> None:
    torch.manual_seed(0)
    x, norm, weight, bias = (torch.randn(shape).to(dtype) for shape in ((T, D), (D,), (O, D), (O,)))
    before = x.clone()

    out = norm_linear(x, norm if normalised else None, EPS, weight, bias if biased else None)

    inputs = F.rms_norm(x, (D,), norm, EPS) if normalised else x
    torch.testing.assert_close(out, F.linear(inputs, weight, bias if biased else None))
    assert torch.equal(x, before)


@pytest.mark.parametrize("biased", [False, True])
def test_norm_and_gated_product(biased: bool) -> None:
    torch.manual_seed(1)
    x, norm, weight, bias = (torch.randn(shape) for shape in ((T, D), (D,), (2 * I, D), (2 * I,)))

    out = norm_gate_up(x, norm, EPS, weight, bias if biased else None)

    normalised = F.rms_norm(x, (D,), norm, EPS)
    bias_of = (bias[:I], bias[I:]) if biased else (None, None)
    gate, up = F.linear(normalised, weight[:I], bias_of[0]), F.linear(normalised, weight[I:], bias_of[1])
    torch.testing.assert_close(out, F.silu(gate) * up)


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_added_in_place(biased: bool) -> None:
    torch.manual_seed(2)
    x, weight, bias, residual = (torch.randn(shape) for shape in ((T, D), (O, D), (O,), (T, O)))
    expected = residual + F.linear(x, weight, bias if biased else None)

    linear_add_(x, weight, bias if biased else None, residual, SoloGroup())

    torch.testing.assert_close(residual, expected)
