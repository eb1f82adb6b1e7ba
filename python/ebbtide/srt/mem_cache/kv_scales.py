"""Scales of keys and values in FP8: a stored number is multiplied by its head's scale.

Scales are in ordinary memory at fixed addresses, not in arenas: no release touches them, and CUDA graphs read
the values at the time of the replay.

Shapes: T tokens, K KV heads, H head_dim, G layers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

# Tools that write such checkpoints agree only on the last part of the name.
_NAME = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:attn\.|k_proj\.(?=k_)|v_proj\.(?=v_))?([kv])_scale"
)


# Calibrated scales leave room for numbers this many times larger than the largest seen. No precision is lost:
# numbers only get a smaller exponent.
HEADROOM = 2.0
_MAX_EXPONENT = 40.0


class HeadScales:
    """The scales of one layer, as views that follow every change.

    Attributes:
        scales_2K, inverses_2K: float32, of keys and then of values, per head; and their inverses.
    """

    def __init__(self, scales: KVScales, layer: int) -> None:
        self.scales_2K = scales.scales_G2K[layer]
        self.inverses_2K = scales.inverses_G2K[layer]
        self._scales, self._layer = scales, layer

    @property
    def are_recorded(self) -> bool:
        """Whether `record` must be called with the keys and values of this pass."""
        return self._scales.is_recording

    def record(self, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Record the size of a pass's keys and values, after rotation and before rounding."""
        self._scales.record(self._layer, k_TKH, v_TKH)


class KVScales:
    """The scales of all layers of a rank.

    They may be calibrated. After `begin`, passes that are not captured record the largest number of each
    head, until enough tokens were seen. `settle` then sets the scales, to powers of two, so that dividing by
    them is exact. It may only be called while the pool is empty, since the stored numbers belong to the
    scales in force. All ranks see the same passes, so they settle at the same moment.

    Args:
        scales_G2K: float32, finite and above 0, on the device of the pool.
        calibration_tokens: tokens of a calibration; 0: there is none.
        keeps_up: whether to calibrate again when weights have changed.

    Attributes:
        scales_G2K, inverses_G2K: only changed in place.
    """

    def __init__(self, scales_G2K: Tensor, *, calibration_tokens: int = 0, keeps_up: bool = False) -> None:
        self.scales_G2K = scales_G2K.clone()
        self.inverses_G2K = scales_G2K.reciprocal()
        self._largest_G2K = torch.zeros_like(scales_G2K)
        self._calibration_tokens = calibration_tokens
        self._keeps_up = keeps_up
        self._num_missing = 0
        self._is_due = False
        self._begins_next = False
        self._is_paused = False
        self._layers = [HeadScales(self, layer) for layer in range(len(scales_G2K))]

    def of(self, layer: int) -> HeadScales:
        """The scales of one layer."""
        return self._layers[layer]

    @property
    def is_recording(self) -> bool:
        """Whether a calibration still needs tokens."""
        return self._num_missing > 0 and not self._is_paused

    def begin(self) -> None:
        """Begin a calibration with the next passes, and drop what an earlier one has recorded."""
        self._largest_G2K.zero_()
        self._num_missing, self._is_due = self._calibration_tokens, False
        self._begins_next = False

    def weights_changed(self) -> None:
        """Note that other weights serve from now on."""
        if not self._keeps_up:
            return
        if self._is_due:
            # Begin after this one has settled: if every update restarted the calibration, none would settle.
            self._begins_next = True
        else:
            self.begin()

    def record(self, layer: int, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """As `HeadScales.record`; called for the layers in order."""
        for side, x_TKH in enumerate((k_TKH, v_TKH)):
            largest_K = x_TKH.float().abs().nan_to_num(0.0, 0.0).amax((0, 2))
            torch.maximum(self._largest_G2K[layer, side], largest_K, out=self._largest_G2K[layer, side])
        if layer == len(self._layers) - 1:
            self._num_missing -= len(k_TKH)
            self._is_due = self._num_missing <= 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, passes are not recorded, because their tokens belong to no request."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def settle(self) -> bool:
        """Set the scales by what was recorded. False: not enough tokens were seen.

        A head of zeros alone gets a scale of 1.
        """
        if not self._is_due:
            return False
        self._is_due = False
        exponents = (self._largest_G2K * (HEADROOM / FP8_MAX)).log2().ceil()
        exponents.clamp_(-_MAX_EXPONENT, _MAX_EXPONENT)
        self.scales_G2K.copy_(torch.where(self._largest_G2K > 0, exponents.exp2(), 1.0))
        self.inverses_G2K.copy_(self.scales_G2K.reciprocal())
        smallest, largest = (bound.item() for bound in torch.aminmax(self.scales_G2K))
        logger.info("scales of the KV cache calibrated: smallest=%g largest=%g", smallest, largest)
        if self._begins_next:
            self.begin()
        return True


def scale_place(name: str) -> tuple[int, int] | None:
    """(layer, side) of a checkpoint's scale, side 0 for keys; None: the tensor is no such scale."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), "kv".index(match[2])) if match is not None else None


def quantised(x_TKH: Tensor, inverse_K: Tensor | None) -> Tensor:
    """Numbers as the pool stores them in FP8: rounded to nearest, and clamped to the range.

    Args:
        inverse_K: of the heads' scales; None: all are 1.
    """
    x = x_TKH.float() if inverse_K is None else x_TKH.float() * inverse_K[:, None]
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dequantised(x_TKH: Tensor, scale_K: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored numbers times their scales. Without scales, every dtype of models holds them exactly."""
    return x_TKH.to(dtype) if scale_K is None else (x_TKH.float() * scale_K[:, None]).to(dtype)
