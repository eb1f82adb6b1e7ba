"""What a decoder layer does in one go. Few tokens on a GPU take kernels of their own, the rest the parts.

With few tokens a layer costs the time to read its weights, and to start and drain each kernel; that is what
`small_batch` saves.

Shapes: T tokens, D inputs, O outputs, I intermediate size.
"""

from types import ModuleType

import torch
from torch import Tensor

from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.layers import linear as products
from ebbtide.srt.layers.activation import silu_mul
from ebbtide.srt.layers.norm import rms_norm


def norm_linear(
    x_TD: Tensor, norm_weight_D: Tensor | None, eps: float, weight_OD: Tensor, bias_O: Tensor | None
) -> Tensor:
    """rms_norm(x) Wᵀ (+ b), [T, O]; without the norm where its weight is None."""
    if (kernels := _small_batch(x_TD)) is not None:
        product: Tensor = kernels.norm_linear(x_TD, norm_weight_D, eps, weight_OD, bias_O)
        return product
    normalised_TD = x_TD if norm_weight_D is None else rms_norm(x_TD, norm_weight_D, eps)
    return products.linear(normalised_TD, weight_OD, bias_O)


def norm_gate_up(
    x_TD: Tensor, norm_weight_D: Tensor, eps: float, weight_2ID: Tensor, bias_2I: Tensor | None
) -> Tensor:
    """silu(gate) · up of rms_norm(x), [T, I]; the gates' rows of the weight come first."""
    if bias_2I is None and (kernels := _small_batch(x_TD)) is not None:
        product: Tensor = kernels.norm_gate_up(x_TD, norm_weight_D, eps, weight_2ID)
        return product
    return silu_mul(products.linear(rms_norm(x_TD, norm_weight_D, eps), weight_2ID, bias_2I))


def linear_add_(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, group: ParallelGroup
) -> None:
    """residual += x Wᵀ (+ b), in place. Each rank holds some of the inputs, and all of the bias."""
    if group.size > 1:
        part_TO = norm_linear(x_TD, None, 0.0, weight_OD, bias_O if group.rank == 0 else None)
        group.add_reduced_(part_TO, residual_TO)
    elif (kernels := _small_batch(x_TD)) is not None:
        kernels.linear_add_(x_TD, weight_OD, bias_O, residual_TO)
    else:
        products.linear_add_(x_TD, weight_OD, bias_O, residual_TO)


def _small_batch(x_TD: Tensor) -> ModuleType | None:
    """The kernels for few tokens, where they apply."""
    if not (x_TD.is_cuda and x_TD.dtype == torch.bfloat16):
        return None
    from ebbtide.srt.layers import small_batch

    return small_batch if len(x_TD) <= small_batch.MAX_TOKENS else None
