"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension, accumulated in float32."""
    if x.is_cuda:
        from ebbtide.srt.layers.kernels.norm import rms_norm_at_once

        return rms_norm_at_once(x, weight, eps, offset)
    if offset == 0.0:
        return F.rms_norm(x, weight.shape, weight, eps)
    # The sum of weight and offset has more digits than either.
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a weight that is loaded later.

    Args:
        offset: added to the weight; Gemma's checkpoints hold what is to be added to one.
    """

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)
