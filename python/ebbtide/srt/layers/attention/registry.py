"""Attention backend name → class, the ones to be preferred first."""

from __future__ import annotations

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention.base import AttentionBackend, AttentionShape
from ebbtide.srt.layers.attention.flashinfer import FlashInferAttention
from ebbtide.srt.layers.attention.torch_native import TorchNativeAttention
from ebbtide.srt.layers.attention.triton import TritonAttention

ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {
    "flashinfer": FlashInferAttention,
    "triton": TritonAttention,
    "torch_native": TorchNativeAttention,
}


def choose_backend(
    chosen: str | None, shape: AttentionShape, device: torch.device
) -> tuple[type[AttentionBackend], list[str]]:
    """The backend of this name; where none is named, the first that serves the shape on the device.

    On a CPU a name of one for GPUs stands for torch's own: clients name what they have on their GPUs.

    Returns:
        Its class, and what stood in the way of those that would have been preferred.

    Raises ConfigurationError where the one that was named does not serve, or is unknown.
    """
    if chosen is None:
        return _first_that_serves(shape, device)
    backend = backend_named(chosen)
    problem = backend.problem(shape, device)
    if problem is None:
        return backend, []
    if device.type != "cpu":
        raise ConfigurationError(f"attention_backend={chosen}: {problem}")
    return TorchNativeAttention, [f"attention_backend={chosen}: {problem}"]


def backend_named(name: str) -> type[AttentionBackend]:
    """The backend's class. Raises ConfigurationError for an unknown name."""
    if name not in ATTENTION_BACKENDS:
        raise ConfigurationError(
            f"attention_backend: expected one of {', '.join(ATTENTION_BACKENDS)}, got {name!r}"
        )
    return ATTENTION_BACKENDS[name]


def name_of(backend: AttentionBackend) -> str:
    """The name that its class has here."""
    return next(name for name, kind in ATTENTION_BACKENDS.items() if type(backend) is kind)


def _first_that_serves(
    shape: AttentionShape, device: torch.device
) -> tuple[type[AttentionBackend], list[str]]:
    if device.type == "cpu":
        return TorchNativeAttention, []
    problems: list[str] = []
    for backend in ATTENTION_BACKENDS.values():
        problem = backend.problem(shape, device)
        if problem is None:
            return backend, problems
        problems.append(problem)
    raise ConfigurationError(f"no attention backend serves this model: {'; '.join(problems)}")
