"""Attention backends by name, and the choice among them."""

from __future__ import annotations

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention.base import AttentionBackend, AttentionShape
from ebbtide.srt.layers.attention.flashinfer import FlashInferAttention
from ebbtide.srt.layers.attention.flashinfer_latent import FlashInferLatentAttention
from ebbtide.srt.layers.attention.torch_native import TorchNativeAttention
from ebbtide.srt.layers.attention.triton import TritonAttention

ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {  # in order of preference
    "flashinfer": FlashInferAttention,
    "triton": TritonAttention,
    "torch_native": TorchNativeAttention,
}
# These replace backends of the same name for layers that cache latents.
LATENT_BACKENDS: dict[str, type[AttentionBackend]] = {"flashinfer": FlashInferLatentAttention}


def choose_backend(
    chosen: str | None, shape: AttentionShape, device: torch.device
) -> tuple[type[AttentionBackend], list[str]]:
    """The backend of this name; without a name, the first one that serves the shape on the device.

    On a CPU, the name of a GPU backend chooses torch's own: clients name what they use on their GPUs.

    Returns:
        Its class, and why backends that would be preferred do not serve.

    Raises ConfigurationError: the named backend is unknown, or does not serve.
    """
    if chosen is None:
        return _first_that_serves(shape, device)
    backend = backends_for(shape).get(chosen)
    if backend is None:
        raise ConfigurationError(
            f"attention_backend: expected one of {', '.join(ATTENTION_BACKENDS)}, got {chosen!r}"
        )
    problem = backend.problem(shape, device)
    if problem is None:
        return backend, []
    if device.type != "cpu":
        raise ConfigurationError(f"attention_backend={chosen}: {problem}")
    instead, _ = _first_that_serves(shape, device)
    return instead, [f"attention_backend={chosen}: {problem}"]


def backends_for(shape: AttentionShape) -> dict[str, type[AttentionBackend]]:
    """The backends by name, for what layers of this shape cache."""
    return ATTENTION_BACKENDS if shape.latent is None else ATTENTION_BACKENDS | LATENT_BACKENDS


def name_of(backend: AttentionBackend) -> str:
    """The name of a backend."""
    named = (*ATTENTION_BACKENDS.items(), *LATENT_BACKENDS.items())
    return next(name for name, kind in named if type(backend) is kind)


def _first_that_serves(
    shape: AttentionShape, device: torch.device
) -> tuple[type[AttentionBackend], list[str]]:
    problems: list[str] = []
    for backend in backends_for(shape).values() if device.type != "cpu" else [TorchNativeAttention]:
        problem = backend.problem(shape, device)
        if problem is None:
            return backend, problems
        problems.append(problem)
    raise ConfigurationError(f"no attention backend serves this model: {'; '.join(problems)}")
