"""The import paths of SGLang that RL frameworks use, with Ebbtide behind them. Source: wire_api section 8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang._absent import NamesOnly, refuse_real_sglang
from sglang.version import __version__ as __version__

if TYPE_CHECKING:
    from sglang._runtime import Runtime as Runtime
    from sglang.srt.entrypoints.engine import Engine as Engine
    from sglang.srt.server_args import ServerArgs as ServerArgs

refuse_real_sglang()
NamesOnly.install()


def __getattr__(name: str) -> Any:
    # When first asked for: trainers import this package without wanting an engine.
    match name:
        case "Engine":
            from sglang.srt.entrypoints.engine import Engine

            return Engine
        case "ServerArgs":
            from sglang.srt.server_args import ServerArgs

            return ServerArgs
        case "Runtime":
            from sglang._runtime import Runtime

            return Runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
