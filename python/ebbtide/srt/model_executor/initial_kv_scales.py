"""The scales of a KV cache in FP8 as they are at the start: a checkpoint's, or 1.

A checkpoint may hold one number for a layer's keys and one for its values, or one per KV head.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor

from ebbtide.formats.stored_tensor import whole
from ebbtide.srt.config import CacheConfig, ModelConfig
from ebbtide.srt.distributed.division import Division, part_of
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.errors import ConfigurationError, first_few
from ebbtide.srt.mem_cache.kv_scales import KVScales, scale_place
from ebbtide.srt.model_executor.loader import Checkpoint

logger = logging.getLogger(__name__)


def build_kv_scales(
    model_config: ModelConfig, cache_config: CacheConfig, group: ParallelGroup, device: torch.device
) -> KVScales | None:
    """The scales of a KV cache; None: all are 1, and stay so.

    Args:
        model_config: with the heads of all ranks.

    Raises ConfigurationError as `checkpoint_scales`.
    """
    if cache_config.dtype != "fp8_e4m3":
        return None
    scales_G2K = checkpoint_scales(model_config.path, model_config.load_format, model_config, group)
    is_calibrated = cache_config.scales != "checkpoint"
    found = "1" if scales_G2K is None else "the checkpoint's"
    logger.info("KV cache in FP8: scales=%s%s", found, " until calibrated" if is_calibrated else "")
    if scales_G2K is None:
        if not is_calibrated:
            return None
        _, count = _heads_of(model_config, group)
        scales_G2K = torch.ones((model_config.num_layers, 2, count))
    tokens = cache_config.calibration_tokens if is_calibrated else 0
    return KVScales(
        scales_G2K.to(device), calibration_tokens=tokens, keeps_up=cache_config.scales == "recalibrate"
    )


def checkpoint_scales(
    path: str, load_format: str, config: ModelConfig, group: ParallelGroup
) -> Tensor | None:
    """The scales that a checkpoint brings for this rank's heads, [layers, 2, K]; None where it has none.

    Args:
        config: with the heads of all ranks.

    Raises ConfigurationError for a scale that is missing, there twice, of another shape, or not a finite
    number above 0.
    """
    if load_format == "dummy":
        return None
    checkpoint = Checkpoint(path, load_format)
    places = {name: place for name in checkpoint.entries if (place := scale_place(name)) is not None}
    if not places:
        return None
    _require_one_each(path, Counter(places.values()), config.num_layers)
    first, count = _heads_of(config, group)
    scales_G2K = torch.ones((config.num_layers, 2, count))
    for name, tensor in checkpoint.tensors():
        if name in places:
            scales_K = _per_head(name, whole(tensor), config.num_kv_heads)
            scales_G2K[places[name]] = scales_K[first : first + count]
    return scales_G2K


def _heads_of(config: ModelConfig, group: ParallelGroup) -> tuple[int, int]:
    """The first KV head of this rank, and how many it has."""
    return part_of(group.rank, group.size, config.num_kv_heads, Division.SHARED, "num_key_value_heads")


def _require_one_each(path: str, found: Counter[tuple[int, int]], num_layers: int) -> None:
    """Raises ConfigurationError unless each layer of the model has one scale for keys and one for values."""
    wanted = Counter((layer, side) for layer in range(num_layers) for side in range(2))
    if found == wanted:
        return
    problems = [
        f"layer {layer}: expected {wanted[layer, side]} {'kv'[side]}_scale, found {found[layer, side]}"
        for layer, side in sorted(wanted | found)
        if wanted[layer, side] != found[layer, side]
    ]
    raise ConfigurationError(f"{path}: scales of the KV cache: {first_few(problems)}")


def _per_head(name: str, scale: Tensor, num_kv_heads: int) -> Tensor:
    """One scale for each KV head, float32."""
    if scale.numel() not in (1, num_kv_heads):
        raise ConfigurationError(
            f"{name}: expected one number, or one for each of {num_kv_heads} KV heads, "
            f"got shape {list(scale.shape)}"
        )
    scales_K = scale.float().flatten().expand(num_kv_heads)
    if not bool((scales_K.isfinite() & (scales_K > 0)).all()):
        raise ConfigurationError(f"{name}: expected finite numbers above 0, got {scales_K.tolist()}")
    return scales_K
