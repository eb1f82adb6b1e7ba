"""Attention backend name → class."""

from collections.abc import Callable

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention.base import AttentionBackend, KVPages
from ebbtide.srt.layers.attention.flashinfer import FlashInferAttention
from ebbtide.srt.layers.attention.torch_native import TorchNativeAttention


def _torch_native(
    kv_pages: KVPages, num_layers: int, num_q_heads: int, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    return TorchNativeAttention(kv_pages, num_layers, dtype)


ATTENTION_BACKENDS: dict[str, Callable[[KVPages, int, int, torch.dtype, torch.device], AttentionBackend]] = {
    "torch_native": _torch_native,
    "flashinfer": FlashInferAttention,
}


def build_attention(
    name: str, kv_pages: KVPages, num_layers: int, dtype: torch.dtype, num_q_heads: int | None = None
) -> AttentionBackend:
    """The backend over a KV pool, on the pool's device.

    Args:
        dtype: of the queries.
        num_q_heads: None: as many as KV heads.

    Raises ConfigurationError for an unknown name.
    """
    if name not in ATTENTION_BACKENDS:
        raise ConfigurationError(
            f"attention backend {name!r} is unknown; valid are {', '.join(ATTENTION_BACKENDS)}"
        )
    first = kv_pages.k(0)
    num_q_heads = num_q_heads if num_q_heads is not None else first.shape[2]
    return ATTENTION_BACKENDS[name](kv_pages, num_layers, num_q_heads, dtype, first.device)
