"""What is done to query and key heads between the projection and the attention.

Shapes: T tokens, H head_dim.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Rope(NamedTuple):
    """Cosines [T, 1, H], both halves alike, and sines [T, 1, H/2] of the positions of one step."""

    cos_T1H: Tensor
    sin_T1H: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS normalisation of every query and key head, before the rotation.

    Attributes:
        q_weight, k_weight: [H].
        eps: added to the mean of squares.
        offset: added to the weights, see `RMSNorm`.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0
