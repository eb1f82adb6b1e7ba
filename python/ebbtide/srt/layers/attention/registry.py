"""Attention backend name → class."""

from collections.abc import Callable

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention.base import AttentionBackend, KVPages
from ebbtide.srt.layers.attention.torch_native import TorchNativeAttention

ATTENTION_BACKENDS: dict[str, Callable[[KVPages, int, torch.dtype], AttentionBackend]] = {
    "torch_native": TorchNativeAttention,
}


def build_attention(name: str, kv_pages: KVPages, num_layers: int, dtype: torch.dtype) -> AttentionBackend:
    """The backend over a KV pool. Raises ConfigurationError for an unknown name."""
    if name not in ATTENTION_BACKENDS:
        raise ConfigurationError(
            f"attention backend {name!r} is unknown; valid are {', '.join(ATTENTION_BACKENDS)}"
        )
    return ATTENTION_BACKENDS[name](kv_pages, num_layers, dtype)
