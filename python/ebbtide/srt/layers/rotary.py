"""Rotary position embedding: the default form, linear scaling, Llama 3's, and YaRN.

Shapes: T tokens, N heads, K KV heads, H head_dim, R rotary_dim.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.heads import HeadNorms, Rope
from ebbtide.srt.layers.norm import rms_norm

RopeKind = Literal["default", "linear", "llama3", "yarn"]
_CONTEXT = "original_max_position_embeddings"
# The settings that each kind requires.
_NEEDED: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT),
    "yarn": ("factor", _CONTEXT),
}


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles.

    Attributes:
        kind: the variant.
        theta: base of the geometric series of wavelengths.
        factor: how many times longer scaled waves are (all variants but default).
        low_turns, high_turns: llama3 and yarn blend scaled and unscaled frequencies between these numbers of
            turns within the original context. In configs: llama3's frequency factors, yarn's beta_slow and
            beta_fast.
        original_context_len: context length in tokens before scaling (llama3, yarn).
        is_truncated: whether yarn rounds the limits of its blend to whole pairs.
        scale: a factor for cosines and sines (yarn).
        share: the share of a head's numbers that is rotated, the first ones.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_turns: float = 1.0
    high_turns: float = 4.0
    original_context_len: int = 8192
    is_truncated: bool = True
    scale: float = 1.0
    share: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """How many numbers of a head are rotated."""
        return int(head_dim * self.share)


def rope_config(hf_config: Any) -> RopeConfig:
    """Read the rope settings of a Hugging Face config, in the form of transformers 5 or an older one.

    Raises ConfigurationError for a variant that is not implemented, or one that lacks a setting.
    """
    settings = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None)
    share = getattr(hf_config, "partial_rotary_factor", None)
    return rope_from(settings or {}, getattr(hf_config, "rope_theta", None), 1.0 if share is None else share)


def rope_from(settings: Mapping[str, Any], theta: float | None = None, share: float = 1.0) -> RopeConfig:
    """Read one set of rope settings. `theta` and `share` are defaults for settings that lack them.

    Raises ConfigurationError for a variant that is not implemented, or one that lacks a setting.
    """
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in get_args(RopeKind):
        raise ConfigurationError(
            f"rope type {kind!r} is not supported; supported are {', '.join(get_args(RopeKind))}"
        )
    share = float(settings.get("partial_rotary_factor", share))
    if not 0 < share <= 1:
        raise ConfigurationError(f"partial_rotary_factor: expected a number in (0, 1], got {share}")
    kind = cast(RopeKind, kind)
    for name in _NEEDED[kind]:
        if name not in settings:
            raise ConfigurationError(f"rope type {kind!r} needs the setting {name!r} in config.json")
    theta = settings.get("rope_theta", theta)
    rope = RopeConfig(kind, float(theta if theta is not None else 10000.0), share=share)
    if kind != "default":
        rope = replace(rope, factor=float(settings["factor"]))
    if kind == "llama3":
        low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
        rope = replace(rope, low_turns=low, high_turns=high, original_context_len=int(settings[_CONTEXT]))
    if kind == "yarn":
        rope = replace(
            rope,
            low_turns=float(settings.get("beta_slow") or 1.0),
            high_turns=float(settings.get("beta_fast") or 32.0),
            original_context_len=int(settings[_CONTEXT]),
            is_truncated=bool(settings.get("truncate", True)),
            scale=_yarn_scale(settings),
        )
    return rope


def _yarn_scale(settings: Mapping[str, Any]) -> float:
    """Yarn's factor for cosines and sines: given as such, or computed from `factor` and two weights."""
    if (given := settings.get("attention_factor")) is not None:
        return float(given)
    factor, weight, divisor = settings["factor"], settings.get("mscale"), settings.get("mscale_all_dim")
    if weight and divisor:
        return yarn_growth(factor, weight) / yarn_growth(factor, divisor)
    return yarn_growth(factor)


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """Yarn's factor for queries, and for keys, when contexts are `factor` times longer."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Angles per position, float32, of each of the rotary_dim / 2 pairs."""
    rotary_dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).float() / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    # Frequencies with many turns within the original context are kept, those with few are divided by the
    # factor, and those between are a blend: in llama3 by number of turns, in yarn by the index of the pair.
    if rope.kind == "llama3":
        turns = rope.original_context_len * frequencies / (2 * math.pi)
        keep = (turns - rope.low_turns) / (rope.high_turns - rope.low_turns)
    else:
        first, last = (
            _pair_that_turns(turns, rope, rotary_dim) for turns in (rope.high_turns, rope.low_turns)
        )
        if rope.is_truncated:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        places = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
        keep = 1.0 - (places - first) / max(last - first, 1e-3)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / rope.factor


def _pair_that_turns(turns: float, rope: RopeConfig, rotary_dim: int) -> float:
    """The index (fractional) of the pair that turns this often within the original context."""
    wave = rope.original_context_len / (turns * 2 * math.pi)
    return rotary_dim * math.log(wave) / (2 * math.log(rope.theta))


class RotaryEmbedding(nn.Module):
    """Computes the rotation of the pairs (i, i + R/2) of every head, whose angles grow with the position."""

    inv_freq: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(rope, head_dim, device), persistent=False)
        self._scale = rope.scale

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> Rope:
        """Cosines and sines for these positions. Called once per pass, for all layers."""
        if positions_T.is_cuda:
            # One launch instead of seven.
            from ebbtide.srt.layers.kernels.rope import rope_angles

            return rope_angles(positions_T, self.inv_freq, dtype, self._scale)
        angles = positions_T.to(torch.float32)[:, None, None] * self.inv_freq
        cos, sin = angles.cos().mul_(self._scale).to(dtype), angles.sin().mul_(self._scale).to(dtype)
        return Rope(torch.cat((cos, cos), dim=-1), sin)


def rotate(x_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate heads into a new tensor. `sin_T1R` is half as wide as `cos_T1R`."""
    rotary_dim = cos_T1R.shape[-1]
    if rotary_dim < x_TNH.shape[-1]:
        rotated = rotate(x_TNH[..., :rotary_dim], cos_T1R, sin_T1R)
        return torch.cat((rotated, x_TNH[..., rotary_dim:]), dim=-1)
    first, second = x_TNH.chunk(2, dim=-1)
    rotated = x_TNH * cos_T1R
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    rotated_first.addcmul_(second, sin_T1R, value=-1.0)
    rotated_second.addcmul_(first, sin_T1R)
    return rotated


def split_heads(
    qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split queries, keys and values; normalise and rotate queries and keys."""
    sizes = [qkv_TNH.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    q_TNH, k_TKH, v_TKH = torch.split(qkv_TNH, sizes, dim=1)
    if norms is not None:
        q_TNH = rotate(rms_norm(q_TNH, norms.q_weight, norms.eps, norms.offset), *rope)
        k_TKH = rotate(rms_norm(k_TKH, norms.k_weight, norms.eps, norms.offset), *rope)
        return q_TNH, k_TKH, v_TKH
    rotated_TNH = rotate(qkv_TNH[:, : qkv_TNH.shape[1] - num_kv_heads], *rope)
    return rotated_TNH[:, :-num_kv_heads], rotated_TNH[:, -num_kv_heads:], v_TKH
