"""The activation of a gated MLP.

Shapes: T tokens, I intermediate size.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


def gated(gate_up_T2I: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) · up, [T, I]; the gates are the first half of each row."""
    if gate_up_T2I.is_cuda:
        from ebbtide.srt.layers.kernels.activation import gated as gated_at_once

        return gated_at_once(gate_up_T2I, activation)
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)
