"""The import paths of SGLang that RL frameworks use, implemented by Ebbtide. Source: wire_api section 8."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sglang._absent import NamesOnly, refuse_real_sglang
from sglang.version import __version__ as __version__

if TYPE_CHECKING:
    from sglang._runtime import Runtime as Runtime
    from sglang.srt.entrypoints.engine import Engine as Engine
    from sglang.srt.server_args import ServerArgs as ServerArgs

refuse_real_sglang()
NamesOnly.install()


# Imported on first access: trainers import this package without needing an engine.
_HOMES = {
    "Engine": "sglang.srt.entrypoints.engine",
    "Runtime": "sglang._runtime",
    "ServerArgs": "sglang.srt.server_args",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
