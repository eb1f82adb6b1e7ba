"""Scales of keys and values in FP8: a stored number times its head's scale is what it stands for.

They are ordinary memory beside the arenas, at addresses that stay: a release of whatever tag leaves them as
they are, and CUDA graphs read what they hold at the time of the replay.

Shapes: T tokens, K KV heads, H head_dim, G layers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

# Tools that write such checkpoints agree on the last word alone.
_NAME = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:attn\.|k_proj\.(?=k_)|v_proj\.(?=v_))?([kv])_scale"
)


class HeadScales(NamedTuple):
    """Of one layer's heads, keys and then values: the scales and their inverses, float32 [2, K]."""

    scales_2K: Tensor
    inverses_2K: Tensor


class KVScales:
    """The scales of all layers of a rank.

    Args:
        scales_G2K: float32, finite and above 0, on the device of the pool.
    """

    def __init__(self, scales_G2K: Tensor) -> None:
        self.scales_G2K = scales_G2K
        self._inverses_G2K = scales_G2K.reciprocal()

    def of(self, layer: int) -> HeadScales:
        """The scales of one layer: views, which follow every change."""
        return HeadScales(self.scales_G2K[layer], self._inverses_G2K[layer])


def scale_place(name: str) -> tuple[int, int] | None:
    """Layer and side (0 for keys) of a checkpoint's tensor that is a scale; None for any other."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), "kv".index(match[2])) if match is not None else None


def quantised(x_TKH: Tensor, inverse_K: Tensor | None) -> Tensor:
    """Numbers as the pool stores them in FP8: rounded to the nearest, those beyond the range to its end.

    Args:
        inverse_K: of the heads' scales; None: all are 1.
    """
    x = x_TKH.float() if inverse_K is None else x_TKH.float() * inverse_K[:, None]
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dequantised(x_TKH: Tensor, scale_K: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What stored numbers stand for; without scales every dtype of models holds them exactly."""
    return x_TKH.to(dtype) if scale_K is None else (x_TKH.float() * scale_K[:, None]).to(dtype)
