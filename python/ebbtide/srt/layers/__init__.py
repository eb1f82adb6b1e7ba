"""Parameters that get memory from the weight store, and are loaded later."""

import torch
from torch import nn


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without data or gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
