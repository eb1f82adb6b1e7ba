"""Ebbtide: an inference engine for the rollouts of reinforcement learning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ebbtide.version import __version__ as __version__

if TYPE_CHECKING:
    from ebbtide.client import Client
    from ebbtide.srt.entrypoints.engine import Engine
    from ebbtide.srt.sampling_params import SamplingParams
    from ebbtide.srt.server_args import ServerArgs

__all__ = ["Client", "Engine", "SamplingParams", "ServerArgs"]

# Loaded when first asked for: trainers and command lines import this package without wanting torch at once.
_HOMES = {
    "Client": "ebbtide.client",
    "Engine": "ebbtide.srt.entrypoints.engine",
    "SamplingParams": "ebbtide.srt.sampling_params",
    "ServerArgs": "ebbtide.srt.server_args",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
