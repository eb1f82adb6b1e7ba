"""The activation of a gated MLP.

Shapes: T tokens, I intermediate size.
"""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) · up, [T, I]; the gates are the first half of each row."""
    if gate_up_T2I.is_cuda:
        from ebbtide.srt.layers.kernels import activation

        return activation.silu_mul(gate_up_T2I)
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
