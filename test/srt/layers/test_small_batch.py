"""Products of few tokens against float32 torch.

Shapes: T tokens, O outputs, K columns.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures.kernels import DEVICE, HAS_GPU as ON_GPU, needs_gpu
from torch import Tensor

from ebbtide.srt.layers.kernels.tiles import Config, MatvecConfig, ProductConfig

pytest.importorskip("triton")
from ebbtide.srt.layers.small_batch import Shrinking, multiply

EPS = 1e-5

# Rows and columns that blocks divide, and that they do not.
SMALL_SHAPES = [(96, 320), (200, 640), (64, 1024)]
# Tokens, rows, columns, block sizes.
INTERPRETED: list[tuple[int, int, int, Config | None]] = [
    (1, 20, 320, None),
    (1, 20, 320, MatvecConfig(8, 256, 2)),
    (3, 96, 192, None),
    (8, 32, 1024, None),
    (17, 40, 192, None),
    (33, 40, 192, None),
    # The last part of the columns is shorter than the others, or all are equal.
    (5, 40, 320, ProductConfig(64, 128, 2, 4, 3)),
    (5, 40, 320, ProductConfig(64, 128, 3, 4, 3)),
]
# Outputs and columns of products of Llama 3.1 8B, Qwen3 0.6B and Qwen2.5 7B.
MODEL_SHAPES = [
    (6144, 4096),
    (4096, 14336),
    (4096, 1024),
    (1024, 2048),
    (1024, 3072),
    (3584, 18944),
    (4608, 3584),
]


class Tensors:
    """Operands of a product whose results are of the order of 1."""

    def __init__(self, num_tokens: int, num_rows: int, num_columns: int) -> None:
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        generator = torch.Generator().manual_seed(num_tokens * num_rows + num_columns)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, dtype)

        self.x = random(num_tokens, num_columns) * 3
        self.norm = 1 + 0.2 * random(num_columns)
        self.weight = random(2 * num_rows, num_columns) / num_columns**0.5
        self.half = self.weight[:num_rows]
        self.bias = random(num_rows)
        self.residual = random(num_tokens, num_rows)

    def normalised(self) -> Tensor:
        return F.rms_norm(self.x.float(), self.norm.shape, self.norm.float(), EPS)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of operands and result."""
    assert actual.shape == expected.shape
    tolerance = 2e-2 if actual.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def check_all(num_tokens: int, num_rows: int, num_columns: int, **options: Any) -> None:
    """Every use of the kernels at one shape. `options`: of `multiply`."""
    given = Tensors(num_tokens, num_rows, num_columns)
    # A norm is of one token.
    normalised, norm = (given.normalised(), given.norm) if num_tokens == 1 else (given.x.float(), None)
    half, up = given.weight.float().chunk(2)
    out = torch.full_like(given.residual, float("nan"))
    multiply(given.x, norm, EPS, given.half, given.bias, out, **options)
    assert_near(out, normalised @ half.T + given.bias.float())
    multiply(given.x, None, EPS, given.half, None, out, **options)
    assert_near(out, given.x.float() @ half.T)
    for activation, gate in (("silu", F.silu), ("gelu_tanh", partial(F.gelu, approximate="tanh"))):
        multiply(given.x, norm, EPS, given.weight, None, out, gated=activation, **options)
        assert_near(out, gate(normalised @ half.T) * (normalised @ up.T))
    for bias in (None, given.bias):
        out = given.residual.clone()
        multiply(given.x, None, EPS, given.half, bias, out, add=True, **options)
        sum_TO = given.residual.float() + given.x.float() @ half.T
        assert_near(out, sum_TO if bias is None else sum_TO + bias.float())


@pytest.mark.skipif(ON_GPU, reason="the GPU runs these kernels")
@pytest.mark.parametrize(("num_tokens", "num_rows", "num_columns", "config"), INTERPRETED, ids=str)
def test_every_product_equals_the_one_of_torch_in_the_interpreter(
    num_tokens: int, num_rows: int, num_columns: int, config: Config | None
) -> None:
    check_all(num_tokens, num_rows, num_columns, config=config)


@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 17, 32, 64])
@pytest.mark.parametrize(("num_rows", "num_columns"), MODEL_SHAPES + SMALL_SHAPES)
def test_every_product_equals_the_one_of_torch(num_tokens: int, num_rows: int, num_columns: int) -> None:
    check_all(num_tokens, num_rows, num_columns)


@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 32])
def test_a_chain_in_a_graph_gives_bit_for_bit_what_it_gives_outside(num_tokens: int) -> None:
    """In a graph kernels overlap: a kernel that read too early, or wrote too early, would show here."""
    given = [Tensors(num_tokens, 1024, 1024) for _ in range(2)]
    residual = given[0].x.clone()

    def chain() -> Tensor:
        for layer in range(24):
            tensors = given[layer % 2]
            norm = tensors.norm if num_tokens == 1 else None
            y, gated = torch.empty_like(residual), torch.empty_like(residual)
            multiply(residual, norm, EPS, tensors.half, tensors.bias, y)
            multiply(y, None, 0.0, tensors.half, None, residual, add=True)
            multiply(residual, norm, EPS, tensors.weight, None, gated, gated="silu")
            multiply(gated, None, 0.0, tensors.half, None, residual, add=True)
            residual.div_(residual.norm(dim=1, keepdim=True))
        return residual.clone()

    expected = chain()
    graph = torch.cuda.CUDAGraph()  # noqa: TID251
    with torch.cuda.graph(graph):  # noqa: TID251
        result = chain()
    for _ in range(20):
        residual.copy_(given[0].x)
        graph.replay()
        assert torch.equal(result, expected)


@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, 3), (5, 3), (5, 8), (40, 3)])
@pytest.mark.parametrize("add", [False, True])
def test_the_first_half_of_adapters_is_computed_beside(num_tokens: int, num_slots: int, add: bool) -> None:
    num_columns, num_ranks = 1088, 48
    operands = Tensors(num_tokens, 96, num_columns)
    x, weight = operands.x / 3, operands.half
    a_SEPK = (
        torch.randn(num_slots, 2, 1, num_ranks, num_columns)[:, 0].to(x.device, x.dtype) / num_columns**0.5
    )
    slots = torch.arange(num_tokens, dtype=torch.int32, device=x.device) * 5 % (num_slots + 1) - 1
    if num_tokens == 1:
        slots[0] = 2
    shrinking = Shrinking.of(a_SEPK, slots)
    residual = torch.randn(num_tokens, 96, device=x.device).to(x.dtype)
    out = residual.clone()
    multiply(x, None, 0.0, weight, None, out, add=add, shrinking=shrinking)
    expected = x.float() @ weight.float().t() + (residual.float() if add else 0.0)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            inner = a_SEPK[slot, 0].float() @ x[token].float()
            torch.testing.assert_close(shrinking.inner[:, token].sum(0), inner, atol=1e-2, rtol=1e-2)
