"""What a `Linear` does in one go equals its parts, one after the other. Kernels: test_small_batch.py.

Shapes: T tokens, D inputs, O outputs, I intermediate size.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.norm import NormedResidual, Residual, RMSNorm
from ebbtide.srt.layers.step import Kernels, Step

EPS = 1e-5
T, D, O, I = 5, 24, 16, 12  # noqa: E741
NO_TOKENS = torch.zeros(0, dtype=torch.int64)
NO_ATTENTION: Any = None
STEP = Step(NO_TOKENS, NO_TOKENS, NO_ATTENTION, Kernels())


def inputs_of(x: Tensor, norm: RMSNorm | None) -> Tensor | NormedResidual:
    return x if norm is None else Residual(x).normed(norm)


class Rank(ParallelGroup):
    """One of two ranks; the other one's part of every sum is `other`."""

    size = 2

    def __init__(self, rank: int, other: Tensor) -> None:
        self.rank, self.other = rank, other

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x.add_(self.other)

    def add_reduced_(self, x: Tensor, onto: Tensor) -> None:
        onto += x + self.other


def make_linear(num_outputs: int, *, biased: bool, dtype: torch.dtype = torch.float32) -> Linear:
    linear = Linear(D, num_outputs, bias=biased, dtype=dtype)
    for name, parameter in list(linear.named_parameters()):
        setattr(linear, name, nn.Parameter(torch.randn(parameter.shape).to(dtype), requires_grad=False))
    return linear


def make_norm(offset: float, dtype: torch.dtype = torch.float32) -> RMSNorm:
    norm = RMSNorm(D, eps=EPS, dtype=dtype, offset=offset)
    norm.weight = nn.Parameter(torch.randn(D).to(dtype), requires_grad=False)
    return norm


def normalised(x: Tensor, norm: RMSNorm) -> Tensor:
    return F.rms_norm(x.float(), (D,), norm.weight.float() + norm.offset, EPS).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_norm_and_product(dtype: torch.dtype, biased: bool, offset: float | None) -> None:
    torch.manual_seed(0)
    x, linear = torch.randn(T, D).to(dtype), make_linear(O, biased=biased, dtype=dtype)
    norm = make_norm(offset, dtype) if offset is not None else None
    before = x.clone()

    out = linear(inputs_of(x, norm), STEP)

    inputs = x if norm is None else normalised(x, norm)
    torch.testing.assert_close(out, F.linear(inputs, linear.weight, linear.bias))
    assert torch.equal(x, before)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_norm_and_gated_product(biased: bool, activation: str) -> None:
    torch.manual_seed(1)
    x, linear, norm = torch.randn(T, D), make_linear(2 * I, biased=biased), make_norm(0.0)

    out = linear.gated(inputs_of(x, norm), activation, STEP).tensor()

    gate, up = F.linear(normalised(x, norm), linear.weight, linear.bias).split(I, dim=1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(out, active * up)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_product_is_added_up_and_in_place_with_the_bias_of_one_rank(biased: bool, rank: int | None) -> None:
    torch.manual_seed(2)
    x, residual, linear = torch.randn(T, D), torch.randn(T, O), make_linear(O, biased=biased)
    expected = F.linear(x, linear.weight, linear.bias if rank != 1 else None)
    if rank is not None:
        linear.group = Rank(rank, torch.randn(T, O))
        expected = expected + linear.group.other

    summed = linear.addend(x, STEP).tensor()
    stream = Residual(residual.clone())
    stream.add(linear.addend(x, STEP))
    added = stream.x_TD

    torch.testing.assert_close(summed, expected)
    torch.testing.assert_close(added, residual + expected)


def test_a_norm_is_of_the_residual_as_it_was_when_it_was_taken() -> None:
    torch.manual_seed(4)
    stream, norm, linear = Residual(torch.randn(T, D)), make_norm(0.0), make_linear(O, biased=False)
    taken = stream.normed(norm)
    expected = F.linear(normalised(stream.x_TD, norm), linear.weight)
    torch.testing.assert_close(linear(taken, STEP), expected)
    torch.testing.assert_close(linear(taken, STEP), expected)  # for another product too

    stream.add(torch.ones(T, D))

    with pytest.raises(AssertionError, match="the residual has changed"):
        linear(taken, STEP)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes bfloat16 here")  # noqa: TID251
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_layers_of_few_tokens_give_what_libraries_give(num_tokens: int, offset: float) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(3)
    given = torch.randn(num_tokens, D)
    norms = [make_norm(offset) for _ in range(3)]
    mixers = [make_linear(D, biased=biased) for biased in (False, True)]
    gate_up, down = make_linear(2 * D, biased=False), make_linear(D, biased=False)

    def layers(kernels: Kernels) -> Tensor:
        stream, step = Residual(given.clone()), replace(STEP, kernels=kernels)
        stream.add(mixers[0].addend(mixers[1](stream.normed(norms[0]), step), step))
        stream.add(down.addend(gate_up.gated(stream.normed(norms[1]), "silu", step), step))
        stream.keep(torch.tensor([num_tokens - 1]))
        stream.add(mixers[1].addend(given[:1], step))
        return stream.normed(norms[2]).tensor()

    expected = layers(Kernels())
    assert expected.shape == (1, D)
    torch.testing.assert_close(layers(Kernels(few=8)), expected, rtol=2e-5, atol=2e-5)
