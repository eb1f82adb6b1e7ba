"""Matrix products with weights that are loaded later."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup, SoloGroup

# For float32 torch asks MKL, which leaves half of what a CPU can do unused where it does not know the CPU:
# measured on AMD EPYC, oneDNN takes 0.5–0.7 of the time at every number of rows. Narrower types go to oneDNN
# by themselves. The operator is the one that torch's own compiler emits; builds without it use `F.linear`.
_HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ (+ b), by the quickest kernel for the dtype and the device."""
    if _HAS_ONEDNN and weight.dtype == torch.float32 and weight.is_cpu:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def linear_add_(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """residual += x Wᵀ (+ b), in place."""
    if residual.is_cuda and bias is None:
        # The product is added in the accumulator: one pass over the residual less, and one rounding.
        residual.addmm_(x, weight.t())
    else:
        residual += linear(x, weight, bias)


class Linear(nn.Module):
    """y = x Wᵀ (+ b). Parameters are made on the meta device; the weight store gives them memory.

    Attributes:
        group: the ranks that divide the weight among them. Where each holds some of the inputs, the
            caller adds their products up (`fused.linear_add_`).
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.group: ParallelGroup = SoloGroup()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device="meta"), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device="meta"), requires_grad=False)
            if bias
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
